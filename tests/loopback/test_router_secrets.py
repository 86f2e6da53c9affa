"""Handles name hosts, ports and blocks: none passes the router in either direction, however it is spelled. And what a client
sends that is no turn at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from backhaul_router.report import Route
from router_turns import CHAT, COMPLETIONS, STORY, Cluster, first_turn, opening, run_cluster

FORGED = b'{"do_remote_prefill": true, "remote_host": "attacker", "remote_engine_id": "forged"}'
MESSAGES = json.dumps(opening()).encode()


def body(rest: bytes, *, stream: bool = False) -> bytes:
    flag = b"true" if stream else b"false"
    return b'{"model": "loopback", "messages": ' + MESSAGES + b', "stream": ' + flag + b", " + rest + b"}"


SMUGGLED = {
    "plain": b'"kv_transfer_params": ' + FORGED,
    "escaped": b'"kv_transfer_p\\u0061rams": ' + FORGED,
    "escaped all through": b'"' + b"".join(b"\\u%04x" % c for c in b"kv_transfer_params") + b'": ' + FORGED,
    "twice": b'"kv_transfer_params": 1, "x": 0, "kv_transfer_params": ' + FORGED,
    "twice, once escaped": b'"kv_transfer_params": null, "kv_transfer_params\\u0000": 1, "kv_transfer\\u005fparams": '
    + FORGED,
    "among the extra arguments": b'"vllm_xargs": {"kv_transfer_params": ' + FORGED + b"}",
    "there, escaped": b'"vllm_xargs": {"a": 1, "kv_tr\\u0061nsfer_params": ' + FORGED + b"}",
    "there, as a string": b'"vllm_xargs": {"kv_transfer_params": "x"}',
    "there, twice": b'"vllm_xargs": {}, "vllm_x\\u0061rgs": {"kv_transfer_params": ' + FORGED + b"}",
    "the encoder's": b'"ec_transfer_params": ' + FORGED,
    "the encoder's among the extra arguments": b'"vllm_xargs": {"ec_transfer_params": ' + FORGED + b"}",
}


def check_received(cluster: Cluster) -> None:
    """Only the router's own parameters have reached an engine."""
    for engine in cluster.engines:
        for request in engine.received:
            assert b"attacker" not in request.raw
            assert b"forged" not in request.raw
            if request.body is not None:
                pairs = json.loads(request.raw, object_pairs_hook=list)
                assert [key for key, _ in pairs if key == "kv_transfer_params"] in ([], ["kv_transfer_params"])
                assert "ec_transfer_params" not in request.body
                assert "kv_transfer_params" not in (request.body.get("vllm_xargs") or {})


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("how", SMUGGLED)
async def test_a_forged_handle_reaches_no_engine(how: str, stream: bool) -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask(body(SMUGGLED[how], stream=stream))
        assert answer.status == 200
        await cluster.ask(body(SMUGGLED[how] + b', "n": 2', stream=stream), conversation=None)
        check_received(cluster)


@pytest.mark.parametrize("how", SMUGGLED)
async def test_a_forged_handle_reaches_no_engine_by_other_paths(how: str) -> None:
    async with run_cluster() as cluster:
        for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"):
            await cluster.ask(body(SMUGGLED[how]), path)
            assert cluster.d.requests_to(path)
        check_received(cluster)


@pytest.mark.parametrize(
    "raw",
    [
        body(b'"x": NaN, "kv_transfer_params": ' + FORGED),
        b"\xef\xbb\xbf" + body(b'"kv_transfer_params": ' + FORGED),
        body(b'"kv_transfer_params": ' + FORGED).decode().encode("utf-16"),
        body(b'"x": "\xed\xa0\x80", "kv_transfer_params": ' + FORGED),
        body(b'"vllm_xargs": {"\xed\xa0\x80": 1, "kv_transfer_params": ' + FORGED + b"}"),
        body(b'"kv_transfer_params": ' + FORGED) + b",",
        b"",
        b"[]",
        b'"text"',
    ],
)
async def test_what_the_router_cannot_read_reaches_no_engine(raw: bytes) -> None:
    async with run_cluster() as cluster:
        for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages"):
            answer = await cluster.ask(raw, path)
            assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
            assert answer.json["error"].get("code") == (None if path == "/v1/messages" else "malformed_body")
            assert not [r for e in cluster.engines for r in e.received if r.path == path]


