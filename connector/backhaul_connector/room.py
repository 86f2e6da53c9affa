"""Eviction under memory pressure: room for the requests that run, and for the one that is scheduled next: leases end for them."""

from __future__ import annotations

from .lease_table import LeaseTable
from .shape import Request


class Room:
    """Requests that found no blocks ask again. vLLM tells the connector of each attempt, and of those that succeed."""

    def __init__(self, leases: LeaseTable, block_size: int, groups: int = 1) -> None:
        """`groups`: each KV cache group takes blocks of its own for the same tokens."""
        self._leases = leases
        self._block_size = block_size
        self._groups = groups
        self._fits = False
        self._refused: set[str] = set()
        """Requests that were to fit by their own count, and did not."""

    def make(self, request: Request, local: int, free: int) -> None:
        """Before an attempt: of the request's tokens `local` are in the prefix cache, and `free` blocks are free.

        What the cache has may lie in blocks that are free as well, and then takes of them (0.32, kv_cache_manager.py,
        `allocate_slots`), as drafted tokens do. Nobody says how many: one that does not fit although it should gets room for
        all of it."""
        needed = self._blocks(request.num_tokens - local)
        self._fits = needed <= free
        if self._fits and request.request_id in self._refused:
            needed = self._blocks(request.num_tokens) + 1
        if needed > free and self._leases.occupied:
            self._leases.make_room(needed - free)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._groups

    def attempted(self, request_id: str) -> None:
        """vLLM is about to allocate blocks for the request that room was made for last."""
        if self._fits:
            self._refused.add(request_id)

    def over(self, request_id: str) -> None:
        """It has its blocks, or has ended."""
        self._refused.discard(request_id)

    def keep(self, running: int, free: int) -> None:
        """Each of the `running` requests may need a block more at every step, and the workers let go of a lease a step later.
        vLLM does not ask for these: it would preempt a request."""
        wanted = 2 * running * self._groups
        if self._leases.occupied and free < wanted:
            self._leases.make_room(wanted - free)
