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

import msgspec

SIZE = 16
"""Bytes of one digest."""

SPAN = 32
"""Blocks of one span."""

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


def block_chain(token_ids: Sequence[int], block_size: int, start: bytes = b"") -> bytes:
    """One digest per whole block of `block_size` tokens; a remainder is left out.

    `start` is the chain of the blocks before `token_ids`. Raises `OverflowError` for ids that are negative or beyond 32 bits.
    """
    return _packed_chain(_pack(token_ids), block_size, start)


def _pack(token_ids: Sequence[int]) -> bytes:
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _packed_chain(data: bytes, block_size: int, start: bytes) -> bytes:
    step = block_size * _PACKED
    whole = len(data) // step * step
    return chain([data[i : i + step] for i in range(0, whole, step)], start)


class Chains(msgspec.Struct, frozen=True):
    """The block chain of a sequence, and one over spans of `SPAN` blocks beside it: a fifth of the work, with which the
    blocks of a known prefix need not be hashed again."""

    blocks: bytes = b""
    spans: bytes = b""


_NOTHING_KNOWN = Chains()


def chains(token_ids: Sequence[int], block_size: int, known: Chains = _NOTHING_KNOWN) -> Chains:
    """Both chains of `token_ids`. `known` are those of any other sequence in blocks of the same size: what the two have in
    common, in whole spans, is taken from there. Raises `OverflowError` as `block_chain` does."""
    data = _pack(token_ids)
    spans = _packed_chain(data, block_size * SPAN, b"")
    same = common(spans, known.spans) * SPAN
    start = known.blocks[: same * SIZE]
    return Chains(start + _packed_chain(data[same * block_size * _PACKED :], block_size, start), spans)


def extended(before: Chains, token_ids: Sequence[int], more: Sequence[int], block_size: int) -> Chains:
    """The chains of `token_ids` and `more` behind them, where `before` are those of `token_ids`."""
    whole = count(before.spans) * SPAN
    data = _pack((*token_ids[whole * block_size :], *more))
    rest = data[(count(before.blocks) - whole) * block_size * _PACKED :]
    return Chains(
        before.blocks + _packed_chain(rest, block_size, before.blocks),
        before.spans + _packed_chain(data, block_size * SPAN, before.spans),
    )


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
