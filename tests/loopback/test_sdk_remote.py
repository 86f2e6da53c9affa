"""The SDK on a served router: the same conversations and the same reports as with an embedded one."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import backhaul
import httpx
import httpx2
import msgspec
import openai
import pytest
from backhaul import Reason, ReuseReport, Route
from backhaul._http import openais_http_module
from backhaul._remote import follow
from backhaul_loopback import CostModel, LoopbackPair, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.serve.asgi import make_app
from backhaul_router.serve.tenants import NO_TENANTS, Tenants
from backhaul_router.wire.stream import COMMENT
from hypothesis import given
from hypothesis import strategies as st
from served import freed, in_thread
from test_sdk_end_to_end import SYSTEM, talk, talk_sync

pytestmark = pytest.mark.openai

TIMES = {
    "estimates",
    "render_ms",
    "prefill_ms",
    "first_byte_ms",
    "total_ms",
    "handle_remaining_s",
    "saved_ms",
    "saved_basis",
}
HISTORY: list[Any] = [SYSTEM, {"role": "user", "content": "Count."}]
Agent = Callable[[Any, LoopbackPair], Any]


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


def remote(http: Any, **options: Any) -> dict[str, Any]:
    return {"base_url": f"{str(http.base_url).rstrip('/')}/v1", "api_key": "none", **options}


def comparable(report: ReuseReport, pair: LoopbackPair) -> dict[str, Any]:
    """A report without times and with the engines' roles for their ports."""
    text = json.dumps({key: value for key, value in report.to_dict().items() if key not in TIMES})
    for engine in (pair.prefill, pair.decode):
        text = text.replace(engine.url, engine.config.role)
    return {
        **json.loads(text),
        "timed": report.first_byte_ms is not None,
        "handle": report.handle_remaining_s is not None,
    }


async def whole(client: Any, pair: LoopbackPair) -> None:
    await talk(client, pair.model)


async def streamed(client: Any, pair: LoopbackPair) -> None:
    await talk(client, pair.model, stream=True)


async def failing(client: Any, pair: LoopbackPair) -> None:
    """A refused turn, and one whose stream breaks."""
    await client.models.list()
    pair.prefill.faults.drop = True
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model=pair.model, messages=HISTORY)
    pair.prefill.faults.clear()
    pair.decode.faults.die_after_bytes = 600
    with pytest.raises(openai.APIError):
        async for _ in await client.chat.completions.create(model=pair.model, messages=HISTORY, stream=True):
            pass
    pair.decode.faults.clear()
    await talk(client, pair.model)


async def leaving(client: Any, pair: LoopbackPair) -> None:
    """A stream that is left early, among others."""
    await talk(client, pair.model)
    async with await client.chat.completions.create(
        model=pair.model, messages=HISTORY, max_tokens=4000, stream=True
    ) as stream:
        await anext(stream)


async def naming(client: Any, pair: LoopbackPair) -> None:
    """Explicit ids go before the scope's, in the header and in the body."""
    for extra in ({"extra_headers": {"X-Session-ID": "a/b"}}, {"extra_body": {"conversation_id": "c d"}}):
        await client.chat.completions.create(model=pair.model, messages=HISTORY, max_tokens=4, **extra)


async def completing(client: Any, pair: LoopbackPair) -> None:
    for prompt in ("Once upon a time. " * 30, "Once upon a time. " * 60):
        await client.completions.create(model=pair.model, prompt=prompt, max_tokens=4)


async def in_both_ways(agent: Agent, costs: CostModel | None = None) -> list[list[dict[str, Any]]]:
    """The reports of an agent on an embedded and on a served router, over fresh engines each."""
    found = []
    for served in (False, True):
        async with loopback_pair(decode={"costs": costs or CostModel()}) as pair:
            async with in_thread(pair, local_max_tokens=0) as http:
                embedded = {"prefill": [pair.prefill.url], "decode": [pair.decode.url], "local_max_tokens": 0}
                options = remote(http) if served else embedded
                async with backhaul.AsyncOpenAI(**options, max_retries=0) as client:
                    async with backhaul.conversation("c1") as chat:
                        await agent(client, pair)
                        reports = chat.reuse.turns
                    found.append([comparable(report, pair) for report in reports])
            await freed(pair)
    return found


