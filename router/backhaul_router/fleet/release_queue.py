"""Queue of leases to release, by the process that holds them: whatever is sent there next takes them along."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .engine import Holder


class ReleaseQueue:
    """Lease ids in the order in which they fell due. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self._due: dict[Holder, list[str]] = {}
        self._lock = threading.Lock()

    def add(self, holder: Holder, leases: Iterable[str]) -> None:
        """Leases on a decode engine of ours that nobody needs any more."""
        with self._lock:
            self._due.setdefault(holder, []).extend(leases)

    def take(self, holder: Holder, at_most: int = 10_000) -> tuple[str, ...]:
        """Leases that are due; they are then in the caller's hands, to be sent or put back."""
        if not self._due:
            return ()
        with self._lock:
            due = self._due.pop(holder, [])
            if due[at_most:]:
                self._due[holder] = due[at_most:]
            return tuple(due[:at_most])

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who holds leases that are due."""
        with self._lock:
            return tuple(self._due)
