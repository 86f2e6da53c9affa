"""D's leases under the connector: who may read a finished request's blocks, and until when.

A lease lives until it is read (if it is not shared), released, expired, evicted or flushed. Readers that claimed it in
time hold it beyond that, each for as long as it said. The blocks are let go when the lease has ended and nobody holds
it, and never before. This table is the only authority: a claim that it refuses is a read that does not happen.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .asks import LeaseOrders
from .blocks import Block
from .clock import Clock
from .connector_metrics import ConnectorMetrics
from .lease_channel import Claim, Done

How = Literal["read", "released", "expired", "evicted", "flushed"]

_WHY = {"read": "released", "flushed": "epoch"}
"""What a reader that comes too late is told, where it is not how the lease ended."""

_REMEMBERED = 10_000
"""Ended leases that are still told from ones that never were."""


@dataclass(eq=False)
class DecodeLease:
    id: str
    blocks: Sequence[Block]
    digests: Sequence[bytes]
    """In full, one per block."""
    tokens: int
    shared: bool
    created: float
    deadline: float
    holds: dict[str, float] = field(default_factory=dict)
    """Until when, by claim."""
    ended: How | None = None


class DecodeLeases:
    def __init__(
        self,
        *,
        engine_id: str,
        clock: Clock,
        max_blocks: int,
        metrics: ConnectorMetrics,
        release: Callable[[Sequence[Block]], None],
    ) -> None:
        """`max_blocks`: beyond so many leased blocks the oldest leases that nobody holds are evicted."""
        self.engine_id = engine_id
        self.epoch = secrets.token_hex(8)
        self._clock = clock
        self._max_blocks = max_blocks
        self._metrics = metrics
        self._release = release
        self._leases: dict[str, DecodeLease] = {}
        self._pins: Counter[int] = Counter()
        """How many leases hold a block, by its number."""
        self._gone: OrderedDict[str, How] = OrderedDict()

    def __len__(self) -> int:
        return sum(lease.ended is None for lease in self._leases.values())

    def __contains__(self, lease_id: str) -> bool:
        """Whether its blocks are still what they were."""
        return lease_id in self._leases

    def __iter__(self) -> Iterator[str]:
        return iter([lease.id for lease in self._leases.values() if lease.ended is None])

    @property
    def block_ids(self) -> set[int]:
        return set(self._pins)

    @property
    def num_blocks(self) -> int:
        """Leased blocks, each counted once."""
        return len(self._pins)

    @property
    def oldest_s(self) -> float:
        ages = [self._clock.now() - self._leases[lease_id].created for lease_id in self]
        return max(ages, default=0.0)

    # -- a lease's life --------------------------------------------------------------------------------------

    def add(
        self,
        lease_id: str,
        blocks: Sequence[Block],
        digests: Sequence[bytes],
        *,
        tokens: int,
        ttl_s: float,
        shared: bool,
    ) -> DecodeLease | None:
        """Leases the blocks, which the caller held. `None` when there is no room even without all older leases."""
        now = self._clock.now()
        lease = DecodeLease(lease_id, blocks, digests, tokens, shared, now, now + ttl_s)
        self._leases[lease_id] = lease
        self._pins.update(block.id for block in blocks)
        if self.num_blocks > self._max_blocks:
            self._evict()
        return lease if lease.ended is None else None

    def claim(self, asked: Claim) -> DecodeLease | str:
        """Holds the lease for a reader whose own digest of the last block that it asks for is the lease's: chained, it
        stands for all before it. Else why not.

        One reader at a time holds a lease that is not shared, since its first read ends it."""
        self.reap()
        lease, why = self._leases.get(asked.lease), self._why_not(asked)
        self._metrics.claims[why or "granted"] += 1
        if why is not None or lease is None:
            return why or "unknown_lease"
        lease.holds[asked.claim] = self._clock.now() + asked.hold_s
        return lease

    def _why_not(self, asked: Claim) -> str | None:
        if asked.engine != self.engine_id:
            return "other_engine"
        if asked.epoch != self.epoch:
            return "epoch"
        lease = self._leases.get(asked.lease)
        ended = self._gone.get(asked.lease) if lease is None else lease.ended
        if ended is not None:
            return _WHY.get(ended, ended)
        if lease is None:
            return "unknown_lease"
        if asked.blocks > len(lease.digests):
            return "malformed"
        if asked.tail or lease.digests[asked.blocks - 1] != asked.hash:
            return "differs"
        return "released" if lease.holds and not lease.shared else None

    def done(self, told: Done) -> None:
        """A reader is finished. The first read ends a lease that is not shared."""
        lease = self._leases.get(told.lease)
        if lease is not None and lease.holds.pop(told.claim, None) is not None:
            self._settle(lease, "read" if told.read and not lease.shared else None)

    def notified(self, lease_id: str) -> bool:
        """A reader said over the side channel that it is finished: how stock engines end a lease, and all they can say.

        False for a lease that is not there."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if not lease.shared and lease.ended is None:
            self._end(lease, "read")
        return True

    def decline(self, lease_id: str) -> None:
        """The one reader of a lease that is not shared does not want it."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.ended is None and not lease.shared:
            self._end(lease, "released")

    def release(self, lease_id: str) -> bool:
        self.reap()
        lease = self._leases.get(lease_id)
        if lease is None or lease.ended is not None:
            return False
        self._end(lease, "released")
        return True

    def renew(self, lease_id: str, ttl_s: float) -> bool:
        """Gives a lease so many seconds from now; false for one that has ended."""
        self.reap()
        lease = self._leases.get(lease_id)
        if lease is None or lease.ended is not None:
            return False
        lease.deadline = self._clock.now() + ttl_s
        return True

    def flush(self) -> int:
        """Ends every lease and moves the epoch, so that no handle from before is honoured again."""
        self.reap()
        live = [self._leases[lease_id] for lease_id in self]
        for lease in live:
            self._end(lease, "flushed")
        self.epoch = secrets.token_hex(8)
        return len(live)

    def forget(self, lease_id: str | None) -> None:
        """Frees a lease (all for `None`), held or not, as if it had never been: a bug in the engine."""
        for known in list(self._leases) if lease_id is None else [lease_id]:
            if known in self._leases:
                self._drop(known)

    # -- time ------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Ends the leases and the holds whose time is up."""
        now = self._clock.now()
        for lease in list(self._leases.values()):
            lease.holds = {claim: until for claim, until in lease.holds.items() if until > now}
            self._settle(lease, "expired" if lease.deadline <= now else None)

    def next_deadline(self) -> float | None:
        """When `reap` next has something to do; ask it first."""
        times = [lease.deadline for lease in self._leases.values() if lease.ended is None]
        times += [until for lease in self._leases.values() for until in lease.holds.values()]
        return min(times, default=None)

    # -- for the router --------------------------------------------------------------------------------------

    def carry_out(self, orders: LeaseOrders, ttl_s: float) -> dict[str, Any]:
        """What came of a request's lease operations; `ttl_s` is for renewals that do not say."""
        self.reap()
        released = [lease_id for lease_id in orders.release if self.release(lease_id)]
        wanted_s = orders.ttl_s or ttl_s
        renewed = {lease_id: wanted_s for lease_id in orders.renew if self.renew(lease_id, wanted_s)}
        asked_for = dict.fromkeys([*orders.release, *orders.renew])
        result: dict[str, Any] = {
            "released": released,
            "renewed": renewed,
            "unknown": [lease_id for lease_id in asked_for if lease_id not in released and lease_id not in renewed],
        }
        if orders.flush:
            result["flushed"] = self.flush()
        result |= {"epoch": self.epoch, "count": len(self), "blocks": self.num_blocks}
        if orders.listed:
            result["leases"] = self.listing()
        return result

    def listing(self) -> list[dict[str, Any]]:
        now = self._clock.now()
        return [
            {
                "id": lease.id,
                "blocks": len(lease.blocks),
                "tokens": lease.tokens,
                "age_s": now - lease.created,
                "remaining_s": lease.deadline - now,
                "holds": len(lease.holds),
                "shared": lease.shared,
            }
            for lease in self._leases.values()
            if lease.ended is None
        ]

    # -- inside ----------------------------------------------------------------------------------------------

    def _settle(self, lease: DecodeLease, how: How | None) -> None:
        if lease.ended is None and how is not None:
            self._end(lease, how)
        elif lease.ended is not None and not lease.holds:
            self._let_go(lease, lease.ended)

    def _end(self, lease: DecodeLease, how: How) -> None:
        lease.ended = how
        self._metrics.leases_ended[how] += 1
        if not lease.holds:
            self._let_go(lease, how)

    def _let_go(self, lease: DecodeLease, how: How) -> None:
        self._gone[lease.id] = how
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self._drop(lease.id)

    def _drop(self, lease_id: str) -> None:
        blocks = self._leases.pop(lease_id).blocks
        for block in blocks:
            self._pins[block.id] -= 1
            if not self._pins[block.id]:
                del self._pins[block.id]
        self._release(blocks)

    def _evict(self) -> None:
        """Shared ones, oldest first, until the rest may stay: who reads another may be a stock engine, without a claim."""
        for old in list(self._leases.values()):
            if self.num_blocks <= self._max_blocks:
                return
            if old.shared and old.ended is None and not old.holds:
                self._end(old, "evicted")
