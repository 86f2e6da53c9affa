"""When reads must have ended: a worker's record of the holds that its reads rely on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping


class Holds:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}

    def begin(self, left_s: Mapping[str, float]) -> None:
        """Reads that start now, by request, and for how many seconds each one's blocks are held."""
        now = self._clock()
        self._ends.update({request: now + left for request, left in left_s.items()})

    def late(self, ended: Iterable[str], under_way: Iterable[str]) -> set[str]:
        """Which of the reads that have ended did so after their hold: they may have seen blocks of someone else. Forgets
        them, and every read that is no longer under way."""
        if not self._ends:
            return set()
        now = self._clock()
        ended = set(ended)
        late = {request for request in ended if self._ends.get(request, now) < now}
        self._ends = {
            request: end for request, end in self._ends.items() if request not in ended and request in under_way
        }
        return late
