"""Spans of turns: a turn and its calls to engines hang together, say what the report says, and hold nothing of the prompts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from backhaul_cli import main as cli
from backhaul_loopback import LoopbackPair, loopback_pair
from backhaul_loopback.clock import CostModel
from backhaul_router.config import RouterConfig
from backhaul_router.drive import tracing
from backhaul_router.drive.tracer_provider import tracing_of
from backhaul_router.drive.tracing import TurnTracing
from backhaul_router.errors import ConfigError
from backhaul_router.report import Proof, Reason, Route
from backhaul_router.serve import otlp
from backhaul_router.serve.asgi import make_app
from backhaul_router.serve.otlp import ENDPOINT_VARIABLES, tracing_from
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from router_turns import CHAT, STORY, Cluster, first_turn, opening, run_cluster
from served import serving

DOCS = Path(__file__).parents[2] / "docs" / "tracing.md"
SOURCE = Path(str(tracing.__file__))
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENTS = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "a=b")]


class Kept:
    """The spans that a router made."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = TurnTracing(self.provider)

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        """In the order of their beginning."""
        return [span.name for span in sorted(self.all, key=lambda span: span.start_time or 0)]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def turn(self) -> ReadableSpan:
        """The last one."""
        return [span for span in self.all if said(span).get("gen_ai.operation.name")][-1]


@asynccontextmanager
async def traced(**how: Any) -> AsyncIterator[tuple[Cluster, Kept]]:
    async with run_cluster(**how) as cluster:
        kept = Kept()
        cluster.router.tracing = kept.tracing
        yield cluster, kept


