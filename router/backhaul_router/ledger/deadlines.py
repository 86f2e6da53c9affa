"""Calendar queue: many things, each with a time, in a bucket for its span of time; only the bucket that is near is a heap.

A heap of pairs takes 100 bytes a thing, and what is not awaited any more stays in it. Here the things are in one list for each
span of time, in no order; only the list whose time has come is put in order. A list of which too much is void is cleaned by
itself, so that nothing ever takes as long as all the things there are.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)
_SPAN_S = 2.0
_VOID = 4
"""A list is cleaned when more than one thing in so many is void."""


class CalendarQueue(Generic[_T]):
    """Calendar queue whose entries are voided lazily. Their owner has the lock, and knows of each thing the time under which it
    was put here last: `when` says it, or `None` of what is not awaited any more. Every other time under which the thing was put
    here is void."""

    def __init__(self, when: Callable[[_T], float | None], span_s: float = _SPAN_S) -> None:
        self._when = when
        self._span_s = span_s
        self._far: dict[int, list[_T]] = {}
        """By number of the span."""
        self._void: dict[int, int] = {}
        self._next: int | None = None
        """The first span in `_far`."""
        self._near: list[tuple[float, int, _T]] = []
        """A heap: all that is due up to the end of `_reached`. While it is empty there is no such span."""
        self._near_void = 0
        self._reached = 0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Places taken, void ones too."""
        return len(self._near) + sum(map(len, self._far.values()))

    def put(self, thing: _T, at: float) -> None:
        """Where it was put before under another time, `void` has to be told."""
        span = int(at // self._span_s)
        if self._near and span <= self._reached:
            heapq.heappush(self._near, (at, next(self._numbers), thing))
        elif (things := self._far.get(span)) is not None:
            things.append(thing)
        else:
            self._far[span] = [thing]
            if self._next is None or span < self._next:
                self._next = span

    def void(self, at: float) -> None:
        """What was put here under this time is not awaited then any more: `when` says so by now."""
        span = int(at // self._span_s)
        things = self._far.get(span)
        if things is None:
            self._void_near()
            return
        void = self._void.get(span, 0) + 1
        if void <= len(things) // _VOID:
            self._void[span] = void
        elif left := self._awaited(span, things):
            self._far[span] = left
            self._void.pop(span, None)
        else:
            self._remove(span)

    def take(self, until: float) -> _T | None:
        """The first thing that is due by `until`; of those that are due at the same time, the one that was put here first."""
        while True:
            while self._near and self._near[0][0] <= until:
                at, _, thing = heapq.heappop(self._near)
                if self._when(thing) == at:
                    return thing
                self._near_void -= 1
            if self._near or self._next is None or self._next * self._span_s > until:
                return None
            self._reached, self._near_void = self._next, 0
            for thing in self._awaited(self._reached, self._far[self._reached]):
                if (at_ := self._when(thing)) is not None:
                    self._near.append((at_, next(self._numbers), thing))
            heapq.heapify(self._near)
            self._remove(self._reached)

    def _void_near(self) -> None:
        self._near_void += 1
        if self._near_void > len(self._near) // _VOID:
            self._near = [one for one in self._near if self._when(one[2]) == one[0]]
            heapq.heapify(self._near)
            self._near_void = 0

    def _awaited(self, span: int, things: list[_T]) -> list[_T]:
        """Those of a span's things that are not void, each once."""
        when, span_s = self._when, self._span_s
        return list(
            dict.fromkeys(thing for thing in things if (at := when(thing)) is not None and at // span_s == span)
        )

    def _remove(self, span: int) -> None:
        del self._far[span]
        self._void.pop(span, None)
        if span == self._next:
            self._next = min(self._far, default=None)
