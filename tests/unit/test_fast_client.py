"""The drop-in sends what openai's client sends, byte for byte, without walking every message along its type."""

from __future__ import annotations

import datetime
import enum
import inspect
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import backhaul
import httpx
import openai
import pydantic
import pytest
from backhaul import _fast
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._utils import PropertyInfo, maybe_transform
from openai._utils._json import openapi_dumps
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionUserMessageParam,
    ParsedChatCompletionMessage,
    completion_create_params,
)
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, response_create_params
from typing_extensions import TypedDict

pytestmark = pytest.mark.openai

try:
    import httpx2
except ImportError:
    MODULE: Any = httpx
else:
    MODULE = httpx2 if openai.__version__ >= "3" else httpx

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Zürich \\u2028"}'}}
USER = {"role": "user", "content": "Where? \U0001f600"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
FILE = {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0=", "filename": "a.pdf"}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
SAID = ChatCompletionMessage.model_validate(
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm", "refusal": None}
)
PARSED = ParsedChatCompletionMessage[Any].model_validate({"role": "assistant", "content": "{}", "parsed": {"a": 1}})


class Role(enum.StrEnum):
    USER = "user"


class Dump(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    role: str = "user"
    content: str = pydantic.Field(alias="Content")
    unset: int = 1


class Text(str):
    pass


class Answer(pydantic.BaseModel):
    name: str


CHAT: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"messages": [{"role": "system", "content": "You."}, USER]},
    "typed dicts": lambda: {"messages": [ChatCompletionUserMessageParam(role="user", content="x", name="n")]},
    "parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE, FILE]}]},
    "tuples": lambda: {"messages": [{"role": "user", "content": ({"type": "text", "text": "x"},)}]},
    "tool calls": lambda: {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": ""},
        ]
    },
    "an answer put back": lambda: {"messages": [USER, SAID, {"role": "tool", "tool_call_id": "c1", "content": "x"}]},
    "a parsed answer put back": lambda: {"messages": [USER, PARSED]},
    "tool calls put back": lambda: {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": SAID.tool_calls}]
    },
    "a model of the caller": lambda: {"messages": [Dump(Content="x")]},
    "a model in a field of no type": lambda: {"messages": [{**USER, "more": Dump(Content="x"), "said": SAID}]},
    "a generator": lambda: {"messages": (message for message in [USER, SAID])},
    "a tuple": lambda: {"messages": (USER, SAID)},
    "generators inside": lambda: {"messages": [{"role": "user", "content": (part for part in [PICTURE, FILE])}]},
    "None inside": lambda: {"messages": [{"role": "assistant", "content": None, "refusal": None}]},
    "omitted fields": lambda: {"messages": [{"role": "user", "content": "x", "name": openai.omit}]},
    "not given fields": lambda: {"messages": [{"role": "user", "content": "x", "name": openai.NOT_GIVEN}]},
    "unknown fields": lambda: {"messages": [{**USER, "reasoning_content": "hm", "n": [1, 2.5, True, {"b": [None]}]}]},
    "names of Python": lambda: {"messages": [{**USER, "from_": 1, "fileData": 2, "class": 3}]},
    "enumerations and subclasses": lambda: {"messages": [{"role": Role.USER, "content": Text("x")}]},
    "dates": lambda: {"messages": [{**USER, "at": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)}]},
    "keys that are no strings": lambda: {"messages": [{**USER, "n": {1: "a", None: "b", 2.5: "c"}}]},
    "strange messages": lambda: {"messages": ["a string", None, 5, ["nested"], {}]},
    "bytes and sets": lambda: {"messages": [{"role": "user", "content": b"x"}, {"role": "user", "content": {"x"}}]},
    "an empty list": lambda: {"messages": []},
    "messages that are a string": lambda: {"messages": "abc"},
    "messages that are a dict": lambda: {"messages": {"role": "user"}},
    "messages that are None": lambda: {"messages": None},
    "tools": lambda: {"messages": [USER], "tools": [TOOL, {"type": "custom", "custom": {"name": "c"}}]},
    "a tool of pydantic": lambda: {"messages": [USER], "tools": [openai.pydantic_function_tool(Answer)]},
    "tools omitted": lambda: {"messages": [USER], "tools": openai.omit},
    "no tools": lambda: {"messages": [USER], "tools": []},
    "tools that are None": lambda: {"messages": [USER], "tools": None},
    "everything else": lambda: {
        "messages": [USER],
        "temperature": 0,
        "stop": ["a"],
        "logit_bias": {"1": 2},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "extra_body": {"top_k": 1, "chat_template_kwargs": {"thinking": False}},
    },
    "messages replaced in extra_body": lambda: {"messages": [USER], "extra_body": {"z": 1, "messages": [SAID]}},
    "a message removed in extra_body": lambda: {"messages": [USER], "extra_body": {"messages": openai.omit}},
    "extra_body alone": lambda: {"messages": [], "extra_body": {"messages": [USER], "tools": [TOOL]}},
}
REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "no messages": dict,
    "an unknown word": lambda: {"messages": [USER], "topk": 1},
    "bytes in a field of no type": lambda: {"messages": [{**USER, "n": b"x"}]},
    "any object": lambda: {"messages": [object()]},
    "a date of no time": lambda: {"messages": [{**USER, "at": datetime.date(2026, 1, 2)}]},
    "not a number": lambda: {"messages": [{**USER, "n": float("nan")}]},
    "half a character": lambda: {"messages": [{"role": "user", "content": "\ud83d"}]},
    "a key that is a tuple": lambda: {"messages": [{**USER, "n": {(1, 2): 3}}]},
    "a model as response_format": lambda: {"messages": [USER], "response_format": Answer},
    "an object as messages": lambda: {"messages": object()},
    "a number as extra_body": lambda: {"messages": [USER], "extra_body": 5},
    "a message that holds itself": lambda: {"messages": [holds_itself()]},
}


