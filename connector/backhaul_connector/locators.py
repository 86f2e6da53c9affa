"""Truncated hash chain (locators): what D publishes with a handle, by which P finds the leading blocks of its own prompt.

A locator is the first four bytes of vLLM's block hash. Those hashes are chained, so one stands for all tokens up to its
block's end, adapter, salt and images included. Four bytes prove nothing and need not: whoever reads claims first, and D
compares the whole hash of the last block that is asked for (`lease_table`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

LOCATOR_BYTES = 4


def whole_blocks(hashes: Sequence[bytes], hashes_per_block: int, blocks: int) -> Sequence[bytes]:
    """The hash at the end of each of the leading `blocks` KV blocks, where vLLM may hash in smaller units than it stores."""
    end = blocks * hashes_per_block
    return hashes[:end] if hashes_per_block == 1 else hashes[hashes_per_block - 1 : end : hashes_per_block]


def publish(hashes: Sequence[bytes]) -> str:
    """One locator per hash, as base64: a third of a byte per token at a block size of 16."""
    return base64.b64encode(pack(hashes)).decode()


def pack(hashes: Sequence[bytes]) -> bytes:
    return b"".join([h[:LOCATOR_BYTES] for h in hashes])


def read(published: str) -> bytes | None:
    """What `publish` packed, or `None` if it is nothing of the kind."""
    try:
        packed = base64.b64decode(published, validate=True)
    except (binascii.Error, ValueError):
        return None
    return packed if len(packed) % LOCATOR_BYTES == 0 else None


def common(theirs: bytes, mine: Sequence[bytes]) -> int:
    """How many leading blocks of `mine`, given by their hashes, have the locators that `theirs` packs.

    By bisection over slices: chained hashes that differ once differ from there on.
    """
    most = min(len(theirs) // LOCATOR_BYTES, len(mine))
    packed = pack(mine[:most])
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if theirs[low * LOCATOR_BYTES : middle * LOCATOR_BYTES] == packed[low * LOCATOR_BYTES : middle * LOCATOR_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
