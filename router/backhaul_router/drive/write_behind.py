"""What turns leave is filed when their answers are on their way, and before anybody looks at the ledger.

A turn's client need not wait for it. Whoever looks, in whatever thread, files what is waiting first, so that nobody sees the
difference; what is released by it is up to the turn's own event loop.
"""

from __future__ import annotations

import threading
from collections import deque

from ..fleet.retention import Retention
from ..ledger.protocol import Ledger
from ..ledger.records import Held
from ..turn.effects import Settle


class Left:
    """What one turn left."""

    __slots__ = ("dropped", "fault", "now", "pause_s", "settle")

    def __init__(self, settle: Settle, now: float, pause_s: float | None) -> None:
        self.settle = settle
        self.now = now
        """When it was left."""
        self.pause_s = pause_s
        self.dropped: tuple[Held, ...] = ()
        """What is to be released once it is filed."""
        self.fault: Exception | None = None
        """Why it could not be filed."""


class Filing:
    """Of one router, on a ledger in memory. Methods never await, and may be called from any thread."""

    def __init__(self, ledger: Ledger, retention: Retention) -> None:
        self._ledger = ledger
        self._retention = retention
        self._waiting: deque[Left] = deque()
        """One is in here until it is filed."""
        self._filed: set[Left] = set()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Filing {len(self._waiting)} waiting, {len(self._filed)} to release>"

    def add(self, left: Left) -> None:
        self._waiting.append(left)

    def file_all(self) -> None:
        if not self._waiting:
            return
        with self._lock:
            while self._waiting:
                left = self._waiting[0]
                try:
                    left.dropped = self._file(left)
                except Exception as fault:  # noqa: BLE001 - whoever looks has nothing to do with it: `take` hands it on
                    left.fault = fault
                self._filed.add(left)
                self._waiting.popleft()

    def _file(self, left: Left) -> tuple[Held, ...]:
        settle = left.settle
        dropped = self._ledger.settle(settle.key, settle.taken, settle.branch, left.now)
        if not isinstance(dropped, tuple):
            raise TypeError("a ledger in memory files at once")
        note(self._retention, left, dropped)
        return dropped

    def take(self, left: Left) -> bool:
        """Files it, if nobody has. Whether what is to be released is now up to the caller, or its fault to be told."""
        self.file_all()
        with self._lock:
            found = left in self._filed
            self._filed.discard(left)
        return found

    def all(self) -> tuple[Left, ...]:
        """Files everything. Returns what nobody has taken."""
        self.file_all()
        with self._lock:
            return tuple(self._filed)


def note(retention: Retention, left: Left, dropped: tuple[Held, ...]) -> None:
    """Tells the account of what engines keep, once it is filed."""
    settle, held = left.settle, left.settle.branch.held
    retention.settled(settle.key, settle.taken, settle.branch, dropped, left.now)
    if left.pause_s is not None and held is not None:
        retention.paused((held.name,), left.now, left.pause_s)
