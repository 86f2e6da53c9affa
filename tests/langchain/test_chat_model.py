"""`ChatBackhaul` over loopback engines: configuration, conversations, reports, streams."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import pickle
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import backhaul
import openai
import pytest
from aiohttp import web
from backhaul._options import SETTINGS
from backhaul_langchain import ChatBackhaul
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, loopback_pair
from backhaul_router.identity.scope import current
from langchain_core.callbacks import AsyncCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.load import dumps, load
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models._client_utils import StreamChunkTimeoutError
from pydantic import SecretStr, ValidationError
from served import freed, in_thread

pytestmark = pytest.mark.openai

SYSTEM = ("system", "You are a patient agent that answers at length. " * 8)
QUESTIONS = ("Who are you?", "What did I ask before this question?", "And what comes after it, in your opinion?")
ROUTER = "http://router.invalid/v1"
KEY = "sk-very-secret"


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


@pytest.fixture
async def embedded(pair: LoopbackPair) -> AsyncIterator[ChatBackhaul]:
    model = ChatBackhaul(model=pair.model, prefill=[pair.prefill.url], decode=[pair.decode.url], local_max_tokens=0)
    yield model
    await model.aclose()


@pytest.fixture
async def remote(pair: LoopbackPair) -> AsyncIterator[ChatBackhaul]:
    async with in_thread(pair, local_max_tokens=0) as router:
        model = ChatBackhaul(model=pair.model, base_url=str(router.base_url.join("/v1")))
        yield model
        await model.aclose()


@pytest.fixture(params=["embedded", "remote"])
def model(request: pytest.FixtureRequest) -> ChatBackhaul:
    return request.getfixturevalue(request.param)


def report_of(message: Any) -> dict[str, Any]:
    return message.response_metadata["backhaul"]


async def whole(chunks: AsyncIterator[Any]) -> AIMessageChunk:
    found = [chunk async for chunk in chunks]
    return sum(found[1:], found[0])


# --- configuration


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "name the engines with prefill= and decode=, or a router with base_url="),
        ({"prefill": ["http://p:1"]}, "prefill= without decode="),
        ({"prefill": [], "decode": ["http://d:1"]}, "prefill= is empty"),
        ({"prefill": "http://p:1", "decode": ["http://d:1"]}, "valid list"),
        (
            {"prefill": ["http://p:1"], "decode": ["http://d:1"], "base_url": ROUTER},
            "base_url= has nothing to apply to",
        ),
        ({"prefill": ["http://p:1"], "decode": ["http://d:1"], "lease_margin_s": 900}, "lease_margin_s=900"),
        ({"prefill": ["http://p:1"], "decode": ["http://d:1"], "route": "scenic"}, "route='scenic': use one of"),
        ({"base_url": ROUTER, "local_max_tokens": 0}, "local_max_tokens= configures the embedded router"),
        ({"base_url": ROUTER, "engine_api_key": "k"}, "engine_api_key= configures the embedded router"),
        ({"base_url": ROUTER, "use_responses_api": True}, "this model speaks chat completions"),
        ({"base_url": ROUTER, "openai_proxy": "http://proxy:1"}, "give http_client= and http_async_client="),
        ({"base_url": ROUTER, "conversation_id": ""}, "conversation id ''"),
        ({"base_url": "http://[::1:8000/v1"}, "base_url=: 'http://[::1:8000/v1' is not a URL"),
        ({"base_url": ROUTER, "n": 0}, "n must be at least 1"),
    ],
)
def test_what_cannot_work_is_a_validation_error_that_says_so(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        ChatBackhaul(model="m", **words)
    assert said in str(error.value)


def test_the_models_name_is_required() -> None:
    with pytest.raises(ValidationError, match="Field required"):
        ChatBackhaul(base_url=ROUTER)  # type: ignore[call-arg]


def test_every_setting_of_the_router_is_a_field() -> None:
    assert set(ChatBackhaul.model_fields) >= SETTINGS


def test_keys_are_not_shown_and_openais_own_is_not_sent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://openai.invalid/v1")
    open_router = ChatBackhaul(model="m", base_url=ROUTER)
    assert open_router.root_client.api_key == open_router.root_async_client.api_key == "none"
    monkeypatch.setenv("BACKHAUL_ENGINE_API_KEY", KEY)
    for closed in (
        ChatBackhaul(model="m", base_url=ROUTER, api_key=SecretStr(KEY)),
        ChatBackhaul(model="m", prefill=["http://p:1"], decode=["http://d:1"]),
    ):
        assert KEY not in repr(closed) + str(closed) + dumps(closed) + json.dumps(closed.asdict(), default=str)


# --- copies


def test_a_model_comes_back_from_langchains_serialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ChatBackhaul(
        model="m", prefill=["http://p:1"], decode=["http://d:1"], engine_api_key=SecretStr(KEY), local_max_tokens=7
    )
    stored = json.loads(dumps(model))
    assert stored["id"] == ["backhaul_langchain", "ChatBackhaul"]
    secrets = {"BACKHAUL_ENGINE_API_KEY": KEY}
    back = load(stored, allowed_objects=[ChatBackhaul], valid_namespaces=["backhaul_langchain"], secrets_map=secrets)
    assert isinstance(back, ChatBackhaul)
    assert back.asdict() == model.asdict()
    assert (back.prefill, back.local_max_tokens, back.engine_api_key) == (["http://p:1"], 7, SecretStr(KEY))


def test_an_empty_key_in_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_ENGINE_API_KEY", "")
    ChatBackhaul(model="m", prefill=["http://p:1"], decode=["http://d:1"])


def test_what_the_environment_says_for_the_other_kind_of_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_BASE_URL", ROUTER)
    monkeypatch.setenv("BACKHAUL_ENGINE_API_KEY", KEY)
    engines: dict[str, Any] = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
    for words in (engines, {}):
        model = ChatBackhaul(model="m", **words)
        assert (model.openai_api_base is None, model.engine_api_key is None) == (bool(words), not words)
        back = load(
            json.loads(dumps(model)),
            allowed_objects=[ChatBackhaul],
            valid_namespaces=["backhaul_langchain"],
            secrets_from_env=True,
        )
        assert back.asdict() == model.asdict()


def test_copies_in_this_process_share_the_router_and_a_pickled_one_makes_its_own() -> None:
    model = ChatBackhaul(model="m", prefill=["http://p:1"], decode=["http://d:1"], temperature=0.5)
    for near in (model.model_copy(update={"temperature": 0.1}), copy.copy(model), copy.deepcopy(model)):
        assert near.root_async_client is model.root_async_client
    far = pickle.loads(pickle.dumps(model))
    assert far.asdict() == model.asdict()
    assert far.root_async_client is not model.root_async_client
    assert far.client is not None


def test_traces_name_the_provider_and_the_model() -> None:
    model = ChatBackhaul(model="m", base_url=ROUTER, temperature=0.5, max_tokens=8)
    params = model._get_ls_params(model="other")
    assert params == {
        "ls_provider": "backhaul",
        "ls_model_name": "other",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 8,
    }
    assert model._llm_type == "backhaul-chat"
    assert model.profile is None
    assert "backhaul" in (model.metadata or {})["lc_versions"]


# --- conversations

Ask = Callable[[ChatBackhaul], Awaitable[Any]]
HI = [SYSTEM, ("user", "Hi.")]


async def batched(model: ChatBackhaul) -> Any:
    [answer] = await model.abatch([HI], thread("t1"))
    return answer


async def last_event(model: ChatBackhaul) -> Any:
    events = [event async for event in model.astream_events(HI, thread("t1"), version="v2")]
    return events[-1]["data"]["output"]


async def third_protocol(model: ChatBackhaul) -> Any:
    return await (await model.astream_events(HI, thread("t1"), version="v3")).output


async def third_protocol_sync(model: ChatBackhaul) -> Any:
    return await asyncio.to_thread(lambda: model.stream_events(HI, thread("t1"), version="v3").output)


async def inside_a_lambda(model: ChatBackhaul) -> Any:
    """The config is not passed on, LangChain's context has it."""

    async def step(messages: Any) -> Any:
        return await model.ainvoke(messages)

    return await RunnableLambda(step).ainvoke(HI, thread("t1"))


