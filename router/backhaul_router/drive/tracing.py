"""OpenTelemetry instrumentation: spans of every turn. Needs the extra `otel`; nothing else here imports this module at once.

    chat MODEL                  the turn: what it reused and why not, as its report says
      render                    the calls to engines, one after the other; a call that is repeated is another span
      prefill
        read                    P reads KV from D, where the engine tells how long that took
      decode                    until the answer's end

The client's `traceparent` is the turn's parent, else the span that the calling code is in. Engines get the context of their own
span, so that what they trace themselves hangs below it. `docs/tracing.md` lists the attributes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Final, ParamSpec
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..engines.client import EngineFailure
from ..errors import Leg
from ..fleet.engine import Engine
from ..fleet.fleet import Fleet
from ..report import ReuseReport
from ..turn.turn import Turn
from .spans import NO_SPANS, Spans

log = logging.getLogger("backhaul")

Value = str | bool | int | float

_HEADERS: Final = TraceContextTextMapPropagator()
"""W3C Trace Context alone: baggage is the client's, and does not go to the engines."""
_MAX_NAME: Final = 256
"""Characters of what clients make up."""
_GEN_AI: Final = {
    "conversation": "gen_ai.conversation.id",
    "model": "gen_ai.request.model",
    "prompt": "gen_ai.usage.input_tokens",
    "generated": "gen_ai.usage.output_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
}
"""Keys of a report that OpenTelemetry's conventions for generative AI have a name for."""
_TOLD_OTHERWISE: Final = frozenset({"total_ms", "status", "error"})
_NAMES: Final = {
    key: _GEN_AI.get(key, f"backhaul.{key}") for key in ReuseReport.__struct_fields__ if key not in _TOLD_OTHERWISE
}
_OF_PREFILL: Final = ("prompt", "cached", "offered", "verified", "local", "pulled", "computed")
_CLIENT_GONE: Final = "client_gone"

_P = ParamSpec("_P")