@pytest.mark.parametrize("agent", [whole, streamed, failing, naming, completing])
async def test_reports_are_those_of_an_embedded_router(agent: Agent) -> None:
    embedded, served = await in_both_ways(agent)
    assert len(embedded) >= 2
    for one, other in zip(embedded, served, strict=True):
        if one["identity_source"] == "scope":
            assert other.pop("identity_source") == "header:x-conversation-id"
            del one["identity_source"]
        assert other == one


async def test_a_stream_that_is_left_has_its_report_too() -> None:
    embedded, served = await in_both_ways(leaving, CostModel(decode_s=0.005))
    assert [report["error"] for report in served] == [None, None, None, "client_gone"]
    assert [report["route"] for report in served] == [report["route"] for report in embedded]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_synchronous_agent_has_the_same(pair: LoopbackPair, stream: bool) -> None:
    async with in_thread(pair, local_max_tokens=0) as http:

        def agent() -> backhaul.Conversation:
            with backhaul.OpenAI(**remote(http)) as client, backhaul.conversation() as chat:
                talk_sync(client, pair.model, stream=stream)
                assert pair.decode.pinned_blocks > 0
            return chat

        chat = await asyncio.to_thread(agent)
        await freed(pair)
        assert (await http.get("/backhaul/conversations")).json() == {"conversations": []}
    assert [turn.route for turn in chat.reuse.turns] == [Route.COLD, Route.WARM, Route.WARM]
    assert chat.reuse.total.offered > 0


async def test_the_report_is_there_when_the_last_event_is(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http)) as client:
        async with backhaul.conversation() as chat:
            stream = await client.chat.completions.create(
                model=pair.model, messages=HISTORY, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            assert chat.reuse.last is None
            async for _ in stream:
                pass
            assert chat.reuse.last is not None
            assert chat.reuse.last.decode_engine == pair.decode.url


async def test_a_bound_client_ends_its_conversation_when_it_is_closed(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http)) as client:
        async with client.for_conversation("ticket-17") as bound:
            await talk(bound, pair.model)
            assert pair.decode.pinned_blocks > 0
        await freed(pair)
        assert [report.conversation for report in bound.reuse.turns] == ["ticket-17"] * 3
        await client.models.list()


async def test_agents_side_by_side_keep_to_their_own_reports(pair: LoopbackPair) -> None:
    async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http)) as client:

        async def agent() -> list[tuple[str | None, int]]:
            async with backhaul.conversation() as chat:
                await talk(client, pair.model, stream=True)
            return [
                (report.conversation == chat.id and report.conversation, report.turn) for report in chat.reuse.turns
            ]

        for turns in await asyncio.gather(*(agent() for _ in range(5))):
            assert [number for _, number in turns] == [1, 2, 3]
            assert all(conversation for conversation, _ in turns)
    await freed(pair)


@pytest.mark.parametrize("module", [httpx, openais_http_module()], ids=lambda module: str(module.__name__))
async def test_the_callers_own_http_client_is_used_for_everything(pair: LoopbackPair, module: Any) -> None:
    """With one connection: a report's request, as after a stream that is left, does not wait for the answer that waits for it."""
    asked: list[str] = []
    own = module.AsyncClient(limits=module.Limits(max_connections=1), event_hooks={"request": [noting(asked)]})
    async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http), http_client=own) as client:
        async with backhaul.conversation() as chat:
            await talk(client.with_options(max_retries=1), pair.model, stream=True)
            stream = await client.chat.completions.create(model=pair.model, messages=HISTORY, stream=True)
            await stream.close()
    assert asked == ["POST /v1/chat/completions"] * 4 + ["GET /backhaul", "DELETE /backhaul"]
    assert chat.reuse.total.turns == 4


