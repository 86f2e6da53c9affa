"""Repository of handles: what the ledger has on file, the account of what engines keep for it, and the release of the rest. A
handle is a decode engine's `kv_transfer_params`, by which another engine reads the KV of a history.

What turns leave is in a write-behind queue until their answers are on their way: a turn's client need not wait for it. Whoever
reads, in whatever thread, applies what is pending first, so that nobody sees the difference.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from ..engines.leases import Leases, Spawn
from ..errors import LeaseError
from ..fleet.engine import Holder
from ..fleet.retention import Cause, Retention
from ..ledger.protocol import Dropped, Ledger, arrived
from ..ledger.records import Branch, Held
from ..report import Reason
from ..turn.effects import Settle


class PendingWrite(msgspec.Struct, eq=False):
    """Queue entry: what one turn left."""

    settle: Settle
    now: float
    """When it was left."""
    pause_s: float | None
    dropped: tuple[Held, ...] = ()
    """What is to be released once it is applied."""
    fault: Exception | None = None
    """Why it could not be applied."""

    def tell(self, retention: Retention, dropped: tuple[Held, ...]) -> None:
        """Tells the account of what engines keep, once the ledger has it."""
        settle, held = self.settle, self.settle.branch.held
        retention.settled(settle.key, settle.taken, settle.branch, dropped, self.now)
        if self.pause_s is not None and held is not None:
            retention.paused((held.name,), self.now, self.pause_s)


class WriteBehindQueue:
    """Write-behind queue of one router, before a ledger in memory. Methods never await, and may be called from any thread."""

    def __init__(self, ledger: Ledger, retention: Retention) -> None:
        self._ledger = ledger
        self._retention = retention
        self._pending: deque[PendingWrite] = deque()
        """One is in here until it is applied."""
        self._applied: set[PendingWrite] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WriteBehindQueue {len(self._pending)} pending, {len(self._applied)} to release>"

    def add(self, write: PendingWrite) -> None:
        self._pending.append(write)

    def apply_all(self) -> None:
        if not self._pending:
            return
        with self._lock:
            while self._pending:
                write = self._pending[0]
                try:
                    write.dropped = self._apply(write)
                except Exception as fault:  # noqa: BLE001 - whoever reads has nothing to do with it: `take` hands it on
                    write.fault = fault
                self._applied.add(write)
                self._pending.popleft()

    def _apply(self, write: PendingWrite) -> tuple[Held, ...]:
        settle = write.settle
        dropped = self._ledger.settle(settle.key, settle.taken, settle.branch, write.now)
        if not isinstance(dropped, tuple):
            raise TypeError("a ledger in memory files at once")
        write.tell(self._retention, dropped)
        return dropped

    def take(self, write: PendingWrite) -> bool:
        """Applies it, if nobody has. Whether what is to be released is now up to the caller, or its fault to be told."""
        self.apply_all()
        with self._lock:
            found = write in self._applied
            self._applied.discard(write)
        return found

    def all(self) -> tuple[PendingWrite, ...]:
        """Applies everything. Returns what nobody has taken."""
        self.apply_all()
        with self._lock:
            return tuple(self._applied)


log = logging.getLogger("backhaul")

Note = Callable[[tuple[Held, ...]], None]


class Handles:
    """Repository of one router's handles. `on_settled` is told of each turn's branch once it is on file."""

    def __init__(
        self,
        ledger: Ledger,
        retention: Retention,
        leases: Leases,
        spawn: Spawn,
        on_settled: Callable[[Branch], None],
    ) -> None:
        self._ledger = ledger
        self._retention = retention
        self._leases = leases
        self._spawn = spawn
        self._on_settled = on_settled
        self._writes = WriteBehindQueue(ledger, retention)

    def __repr__(self) -> str:
        return f"<Handles {self.ledger}>"

    @property
    def ledger(self) -> Ledger:
        """Histories and handles, with what every turn has left whose answer has been given."""
        self._writes.apply_all()
        return self._ledger

    @property
    def retention(self) -> Retention:
        """What decode engines keep for this router, likewise."""
        self._writes.apply_all()
        return self._retention

    def settle(self, write: PendingWrite) -> None:
        """Files what a turn left. On a shared ledger at once: the next turn may come to another router."""
        if not self._ledger.shared:
            self._writes.add(write)
            asyncio.get_running_loop().call_soon(self._release_after, write)
            return
        settle = write.settle
        dropped = self._ledger.settle(settle.key, settle.taken, settle.branch, write.now)
        self.drop(dropped, lambda dropped: write.tell(self._retention, dropped), ride=True)
        self._on_settled(settle.branch)

    def settle_all(self) -> None:
        """Files what is left of turns whose answers are on their way, and begins to release what that drops."""
        for write in self._writes.all():
            self._release_after(write)

    def _release_after(self, write: PendingWrite) -> None:
        if not self._writes.take(write):
            return
        if write.fault is not None:
            context = {"message": "what a turn left could not be filed", "exception": write.fault}
            asyncio.get_running_loop().call_exception_handler(context)
            return
        self.drop(write.dropped, ride=True)
        self._on_settled(write.settle.branch)

    def drop(self, dropped: Dropped, note: Note | None = None, *, ride: bool = False, why: Cause = Cause.ENDED) -> None:
        """Releases what the ledger drops, in the background where it has to be waited for. `note` is told of it first. With
        `ride` leases may wait a moment for a request that takes their release along."""
        if not isinstance(dropped, tuple):
            self._later(dropped, lambda held: self.drop(held, note, ride=ride, why=why))
            return
        if note is not None:
            note(dropped)
        if dropped:
            self.retention.dropped(dropped, why)
            self._leases.end(dropped, ride=ride)
        if self.retention.due:
            self.give_up_retained()

    def _later(self, dropped: Coroutine[Any, Any, tuple[Held, ...]], then: Note) -> None:
        async def wait() -> None:
            then(await dropped)

        self._spawn(wait())

    async def end_now(self, dropped: Dropped) -> None:
        """Returns when what the ledger drops is released, or has failed to be."""
        if ended := await arrived(dropped):
            self.retention.dropped(ended)
            await self._leases.end_now(ended)

    def void(self, decode: str, dropped: Dropped) -> None:
        """Forgets what the ledger drops of a process that is gone: there is nothing to release."""
        if not isinstance(dropped, tuple):
            self._later(dropped, lambda held: self.void(decode, held))
            return
        self.retention.dropped(dropped, Cause.UNUSABLE)
        log.warning("%s has restarted: %d handles of its earlier process are void", decode, len(dropped))

    def give_up_retained(self) -> None:
        """Drops and releases what `retention` has given up."""
        for victim in self.retention.take_due():
            name, key = victim.held.name, victim.key
            dropped = self.ledger.drop_for(
                key.conversation,
                lambda held: held.name == name,  # noqa: B023
                Reason.EVICTED,
                key.tenant,
            )
            if not victim.with_turn:
                self.drop(dropped, ride=True)
                continue
            self._leases.end_soon(Holder.of(victim.held.decode, victim.held.handle.engine_id))
            if not isinstance(dropped, tuple):
                self._later(dropped, lambda _: None)

    async def flush(self) -> None:
        """Drops and releases everything; decode engines of ours end other routers' leases too. Raises `LeaseError`."""
        dropped = await arrived(self.ledger.flush())
        self.retention.dropped(dropped, Cause.FLUSHED)
        await self._leases.end_now(held for held in dropped if not held.leased)
        try:
            await self._leases.flush()
        except LeaseError:
            self._leases.end((held for held in dropped if held.leased), ride=True)
            raise
