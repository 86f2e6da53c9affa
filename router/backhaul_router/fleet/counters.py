"""Counters of what the router did; each has its line in the docs on operation."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..report import ReuseReport

Event: TypeAlias = Literal[
    "withheld",
    "unreachable_pins",
    "proof_faults",
    "prompts_computed_twice",
    "prompts_differed",
    "failed_polls",
    "audit_alarms",
]
"""What is counted one at a time: a field of `Counters`."""


@dataclass
class Counters:
    """Monotonic counters. Thread-safe where they are changed by a method."""

    turns: Counter[str] = field(default_factory=Counter)
    """By route."""
    reasons: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    withheld: int = 0
    """Requests that were sent to no engine, since two had broken with them."""
    releases: int = 0
    failed_releases: int = 0
    unreachable_pins: int = 0
    """Streamed turns whose handle the engine kept to itself: D pins their blocks until the TTL."""
    proof_faults: int = 0
    """An engine ran other ids than those it was sent, did not check a handle, or said what the protocol has not."""
    prompts_computed_twice: int = 0
    """A decode engine of ours computed a prompt that P had computed, because it could not read P's blocks."""
    prompts_differed: int = 0
    """A decode engine of ours computed a prompt by itself, because P's was another one."""
    failed_polls: int = 0
    """Times that an engine did not show its load."""
    audit_alarms: int = 0
    """What the router counted as reused is not what the engines counted."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, event: Event) -> None:
        """One more."""
        with self._lock:
            setattr(self, event, getattr(self, event) + 1)

    def count(self, report: ReuseReport) -> None:
        """A turn has ended."""
        with self._lock:
            self.turns[report.route] += 1
            if report.reason:
                self.reasons[report.reason] += 1
            self.retries += report.retries

    def count_release(self, number: int = 1, *, failed: bool) -> None:
        """So many handles were released, or could not be."""
        with self._lock:
            self.releases += number
            self.failed_releases += number * failed