def noting(asked: list[str]) -> Callable[[Any], Any]:
    """A request hook."""

    async def note(request: Any) -> None:
        asked.append(f"{request.method} {request.url.path.partition('/conversations')[0]}")

    return note


# --- a turn is one request

TEXT = [{"role": "user", "content": "Count."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TEXT, "max_tokens": 8},
    "/v1/completions": {"prompt": "Once upon a time.", "max_tokens": 8},
    "/v1/responses": {"input": "Count.", "max_output_tokens": 8},
    "/v1/messages": {"messages": TEXT, "max_tokens": 8},
}
SHAPES = {
    "whole": {},
    "streamed": {"stream": True},
    "streamed with usage": {"stream": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", BODIES)
async def test_a_turn_is_one_request_and_its_answer_what_any_client_gets(
    pair: LoopbackPair, path: str, shape: str
) -> None:
    body = {
        "model": pair.model,
        **BODIES[path],
        **(SHAPES[shape] if path in list(BODIES)[:2] else {"stream": shape != "whole"}),
    }
    asked: list[str] = []
    async with (
        in_thread(pair, check_pairs=False) as http,
        httpx.AsyncClient(base_url=str(http.base_url), event_hooks={"request": [noting(asked)]}) as client,
    ):
        follow(client)
        with backhaul.conversation("c") as chat:
            ours = await client.post(path, json=body, headers={"X-Conversation-ID": "c"})
            assert asked == [f"POST {path}"]
            (report,) = chat.reuse.turns
            assert (await http.get("/backhaul/conversations/c")).json()["reports"] == [report.to_dict()]
        stock = await http.post(path, json=body, headers={"X-Conversation-ID": "d"})
    assert b"\n: " not in ours.content
    assert len(ours.content.split(b"\n\n")) == len(stock.content.split(b"\n\n"))
    told = [json.loads(one.removeprefix(b"data: ")) for one in ours.content.splitlines() if b'"backhaul":{' in one]
    for answer in told:
        usage = answer.get("response", answer)["usage"]
        assert usage["backhaul"] == report.to_dict()
    assert len(told) == ((path != "/v1/chat/completions" and path != "/v1/completions") or shape != "streamed")


async def test_a_turn_that_only_names_its_conversation_has_its_report_too(pair: LoopbackPair) -> None:
    heard: list[ReuseReport] = []
    stop = backhaul.on_turn(heard.append)
    try:
        async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http)) as client:
            for stream in (False, True):
                answer: Any = await client.chat.completions.create(
                    model=pair.model, messages=HISTORY, stream=stream, extra_body={"conversation_id": "c"}
                )
                if stream:
                    _ = [event async for event in answer]
    finally:
        stop()
    assert [(report.turn, report.decode_engine) for report in heard] == [(1, pair.decode.url), (2, pair.decode.url)]


ELSEWHERE = ("203.0.113.7", 4711)
KEYS = Tenants.from_mapping({"alice": ["alice-0123456789"]})


@pytest.mark.parametrize(
    ("tenants", "client", "seen"),
    [(NO_TENANTS, ELSEWHERE, None), (KEYS, ELSEWHERE, "(url withheld)"), (KEYS, ("127.0.0.1", 4711), "http://")],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_says_of_its_turn_what_the_router_shows_its_client(
    pair: LoopbackPair, tenants: Tenants, client: tuple[str, int], seen: str | None, stream: bool
) -> None:
    config = RouterConfig(prefill=(pair.prefill.url,), decode=(pair.decode.url,))
    app = make_app(config, tenants)
    told = {"authorization": "Bearer alice-0123456789", "X-Conversation-ID": "c", "X-Backhaul-Report": "comment"}
    body = {"model": pair.model, "messages": TEXT, "stream": stream}
    try:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app, client=client), base_url="http://router", headers=told
        ) as http:
            answer = await http.post("/v1/chat/completions", json=body)
            shown = await http.get("/backhaul/conversations/c")
    finally:
        await app.router.aclose()
    found = re.search(rb"^: backhaul (.*)$" if stream else rb'"backhaul":(\{.*?\})\}', answer.content, re.MULTILINE)
    assert found is not None
    report = json.loads(found[1])
    if seen is None:
        assert shown.status_code == 403
        assert report.keys() == {"conversation", "turn", "route", "reason", "offered", "cached", "computed"}
    else:
        assert [report] == shown.json()["reports"]
        assert report["decode_engine"].startswith(seen)


