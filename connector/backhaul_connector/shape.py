"""What prompts and blocks are like on one engine: what both legs of a turn need to know to compare and cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from . import locators


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
    block_hashes: list[bytes]
    skip_reading_prefix_cache: bool
    abort_immediately: bool


@dataclass
class Shape:
    block_size: int
    """Tokens."""
    groups: int
    """KV cache groups, each with a block list of its own."""
    block_bytes: int
    """What a read of one block moves: all groups, all workers."""
    recompute_threshold: int
    """Fewer tokens than these are computed rather than read."""
    bidirectional: bool
    """Whether this engine keeps blocks, and reads what another kept."""
    unsupported: str | None
    """What keeps whole blocks from being compared and cut here; `None` where they can be."""
    hashes_per_block: int = 1

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
