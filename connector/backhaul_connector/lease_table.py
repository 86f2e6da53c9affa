"""Lease table of a decode engine: what it keeps for later turns, who is reading it, and when it ends.

One table lives in the engine's scheduler process and is the only authority over the blocks that finished turns left behind.
Its rules:

- A lease is live until it is read (unless shared), released, expired, evicted or flushed. Then no one can claim it.
- A claim that is granted holds the lease. What a hold protects is not freed before `done`, or the hold's own end; the end
  of a lease that came meanwhile waits for its last hold.
- A lease that is not shared is held by one reader at a time, since its first read ends it.
- An ended lease stays in the table, unclaimable, until the workers have let go of it (`forget`).
- A grant proves that the reader's prompt is the lease's: the whole chained hash of the last block that it asks for is equal,
  and for a lease that is read as a whole that of all its tokens.

The scheduler's thread and those of the lease channel use it at the same time; every public method takes the lock.
"""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backhaul_protocol.lease_channel import LONGEST_HOLD_S, Answer, Claim, Decline, Done, Message
from backhaul_protocol.leases import LeaseAnswer, LeaseOperation, LeaseRow
from backhaul_protocol.why import Why

MOST_REMEMBERED = 4096
"""Ended leases whose end is still known, so that a late reader hears why."""


class End(enum.StrEnum):
    """How a lease ended."""

    READ = "read"
    RELEASED = "released"
    EXPIRED = "expired"
    EVICTED = "evicted"
    FLUSHED = "flushed"


_WHY = {
    End.READ: Why.RELEASED,
    End.RELEASED: Why.RELEASED,
    End.EXPIRED: Why.EXPIRED,
    End.EVICTED: Why.EVICTED,
    End.FLUSHED: Why.EPOCH,
}
"""What a reader that comes too late is told."""


@dataclass(frozen=True)
class Grant:
    """An accepted claim."""

    block_ids: list[list[int]]
    """The leading blocks of each KV cache group, D's own ids; all that are kept of a lease that is read as a whole."""
    tokens: int


@dataclass(frozen=True)
class Whole:
    """What makes a lease good for nothing but a read of all of it."""

    tokens: int
    tail: bytes
    """The hash of all these tokens (`Shape.tail_hash`)."""


@dataclass
class _Lease:
    id: str
    hashes: Sequence[bytes]
    block_ids: Sequence[Sequence[int]]
    pinned: Sequence[int]
    block_size: int
    shared: bool
    began: float
    expires: float
    whole: Whole | None = None
    holds: dict[str, float] = field(default_factory=dict)
    """Until when, by claim."""
    ending: End | None = None
    """How it ends once no one holds it."""

    @property
    def tokens(self) -> int:
        return len(self.hashes) * self.block_size if self.whole is None else self.whole.tokens

    @property
    def can_be_evicted(self) -> bool:
        """Not one that is kept for a single read: its reader may be a stock engine, which reads without a claim."""
        return self.shared and not self.holds


@dataclass(frozen=True)
class Totals:
    """What the table did since it was asked last, and what it holds now."""

    ended: Counter[str]
    claims: Counter[str]
    leases: int
    blocks: int
    oldest_s: float


