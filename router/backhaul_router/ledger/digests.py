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

SPAN = 32
"""Blocks of one span. Its digest takes no room of its own: it is where its last block's would be."""

_BEFORE_ALL = bytes(SIZE)
_PACKED = 4


def chain(parts: Iterable[bytes], start: bytes = b"") -> bytes:
    """One digest per part, each chained to those before it, concatenated."""
    digests = []
    last = start[-SIZE:] or _BEFORE_ALL
    for part in parts:
        last = blake2b(last + part, digest_size=SIZE).digest()
        digests.append(last)
    return b"".join(digests)


def block_chain(token_ids: Sequence[int], block_size: int, known: bytes = b"") -> bytes:
    """One digest per whole block of `block_size` tokens; a remainder is left out.

    The last block of a span has the digest of the whole span, chained to that of the span before, in place of its own: a span
    is digested in a fifth of the time that its blocks take, and `known`, the chain of any other sequence in blocks of the same
    size, is looked through by spans. What the two have in common, in whole spans, is taken from there. Raises
    `OverflowError` for ids that are negative or beyond 32 bits.
    """
    data, step = _pack(token_ids), block_size * _PACKED
    if not known:
        return _blocks(data, step)
    spans = chain(_parts(data, step * SPAN))
    low, high = 0, min(count(spans), count(known) // SPAN)
    while low < high:
        middle = (low + high + 1) // 2
        if spans[(middle - 1) * SIZE : middle * SIZE] == known[(middle * SPAN - 1) * SIZE : middle * SPAN * SIZE]:
            low = middle
        else:
            high = middle - 1
    start = known[: low * SPAN * SIZE]
    return start + _blocks(data[low * SPAN * step :], step, start, spans[low * SIZE :])


def extended(before: bytes, token_ids: Sequence[int], more: Sequence[int], block_size: int) -> bytes:
    """The block chain of `token_ids` and `more` behind them, where `before` is that of `token_ids`."""
    whole = count(before) // SPAN * SPAN
    start = before[: whole * SIZE]
    data = _pack((*token_ids[whole * block_size :], *more))
    return start + _blocks(data, block_size * _PACKED, start, done=before[whole * SIZE :])


def _pack(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _parts(data: bytes, step: int) -> list[bytes]:
    return [data[i : i + step] for i in range(0, len(data) // step * step, step)]


def _blocks(data: bytes, step: int, start: bytes = b"", spans: bytes = b"", done: bytes = b"") -> bytes:
    """The digests of what follows the whole spans of `start`. `spans` are those of its first spans, and `done` those of its
    first blocks, less than a span, where they are known."""
    found = [done]
    last = before = start[-SIZE:] or _BEFORE_ALL
    parts = _parts(data, step)
    first = count(done)
    for at in range(0, len(parts), SPAN):
        blocks = parts[at : at + SPAN]
        is_whole = len(blocks) == SPAN
        if first:
            last = done[-SIZE:]
        for block in blocks[first : SPAN - 1]:
            last = blake2b(last + block, digest_size=SIZE).digest()
            found.append(last)
        if is_whole:
            known = spans[at // SPAN * SIZE : (at // SPAN + 1) * SIZE]
            last = known or blake2b(before + b"".join(blocks), digest_size=SIZE).digest()
            before = last
            found.append(last)
        first = 0
    return b"".join(found)


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
