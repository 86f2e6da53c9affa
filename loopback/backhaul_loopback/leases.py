"""Blocks that stay held after their request ended, until a peer has read them or time is up: vLLM's own leases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import Block


@dataclass(eq=False)
class Lease:
    blocks: Sequence[Block]
    deadline: float | None
    """On the engine's own clock; `None` never ends: the leak of parameters without a flag, on D."""


class LeaseTable:
    """Leases by the request that left them. A lease ends once: read, released, expired or forgotten."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._leases))

    @property
    def block_ids(self) -> set[int]:
        return {block.id for lease in self._leases.values() for block in lease.blocks}

    def add(self, request_id: str, blocks: Sequence[Block], deadline: float | None) -> None:
        self._leases[request_id] = Lease(blocks, deadline)

    def end(self, request_id: str) -> Sequence[Block] | None:
        """The blocks to release; `None` when there is no such lease (any more)."""
        lease = self._leases.get(request_id)
        if lease is None or lease.deadline is None:
            return None
        del self._leases[request_id]
        return lease.blocks

    def extend(self, request_id: str, deadline: float) -> None:
        lease = self._leases.get(request_id)
        if lease is not None and lease.deadline is not None:
            lease.deadline = max(lease.deadline, deadline)

    def remaining(self, request_id: str, now: float) -> float:
        """Seconds until the lease ends; 0 for one that has."""
        lease = self._leases.get(request_id)
        if lease is None:
            return 0.0
        return math.inf if lease.deadline is None else max(0.0, lease.deadline - now)

    def expired(self, now: float) -> list[str]:
        return [
            request_id
            for request_id, lease in self._leases.items()
            if lease.deadline is not None and lease.deadline <= now
        ]

    def next_deadline(self) -> float | None:
        return min((lease.deadline for lease in self._leases.values() if lease.deadline is not None), default=None)