class LeaseTable:
    def __init__(
        self,
        engine_id: str,
        blocks: int,
        max_leased_fraction: float = 0.8,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`blocks` is how many KV blocks the engine has: while leases pin more than the fraction of them, shared ones are
        evicted, oldest first, so that they never starve requests."""
        self.engine_id = engine_id
        self.epoch = secrets.token_hex(8)
        self._most_blocks = int(blocks * max_leased_fraction)
        self._clock = clock
        self._lock = threading.Lock()
        self._live: OrderedDict[str, _Lease] = OrderedDict()
        self._leaving: dict[str, int] = {}
        """Ended, but not yet let go of by the workers, with how many blocks that will free."""
        self._to_end: set[str] = set()
        self._to_keep: set[str] = set()
        self._ends: OrderedDict[str, End] = OrderedDict()
        self._pins: set[int] = set()
        self._pins_again: dict[int, int] = {}
        """How many leases beyond the first pin a block."""
        self._next_check = 0.0
        self._ended: Counter[str] = Counter()
        self._claims: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<LeaseTable {len(self._live)} leases, {len(self._pins)} blocks, epoch {self.epoch}>"

    def __contains__(self, lease_id: str) -> bool:
        with self._lock:
            return lease_id in self._live or lease_id in self._leaving

    # --- the scheduler's side -----------------------------------------------------------------------------------------

    def add(
        self,
        lease_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        pinned: Sequence[int],
        *,
        block_size: int,
        ttl_s: float,
        shared: bool,
        whole: Whole | None = None,
    ) -> None:
        """A finished turn's whole blocks, by the hash at each one's end. `pinned` are all blocks that stay in use for it.
        May evict older leases."""
        now = self._clock()
        with self._lock:
            lease = _Lease(lease_id, hashes, block_ids, pinned, block_size, shared, now, now + ttl_s, whole)
            self._live[lease_id] = lease
            again = self._pins.intersection(pinned)
            self._pins.update(pinned)
            for block in again:
                self._pins_again[block] = self._pins_again.get(block, 0) + 1
            self._next_check = min(self._next_check, lease.expires)
            for oldest in list(self._live.values()):
                if len(self._pins) <= self._most_blocks:
                    break
                if oldest.can_be_evicted:
                    self._end(oldest, End.EVICTED)

    def sweep(self) -> frozenset[str]:
        """Ends what is due; the leases that have ended since the last call, which the workers are to let go of."""
        now = self._clock()
        with self._lock:
            if now >= self._next_check:
                self._next_check = float("inf")
                for lease in list(self._live.values()):
                    self._check(lease, now)
            ended, self._to_end = frozenset(self._to_end), set()
            return ended

    def take_kept(self) -> frozenset[str]:
        """Leases that were claimed since the last call: for these the readers' `done` counts, not NIXL's notifications."""
        with self._lock:
            kept, self._to_keep = frozenset(self._to_keep), set()
            return kept

    @property
    def occupied(self) -> bool:
        """Whether there is any lease that could make room."""
        return bool(self._live)

    @property
    def urgent(self) -> bool:
        """Whether there is anything that the workers have to be told."""
        return bool(self._to_end or self._to_keep) or self._clock() >= self._next_check

    @property
    def next_check(self) -> float | None:
        """When `sweep` has something to do by itself, on the table's clock; `None` for never."""
        return None if self._next_check == float("inf") else self._next_check

    def forget(self, lease_id: str) -> None:
        """The workers have let go of a lease: because it had ended, or because a stock engine has read it."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is not None:
                self._end(lease, lease.ending or End.READ)
                self._to_end.discard(lease_id)
            self._leaving.pop(lease_id, None)

    def make_room(self, blocks: int) -> None:
        """Ends the oldest leases that no one holds until `blocks` blocks come free, those of ended leases that the workers
        have yet to let go of included: for a request that waits for them."""
        with self._lock:
            missing = blocks - sum(self._leaving.values())
            for oldest in list(self._live.values()):
                if missing <= 0:
                    break
                if oldest.can_be_evicted:
                    before = len(self._pins)
                    self._end(oldest, End.EVICTED)
                    missing -= before - len(self._pins)

    def release(self, ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """Ends leases; which there were, and which not."""
        return self._each(ids, lambda lease: self._end_when_free(lease, End.RELEASED))

    def renew(self, ids: Iterable[str], ttl_s: float) -> tuple[dict[str, float], list[str]]:
        """Makes leases last `ttl_s` from now; their remaining seconds, and which there were not."""
        expires = self._clock() + ttl_s

        def prolong(lease: _Lease) -> None:
            lease.expires = expires

        found, unknown = self._each(ids, prolong)
        with self._lock:
            self._next_check = min(self._next_check, expires)
        return dict.fromkeys(found, ttl_s), unknown

    def flush(self) -> int:
        """Ends every lease and begins a new epoch, so that no handle that is out there can be read; how many there were."""
        with self._lock:
            leases = [lease for lease in self._live.values() if lease.ending is None]
            for lease in leases:
                self._end_when_free(lease, End.FLUSHED)
            self.epoch = secrets.token_hex(8)
            return len(leases)

    def count(self) -> tuple[int, int]:
        """Leases, and the blocks that they pin, each counted once."""
        with self._lock:
            return sum(lease.ending is None for lease in self._live.values()), len(self._pins)

    def listed(self) -> tuple[LeaseRow, ...]:
        """The leases as an operator reads them, oldest first."""
        now = self._clock()
        with self._lock:
            return tuple(
                LeaseRow(
                    id=lease.id,
                    blocks=len(lease.pinned),
                    tokens=lease.tokens,
                    age_s=round(now - lease.began, 3),
                    remaining_s=round(lease.expires - now, 3),
                    holds=len(lease.holds),
                    shared=lease.shared,
                )
                for lease in self._live.values()
                if lease.ending is None
            )

    def operate(self, asked: LeaseOperation, ttl_s: float) -> LeaseAnswer:
        """Does what a router asks; `ttl_s` is for renewals that do not say."""
        released, unknown = self.release(asked.release)
        renewed, unknown_too = self.renew(asked.renew, asked.ttl_s or ttl_s)
        flushed = self.flush() if asked.flush else None
        count, blocks = self.count()
        return LeaseAnswer(
            released=released,
            renewed=renewed,
            unknown=list(dict.fromkeys([*unknown, *unknown_too])),
            flushed=flushed,
            epoch=self.epoch,
            count=count,
            blocks=blocks,
            leases=self.listed() if asked.list else None,
        )

    def totals(self) -> Totals:
        now = self._clock()
        with self._lock:
            ended, self._ended = self._ended, Counter()
            claims, self._claims = self._claims, Counter()
            oldest = next(iter(self._live.values()), None)
            return Totals(ended, claims, len(self._live), len(self._pins), now - oldest.began if oldest else 0.0)

    # --- the readers' side --------------------------------------------------------------------------------------------

    def answer(self, message: Message, peer: Callable[[], Mapping[str, int]]) -> Answer:
        """To one message of the lease channel; `peer` goes into every grant."""
        match message:
            case Claim():
                granted = self.claim(message)
                if isinstance(granted, Why):
                    return Answer(ok=False, why=granted)
                return Answer(ok=True, block_ids=granted.block_ids, tokens=granted.tokens, peer=dict(peer()))
            case Done():
                self.done(message.lease, message.claim, read=message.read)
            case Decline():
                self.decline(message.lease)
        return Answer(ok=True)

    def claim(self, asked: Claim) -> Grant | Why:
        """Grants the leading blocks that a reader asks for, and holds them for it, if its own hash of the last of them is the
        lease's; else why not. A lease that is read as a whole is granted to a reader that has all of its tokens: `tail` is its
        own hash of them."""
        with self._lock:
            answer = self._claim(asked)
            self._claims["granted" if isinstance(answer, Grant) else answer] += 1
            return answer

    def _claim(self, asked: Claim) -> Grant | Why:
        now = self._clock()
        if asked.engine != self.engine_id:
            return Why.OTHER_ENGINE
        if asked.epoch != self.epoch:
            return Why.EPOCH
        lease = self._live.get(asked.lease)
        if lease is not None:
            self._check(lease, now)
        if lease is None or lease.ending is not None or lease.id not in self._live:
            end = lease.ending if lease is not None and lease.ending else self._ends.get(asked.lease)
            return Why.UNKNOWN_LEASE if end is None else _WHY[end]
        blocks, until = asked.blocks, now + asked.hold_s
        if not 0 < blocks <= len(lease.hashes) or not 0 < asked.hold_s <= LONGEST_HOLD_S:
            return Why.MALFORMED
        if lease.hashes[blocks - 1] != asked.hash or asked.tail != (lease.whole and lease.whole.tail):
            return Why.DIFFERS
        if lease.whole is not None and blocks != len(lease.hashes):
            return Why.MALFORMED
        if not lease.shared and lease.holds.keys() - {asked.claim}:
            return Why.RELEASED
        lease.holds[asked.claim] = until
        self._next_check = min(self._next_check, until)
        if not lease.shared:
            self._to_keep.add(lease.id)
        if lease.whole is not None:
            return Grant([list(group) for group in lease.block_ids], lease.whole.tokens)
        return Grant([list(group[:blocks]) for group in lease.block_ids], blocks * lease.block_size)

    def done(self, lease_id: str, claim: str, *, read: bool) -> None:
        """A reader is finished. A lease that is not shared ends with its first read."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is None or lease.holds.pop(claim, None) is None:
                return
            if read and not lease.shared and lease.ending is None:
                lease.ending = End.READ
            self._end_if_due(lease)

    def decline(self, lease_id: str) -> None:
        """A reader does not want a lease that was kept for it alone; a shared one stays."""
        with self._lock:
            lease = self._live.get(lease_id)
            if lease is not None and not lease.shared:
                self._end_when_free(lease, End.RELEASED)

    # --- with the lock held -------------------------------------------------------------------------------------------

    def _each(self, ids: Iterable[str], act: Callable[[_Lease], None]) -> tuple[list[str], list[str]]:
        found: list[str] = []
        unknown: list[str] = []
        now = self._clock()
        with self._lock:
            for lease_id in ids:
                lease = self._live.get(lease_id)
                if lease is not None:
                    self._check(lease, now)
                if lease is None or lease.ending is not None or lease_id not in self._live:
                    unknown.append(lease_id)
                else:
                    act(lease)
                    found.append(lease_id)
        return found, unknown

    def _check(self, lease: _Lease, now: float) -> None:
        for claim in [claim for claim, until in lease.holds.items() if until <= now]:
            del lease.holds[claim]
        if lease.ending is None and lease.expires <= now:
            lease.ending = End.EXPIRED
        self._end_if_due(lease)
        if lease.id in self._live:
            due = min(lease.holds.values(), default=float("inf"))
            self._next_check = min(self._next_check, due if lease.ending else min(due, lease.expires))

    def _end_when_free(self, lease: _Lease, how: End) -> None:
        lease.ending = lease.ending or how
        self._end_if_due(lease)

    def _end_if_due(self, lease: _Lease) -> None:
        if lease.ending is not None and not lease.holds:
            self._end(lease, lease.ending)

    def _end(self, lease: _Lease, how: End) -> None:
        if self._live.pop(lease.id, None) is None:
            return
        lease.ending = how
        self._ended[how] += 1
        self._ends[lease.id] = how
        if len(self._ends) > MOST_REMEMBERED:
            self._ends.popitem(last=False)
        self._to_end.add(lease.id)
        before = len(self._pins)
        again = self._pins_again.keys() & lease.pinned
        self._pins.difference_update(set(lease.pinned) - again if again else lease.pinned)
        for block in again:
            left = self._pins_again.pop(block) - 1
            if left:
                self._pins_again[block] = left
        self._leaving[lease.id] = before - len(self._pins)
