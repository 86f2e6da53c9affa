"""Public face: OpenTelemetry spans of an embedded router's turns; needs the extra `otel`."""

from .drive.tracing import TurnTracing

__all__ = ["TurnTracing"]
