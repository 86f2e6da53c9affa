"""Public face: Prometheus metrics of an embedded router; needs the extra `server`."""

from .serve.metrics import RouterMetrics

__all__ = ["RouterMetrics"]