WAYS: dict[str, Ask] = {
    "ainvoke": lambda model: model.ainvoke(HI, thread("t1")),
    "astream": lambda model: whole(model.astream(HI, thread("t1"))),
    "abatch": batched,
    "astream_events": last_event,
    "astream_events v3": third_protocol,
    "invoke": lambda model: asyncio.to_thread(model.invoke, HI, thread("t1")),
    "stream": lambda model: asyncio.to_thread(lambda: sum_up(model.stream(HI, thread("t1")))),
    "batch": lambda model: asyncio.to_thread(lambda: model.batch([HI, HI], thread("t1"))[-1]),
    "stream_events v3": third_protocol_sync,
    "with_config": lambda model: model.with_config(thread("t1")).ainvoke(HI),
    "bind": lambda model: model.bind(temperature=0).ainvoke(HI, thread("t1")),
    "sequence": lambda model: (ChatPromptTemplate.from_messages(HI) | model).ainvoke({}, thread("t1")),
    "lambda": inside_a_lambda,
}


def sum_up(chunks: Any) -> Any:
    first, *rest = chunks
    return sum(rest, first)


@pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)
async def test_a_thread_is_a_conversation_however_the_model_is_called(model: ChatBackhaul, ask: Ask) -> None:
    answer = await ask(model)
    assert report_of(answer)["conversation"] == "langgraph:t1"
    assert answer.usage_metadata["input_token_details"]["cache_read"] == report_of(answer)["cached"]


