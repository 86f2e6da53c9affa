"""The drop-in clients over a scripted router that answers as vLLM does."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any, get_type_hints

import backhaul
import httpx
import httpx2
import openai
import pytest
from backhaul import ConfigError, Route
from backhaul._options import ClientOptions, RouterSettings
from backhaul_router.config import RouterConfig
from fake_router import JSON, SSE, FakeReply, FakeRouter, event, never, stalling_after
from pydantic import BaseModel

pytestmark = pytest.mark.openai

ENGINES: dict[str, Any] = {"prefill": ["http://p:8100"], "decode": ["http://d:8200"]}
OPENAI_3 = openai.__version__.startswith("3.")
"""openai 3 takes clients of httpx2 and of httpx, openai 2 those of httpx only."""
MESSAGES: Any = [{"role": "user", "content": "Where is it raining?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
WORDS = ["It ", "rains ", "here."]
USAGE = {"prompt_tokens": 12, "total_tokens": 20, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}
CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bergen"}'}}


async def vllm(router: FakeRouter, request: Any) -> FakeReply:
    """Answers in the shapes of vLLM 0.32 (vllm/entrypoints/openai/chat_completion/protocol.py)."""
    asked = json.loads(request.body)
    if asked.get("stream"):
        return FakeReply(router, request, 200, [SSE], _events(asked))
    return FakeReply(router, request, 200, [JSON], _whole(asked))


async def _whole(asked: dict[str, Any]) -> AsyncIterator[bytes]:
    content = '{"city": "Bergen"}' if "response_format" in asked else "".join(WORDS)
    calls = [CALL] if "tools" in asked else []
    message = {"role": "assistant", "content": None if calls else content, "refusal": None, "tool_calls": calls}
    logprobs = {"content": [{"token": "It", "logprob": -0.1, "bytes": [73, 116], "top_logprobs": []}]}
    choices = [
        {
            "index": n,
            "message": {**message, "reasoning": None},
            "logprobs": logprobs if asked.get("logprobs") else None,
            "finish_reason": "tool_calls" if calls else "stop",
            "stop_reason": None,
            "token_ids": None,
        }
        for n in range(asked.get("n") or 1)
    ]
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    yield json.dumps({**answer, "usage": USAGE, "prompt_logprobs": None}).encode()


async def _events(asked: dict[str, Any]) -> AsyncIterator[bytes]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    for word in WORDS:
        yield chunk({"content": word})
    yield chunk({"content": ""}, "stop")
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": USAGE})
    yield event(b"[DONE]")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    """Takes the place of the routers that clients make; `router.config` is what the last one was made with."""
    router = FakeRouter(vllm)

    def make(config: RouterConfig, *, on_report: object, tracing: object) -> FakeRouter:
        router.config = config  # type: ignore[attr-defined]
        return router

    monkeypatch.setattr("backhaul._http.Router", make)
    return router


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **options)


async def acreate(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(model="m", messages=MESSAGES, **options)


# The constructor


def test_the_clients_are_openais() -> None:
    assert issubclass(backhaul.OpenAI, openai.OpenAI)
    assert issubclass(backhaul.AsyncOpenAI, openai.AsyncOpenAI)


def test_an_embedded_client_needs_no_key_and_ignores_openais_environment(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    with backhaul.OpenAI(**ENGINES) as client:
        assert create(client).choices[0].message.content == "It rains here."
    assert router.requests[0].path == "/v1/chat/completions"


def test_the_key_in_the_environment_does_not_reach_the_router(
    router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with backhaul.OpenAI(**ENGINES) as client:
        create(client)
    assert "sk-secret" not in repr(router.requests[0].headers)


def test_router_settings_and_the_engines_key_go_to_the_router(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES, reuse=False, route="cold", local_max_tokens=0, engine_api_key="k", timeout=3):
        config = router.config  # type: ignore[attr-defined]
    assert config == RouterConfig(**ENGINES, reuse=False, route=Route.COLD, local_max_tokens=0, api_key="k")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": ["http://p:1"]}, "prefill= without decode="),
        ({"decode": ["http://d:1"]}, "decode= without prefill="),
        ({"prefill": [], "decode": ["http://d:1"]}, "prefill= is empty"),
        ({"prefill": "http://p:1", "decode": ["http://d:1"]}, "takes a list of engine URLs"),
        ({**ENGINES, "base_url": "http://x/v1"}, "so base_url= has nothing to apply to"),
        ({**ENGINES, "http_client": object()}, "so http_client= has nothing to apply to"),
        ({**ENGINES, "route": "hot"}, "route='hot': use one of cold, warm, local"),
        ({**ENGINES, "prefill": ["http://[::1:8100"]}, "is not an engine's URL"),
        ({"base_url": "http://u:p@[::1:8000/v1"}, r"OpenAI: base_url=: 'http://\[::1:8000/v1' is not a URL"),
        ({"base_url": "http://x/v1", "reuse": False}, "reuse= configures the embedded router"),
        ({"base_url": "http://x/v1", "engine_api_key": "k"}, "engine_api_key= configures the embedded router"),
    ],
)
@pytest.mark.parametrize("kind", [backhaul.OpenAI, backhaul.AsyncOpenAI])
def test_settings_that_cannot_work_together_are_refused_at_once(
    kind: type[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_a_base_url_of_the_environment_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://[::1:8000/v1")
    with pytest.raises(ConfigError, match=r"^OpenAI: OPENAI_BASE_URL: 'http://\[::1:8000/v1' is not a URL"):
        backhaul.OpenAI(api_key="k")
    backhaul.OpenAI(api_key="k", base_url="http://x/v1")


@pytest.mark.parametrize("kind", [backhaul.OpenAI, backhaul.AsyncOpenAI])
def test_an_unknown_word_is_a_type_error_that_names_it(kind: type[Any], router: FakeRouter) -> None:
    with pytest.raises(TypeError, match="'reusee'"):
        kind(**ENGINES, reusee=True)


def test_the_typed_words_are_those_of_the_router_and_of_openai() -> None:
    fields = {field.name for field in dataclasses.fields(RouterConfig)} - {"prefill", "decode", "api_key"}
    assert RouterSettings.__annotations__.keys() == fields
    openais = set(inspect.signature(openai.OpenAI.__init__).parameters) - {"self"}
    assert openais <= ClientOptions.__annotations__.keys()
    if OPENAI_3:
        assert ClientOptions.__annotations__.keys() == openais | fields


def test_without_engines_it_is_openais_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(openai.OpenAIError, match="OPENAI_API_KEY"):
        backhaul.OpenAI(base_url="http://x/v1")
    assert str(backhaul.OpenAI(base_url="http://x/v1", api_key="k").base_url) == "http://x/v1/"


# Copies


def test_copies_use_the_same_router(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        copy = client.with_options(timeout=3, max_retries=0).copy(default_headers={"x-a": "b"})
        assert isinstance(copy, backhaul.OpenAI)
        assert copy._client is client._client
        create(copy)
    assert dict(router.requests[0].headers)["x-a"] == "b"


@pytest.mark.parametrize("elsewhere", [{"base_url": "http://x/v1"}, {"http_client": httpx2.Client()}])
def test_a_copy_of_an_embedded_client_cannot_be_pointed_elsewhere(router: FakeRouter, elsewhere: Any) -> None:
    with backhaul.OpenAI(**ENGINES) as client, pytest.raises(ConfigError, match="make a new client"):
        client.with_options(**elsewhere)


def test_closing_the_client_closes_the_router(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        create(client)
    assert router.closed == 1


async def test_closing_the_async_client_closes_the_router(router: FakeRouter) -> None:
    async with backhaul.AsyncOpenAI(**ENGINES) as client:
        await acreate(client)
    assert router.closed == 1


# What openai's clients can do


def test_usage_and_cached_tokens_are_there(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        assert create(client).usage.prompt_tokens_details.cached_tokens == 4


def test_streaming(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client, backhaul.conversation() as chat:
        chunks = list(create(client, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "It rains here."
        assert chunks[-1].usage.completion_tokens == 8
        assert chat.reuse.last is not None
        assert chat.reuse.last.error is None


async def test_async_streaming(router: FakeRouter) -> None:
    async with backhaul.AsyncOpenAI(**ENGINES) as client, backhaul.conversation() as chat:
        words = [chunk.choices[0].delta.content async for chunk in await acreate(client, stream=True)]
        assert "".join(words) == "It rains here."
        assert chat.reuse.last is not None
        assert chat.reuse.last.error is None


async def test_a_stream_left_early_is_aborted(router: FakeRouter) -> None:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    router.script = stalling_after(event(chunk))
    async with backhaul.AsyncOpenAI(**ENGINES) as client, backhaul.conversation() as chat:
        async with await acreate(client, stream=True) as stream:
            await anext(stream)
        assert chat.reuse.last is not None
        assert chat.reuse.last.error == "client_gone"


def test_the_stream_helper(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.content == "It rains here."
    assert {"chunk", "content.delta", "content.done"} <= kinds


async def test_the_async_stream_helper(router: FakeRouter) -> None:
    async with backhaul.AsyncOpenAI(**ENGINES) as client:
        async with client.chat.completions.stream(model="m", messages=MESSAGES) as stream:
            final = await stream.get_final_completion()
    assert final.choices[0].message.content == "It rains here."


def test_raw_and_streaming_responses(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
        assert raw.headers["content-type"] == "application/json"
        assert raw.parse().choices[0].message.content == "It rains here."
        with client.chat.completions.with_streaming_response.create(model="m", messages=MESSAGES) as streaming:
            assert json.loads(streaming.read())["id"] == "chatcmpl-1"


def test_tool_calls(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        [choice] = create(client, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Bergen"}
    assert json.loads(router.requests[0].body)["tools"] == TOOLS


class Place(BaseModel):
    city: str


def test_structured_output(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        answer = client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Bergen")


def test_several_choices_and_logprobs(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        choices = create(client, n=3, logprobs=True).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert choices[2].logprobs.content[0].logprob == -0.1


def test_the_clients_timeout_is_kept(router: FakeRouter) -> None:
    router.script = never
    with backhaul.OpenAI(**ENGINES, max_retries=0) as client, pytest.raises(openai.APITimeoutError):
        create(client, timeout=0.05)


def test_a_configuration_error_is_raised_once_and_as_it_is(router: FakeRouter) -> None:
    async def fail(router: FakeRouter, request: Any) -> FakeReply:
        raise ConfigError("http://p:8100 cannot be reached")

    router.script = fail
    with backhaul.OpenAI(**ENGINES) as client, pytest.raises(ConfigError, match="cannot be reached"):
        create(client)
    assert len(router.requests) == 1


# Conversations


def test_calls_in_a_conversation_carry_it_to_the_embedded_router(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        create(client)
        with backhaul.conversation() as chat:
            create(client)
    assert [request.scope for request in router.requests] == [None, chat]
    assert "x-conversation-id" not in dict(router.requests[1].headers)
    assert router.ended == [chat.id]


def test_a_bound_client_is_in_its_conversation_wherever_it_is_called(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client:
        bound = client.for_conversation("c1")
        with backhaul.conversation("other") as other:
            create(bound)
            create(bound.with_options(timeout=5))
            create(client)
    assert [request.scope and request.scope.id for request in router.requests] == ["c1", "c1", "other"]
    assert (bound.reuse.total.turns, other.reuse.total.turns) == (2, 1)


async def test_bound_async_clients_do_not_mix(router: FakeRouter) -> None:
    async with backhaul.AsyncOpenAI(**ENGINES) as client:
        bound = [client.for_conversation() for _ in range(5)]
        await asyncio.gather(*(acreate(one, user=str(n)) for n, one in enumerate(bound)))
        assert all(one.reuse.total.turns == 1 for one in bound)
        assert len({one.reuse.last and one.reuse.last.conversation for one in bound}) == 5


async def test_closing_a_bound_client_ends_its_conversation_and_nothing_else(router: FakeRouter) -> None:
    async with backhaul.AsyncOpenAI(**ENGINES) as client:
        async with client.for_conversation("c1") as bound:
            await acreate(bound)
        assert (router.ended, router.closed) == (["c1"], 0)
        await acreate(client)


def test_a_client_of_no_conversation_has_no_reports(router: FakeRouter) -> None:
    with backhaul.OpenAI(**ENGINES) as client, pytest.raises(AttributeError, match="for_conversation"):
        _ = client.reuse


@pytest.fixture
def remote() -> tuple[backhaul.OpenAI, list[httpx2.Headers]]:
    seen: list[Any] = []

    def answer(request: Any) -> Any:
        seen.append(request.headers)
        return module.Response(200, json={"id": "1", "object": "list", "data": []})

    module = httpx2 if OPENAI_3 else httpx
    http_client = module.Client(transport=module.MockTransport(answer))
    return backhaul.OpenAI(base_url="http://router/v1", api_key="k", http_client=http_client), seen  # type: ignore[arg-type]


def test_a_remote_router_gets_the_conversation_in_a_header(remote: Any) -> None:
    client, seen = remote
    create(client)
    with backhaul.conversation() as chat:
        create(client)
        create(client, extra_headers={"X-Other": "1"})
    create(client.for_conversation("c1"))
    assert [headers.get("x-conversation-id") for headers in seen] == [None, chat.id, chat.id, "c1"]
    assert seen[2]["x-other"] == "1"


@pytest.mark.parametrize(
    ("explicit", "header"),
    [
        ({"extra_headers": {"x-conversation-id": "mine"}}, "mine"),
        ({"extra_headers": {"X-Session-ID": "mine"}}, None),
        ({"extra_body": {"conversation_id": "mine"}}, None),
        ({"extra_body": {"session_id": "mine"}}, None),
    ],
)
def test_an_explicit_id_wins_over_the_scope(remote: Any, explicit: dict[str, Any], header: str | None) -> None:
    client, seen = remote
    with backhaul.conversation():
        create(client, **explicit)
    assert seen[0].get("x-conversation-id") == header


def test_an_explicit_default_header_wins_over_the_scope(remote: Any) -> None:
    client, seen = remote
    with backhaul.conversation():
        create(client.with_options(default_headers={"X-Conversation-ID": "mine"}))
    assert seen[0]["x-conversation-id"] == "mine"


# HTTP clients for frameworks


@pytest.mark.parametrize("module", [httpx2, httpx] if OPENAI_3 else [httpx], ids=lambda module: module.__name__)
def test_an_http_client_of_either_module_serves_a_stock_openai_client(router: FakeRouter, module: ModuleType) -> None:
    http_client = backhaul.http_client(**ENGINES, module=module, reuse=False)
    assert isinstance(http_client, module.Client)
    with openai.OpenAI(api_key="k", base_url="http://ignored/v1", http_client=http_client) as client:
        assert create(client).choices[0].message.content == "It rains here."
        assert [chunk.id for chunk in create(client, stream=True)] != []
    assert router.config.reuse is False  # type: ignore[attr-defined]


async def test_an_async_http_client_serves_a_stock_openai_client(router: FakeRouter) -> None:
    http_client = backhaul.async_http_client(**ENGINES)
    async with openai.AsyncOpenAI(api_key="k", http_client=http_client) as client:
        assert (await acreate(client)).choices[0].message.content == "It rains here."


def test_an_http_client_refuses_unknown_settings() -> None:
    with pytest.raises(TypeError, match="reusee"):
        backhaul.http_client(**ENGINES, reusee=True)


def test_an_http_client_waits_as_long_as_openais_does(router: FakeRouter) -> None:
    with backhaul.http_client(**ENGINES) as client:
        assert client.timeout.as_dict() == openai.OpenAI(api_key="k").timeout.as_dict()  # type: ignore[union-attr]


# The package


def test_the_public_names_are_typed_and_there() -> None:
    assert all(hasattr(backhaul, name) for name in backhaul.__all__)
    assert get_type_hints(backhaul.Conversation.record)
