"""What the states of a turn have in common: what they need, and what follows from an event."""

from __future__ import annotations

from typing import Protocol

import msgspec

from .effects import Action, Event, Need

Actions = tuple[Action, ...]


class State(Protocol):
    """A turn that is not done."""

    @property
    def need(self) -> Need: ...
    def next(self, event: Event, now: float) -> Step: ...
    def abandon(self, now: float) -> Actions:
        """What remains to be done when the client leaves now."""


class Done(msgspec.Struct, frozen=True):
    """Nothing more to do."""


Step = tuple[State | Done, Actions]


class UnexpectedEvent(AssertionError):
    """A driver's bug: it answered a need with an event of another kind."""

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{type(state).__name__} got {type(event).__name__}")