@given(st.data())
def test_a_comment_is_taken_out_however_the_stream_is_cut(data: st.DataObject) -> None:
    report = ReuseReport(conversation="c", turn=3, route=Route.WARM)
    text = b'data: {"choices":[{"delta":{"content":"a\\n: backhaul {}"}}]}\n\ndata: : backhaul \n\n: ping\n\n'
    end = b"data: [DONE]\n\n"
    stream = text + COMMENT + msgspec.json.encode(report) + b"\n\n" + end
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8)))
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    head = {"x-backhaul-turn": "3", "x-backhaul-route": "warm"}
    elsewhere = Elsewhere(204, head={**head, "content-type": "text/event-stream"}, stream=pieces)
    with elsewhere.client() as client, backhaul.conversation("c") as chat:
        with client.with_streaming_response.chat.completions.create(**ASK, stream=True) as response:
            assert b"".join(response.iter_bytes()) == text + end
        assert elsewhere.asked == ["POST /prefix/v1/chat/completions"]
    assert chat.reuse.turns == [report]


@pytest.mark.parametrize("kind", ["closed client", "synchronous scope", "synchronous client"])
async def test_a_conversation_ends_on_the_router_however_it_is_left(pair: LoopbackPair, kind: str) -> None:
    async with in_thread(pair) as http:
        if kind == "synchronous scope":
            async with backhaul.AsyncOpenAI(**remote(http)) as client:
                with backhaul.conversation():
                    await talk(client, pair.model)
                await freed(pair)
        elif kind == "closed client":
            async with backhaul.conversation():
                async with backhaul.AsyncOpenAI(**remote(http)) as client:
                    await talk(client, pair.model)
        else:
            async with backhaul.conversation():
                with backhaul.OpenAI(**remote(http)) as blocking:
                    await asyncio.to_thread(talk_sync, blocking, pair.model)
        await freed(pair)


async def test_a_cancelled_agent_leaves_nothing_pinned(pair: LoopbackPair) -> None:
    talked = asyncio.Event()

    async def agent(client: backhaul.AsyncOpenAI) -> None:
        async with backhaul.conversation():
            await talk(client, pair.model)
            talked.set()
            await asyncio.Event().wait()

    async with in_thread(pair) as http, backhaul.AsyncOpenAI(**remote(http)) as client:
        task = asyncio.create_task(agent(client))
        await talked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await freed(pair)


async def test_a_router_that_is_gone_masks_no_exception(pair: LoopbackPair, caplog: pytest.LogCaptureFixture) -> None:
    async with in_thread(pair) as http:
        client = backhaul.AsyncOpenAI(**remote(http))
        chat = backhaul.conversation()
        await chat.__aenter__()
        await talk(client, pair.model)
    error = KeyError("the agent's own")
    assert await chat.__aexit__(KeyError, error, None) is None
    assert "what is left on the engines ends with its TTL" in caplog.text
    await client.close()


# --- routers that do not show reports


NOTE = {"conversation": "c1", "turn": 3, "route": "local", "offered": 96, "cached": 64, "computed": 6}