def said(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


def context_of(span: ReadableSpan) -> str:
    """As a `traceparent`."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


# --- turns


async def test_a_turn_is_a_span_with_its_calls_to_engines_below() -> None:
    async with traced() as (cluster, kept):
        await cluster.exact({"messages": opening(), "max_tokens": 4})
        turn = f"chat {cluster.p.model}"
        assert kept.names == [turn, "render", "prefill", "decode"]
        assert {parent_of(kept.one(leg)) for leg in ("render", "prefill", "decode")} == {id_of(kept.turn)}
        assert kept.turn.parent is None
        assert (said(kept.one("prefill"))["server.port"], said(kept.one("decode"))["server.port"]) == (
            cluster.p.config.port,
            cluster.d.config.port,
        )
        assert {said(kept.one(leg))["http.response.status_code"] for leg in ("render", "prefill", "decode")} == {200}
        assert all(span.status.status_code is StatusCode.UNSET for span in kept.all)


async def test_calls_follow_each_other_inside_their_turn() -> None:
    async with traced(d={"costs": CostModel(decode_s=0.001)}) as (cluster, kept):
        await cluster.ask({"messages": opening(), "stream": True, "max_tokens": 4})
        times: list[int] = []
        for leg in ("render", "prefill", "decode"):
            times += [kept.one(leg).start_time or 0, kept.one(leg).end_time or 0]
        assert times == sorted(times)
        assert (kept.turn.start_time or 0) <= times[0]
        assert times[-1] <= (kept.turn.end_time or 0)


async def test_a_turn_says_what_its_report_says() -> None:
    async with traced(p={"prefix_caching": False}) as (cluster, kept):
        await cluster.exact({"messages": await first_turn(cluster)})
        report, turn = cluster.reports[-1], said(kept.turn)
        assert turn["gen_ai.conversation.id"] == "c"
        assert turn["gen_ai.request.model"] == cluster.p.model
        assert turn["gen_ai.usage.input_tokens"] == report.prompt
        assert turn["gen_ai.usage.output_tokens"] == report.generated
        assert turn["gen_ai.usage.cache_read.input_tokens"] == report.cached
        assert (turn["backhaul.route"], turn["backhaul.proof"]) == (Route.WARM, Proof.TOKENS)
        assert (turn["backhaul.turn"], turn["backhaul.offered"]) == (2, report.offered)
        assert turn["backhaul.decode_engine"] == cluster.d.url
        assert turn["server.port"] == cluster.d.config.port
        assert "backhaul.reason" not in turn
        assert "backhaul.read_ms" not in turn, "a stock engine does not tell"
        assert not kept.named("read")


async def test_a_cold_turn_says_why() -> None:
    async with traced() as (cluster, kept):
        await cluster.exact({"messages": opening()})
        assert said(kept.turn)["backhaul.reason"] == Reason.FIRST_TURN


async def test_a_read_that_the_engine_tells_of_is_a_span_of_its_prefill() -> None:
    async with traced(engine={"connector": "backhaul"}, p={"prefix_caching": False}) as (cluster, kept):
        await cluster.exact({"messages": await first_turn(cluster)})
        report, read = cluster.reports[-1], kept.one("read")
        prefill = kept.named("prefill")[-1]
        assert (report.route, parent_of(read)) == (Route.WARM, id_of(prefill))
        assert said(read)["backhaul.pulled"] == report.pulled
        assert said(read)["backhaul.read_bytes"] == report.read_bytes
        assert said(read)["backhaul.read_ms"] == report.read_ms
        assert said(read)["backhaul.engine"] == cluster.d.url
        assert (prefill.start_time or 0) <= (read.start_time or 0) <= (read.end_time or 0) <= (prefill.end_time or 0)
        assert said(prefill)["backhaul.pulled"] == report.pulled


async def test_a_turn_that_decode_runs_alone_has_no_prefill() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"messages": opening(), "n": 2})
        assert kept.names == [f"chat {cluster.p.model}", "decode"]
        assert said(kept.turn)["backhaul.reason"] == Reason.MULTIPLE_CHOICES


async def test_a_text_to_complete_is_another_operation() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"prompt": STORY}, "/v1/completions")
        assert said(kept.turn)["gen_ai.operation.name"] == "text_completion"


async def test_only_a_stream_has_a_first_chunk() -> None:
    async with traced() as (cluster, kept):
        for stream in (False, True):
            await cluster.ask({"messages": opening(), "stream": stream})
            assert said(kept.turn)["gen_ai.request.stream"] is stream
            assert ("gen_ai.response.time_to_first_chunk" in said(kept.turn)) is stream


async def test_requests_that_are_no_turns_have_no_spans() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask(b"", "/v1/models", method="GET")
        await cluster.ask(b"{", CHAT)
        assert not kept.all


async def test_model_names_that_clients_make_up_name_no_span() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"model": "made-up" * 100, "messages": opening()})
        assert kept.turn.name == "chat"
        assert len(said(kept.turn)["gen_ai.request.model"]) == 256


async def test_spans_hold_nothing_of_prompts_answers_and_handles() -> None:
    async with traced(engine={"connector": "backhaul"}, p={"prefix_caching": False}) as (cluster, kept):
        answer = await cluster.exact({"messages": await first_turn(cluster)})
        shown = "".join(span.to_json() for span in kept.all)
        for secret in ("cache keeps the keys", answer.message["content"], cluster.d.engine_id, "remote_block_ids"):
            assert secret not in shown


def test_every_attribute_has_its_line_in_the_docs() -> None:
    page = DOCS.read_text()
    used = {*re.findall(r'"((?:gen_ai|backhaul|server|http|error)\.[a-z_.]+)"', SOURCE.read_text())}
    assert used
    assert not {name for name in used if f"`{name}`" not in page}


# --- trace context


async def test_the_clients_trace_goes_on_through_the_router_to_the_engines() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"messages": opening()}, headers=CLIENTS)
        assert parent_of(kept.turn) == int(PARENT, 16)
        for engine, leg in ((cluster.p, "prefill"), (cluster.d, "decode")):
            (request,) = engine.requests_to(CHAT)
            assert request.headers["traceparent"] == context_of(kept.one(leg))
            assert request.headers["traceparent"].startswith(f"00-{TRACE}-")
            assert request.headers["tracestate"] == "a=b"
            assert request.headers["x-request-id"] == said(kept.one(leg))["backhaul.request_id"]


async def test_a_trace_context_that_is_none_reaches_no_engine() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"messages": opening()}, headers=[("traceparent", "00-1-2-01"), ("tracestate", "a=b")])
        (request,) = cluster.d.requests_to(CHAT)
        assert kept.turn.parent is None
        assert request.headers["traceparent"] == context_of(kept.one("decode"))
        assert "tracestate" not in request.headers


async def test_a_trace_that_is_not_sampled_leaves_no_spans_and_goes_on() -> None:
    async with traced() as (cluster, kept):
        await cluster.ask({"messages": opening()}, headers=[("traceparent", f"00-{TRACE}-{PARENT}-00")])
        (request,) = cluster.d.requests_to(CHAT)
        assert not kept.all
        assert request.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert request.headers["traceparent"].endswith("-00")


async def test_without_a_header_the_turn_belongs_to_the_span_of_the_calling_code() -> None:
    async with traced() as (cluster, kept):
        with kept.provider.get_tracer("agent").start_as_current_span("agent step") as step:
            await cluster.ask({"messages": opening()})
        assert parent_of(kept.turn) == step.get_span_context().span_id


async def test_turns_at_a_time_keep_their_calls_apart() -> None:
    async with traced() as (cluster, kept):
        await asyncio.gather(*(cluster.ask({"messages": opening(name)}, conversation=name) for name in "abcdef"))
        turns = {id_of(span) for span in kept.all if span.name.startswith("chat")}
        assert len(turns) == 6
        assert sorted(map(parent_of, kept.named("decode"))) == sorted(turns)


# --- errors


async def test_a_prefill_that_fails_is_an_error_of_its_span_and_of_the_turn() -> None:
    async with traced() as (cluster, kept):
        await cluster.router.connect()
        cluster.p.faults.status = 500
        await cluster.ask({"messages": opening()})
        leg, turn = kept.one("prefill"), kept.turn
        assert leg.status.status_code is turn.status.status_code is StatusCode.ERROR
        assert (said(leg)["error.type"], said(turn)["error.type"]) == ("500", "prefill_failed")
        assert said(turn)["http.response.status_code"] == 502
        assert turn.status.description == f"prefill engine {cluster.p.url} answered 500"


async def test_an_engine_that_is_down_is_named_by_the_error() -> None:
    async with traced() as (cluster, kept):
        await cluster.router.connect()
        await cluster.kill(cluster.p)
        await cluster.ask({"messages": opening()})
        leg = kept.one("prefill")
        assert said(leg)["error.type"] == "refused"
        assert cluster.p.url in (leg.status.description or "")
        assert kept.turn.status.description == leg.status.description


async def test_a_call_that_is_repeated_is_another_span_and_the_turn_is_no_error() -> None:
    async with traced(decode=2) as (cluster, kept):
        history = await first_turn(cluster)
        kept.exporter.clear()
        used = cluster.reports[0].decode_engine
        next(engine for engine in cluster.decode if engine.url == used).faults.status = 500
        cluster.released_twice = True
        await cluster.exact({"messages": history})
        failed, worked = sorted(kept.named("decode"), key=lambda span: span.start_time or 0)
        assert (failed.status.status_code, said(failed)["backhaul.engine"]) == (StatusCode.ERROR, used)
        assert worked.status.status_code is kept.turn.status.status_code is StatusCode.UNSET
        assert said(kept.turn)["backhaul.retries"] == 1
        assert said(kept.turn)["backhaul.reason"] == Reason.DECODE_FAILED


async def test_a_stream_that_breaks_is_an_error_though_its_head_was_fine() -> None:
    async with traced() as (cluster, kept):
        await cluster.router.connect()
        cluster.d.faults.die_after_bytes = 700
        await cluster.ask({"messages": opening(), "stream": True})
        cluster.d.faults.clear()
        assert said(kept.one("decode"))["http.response.status_code"] == 200
        assert said(kept.one("decode"))["error.type"] == "broken"
        assert said(kept.turn)["error.type"] == "decode_failed"


async def test_a_client_that_leaves_ends_its_spans_and_is_no_error() -> None:
    async with traced(d={"costs": CostModel(decode_s=0.05)}) as (cluster, kept):
        reply = await cluster.open({"messages": opening(), "stream": True, "ignore_eos": True, "max_tokens": 5000})
        await reply.aclose()
        await cluster.idle()
        assert kept.names[-1] == "decode"
        assert said(kept.turn)["backhaul.error"] == "client_gone"
        assert all(span.status.status_code is StatusCode.UNSET for span in kept.all)


class _Faulty(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("ordered by a test")


async def test_a_processor_that_fails_costs_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with traced() as (cluster, kept):
        kept.provider.add_span_processor(_Faulty())
        await cluster.exact({"messages": opening()})
    assert "a turn is not traced" in caplog.text


# --- switching it on


async def test_without_tracing_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, backhaul_router.serve.asgi, backhaul_cli.main, backhaul_router.serve.otlp, backhaul_router.drive.embedded\n"
        "from backhaul_router.drive.tracer_provider import tracing_of\n"
        "assert tracing_of(None) is None and backhaul_router.serve.otlp.tracing_from(None) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", program]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, env=variables)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_an_embedded_router_goes_by_the_provider_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)
    assert tracing_of(None) is None, "the program has set none"
    kept = Kept()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: kept.provider)
    assert tracing_of(None) is not None
    with pytest.raises(ConfigError, match="takes an OpenTelemetry TracerProvider"):
        tracing_of("http://collector:4318")  # type: ignore[arg-type]


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Any:
    for name in (*ENDPOINT_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield


ASKED = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize("off", [{}, {**ASKED, "OTEL_SDK_DISABLED": "true"}, {**ASKED, "OTEL_TRACES_EXPORTER": "none"}])
def test_a_server_that_nobody_asks_for_spans_makes_none(monkeypatch: pytest.MonkeyPatch, off: dict[str, str]) -> None:
    with environment(monkeypatch, **off):
        assert tracing_from(None) is None


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317", "http://", "http://[::1"])
def test_an_endpoint_that_is_no_url_is_refused_at_the_start(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--prefill", "http://p:1", "--decode", "http://d:1", "--otlp-endpoint", url]) == 2
    assert f"otlp_endpoint={url}" in capsys.readouterr().err


def test_without_the_extra_an_option_is_an_error_and_the_environment_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"backhaul\[otel\]"):
        tracing_from("http://collector:4318")
    with environment(monkeypatch, **ASKED), caplog.at_level(logging.WARNING):
        assert tracing_from(None) is None
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no spans are sent" in caplog.text


# --- to a collector


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[Mapping[str, str]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        self.requests.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    @property
    def spans(self) -> dict[str, Any]:
        """By name."""
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    @property
    def service(self) -> str:
        (found,) = {
            attribute.value.string_value
            for request in self.requests
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
        }
        return found


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield collector
    await runner.cleanup()


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair(connector="backhaul") as pair:
        yield pair


async def post(app: Any, pair: LoopbackPair) -> None:
    """A turn, as an ASGI server brings it."""
    body = json.dumps({"model": pair.model, "messages": opening(), "max_tokens": 4}).encode()
    coming = asyncio.Queue[Any]()
    coming.put_nowait({"type": "http.request", "body": body})
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": CHAT, "headers": [], "client": ("::1", 1)}, coming.get, send)
    assert sent[0]["status"] == 200


async def test_a_server_that_ends_has_sent_its_spans(
    collector: Collector, pair: LoopbackPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=k"}
    with environment(monkeypatch, **variables):
        made = tracing_from(None)
    app = make_app(RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,)), tracing=made)
    await app.connect()
    await post(app, pair)
    await app.aclose()
    turn = collector.spans[f"chat {pair.model}"]
    assert turn.kind == SpanKind.SERVER.value + 1  # OTLP counts from 1
    assert "server.address" not in {attribute.key for attribute in turn.attributes}
    assert collector.spans["decode"].parent_span_id == turn.span_id
    assert collector.headers[0]["api-key"] == "k"
    assert collector.service == "backhaul-router"


async def test_a_collector_that_is_down_costs_turns_nothing_and_the_end_little(
    pair: LoopbackPair, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    monkeypatch.setattr(otlp, "_LAST_SPANS_S", 0.05)
    made = tracing_from(f"http://127.0.0.1:{unused_tcp_port}")
    app = make_app(RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,)), tracing=made)
    await app.connect()
    await post(app, pair)
    async with asyncio.timeout(5):  # by itself the exporter would try for longer
        await app.aclose()


@pytest.mark.slow
async def test_the_command_sends_spans_where_it_is_told(collector: Collector, pair: LoopbackPair) -> None:
    async with serving(pair, "--otlp-endpoint", collector.url) as served:
        body = {"model": pair.model, "messages": opening(), "max_tokens": 4}
        answer = await served.http.post(CHAT, json=body, headers=dict(CLIENTS))
        status, _, errors = await served.stop()
    assert (answer.status_code, status) == (200, 0), errors
    assert collector.spans[f"chat {pair.model}"].parent_span_id == bytes.fromhex(PARENT)
    assert {"prefill", "decode"} <= collector.spans.keys()
