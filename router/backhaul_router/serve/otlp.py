"""Where a served router sends its spans: an OpenTelemetry collector that takes OTLP over HTTP (protobuf).

The collector comes from the setting `otlp_endpoint`, or from the environment as OpenTelemetry defines it, which also says the
rest: headers with credentials, sampling, resource attributes, batches.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from .. import urls
from ..drive.run import Tracing
from ..errors import ConfigError

log = logging.getLogger("backhaul")

ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SERVICE: Final = "backhaul-router"
_PATH: Final = "/v1/traces"
_LAST_SPANS_S: Final = 3.0
"""At the end, so long is tried to reach a collector that does not answer."""


def tracing_from(endpoint: str | None) -> Tracing | None:
    """The tracing that `otlp_endpoint` or, without it, the environment asks for; `None` where neither does.

    Raises `ConfigError`: the endpoint is no URL, or the extra `otel` is missing. Where only the environment asks for spans, as it
    may ask every program on a host, a missing extra is a warning."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is not None:
        return _tracing_to(traces_url(endpoint))
    named = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return None
    try:
        return _tracing_to(None)
    except ConfigError as error:
        log.warning("%s is set, but no spans are sent: %s", named, error)
        return None


def traces_url(endpoint: str) -> str:
    """Where spans go, by a collector's base URL. Raises `ConfigError`."""
    parts = urls.split(endpoint)
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ConfigError(f"otlp_endpoint={urls.shown(endpoint)}: a collector's URL looks like http://host:4318")
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _tracing_to(url: str | None) -> Tracing:
    """`None` leaves the address to the environment. Raises `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(f"spans need {error.name}: pip install 'backhaul[otel]'") from None
    from ..drive.tracing import TurnTracing

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def shutdown() -> None:
        giving_up = threading.Timer(
            _LAST_SPANS_S, exporter.shutdown
        )  # it ends the exporter's own tries, which take longer
        giving_up.start()
        try:
            provider.shutdown()
        finally:
            giving_up.cancel()

    return TurnTracing(provider, served=True, on_shutdown=shutdown)
