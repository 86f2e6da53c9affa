"""Lookup of the tracer provider that the program around an embedded router uses, if it uses one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .run import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


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
