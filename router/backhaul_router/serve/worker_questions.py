"""What workers ask each other, as their parent passes it on.

A question is open until everybody whom it went to has answered, or is gone, or its time is over. A change goes on to the others
once the worker that asks has made it: what cannot be done is then done by nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .worker_link import RELOAD, Answers, Ask, Do, Member, Said, Whom
from .worker_process import Place, Process


@dataclass(eq=False)
class _Question:
    number: int
    asker: Place
    by: Process
    ask: Ask
    until: float
    answers: dict[int, Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    spread: bool = False
    """Of a change: the one that asks has made it, and the others are told."""


class Questions:
    """Those of all workers."""

    def __init__(self, places: Sequence[Place], reloaded: Callable[[], None]) -> None:
        """`reloaded` is called when a worker has read the configuration again."""
        self.members: list[Member] = []
        """The engines after the last change; empty before one."""
        self._places = places
        self._reloaded = reloaded
        self._open: dict[int, _Question] = {}
        self._late: dict[int, _Question] = {}
        """Changes whose time was over before the one that asks had made them."""
        self._changes: list[tuple[Place, Process, Ask]] = []
        """That wait for the one before."""
        self._count = 0

    @property
    def next_until(self) -> float | None:
        """When the first time is over."""
        return min((question.until for question in self._open.values()), default=None)

    def ask(self, place: Place, process: Process, ask: Ask) -> None:
        """A worker asks."""
        if ask.whom is Whom.CHANGE and any(one.ask.whom is Whom.CHANGE for one in self._open.values()):
            self._changes.append((place, process, ask))
            return
        self._count += 1
        question = _Question(self._count, place, process, ask, time.monotonic() + ask.limit_s)
        self._open[question.number] = question
        match ask.whom:
            case Whom.CHANGE:
                self._pass_on(question, [place])
            case Whom.CHANGE_AT_ONCE:
                self._pass_on(question, self._places)
            case Whom.ALL | Whom.UNTIL_ONE:
                self._pass_on(question, [one for one in self._places if one.serves])
        self._close_if_done(question)

    def said(self, place: Place, said: Said) -> None:
        """A worker answers."""
        if said.members is not None:
            self.members = said.members
        question = self._open.get(said.question) or self._late.pop(said.question, None)
        if question is None:
            return
        question.waiting.discard(place.number)
        if said.failed:
            question.failed.add(place.number)
        else:
            question.answers[place.number] = said.value
        if question.ask.whom is Whom.UNTIL_ONE and said.good:
            question.waiting.clear()
        if question.ask.whom is Whom.CHANGE and not question.spread and said.good:
            question.spread = True
            if question.ask.kind == RELOAD:
                self._reloaded()
            self._pass_on(question, [one for one in self._places if one is not place])
        self._close_if_done(question)

    def started(self, place: Place) -> None:
        """A worker was started. It has `members`; what is being removed at this moment is among them."""
        removals = [one for one in self._open.values() if one.ask.whom is Whom.CHANGE_AT_ONCE]
        for question in removals:
            self._pass_on(question, [place])

    def gone(self, place: Place) -> None:
        """A worker has ended. Where it was to change something, the one that takes its place begins with the change."""
        for question in [one for one in self._open.values() if place.number in one.waiting]:
            question.waiting.discard(place.number)
            self._close_if_done(question)

    def look_at_the_clock(self, now: float) -> None:
        for question in [one for one in self._open.values() if one.until <= now]:
            if question.ask.whom is Whom.CHANGE and not question.spread:
                self._late[question.number] = question
            self._close(question)

    def _pass_on(self, question: _Question, places: Sequence[Place]) -> None:
        do = Do(question.number, question.ask.kind, question.ask.what)
        for place in places:
            if place.process is not None:
                question.waiting.add(place.number)
                place.process.send(do)

    def _close_if_done(self, question: _Question) -> None:
        if question.number in self._open and not question.waiting:
            self._close(question)

    def _close(self, question: _Question) -> None:
        del self._open[question.number]
        if question.asker.process is question.by:
            workers = [place.shown for place in self._places]
            missing = sorted(question.waiting | question.failed)
            question.by.send(Answers(question.ask.number, question.answers, missing, workers))
        if question.ask.whom is not Whom.CHANGE:
            return
        while self._changes:
            place, process, ask = self._changes.pop(0)
            if place.process is process:
                self.ask(place, process, ask)
                return
