"""Write-behind queue: what turns leave is written to the ledger once their answers are on their way.

A turn's client need not wait for it. Whoever reads, in whatever thread, applies what is pending first, so that nobody sees the
difference; what is released by it is up to the turn's own event loop.
"""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from ..fleet.retention import Retention
from ..ledger.protocol import Ledger
from ..ledger.records import Held
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
