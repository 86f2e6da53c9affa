"""Block manager: KV blocks with reference counts, and a prefix cache over them by chained digests, which evicts by LRU.

Invariants: a block is in the free queue exactly when nobody holds it; a digest in the cache names a full block;
a block keeps its digest and its values after it was freed, until it is given out again. Blocks that were never
used are not made yet; they are given out before any that was.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import kv


@dataclass(eq=False, slots=True)
class Block:
    id: int
    refs: int = 0
    digest: bytes | None = None
    values: list[int] = field(default_factory=list)
    """The KV of the block's positions that were computed or read so far."""
    _summary: tuple[int, int] | None = None

    def attend(self, state: int, size: int) -> int:
        """The state after reading the whole block of `size` positions."""
        if len(self.values) < size:
            return kv.attend(state, self.values)
        if self._summary is None:
            self._summary = kv.summarize(self.values)
        return kv.apply_summary(state, self._summary)

    def write(self, offset: int, value: int) -> None:
        """Stores the KV of one position; everything before it is there already."""
        self._summary = None
        if offset < len(self.values):
            self.values[offset] = value
        else:
            self.values.append(value)

    def load(self, values: Sequence[int]) -> None:
        self._summary = None
        self.values = list(values)


def chain_digest(parent: bytes, keys: Sequence[int], salt: str = "") -> bytes:
    """One full block's digest, of 32 bytes as vLLM's block hashes have. The salt counts in the first block only, and
    through the chain in every one."""
    return hashlib.sha256(parent + salt.encode() + array("Q", keys).tobytes()).digest()


class BlockPool:
    """Blocks are numbered from 1: in vLLM block 0 is the null block, which `num_blocks` counts."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.usable = num_blocks - 1
        self.prefix_caching = prefix_caching
        self._blocks: dict[int, Block] = {}
        self._free: OrderedDict[int, Block] = OrderedDict()
        self._cached: dict[bytes, Block] = {}

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_used} of {self.usable} blocks held, {len(self._cached)} cached>"

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    def __contains__(self, block_id: int) -> bool:
        """Whether the block was ever given out."""
        return block_id in self._blocks

    @property
    def num_free(self) -> int:
        return self.usable - len(self._blocks) + len(self._free)

    @property
    def num_used(self) -> int:
        return self.usable - self.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that someone holds, pinned leases included."""
        return self.num_used / self.usable

    def match(self, digests: Iterable[bytes]) -> list[Block]:
        """The longest run of leading blocks that the prefix cache holds. Nothing is held yet."""
        hit: list[Block] = []
        if self.prefix_caching:
            for digest in digests:
                block = self._cached.get(digest)
                if block is None:
                    break
                hit.append(block)
        return hit

    def can_hold(self, hit: Sequence[Block], fresh: int) -> bool:
        return fresh <= self.num_free - sum(block.refs == 0 for block in hit)

    def hold(self, hit: Sequence[Block], fresh: int) -> list[Block]:
        """Takes the matched blocks and `fresh` empty ones; ask `can_hold` first."""
        for block in hit:
            if block.refs == 0:
                del self._free[block.id]
            block.refs += 1
        return [*hit, *(self._take() for _ in range(fresh))]

    def release(self, blocks: Sequence[Block]) -> None:
        """Last blocks become evictable first, so that a sequence's head survives its tail."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                self._free[block.id] = block

    def cache(self, block: Block, digest: bytes) -> None:
        if self.prefix_caching and block.digest is None and digest not in self._cached:
            block.digest = digest
            self._cached[digest] = block

    def reset_cache(self) -> bool:
        """Forgets every cached prefix; refuses while blocks are held, as vLLM does."""
        if self.num_used:
            return False
        for block in self._cached.values():
            block.digest = None
        self._cached.clear()
        return True

    def _take(self) -> Block:
        if len(self._blocks) < self.usable:
            block = Block(len(self._blocks) + 1, refs=1)
            self._blocks[block.id] = block
            return block
        _, block = self._free.popitem(last=False)
        if block.digest is not None:
            del self._cached[block.digest]
            block.digest = None
        block.load(())
        block.refs = 1
        return block
