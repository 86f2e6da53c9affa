"""Adapter between the connector's lease table and this engine's blocks: they are let go when the table says that it is time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from backhaul_connector.lease_table import LeaseTable, Totals
from backhaul_protocol.lease_channel import Answer, Message
from backhaul_protocol.leases import LeaseAnswer, LeaseOperation

from .blocks import Block
from .clock import Clock
from .metrics import ConnectorMetrics


class Leases:
    """D's leases under the connector. Blocks stay what they were until their lease has ended and nobody holds it."""

    def __init__(
        self,
        *,
        engine_id: str,
        clock: Clock,
        blocks: int,
        max_leased_fraction: float,
        metrics: ConnectorMetrics,
        release: Callable[[Sequence[Block]], None],
    ) -> None:
        self._table = LeaseTable(engine_id, blocks, max_leased_fraction, clock=clock.now)
        self._metrics = metrics
        self._release = release
        self._blocks: dict[str, Sequence[Block]] = {}
        self._kept: set[str] = set()
        """Ended by their readers' `done`, not by a notification: shared ones, and those that were claimed."""

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._blocks

    def __iter__(self) -> Iterator[str]:
        """Those that have not ended, oldest first."""
        return iter([lease.id for lease in self._table.listed()])

    @property
    def epoch(self) -> str:
        return self._table.epoch

    @property
    def block_ids(self) -> set[int]:
        return {block.id for blocks in self._blocks.values() for block in blocks}

    def count(self) -> tuple[int, int, float]:
        """Leases, the blocks that they pin, each counted once, and the age of the oldest in seconds."""
        totals = self.reap()
        return totals.leases, totals.blocks, totals.oldest_s

    def add(
        self,
        lease_id: str,
        blocks: Sequence[Block],
        digests: Sequence[bytes],
        *,
        block_size: int,
        ttl_s: float,
        shared: bool,
    ) -> bool:
        """Leases the blocks, which the caller held. False when there is no room even without all older leases."""
        ids = [block.id for block in blocks]
        self._blocks[lease_id] = blocks
        if shared:
            self._kept.add(lease_id)
        self._table.add(lease_id, digests, [ids], ids, block_size=block_size, ttl_s=ttl_s, shared=shared)
        self.reap()
        return lease_id in self

    def answer(self, message: Message, peer: Callable[[], Mapping[str, int]]) -> Answer:
        """To a reader, over the lease channel."""
        self.reap()
        answer = self._table.answer(message, peer)
        self.reap()
        return answer

    def operate(self, operation: LeaseOperation, ttl_s: float) -> LeaseAnswer:
        """For the router; `ttl_s` is for renewals that do not say."""
        self.reap()
        answer = self._table.operate(operation, ttl_s)
        self.reap()
        return answer

    def flush(self) -> None:
        self._table.flush()
        self.reap()

    def notified(self, lease_id: str) -> bool:
        """A reader said over the side channel that it is finished: how stock engines end a lease, and all they can say.

        False for a lease that is not there."""
        self.reap()
        if lease_id not in self:
            return False
        if lease_id not in self._kept:
            self._let_go(lease_id)
            self.reap()
        return True

    def forget(self, lease_id: str | None) -> None:
        """Frees a lease (all for `None`), held or not, without anyone having been told: a bug in the engine."""
        for known in list(self._blocks) if lease_id is None else [lease_id]:
            self._let_go(known)

    def reap(self) -> Totals:
        """Lets go of the blocks whose leases and holds are over, and counts what has happened."""
        self._kept |= self._table.take_kept()
        for lease_id in self._table.sweep():
            self._let_go(lease_id)
        totals = self._table.totals()
        self._metrics.leases_ended += totals.ended
        self._metrics.claims += totals.claims
        return totals

    def next_deadline(self) -> float | None:
        """When `reap` next has something to do; ask it first."""
        return self._table.next_check

    def _let_go(self, lease_id: str) -> None:
        self._table.forget(lease_id)
        self._kept.discard(lease_id)
        if blocks := self._blocks.pop(lease_id, None):
            self._release(blocks)