async def test_what_is_said_explicitly_goes_before_the_thread(model: ChatBackhaul) -> None:
    async with backhaul.conversation("scope") as chat:
        inside = await model.ainvoke(HI, thread("t1"))
        named = await model.ainvoke(HI, thread("t1"), conversation_id="call")
    bound = await model.bind(conversation_id="bound").ainvoke(HI, thread("t1"))
    fixed = await model.model_copy(update={"conversation_id": "field"}).ainvoke(HI, thread("t1"))
    found = [report_of(answer)["conversation"] for answer in (inside, named, bound, fixed)]
    assert found == ["scope", "call", "bound", "field"]
    assert [turn.conversation for turn in chat.reuse.turns] == ["scope", "call"]
    assert report_of(named)["parent"] == "scope"


async def test_leaving_a_scope_releases_what_the_model_left(model: ChatBackhaul, pair: LoopbackPair) -> None:
    async with backhaul.conversation():
        await model.ainvoke(HI)
        assert pair.decode.pinned_blocks
    await freed(pair)


async def test_threads_side_by_side_are_conversations_of_their_own(embedded: ChatBackhaul) -> None:
    answers = await embedded.abatch([HI, HI, HI], [thread("a"), thread("b"), thread("c")])
    assert [report_of(answer)["conversation"] for answer in answers] == ["langgraph:a", "langgraph:b", "langgraph:c"]


async def test_a_call_without_a_thread_goes_by_its_history(embedded: ChatBackhaul) -> None:
    first = await embedded.ainvoke(HI)
    second = await embedded.ainvoke([*HI, first, ("user", "And now?")])
    assert report_of(second)["conversation"] == report_of(first)["conversation"]
    assert report_of(second)["route"] == "warm"


async def test_a_router_elsewhere_reports_conversations_only(remote: ChatBackhaul) -> None:
    await remote.ainvoke(HI)
    for answer in (await remote.ainvoke(HI), await whole(remote.astream(HI))):
        assert "backhaul" not in answer.response_metadata
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


async def test_the_callers_context_is_its_own_between_chunks(embedded: ChatBackhaul) -> None:
    async with contextlib.aclosing(embedded.astream(HI, thread("t1"))) as chunks:
        await anext(chunks)
        assert (var_child_runnable_config.get(), current.get()) == (None, None)

    def synchronous() -> tuple[Any, Any]:
        with contextlib.closing(embedded.stream(HI, thread("t1"))) as chunks:
            next(chunks)
            return var_child_runnable_config.get(), current.get()

    assert await asyncio.to_thread(synchronous) == (None, None)


async def test_a_conversation_id_that_cannot_be_sent_is_refused(embedded: ChatBackhaul) -> None:
    with pytest.raises(ValueError, match="1 to 256 printable ASCII"):
        await embedded.ainvoke(HI, conversation_id="ü")


# --- answers


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing in {where}"


