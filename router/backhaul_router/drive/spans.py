"""Tracing interface: the spans of turns, as a router tells them what happens. Nothing here imports OpenTelemetry:
`tracing` does, once it is wanted (`tracer_provider`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from ..engines.client import EngineFailure
from ..errors import Leg
from ..fleet.engine import Engine
from ..report import ReuseReport
from ..turn.turn import Turn


class Spans:
    """Spans of one turn; these are the null object, of a turn that nobody traces. Its calls to engines follow each other: each
    ends when the next begins, or the turn ends."""

    def begin(self, leg: Leg, engine: Engine, headers: dict[str, str]) -> None:
        """An engine is about to be called. The client's trace context in `headers` is replaced by that of the call's span."""

    def answered(self, status: int) -> None:
        """It has; for the decode leg, its head is there."""

    def failed(self, failure: EngineFailure) -> None:
        """It has not, or broke off."""

    def end(self, report: ReuseReport) -> None:
        """The turn is over."""


class Tracing(Protocol):
    """Tracer: begins spans."""

    def begin(self, turn: Turn, headers: Mapping[str, str]) -> Spans:
        """A turn begins. `headers` are the client's, names in lower case."""

    def shutdown(self) -> None:
        """Hands on what is left, which can take seconds. Only where the spans' way out belongs to the router."""


NO_SPANS: Final = Spans()
