"""Observers: the caller's own functions, which hear of turns and collapses, and whose faults cost nobody an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
log = logging.getLogger("backhaul")


class Listeners(Generic[_T]):
    """Functions that are told the same thing, each in the order in which it was added."""

    def __init__(self, what: str, *first: Callable[[_T], object] | None) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._listeners: list[Callable[[_T], object]] = []
        for listener in first:
            if listener is not None:
                self.add(listener)

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def add(self, listener: Callable[[_T], object]) -> Callable[[], None]:
        """Returns a function that takes it out again, which may be called twice."""
        if not callable(listener):
            raise TypeError(f"{self._what}: {listener!r} is not a function")
        with self._lock:
            self._listeners = [*self._listeners, entry := _Entry(listener)]

        def remove() -> None:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not entry]

        return remove

    def tell(self, value: _T) -> None:
        for listener in self._listeners:
            try:
                listener(value)
            except Exception:
                log.exception("%s: %r failed; the turn is not affected", self._what, listener)


class _Entry(Generic[_T]):
    """Tells apart a function that was added twice."""

    def __init__(self, listener: Callable[[_T], object]) -> None:
        self._listener = listener

    def __call__(self, value: _T) -> object:
        return self._listener(value)

    def __repr__(self) -> str:
        return repr(self._listener)
