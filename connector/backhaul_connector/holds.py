"""Deadlines of a worker's reads: until when D holds the blocks that they rely on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def _boot() -> str | None:
    """What all processes of a machine have in common until it starts again; `None` where it does not say (no Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Moment:
    """A reading of the monotonic clock that another process can compare with its own, if it is on the same machine."""

    at: float
    boot: str | None

    @classmethod
    def now(cls) -> Moment:
        return cls(time.monotonic(), _boot())

    def age_s(self, now: Moment) -> float:
        """Seconds since; 0 where the clocks cannot be compared."""
        return max(0.0, now.at - self.at) if self.boot is not None and self.boot == now.boot else 0.0


class Holds:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}

    def begin(self, left_s: Mapping[str, float], age_s: float = 0.0) -> None:
        """Reads that start now, by request, and for how many seconds each one's blocks were held `age_s` seconds ago."""
        now = self._clock() - age_s
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
