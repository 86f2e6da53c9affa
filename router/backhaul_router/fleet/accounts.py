"""Accounts of what prefill engines say they did, added up beside the engines' own counters so that an audit can compare them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from backhaul_protocol.account import Account

from ..wire.engine_metrics import AUDITED
from .engine import Engine


@dataclass(frozen=True)
class Baseline:
    """Baseline of an audit: from where on a router's accounts and an engine's counters are compared."""

    accounted: Mapping[str, int]
    counted: Mapping[str, int]
    seen: Mapping[str, int]
    """The counters when they were last read."""
    started_at: float | None


class Accounts:
    """Running totals by engine. Thread-safe, and no method awaits."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._missing: Counter[str] = Counter()
        self._baselines: dict[str, Baseline] = {}
        self._lock = threading.Lock()

    def add(self, url: str, account: Account) -> None:
        """What a prefill engine says it did."""
        with self._lock:
            totals = self._totals[url]
            for name in AUDITED:
                if said := getattr(account, name):
                    totals[name] += said

    def total(self, url: str) -> Mapping[str, int]:
        """What the engine's accounts add up to, in tokens by counter."""
        with self._lock:
            return dict(self._totals.get(url, {}))

    def note_missing(self, url: str) -> None:
        """A prefill of ours ended there without an account."""
        with self._lock:
            self._missing[url] += 1

    def missing(self, url: str) -> int:
        """Prefills that ended there without an account."""
        return self._missing[url]

    def baseline(self, engine: Engine) -> Baseline:
        """Where the engine's audit begins: when the router connected, or when a restart was noticed (`rebase`)."""
        first = Baseline({}, engine.at_start, engine.at_start, engine.started_at)
        with self._lock:
            return self._baselines.get(engine.url, first)

    def rebase(self, url: str, baseline: Baseline) -> None:
        """From now on the audit begins there."""
        with self._lock:
            self._baselines[url] = baseline
