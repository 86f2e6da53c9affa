"""Spans of turns, as a router tells them what happens. Nothing here imports OpenTelemetry: `tracing` does, once it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from ..engines.client import EngineFailure
from ..errors import ConfigError, Leg
from ..fleet.fleet import Engine
from ..report import ReuseReport
from ..turn.turn import Turn

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class Spans(Protocol):
    """The spans of one turn. Its calls to engines follow each other; each ends when the next begins, or the turn ends."""

    def begin(self, leg: Leg, engine: Engine, headers: dict[str, str]) -> None:
        """An engine is about to be called. The client's trace context in `headers` is replaced by that of the call's span."""

    def answered(self, status: int) -> None:
        """It has; for the decode leg, its head is there."""

    def failed(self, failure: EngineFailure) -> None:
        """It has not, or broke off."""

    def end(self, report: ReuseReport) -> None:
        """The turn is over."""


class Tracing(Protocol):
    """Begins spans."""

    def begin(self, turn: Turn, headers: Mapping[str, str]) -> Spans:
        """A turn begins. `headers` are the client's, names in lower case."""

    def shutdown(self) -> None:
        """Hands on what is left, which can take seconds. Only where the spans' way out belongs to the router."""


class _NoSpans:
    def begin(self, leg: Leg, engine: Engine, headers: dict[str, str]) -> None:
        pass

    def answered(self, status: int) -> None:
        pass

    def failed(self, failure: EngineFailure) -> None:
        pass

    def end(self, report: ReuseReport) -> None:
        pass


NO_SPANS: Final[Spans] = _NoSpans()
"""Of a turn that nobody traces."""


def tracing_of(provider: TracerProvider | None) -> Tracing | None:
    """For a router inside a program: over `provider`, or over the one that the program has set for all of its libraries. `None`
    where there is neither. Raises `ConfigError` where `provider` is none."""
    if provider is None:
        trace = sys.modules.get("opentelemetry.trace")
        if trace is None:  # whoever sets one has imported it
            return None
        found = trace.get_tracer_provider()
        if isinstance(found, trace.ProxyTracerProvider):
            return None
        provider = found
    if not callable(getattr(provider, "get_tracer", None)):
        raise ConfigError(f"tracer_provider= takes an OpenTelemetry TracerProvider, not {provider!r}")
    from .tracing import TurnTracing

    return TurnTracing(provider)
