"""Fake attention: KV values that depend on everything before them, and a state that reads them all.

A position's value is computed from the state over *the KV that the request actually holds* for the positions
before it, right or wrong, and from its own token. So KV of other tokens than the prompt's changes every value
after it, the state at the end, and with it the answer, as it does in a real model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

_MASK = 2**64 - 1
_KEY = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_FOLD = 0x100000001B3


def initial_state(model: str) -> int:
    """The state before the first token: equal on every engine that serves the model."""
    return int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "little")


def kv_value(state: int, key: int) -> int:
    """The KV of one position, given the state over all positions before it and the position's key."""
    x = (state ^ (key + 1) * _KEY) & _MASK
    x = (x ^ x >> 31) * _MIX & _MASK
    return x ^ x >> 29


def attend(state: int, values: Iterable[int]) -> int:
    """The state after reading further positions' KV."""
    for value in values:
        state = (state * _FOLD + value) & _MASK
    return state


def summarize(values: Sequence[int]) -> tuple[int, int]:
    """`(factor, term)` such that `state * factor + term` equals `attend(state, values)`: one step for a whole block."""
    return pow(_FOLD, len(values), _MASK + 1), attend(0, values)


def apply_summary(state: int, summary: tuple[int, int]) -> int:
    return (state * summary[0] + summary[1]) & _MASK


def garbage(block_id: int, count: int) -> list[int]:
    """What memory holds that belongs to someone else by now."""
    return [kv_value(block_id, ~position & 0xFFFF) for position in range(count)]
