"""Compatibility table of engine pairs: which prefill engine (P) can read from which decode engine (D), as exchanges have
shown."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .engine import Engine


class PairTable:
    """Safe and unsafe pairs of URLs, P first. Thread-safe, and no method awaits."""

    def __init__(self, get: Callable[[str], Engine | None]) -> None:
        """`get` finds an engine by its URL."""
        self._get = get
        self._checked: set[tuple[str, str]] = set()
        self._unsafe: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def is_checked(self, prefill: str, decode: str) -> bool:
        """Whether it is known if P can read from D. A P of ours needs no check: it answers where a stock one hangs."""
        engine = self._get(prefill)
        ours = engine is not None and engine.connector is not None
        return ours or (prefill, decode) in self._checked

    def unsafe_for(self, decode: str) -> frozenset[str]:
        """Prefill engines that cannot read from this decode engine."""
        return frozenset(p for p, d in tuple(self._unsafe) if d == decode)

    def note(self, prefill: str, decode: str, why_unsafe: str | None) -> None:
        """What an exchange between the two has shown."""
        with self._lock:
            self._checked.add((prefill, decode))
            if why_unsafe is None:
                self._unsafe.pop((prefill, decode), None)
            else:
                self._unsafe[prefill, decode] = why_unsafe

    @property
    def unsafe(self) -> dict[tuple[str, str], str]:
        """(P, D) and why."""
        with self._lock:
            return dict(self._unsafe)

    def forget(self, url: str) -> None:
        """The engine is removed."""
        with self._lock:
            self._checked = {pair for pair in self._checked if url not in pair}
            self._unsafe = {pair: why for pair, why in self._unsafe.items() if url not in pair}