def holds_itself() -> dict[str, Any]:
    message: dict[str, Any] = {"role": "user", "more": {}}
    message["more"]["more"] = message["more"]
    return message


class Wire:
    """Clients of both kinds whose requests end here."""

    def __init__(self, kind: Any) -> None:
        self.bodies: list[bytes] = []
        transport = MODULE.MockTransport(self.answer)
        module = (MODULE.AsyncClient if issubclass(kind, openai.AsyncOpenAI) else MODULE.Client)(transport=transport)
        self.client = kind(api_key="k", base_url="http://server/v1", http_client=module, max_retries=0)

    def answer(self, request: Any) -> Any:
        self.bodies.append(request.content)
        if json.loads(request.content).get("stream"):
            return MODULE.Response(200, text="data: [DONE]\n\n", headers={"content-type": "text/event-stream"})
        message = {"role": "assistant", "content": '{"name": "a"}'}
        return MODULE.Response(200, json={"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})


def sent(kind: Any, call: Callable[[Any], Any]) -> bytes:
    wire = Wire(kind)
    call(wire.client)
    [body] = wire.bodies
    return body


@pytest.mark.parametrize("arguments", CHAT.values(), ids=CHAT)
def test_a_chat_completion(arguments: Callable[[], dict[str, Any]]) -> None:
    def create(client: Any) -> Any:
        return client.chat.completions.create(model="m", **arguments())

    assert sent(backhaul.OpenAI, create) == sent(openai.OpenAI, create)


@pytest.mark.parametrize("arguments", CHAT.values(), ids=CHAT)
async def test_a_chat_completion_async(arguments: Callable[[], dict[str, Any]]) -> None:
    bodies = []
    for kind in (backhaul.AsyncOpenAI, openai.AsyncOpenAI):
        wire = Wire(kind)
        await wire.client.chat.completions.create(model="m", **arguments())
        bodies += wire.bodies
    assert bodies[0] == bodies[1]


def _stream_helper(client: Any, **words: Any) -> None:
    with client.chat.completions.stream(**words) as stream:
        for _ in stream:
            pass


def _streaming_response(client: Any, **words: Any) -> None:
    with client.chat.completions.with_streaming_response.create(**words) as response:
        response.read()


WAYS: dict[str, Callable[..., Any]] = {
    "create, streamed": lambda client, **words: list(client.chat.completions.create(**words, stream=True)),
    "stream": _stream_helper,
    "parse": lambda client, **words: client.chat.completions.parse(**words, response_format=Answer),
    "raw": lambda client, **words: client.chat.completions.with_raw_response.create(**words),
    "raw, of the client": lambda client, **words: client.with_raw_response.chat.completions.create(**words),
    "raw parse": lambda client, **words: client.chat.completions.with_raw_response.parse(**words),
    "streaming response": _streaming_response,
    "of a copy": lambda client, **words: client.with_options(timeout=3).chat.completions.create(**words),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_ask(way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    words = CHAT["an answer put back"]() | {"tools": [openai.pydantic_function_tool(Answer)], "model": "m"}
    theirs = sent(openai.OpenAI, lambda client: way(client, **words))
    resolved = counted(monkeypatch)
    assert sent(backhaul.OpenAI, lambda client: way(client, **words)) == theirs
    assert resolved, "it took the slow path"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the arguments that are put back into bodies from now on."""
    names: list[str] = []
    resolve = _fast.Untyped.resolve

    def counting(self: _fast.Untyped) -> list[Any]:
        names.append(self.name)
        return resolve(self)

    monkeypatch.setattr(_fast.Untyped, "resolve", counting)
    return names


ITEMS: list[Any] = [
    {"role": "user", "content": "x"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    ResponseFunctionToolCall(type="function_call", call_id="c1", name="look", arguments="{}"),
    ResponseOutputMessage.model_validate(
        {
            "id": "1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "x", "annotations": []}],
        }
    ),
    {"type": "function_call_output", "call_id": "c1", "output": "x"},
]
OTHERS: dict[str, Callable[[Any], Any]] = {
    "responses": lambda client: client.responses.create(model="m", input=ITEMS, tools=[{"type": "web_search"}]),
    "responses of a text": lambda client: client.responses.create(model="m", input="x"),
    "responses, streamed": lambda client: list(client.responses.create(model="m", input=ITEMS, stream=True)),
    "responses, raw": lambda client: client.responses.with_raw_response.create(model="m", input=ITEMS),
    "completions": lambda client: client.completions.create(model="m", prompt="x"),
    "completions of ids": lambda client: client.completions.create(model="m", prompt=[1, 2, 3]),
    "completions of lists of ids": lambda client: client.completions.create(model="m", prompt=[[1], (2,), range(3)]),
    "completions of texts": lambda client: client.completions.create(model="m", prompt=["a", Text("b")]),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_responses_and_completions(call: Callable[[Any], Any]) -> None:
    assert sent(backhaul.OpenAI, call) == sent(openai.OpenAI, call)


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_sent_is_refused_as_openai_does(arguments: Callable[[], dict[str, Any]]) -> None:
    errors = []
    for kind in (backhaul.OpenAI, openai.OpenAI):
        with pytest.raises((TypeError, ValueError)) as caught:
            Wire(kind).client.chat.completions.create(model="m", **arguments())
        errors.append((caught.type, str(caught.value).partition("0x")[0]))
    assert errors[0] == errors[1]


KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "type", "function", "text", "image_url", "name", "output", "x"]
)
ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(Text("t")) | st.just(SAID)
)
VALUES = st.recursive(
    ATOMS | st.sampled_from(["user", "assistant", "tool", "function_call", "text", Role.USER, openai.omit]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=2).map(tuple)
    ),
    max_leaves=8,
)


@given(items=st.lists(VALUES, max_size=4))
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("messages", completion_create_params.CompletionCreateParamsNonStreaming),
        ("tools", completion_create_params.CompletionCreateParamsNonStreaming),
        ("input", response_create_params.ResponseCreateParamsNonStreaming),
    ],
)
def test_whatever_is_in_a_list_it_comes_out_as_from_openais_transform(name: str, params: Any, items: list[Any]) -> None:
    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return openapi_dumps(make())
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    ours = outcome(_fast.Untyped(items, name, params).resolve)
    assert ours == outcome(lambda: maybe_transform({name: items}, params)[name])  # type: ignore[index]


async def test_a_history_that_grows_while_a_request_is_retried_is_sent_as_it_was() -> None:
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    bodies: list[bytes] = []

    async def answer(request: Any) -> Any:
        bodies.append(request.content)
        history[0]["content"].append("more")
        history.append({"role": "user", "content": "y"})
        return MODULE.Response(503 if len(bodies) == 1 else 200, headers={"retry-after-ms": "1"}, json={"choices": []})

    http_client = MODULE.AsyncClient(transport=MODULE.MockTransport(answer))
    client = backhaul.AsyncOpenAI(api_key="k", base_url="http://server/v1", http_client=http_client)
    await client.chat.completions.create(model="m", messages=history)
    assert bodies[0] == bodies[1]


async def test_a_call_that_is_awaited_later_sends_the_history_of_that_moment() -> None:
    bodies = []
    for kind in (backhaul.AsyncOpenAI, openai.AsyncOpenAI):
        wire, history = Wire(kind), [USER]
        call = wire.client.chat.completions.create(model="m", messages=history)
        history.append(USER)
        await call
        bodies += wire.bodies
    assert bodies[0] == bodies[1]


def test_the_callers_history_is_left_alone() -> None:
    history: list[Any] = [USER, SAID]
    sent(backhaul.OpenAI, lambda client: client.chat.completions.create(model="m", messages=history, tools=[TOOL]))
    assert history == [USER, SAID]
    assert history[1] is SAID


def test_a_long_history_is_not_walked_along_its_type() -> None:
    """CPU time, in which openai's client is 20 times slower; the margin is for machines that are busy."""
    history: list[Any] = [USER, SAID] * 100

    def cost(kind: Any) -> float:
        client = Wire(kind).client
        times = []
        for _ in range(5):
            began = time.process_time()
            client.chat.completions.create(model="m", messages=history)
            times.append(time.process_time() - began)
        return min(times)

    assert cost(backhaul.OpenAI) * 2 < cost(openai.OpenAI)


def test_a_method_that_a_tracing_library_has_replaced_gets_the_callers_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = [USER]
    seen = []
    completions = openai.resources.chat.completions.Completions
    create = completions.create

    def traced(self: Any, **words: Any) -> Any:
        seen.append(words["messages"])
        return create(self, **words)

    monkeypatch.setattr(completions, "create", traced)
    sent(backhaul.OpenAI, lambda client: client.chat.completions.create(model="m", messages=history))
    assert seen[0] is history


def test_the_methods_look_like_openais() -> None:
    ours, theirs = backhaul.OpenAI(api_key="k"), openai.OpenAI(api_key="k")
    for mine, its in (
        (ours.chat.completions, theirs.chat.completions),
        (ours.responses, theirs.responses),
        (ours.completions, theirs.completions),
    ):
        assert isinstance(mine, type(its))
        assert repr(type(mine)) == repr(type(its))
        assert mine.create.__doc__ == its.create.__doc__
        assert inspect.signature(mine.create) == inspect.signature(its.create)


class _Inner(TypedDict, total=False):
    from_: Annotated[str, PropertyInfo(alias="from")]


class _Params(TypedDict, total=False):
    renamed: list[_Inner | Literal["a"]]
    formatted: list[Annotated[str | datetime.date, PropertyInfo(format="iso8601")]]
    plain: list[dict[str, Any]]


def test_an_argument_whose_type_renames_keys_or_formats_values_is_left_to_openai() -> None:
    assert _fast._renames(_Params, "renamed")
    assert _fast._renames(_Params, "formatted")
    assert not _fast._renames(_Params, "plain")
