"""Chained digests: of a history's messages, and of the token blocks that an engine ran.

Each digest covers everything before it, so two sequences share exactly the prefix over which their digests are equal,
and the length of that prefix is found by bisection. BLAKE2b with 128 bits: what is compared can be adversarial, since a
match decides whose KV is read, so a fast hash would not do; and at a block size of 16 it is one byte per token.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

SIZE = 16
"""Bytes of one digest."""


def _link(previous: bytes, part: bytes) -> bytes:
    return blake2b(part, digest_size=SIZE, key=previous).digest()


def chain(parts: Iterable[bytes], start: bytes = b"") -> bytes:
    """One digest per part, each chained to those before it, concatenated."""
    digests = []
    last = start[-SIZE:]
    for part in parts:
        last = _link(last, part)
        digests.append(last)
    return b"".join(digests)


def block_chain(token_ids: Sequence[int], block_size: int, start: bytes = b"") -> bytes:
    """One digest per whole block of `block_size` tokens; a remainder is left out.

    `start` is the chain of the blocks before `token_ids`. Raises `OverflowError` for ids that are negative or beyond 32 bits.
    """
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    data = memoryview(words.tobytes())
    step = block_size * 4
    whole = len(data) // step * step
    return chain((bytes(data[i : i + step]) for i in range(0, whole, step)), start)


def count(digests: bytes) -> int:
    """How many parts or blocks a chain covers."""
    return len(digests) // SIZE


def common(ours: bytes, theirs: bytes) -> int:
    """Length of the common prefix of two chains, in parts or blocks."""
    low, high = 0, min(count(ours), count(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * SIZE
        if ours[end - SIZE : end] == theirs[end - SIZE : end]:
            low = middle
        else:
            high = middle - 1
    return low