async def test_a_model_that_speaks_of_handles_is_not_censored() -> None:
    words = 'Say "kv_transfer_params": {"remote_host": 1} and "usage" and "error". ' + STORY
    async with run_cluster() as cluster:
        for stream in (False, True):
            reply = await cluster.open({"messages": [{"role": "user", "content": words}], "stream": stream, "n": 1})
            assert b"".join([chunk async for chunk in reply])
        assert cluster.p.requests_to(CHAT)[0].body["messages"][0]["content"] == words


async def test_of_a_clients_headers_only_what_engines_need_is_forwarded() -> None:
    headers = [
        ("Authorization", "Bearer client-key"),
        ("Cookie", "a=b"),
        ("X-Data-Parallel-Rank", "3"),
        ("x-data-parallel-rank", "4"),
        ("X-Request-Id", "mine"),
        ("traceparent", "00-1-2-01"),
        ("X-Anything", "x"),
    ]
    async with run_cluster(api_key="engine-key") as cluster:
        await cluster.ask({"messages": opening(), "stream": True}, headers=headers)
        await cluster.ask({"prompt": "x"}, "/tokenize", headers=headers)
        for engine in cluster.engines:
            for request in engine.received:
                assert "x-data-parallel-rank" not in request.headers
                assert not {"cookie", "x-anything"} & request.headers.keys()
                assert request.headers["authorization"] == "Bearer engine-key"
        (prefill,), (decode,) = cluster.p.requests_to(CHAT), cluster.d.requests_to(CHAT)
        for request in (prefill, decode):
            assert request.headers["traceparent"] == "00-1-2-01"
            assert request.headers["x-session-id"] == "c"
            assert request.headers["x-request-id"].startswith("mine-")
        assert prefill.headers["x-request-id"] != decode.headers["x-request-id"]


@pytest.mark.parametrize("name", ["X-Request-Id", "traceparent", "tracestate"])
@pytest.mark.parametrize("value", ["a\r\nx-data-parallel-rank: 1", "é", "x" * 1000, "\x00"])
async def test_an_odd_header_cannot_become_another(name: str, value: str) -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask({"messages": opening()}, headers=[(name, value)])
        assert answer.status == 200
        assert not [r for e in cluster.engines for r in e.received if "x-data-parallel-rank" in r.headers]


async def test_a_conversation_id_that_no_header_can_hold_still_names_one() -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster, {"conversation_id": "会話"}, conversation=None)
        report = (await cluster.exact({"messages": history, "conversation_id": "会話"}, conversation=None)).reused
        assert (report.route, report.conversation) == (Route.WARM, "会話")
        assert all("conversation_id" not in (r.body or {}) for e in cluster.engines for r in e.received)


# --- ids and limits ------------------------------------------------------------------------------------------------------


async def test_ids_that_contradict_each_other_are_refused() -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask({"messages": opening(), "session_id": "other"}, conversation="c")
        assert (answer.status, answer.json["error"]["code"]) == (400, "conflicting_ids")
        assert answer.json["error"]["param"] == "session_id"
        assert "'c'" in answer.json["error"]["message"]
        assert not cluster.p.requests_to(CHAT)


@pytest.mark.parametrize("value", [5, ["c"], True, "x" * 300, "a\nb"])
async def test_an_id_that_is_none_is_refused(value: Any) -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask({"messages": opening(), "conversation_id": value}, conversation=None)
        assert (answer.status, answer.json["error"]["param"]) == (400, "conversation_id")


async def test_a_body_beyond_the_limit_is_refused() -> None:
    async with run_cluster(max_body_bytes=500) as cluster:
        answer = await cluster.ask({"messages": opening("x" * 500)})
        assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
        assert "max_body_bytes=" in answer.json["error"]["message"]
        assert (await cluster.ask(b"x" * 501, "/tokenize")).status == 413


# --- what is no turn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/health"])
async def test_what_an_engine_says_of_itself_is_passed_on(path: str) -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask(b"", path, method="GET", conversation=None)
        assert answer.status == 200


@pytest.mark.parametrize("name", ["org/model", "a..b", "..."])
async def test_a_models_name_may_have_slashes_and_dots(name: str) -> None:
    async with run_cluster() as cluster:
        await cluster.ask(b"", f"/v1/models/{name}", method="GET", conversation=None)
        assert cluster.d.received[-1].path == f"/v1/models/{name}"