def _harmless(method: Callable[_P, None]) -> Callable[_P, None]:
    """Samplers and processors are someone else's code, whose fault must not cost the client its answer."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            log.exception("a span is lost or incomplete")

    return wrapped


class TurnTracing:
    """Instrumentation of a router's turns over a tracer provider: `Router(config, tracing=TurnTracing(provider))`.

    `served`: the router is a server, and turns are spans of that kind. `on_shutdown` is for a provider that was made for this
    router alone."""

    def __init__(
        self, provider: TracerProvider, *, served: bool = False, on_shutdown: Callable[[], None] | None = None
    ) -> None:
        self._tracer = provider.get_tracer("backhaul_router", version("backhaul"))
        self._kind = SpanKind.SERVER if served else SpanKind.CLIENT
        self._on_shutdown = on_shutdown

    def begin(self, turn: Turn, headers: Mapping[str, str]) -> Spans:
        try:
            return self._begin(turn, headers)
        except Exception:
            log.exception("a turn is not traced")
            return NO_SPANS

    def _begin(self, turn: Turn, headers: Mapping[str, str]) -> Spans:
        facts = turn.facts
        operation, model = facts.api.operation, facts.model[:_MAX_NAME]
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.stream": facts.stream,
        }
        if model:
            attributes["gen_ai.request.model"] = model
        name = f"{operation} {model}" if _serves(turn.fleet, model) else operation
        parent = _HEADERS.extract(headers, context.get_current())
        span = self._tracer.start_span(name, parent, kind=self._kind, attributes=attributes)
        return _TurnSpans(self._tracer, turn, span, shows_server=self._kind is SpanKind.CLIENT)

    def shutdown(self) -> None:
        if self._on_shutdown is not None:
            self._on_shutdown()


def _serves(fleet: Fleet, model: str) -> bool:
    """Names of spans are few: nothing that clients make up."""
    return any(model in engine.models or model in engine.adapters for engine in fleet.engines)


class _Call:
    """A call to an engine. Its span ends with what the engine said of it, which is read only afterwards."""

    __slots__ = ("ended_ns", "engine", "failed", "leg", "read_from", "span", "started_ns", "status")

    def __init__(self, leg: Leg, engine: Engine, span: Span, started_ns: int, read_from: str | None) -> None:
        self.leg = leg
        self.engine = engine
        self.span = span
        self.started_ns = started_ns
        self.ended_ns: int | None = None
        self.read_from = read_from
        self.status: int | None = None
        self.failed = False

    def fail(self, error_type: str, description: str) -> None:
        self.failed = True
        self.span.set_attribute("error.type", error_type)
        self.span.set_status(Status(StatusCode.ERROR, description))


class _TurnSpans(Spans):
    def __init__(self, tracer: trace.Tracer, turn: Turn, span: Span, *, shows_server: bool) -> None:
        """`shows_server`: on a server's own span `server.address` would be its own."""
        self._shows_server = shows_server
        self._tracer = tracer
        self._turn = turn
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._call: _Call | None = None
        self._why = ""
        """What the last call that failed says."""

    @_harmless
    def begin(self, leg: Leg, engine: Engine, headers: dict[str, str]) -> None:
        if self._call is not None and self._call.leg is Leg.DECODE and not self._call.failed:
            self._failed("decode_failed", f"{self._call.engine} gave no answer that could be used")
        self._end_call()
        now_ns = time.time_ns()
        attributes = {**_address(engine.url), "backhaul.engine": engine.url}
        if (request_id := headers.get("x-request-id")) is not None:
            attributes["backhaul.request_id"] = request_id
        span = self._tracer.start_span(
            str(leg), self._context, kind=SpanKind.CLIENT, attributes=attributes, start_time=now_ns
        )
        spare = self._turn.spare
        self._call = _Call(leg, engine, span, now_ns, spare.decode if spare is not None else None)
        for name in _HEADERS.fields:
            headers.pop(name, None)
        _HEADERS.inject(headers, trace.set_span_in_context(span))

    @_harmless
    def answered(self, status: int) -> None:
        if (call := self._call) is None:
            return
        call.status = status
        call.span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self._failed(str(status), f"{call.engine} answered {status}")
        elif call.leg is not Leg.DECODE:
            call.ended_ns = time.time_ns()

    @_harmless
    def failed(self, failure: EngineFailure) -> None:
        self._failed(failure.kind, failure.message)

    def _failed(self, error_type: str, why: str) -> None:
        self._why = why
        if self._call is not None:
            self._call.fail(str(error_type), why)
            self._call.ended_ns = time.time_ns()

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        if call.leg is Leg.PREFILL and call.status == 200 and call.span.is_recording():
            draft = self._turn.draft
            call.span.set_attributes(
                {f"backhaul.{key}": value for key in _OF_PREFILL if (value := getattr(draft, key)) is not None}
            )
            if call.engine.connector is not None and draft.pulled and draft.read_ms is not None:
                self._tell_read(call, draft.read_ms)
        call.span.end(call.ended_ns)

    def _tell_read(self, call: _Call, read_ms: float) -> None:
        """P tells how long its read took and not when it was: it comes before what is computed, once D has confirmed it."""
        draft = self._turn.draft
        latest_ns = call.ended_ns or time.time_ns()
        started_ns = min(call.started_ns + int((draft.claim_ms or 0.0) * 1e6), latest_ns)
        ended_ns = min(started_ns + int(read_ms * 1e6), latest_ns)
        attributes: dict[str, Value] = {
            f"backhaul.{key}": value
            for key in ("pulled", "read_bytes", "read_ms", "claim_ms")
            if (value := getattr(draft, key)) is not None
        }
        if call.read_from is not None:
            attributes |= {**_address(call.read_from), "backhaul.engine": call.read_from}
        parent = trace.set_span_in_context(call.span)
        self._tracer.start_span("read", parent, attributes=attributes, start_time=started_ns).end(ended_ns)

    @_harmless
    def end(self, report: ReuseReport) -> None:
        error = report.error
        call = self._call
        if call is not None and not call.failed and error is not None and error.startswith(f"{call.leg}_"):
            self._failed(error, f"{call.engine} gave no answer that could be used")
        self._end_call()
        span = self._span
        if span.is_recording():
            span.set_attributes(_of_report(report))
            if self._shows_server and report.decode_engine is not None:
                span.set_attributes(_address(report.decode_engine))
            if self._turn.facts.stream and report.first_byte_ms is not None:
                span.set_attribute("gen_ai.response.time_to_first_chunk", report.first_byte_ms / 1e3)
            if error is not None:
                span.set_attribute("backhaul.error", error)
            if error is not None and error != _CLIENT_GONE:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR, self._why or error))
        span.end()


def _of_report(report: ReuseReport) -> dict[str, Value]:
    """What is known of the turn, by the names of docs/tracing.md."""
    out: dict[str, Value] = {"http.response.status_code": report.status}
    for key, name in _NAMES.items():
        value = getattr(report, key)
        if isinstance(value, str):
            if value:
                out[name] = str(value)[:_MAX_NAME]
        elif isinstance(value, bool | int | float):
            out[name] = value
    return out


@functools.lru_cache(maxsize=1024)
def _address(url: str) -> dict[str, str | int]:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}
