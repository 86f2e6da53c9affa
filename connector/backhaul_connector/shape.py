"""Value object of one engine's KV layout: what both legs of a turn need to know to compare and cut prompts and blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from . import locators
from .handles import Handle

NULL_BLOCK = 0
"""Stands in vLLM's lists for a block that has been freed, out of the window."""

_encode = msgspec.msgpack.Encoder().encode


class Request(Protocol):
    """What is used of vLLM's Request."""

    request_id: str
    kv_transfer_params: Any
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_tokens: int
    num_output_tokens: int
    num_preemptions: int
    all_token_ids: Sequence[int]
    block_hashes: list[bytes]
    skip_reading_prefix_cache: bool
    abort_immediately: bool


def _none(request: Request, start: int, end: int) -> object:
    return None


@dataclass
class Shape:
    block_size: int
    """Tokens."""
    groups: int
    """KV cache groups, each with a block list of its own."""
    block_bytes: Sequence[int]
    """What a read of one block moves, by group: all workers."""
    recompute_threshold: int
    """Fewer tokens than these are computed rather than read."""
    bidirectional: bool
    """Whether this engine keeps blocks, and reads what another kept."""
    unsupported: str | None
    """What keeps whole blocks from being compared and cut here; `None` where they can be."""
    hashes_per_block: int = 1
    windows: Sequence[int] = ()
    """Tokens of each group's sliding window, 0 for a group that keeps all; empty where every group does."""
    extra_keys: Callable[[Request, int, int], object] = _none
    """What besides its token ids the KV of a part of a request depends on: adapter, images, salt."""

    @property
    def whole(self) -> bool:
        """Whether KV is read up to exactly the token where the other engine stopped, or not at all: a group with a sliding
        window keeps what the next token needs, which is not what an earlier one would."""
        return any(self.windows)

    def hashed_blocks(self, request: Request) -> int:
        """Blocks that have a hash: with a drafter that reads ahead, vLLM 0.33 hashes a block when what follows is known."""
        return len(request.block_hashes) // self.hashes_per_block

    def hashes(self, request: Request, blocks: int) -> list[bytes]:
        """The hash at the end of each of the leading blocks."""
        return list(locators.whole_blocks(request.block_hashes, self.hashes_per_block, blocks))

    def hash_at(self, request: Request, tokens: int) -> str | None:
        """The hash of the last whole block in `tokens` tokens, as hex."""
        whole = tokens // self.block_size * self.hashes_per_block
        if self.unsupported or not 0 < whole <= len(request.block_hashes):
            return None
        return bytes(request.block_hashes[whole - 1]).hex()

    def tail_hash(self, request: Request, tokens: int) -> bytes | None:
        """What stands for all of the first `tokens` tokens, a last partial block included: the hash of the last whole block,
        the ids behind it, and what else vLLM puts into a block's hash (0.32, kv_cache_utils.py,
        `generate_block_hash_extra_keys`). `None` where hashes are of no use, or are not there yet."""
        blocks = tokens // self.block_size
        if self.unsupported or not 0 < tokens <= request.num_tokens or blocks > self.hashed_blocks(request):
            return None
        parent = bytes(request.block_hashes[blocks * self.hashes_per_block - 1]) if blocks else b""
        start = blocks * self.block_size
        ids = [int(token) for token in request.all_token_ids[start:tokens]]
        return hashlib.sha256(_encode((parent, ids, repr(self.extra_keys(request, start, tokens))))).digest()

    def first_needed(self, group: int, tokens: int) -> int:
        """The first block of a group that the token behind the first `tokens` attends to (0.32,
        single_type_kv_cache_manager.py, `SlidingWindowManager.get_num_skipped_tokens`)."""
        window = self.windows[group] if self.windows else 0
        return max(0, tokens - window + 1) // self.block_size if window else 0

    def blocks_between(self, group: int, start: int, end: int) -> int:
        """How many blocks of a group are read for the tokens from `start` to `end`."""
        first = max(start // self.block_size, self.first_needed(group, end))
        return max(0, -(-end // self.block_size) - first)

    def bytes_between(self, start: int, end: int) -> int:
        return sum(self.blocks_between(group, start, end) * size for group, size in enumerate(self.block_bytes))

    def cut(self, handle: Handle, tokens: int) -> list[list[int]] | None:
        """A handle's block lists for exactly the first `tokens` tokens, or `None` if they do not hold these. vLLM's list of a
        group with a sliding window ends with the last token, and begins somewhere before its window."""
        if len(handle.remote_block_ids) != self.groups:
            return None
        if not self.whole:
            return handle.cut(self.block_size, tokens)
        held = handle.remote_num_tokens
        if held is None or held < tokens:
            return None
        blocks, last = -(-tokens // self.block_size), -(-held // self.block_size)
        lists = []
        for group, ids in enumerate(handle.remote_block_ids):
            needed = blocks - self.first_needed(group, tokens)
            kept = ids[: max(0, len(ids) - (last - blocks))][-needed:] if needed else []
            full = last if not self.windows[group] else len(ids)
            if (
                len(kept) != needed
                or len(ids) != full
                or len(ids) > last
                or (self.windows[group] and NULL_BLOCK in kept)
            ):
                return None
            lists.append(kept)
        return lists

    def is_exactly(self, block_ids: Sequence[Sequence[int]], tokens: int) -> bool:
        """Whether these are as many blocks of each group as a read of the first `tokens` tokens needs."""
        return [len(ids) for ids in block_ids] == [
            self.blocks_between(group, 0, tokens) for group in range(self.groups)
        ]