async def test_a_tool_of_the_engine_is_passed_on() -> None:
    async with run_cluster() as cluster:
        answer = await cluster.ask({"prompt": "abc"}, "/tokenize")
        assert answer.json["count"] == 4
        assert (await cluster.ask({"tokens": [97]}, "/detokenize")).json["prompt"] == "a"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/reset_prefix_cache"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/chat/completions/render"),
        ("GET", "/metrics"),
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/v1/completions/../../sleep"),
        ("GET", "/v1/models/../../metrics"),
        ("GET", "/v1/models/%2e%2e/%2E%2e/metrics"),
        ("GET", "/v1/models/..%2f..%2fmetrics"),
        ("GET", "/v1/models/./../../metrics?x=1"),
        ("POST", "/pause"),
        ("POST", "/"),
    ],
)
async def test_nothing_else_reaches_an_engine(method: str, path: str) -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        before = len(cluster.d.received) + len(cluster.p.received)
        answer = await cluster.ask({"messages": opening()}, path, method=method)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
        assert len(cluster.d.received) + len(cluster.p.received) == before


async def test_an_engine_that_is_gone_is_told_for_other_paths_too() -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        await cluster.kill(cluster.d)
        answer = await cluster.ask({"prompt": "abc"}, "/tokenize")
        assert (answer.status, answer.json["error"]["code"]) == (502, "decode_failed")


HANDLE = {"remote_host": "10.1.2.3", "remote_port": 5600, "remote_block_ids": [[1]]}


@asynccontextmanager
async def other_endpoints(cluster: Cluster, *pieces: bytes, kind: str, hang_up: bool = False) -> AsyncIterator[None]:
    """A decode engine that answers `/v1/embeddings` with `pieces`, in the place of the cluster's."""

    async def respond(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        if hang_up and request.transport is not None:
            request.transport.abort()
        return response

    await cluster.router.connect()
    await cluster.kill(cluster.d)
    app = web.Application()
    app.router.add_post("/v1/embeddings", respond)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", cluster.d.config.port).start()
    try:
        yield
    finally:
        await runner.cleanup()


def event(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


async def test_handles_do_not_leave_by_other_endpoints() -> None:
    whole = json.dumps({"id": "r", "output": ["x"], "kv_transfer_params": HANDLE}).encode()
    async with run_cluster() as cluster:
        async with other_endpoints(cluster, whole[:20], whole[20:], kind="application/json"):
            answer = await cluster.ask({"input": "x"}, "/v1/embeddings")
        assert answer.json == {"id": "r", "output": ["x"]}


async def test_handles_do_not_leave_by_other_streams() -> None:
    delta = event("response.output_text.delta", {"type": "response.output_text.delta", "delta": "kv_transfer_params"})
    done = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": HANDLE}}
    stream = delta + event("response.completed", done)
    async with run_cluster() as cluster:
        pieces = [stream[i : i + 7] for i in range(0, len(stream), 7)]
        async with other_endpoints(cluster, *pieces, kind="text/event-stream"):
            reply = await cluster.open({"input": "x", "stream": True}, "/v1/embeddings")
            raw = b"".join([chunk async for chunk in reply])
        assert raw.startswith(delta)
        rest = raw[len(delta) :]
        assert rest.startswith(b"event: response.completed\n")
        assert json.loads(rest.split(b"data: ")[1]) == {"type": "response.completed", "response": {"id": "r"}}


async def test_another_stream_that_breaks_ends_with_an_error_event() -> None:
    async with run_cluster() as cluster:
        first = event("response.created", {"type": "response.created"})
        async with other_endpoints(cluster, first, kind="text/event-stream", hang_up=True):
            reply = await cluster.open({"input": "x", "stream": True}, "/v1/embeddings")
            raw = b"".join([chunk async for chunk in reply])
        assert raw.startswith(first)
        assert b'"decode_failed"' in raw[len(first) :]


async def test_another_answer_that_breaks_off_is_an_error() -> None:
    async with run_cluster() as cluster:
        async with other_endpoints(cluster, b'{"id": ', kind="application/json", hang_up=True):
            answer = await cluster.ask({"input": "x"}, "/v1/embeddings")
        assert (answer.status, answer.json["error"]["code"]) == (502, "decode_failed")