async def talk(model: Any, *, stream: bool) -> list[Any]:
    """A conversation with a tool call; what the model said."""
    history: list[Any] = [SYSTEM]
    said = []
    for question in QUESTIONS:
        history.append(HumanMessage(question))
        while True:
            asked = model.bind_tools([look]) if question is QUESTIONS[1] else model
            answer = await (
                whole(asked.astream(history, thread("t"))) if stream else asked.ainvoke(history, thread("t"))
            )
            said.append((answer.text, [(call["name"], call["args"]) for call in answer.tool_calls]))
            history.append(answer)
            if not answer.tool_calls:
                break
            history += [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
    return said


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_answers_are_those_of_chat_openai_on_one_engine(model: ChatBackhaul, stream: bool) -> None:
    async with LoopbackEngine("decode") as engine:
        stock = ChatOpenAI(model=engine.model, base_url=f"{engine.url}/v1", api_key=SecretStr("none"))
        expected = await talk(stock, stream=stream)
        await stock.root_async_client.close()
    assert [bool(calls) for _, calls in expected] == [False, True, False, False]
    assert await talk(model, stream=stream) == expected


class Heard(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.last: Any = None

    async def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.last = response.generations[0][0].message  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_second_turn_says_what_it_reused_and_callbacks_hear_it(model: ChatBackhaul, stream: bool) -> None:
    heard, usage = Heard(), UsageMetadataCallbackHandler()
    config: RunnableConfig = {**thread("t1"), "callbacks": [heard, usage]}
    first = await model.ainvoke(HI, config)
    history = [*HI, first, ("user", "And now?")]
    second = await (whole(model.astream(history, config)) if stream else model.ainvoke(history, config))
    report = report_of(second)
    assert (report["turn"], report["route"], report["reason"]) == (2, "warm", None)
    assert second.usage_metadata["input_token_details"]["cache_read"] == report["cached"] > 0
    assert second.usage_metadata["input_tokens"] == report["prompt"]
    assert report_of(heard.last) == report
    assert heard.last.usage_metadata == second.usage_metadata
    [total] = usage.usage_metadata.values()
    assert total["input_tokens"] == first.usage_metadata["input_tokens"] + report["prompt"]


async def test_a_streams_report_is_in_its_last_chunk_alone(embedded: ChatBackhaul) -> None:
    *others, last = [chunk async for chunk in embedded.astream(HI)]
    assert last.chunk_position == "last"
    assert "backhaul" in last.response_metadata
    assert not any("backhaul" in chunk.response_metadata for chunk in others)


async def test_several_prompts_and_several_choices_each_have_the_report(embedded: ChatBackhaul) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = await embedded.agenerate([[HumanMessage("a")], [HumanMessage("b")]], n=2)
    assert [len(choices) for choices in result.generations] == [2, 2]
    assert all(report_of(choice.message) for choices in result.generations for choice in choices)  # type: ignore[union-attr]
    assert result.llm_output["token_usage"]["completion_tokens"] > 0  # type: ignore[index]


async def test_tokens_are_counted_as_the_engines_do(model: ChatBackhaul) -> None:
    messages = [HumanMessage("What is 1 + 2?")]
    counted = await asyncio.to_thread(model.get_num_tokens_from_messages, messages, [look])
    answer = await model.bind_tools([look]).ainvoke(messages)
    assert answer.usage_metadata is not None
    assert counted == answer.usage_metadata["input_tokens"]
    assert await asyncio.to_thread(model.get_token_ids, "abc") == [97, 98, 99]


async def test_errors_of_the_engines_are_openais(model: ChatBackhaul) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await model.ainvoke(HI, model="another")


# --- streams


async def test_a_slow_engine_does_not_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGCHAIN_OPENAI_STREAM_CHUNK_TIMEOUT_S", "0.01")
    async with loopback_pair(costs=CostModel(decode_s=0.005)) as pair:
        engines = {"prefill": [pair.prefill.url], "decode": [pair.decode.url]}
        patient = ChatBackhaul(model=pair.model, **engines)
        assert (await whole(patient.astream(HI))).text
        await patient.aclose()
        hasty = ChatBackhaul(model=pair.model, stream_chunk_timeout=0.01, **engines)
        with pytest.raises(StreamChunkTimeoutError):
            await whole(hasty.astream(HI))
        await hasty.aclose()


async def test_a_stream_left_early_is_aborted_on_the_engine() -> None:
    async with loopback_pair(costs=CostModel(decode_s=0.05)) as pair:
        model = ChatBackhaul(model=pair.model, prefill=[pair.prefill.url], decode=[pair.decode.url])
        ended = asyncio.Event()
        async with backhaul.conversation(on_turn=lambda _: ended.set()) as chat:
            async with contextlib.aclosing(model.astream(HI, max_tokens=4000)) as chunks:
                await anext(chunks)
            async with asyncio.timeout(10):
                await ended.wait()
        assert chat.reuse.last is not None
        assert chat.reuse.last.error == "client_gone"
        await model.aclose()
        await freed(pair)


# --- reasoning


@contextlib.asynccontextmanager
async def thinking_server() -> AsyncIterator[tuple[str, list[Any]]]:
    """Answers as vLLM does for a model that reasons; where it listens, and the bodies that it got."""
    bodies: list[Any] = []
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        head = {"id": "c", "created": 1, "model": "m"}
        message = {"role": "assistant", "content": "42", "reasoning": "Let me see."}
        if not bodies[-1].get("stream"):
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas: list[Any] = [{"role": "assistant", "reasoning": "Let me "}, {"reasoning": "see."}, {"content": "42"}]
        for delta in deltas:
            chunk = head | {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", bodies
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reasoning_is_kept_and_sent_back(stream: bool) -> None:
    async with thinking_server() as (url, bodies):
        model = ChatBackhaul(model="m", base_url=url)
        answer = await (whole(model.astream("6 * 7?")) if stream else model.ainvoke("6 * 7?"))
        assert answer.content_blocks[0] == {"type": "reasoning", "reasoning": "Let me see."}
        assert answer.text == "42"
        history = ["6 * 7?", AIMessage(answer.content, additional_kwargs=answer.additional_kwargs), "And 6 * 8?"]
        await model.ainvoke(history)
        assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "42", "reasoning": "Let me see."}
        await model.model_copy(update={"replay_reasoning": False}).ainvoke(history)
        assert bodies[-1]["messages"][1] == {"role": "assistant", "content": "42"}
        await model.aclose()