class Elsewhere:
    """An HTTP server that answers turns as `head` says, and every request under /backhaul with `status`."""

    def __init__(
        self,
        status: int,
        content: bytes = b"{}",
        head: dict[str, str] | None = None,
        stream: Sequence[bytes] = (),
        note: Any = NOTE,
    ) -> None:
        self.asked: list[str] = []
        self.stream, self.note = stream, note
        self.status, self.content = status, content
        turn = {"x-backhaul-turn": "3", "x-backhaul-route": "local", "x-backhaul-reason": "a_new_one"}
        self.head = turn if head is None else head

    def __call__(self, request: Any) -> Any:
        module = openais_http_module()
        self.asked.append(f"{request.method} {request.url.path.partition('/conversations')[0]}")
        if request.url.path.startswith("/prefix/backhaul/"):
            return module.Response(self.status, content=self.content)
        if self.stream:
            return module.Response(200, headers=self.head, content=iter(self.stream))
        usage = {"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79, "backhaul": self.note}
        chunk = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
        if json.loads(request.content).get("stream"):
            events = [{**chunk, "choices": [{"index": 0, "delta": {"content": "x" * 9000}}]}, {**chunk, "usage": usage}]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            return module.Response(200, headers={**self.head, "content-type": "text/event-stream"}, content=text)
        return module.Response(200, headers=self.head, json={**chunk, "usage": usage})

    def client(self) -> backhaul.OpenAI:
        module = openais_http_module()
        http_client = module.Client(transport=module.MockTransport(self))
        return backhaul.OpenAI(base_url="http://router/prefix/v1", api_key="none", http_client=http_client)


ASK: dict[str, Any] = {"model": "m", "messages": HISTORY}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("status", "content"), [(403, b""), (404, b""), (500, b""), (200, b"<html>"), (200, b'{"reports": []}')]
)
def test_without_reports_the_answer_itself_has_to_do(
    status: int, content: bytes, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = Elsewhere(status, content)
    with caplog.at_level(logging.WARNING, "backhaul"), elsewhere.client() as client:
        with backhaul.conversation("c1") as chat:
            for _ in range(2):
                answer: Any = client.chat.completions.create(**ASK, stream=stream)
                list(answer)
    expected = ReuseReport(
        conversation="c1",
        turn=3,
        model="m",
        route=Route.LOCAL,
        prompt=70,
        generated=9,
        offered=96,
        cached=64,
        computed=6,
    )
    assert chat.reuse.turns == [expected] * 2
    assert len(caplog.records) == 1
    asked_again = 1 if status == 403 else 2
    assert elsewhere.asked.count("GET /prefix/backhaul") == asked_again


@pytest.mark.parametrize("note", [5, {"cached": "many"}, {"total_ms": 1.0, "turn": "x"}], ids=str)
def test_a_note_that_cannot_be_read_says_nothing(note: Any) -> None:
    elsewhere = Elsewhere(404, note=note)
    with elsewhere.client() as client, backhaul.conversation() as chat:
        client.chat.completions.create(**ASK)
    assert chat.reuse.last is not None
    assert (chat.reuse.last.prompt, chat.reuse.last.cached) == (70, None)


def test_a_reason_is_kept_where_it_is_known() -> None:
    elsewhere = Elsewhere(
        404, head={"x-backhaul-turn": "1", "x-backhaul-route": "cold", "x-backhaul-reason": "expired"}
    )
    with elsewhere.client() as client, backhaul.conversation() as chat:
        client.chat.completions.create(**ASK)
    assert chat.reuse.last is not None
    assert chat.reuse.last.reason is Reason.EXPIRED


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_server_that_is_no_backhaul_router_gets_nothing_more(stream: bool) -> None:
    elsewhere = Elsewhere(200, head={})
    with elsewhere.client() as client, backhaul.conversation() as chat:
        list(client.chat.completions.create(**ASK, stream=stream))
    assert elsewhere.asked == ["POST /prefix/v1/chat/completions"]
    assert chat.reuse.turns == []


def test_outside_a_conversation_nothing_more_is_asked() -> None:
    elsewhere = Elsewhere(200)
    with elsewhere.client() as client:
        client.chat.completions.create(**ASK)
    assert elsewhere.asked == ["POST /prefix/v1/chat/completions"]
