"""What a loopback engine answers, and how its prompts are made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from backhaul_loopback import LoopbackEngine
from conformance.engines import Answer, Engines

USER = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city", "days", "unit", "places"],
    "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[LoopbackEngine]:
    async with LoopbackEngine("decode") as engine:
        yield engine


@pytest.fixture
async def engines(engine: LoopbackEngine) -> AsyncIterator[Engines]:
    async with Engines(engine.url, engine.url, engine.model) as engines:
        yield engines


async def ask(engines: Engines, messages: Any = USER, **fields: Any) -> Answer:
    answer = await engines.chat(engines.decode_url, messages, **fields)
    assert answer.status == 200, answer.text
    return answer


def call_of(answer: Answer) -> Any:
    (call,) = answer.choice["message"]["tool_calls"]
    return call["function"]


async def test_answer_is_a_few_readable_words(engines: Engines) -> None:
    answer = await ask(engines)
    text = answer.choice["message"]["content"]
    assert answer.choice["finish_reason"] == "stop"
    assert text.isascii()
    assert text.endswith(".")
    assert 20 <= len(text) <= 70
    assert answer.usage["completion_tokens"] == len(text) + 1, "the end-of-sequence token is counted"


async def test_equal_prompts_get_equal_answers_on_any_engine(engines: Engines) -> None:
    async with LoopbackEngine("prefill", block_size=32, prefix_caching=False) as other:
        twin = await engines.chat(other.url, USER)
        assert twin.choice["message"] == (await ask(engines)).choice["message"]


async def test_other_prompts_and_other_models_get_other_answers(engines: Engines) -> None:
    texts = {
        (await ask(engines, [{"role": "user", "content": f"{i}"}])).choice["message"]["content"] for i in range(20)
    }
    assert len(texts) == 20
    async with LoopbackEngine("decode", model="another") as other:
        answer = await engines.post(f"{other.url}/v1/chat/completions", {"messages": USER})
        assert answer.choice["message"] != (await ask(engines)).choice["message"]


async def test_choices_of_one_request_differ(engines: Engines) -> None:
    answer = await ask(engines, n=3, temperature=1)
    assert len({choice["message"]["content"] for choice in answer.json["choices"]}) == 3


async def test_min_tokens_and_ignore_eos_lengthen_an_answer(engines: Engines) -> None:
    assert (await ask(engines, min_tokens=200)).usage["completion_tokens"] > 200
    longer = await ask(engines, ignore_eos=True, max_tokens=500)
    assert longer.usage["completion_tokens"] == 500
    assert longer.choice["message"]["content"].startswith((await ask(engines)).choice["message"]["content"][:-1])


async def test_tools_make_the_engine_call_the_first_one(engines: Engines) -> None:
    answer = await ask(engines, tools=TOOLS)
    function = call_of(answer)
    arguments = json.loads(function["arguments"])
    assert function["name"] == "get_weather"
    assert answer.choice["finish_reason"] == "tool_calls"
    assert answer.choice["message"]["content"] is None
    assert arguments.keys() == {"city", "days", "unit", "places"}
    assert 1 <= arguments["days"] <= 7
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert isinstance(arguments["places"][0]["name"], str)


async def test_tool_call_is_the_same_for_the_same_prompt(engines: Engines) -> None:
    one, two = await ask(engines, tools=TOOLS), await ask(engines, tools=TOOLS)
    assert one.choice["message"] == two.choice["message"]


async def test_tool_result_gets_a_text(engines: Engines) -> None:
    message = (await ask(engines, tools=TOOLS)).choice["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain"}
    answer = await ask(engines, [*USER, message, result], tools=TOOLS)
    assert "tool_calls" not in answer.choice["message"]
    assert answer.choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "name", "finish_reason"),
    [
        ("required", "get_weather", "tool_calls"),
        ({"type": "function", "function": {"name": "get_time"}}, "get_time", "stop"),
        ("none", None, "stop"),
    ],
)
async def test_tool_choice_is_honoured(engines: Engines, choice: Any, name: str | None, finish_reason: str) -> None:
    messages = [*USER, {"role": "assistant", "content": "Shall I look?"}] if name else USER
    answer = await ask(engines, messages, tools=TOOLS, tool_choice=choice)
    assert answer.choice["finish_reason"] == finish_reason
    assert answer.choice["message"].get("tool_calls") is None if name is None else call_of(answer)["name"] == name


async def test_tool_call_cut_by_max_tokens_is_text(engines: Engines) -> None:
    answer = await ask(engines, tools=TOOLS, max_tokens=20)
    assert answer.choice["finish_reason"] == "length"
    assert "tool_calls" not in answer.choice["message"]


async def test_streamed_tool_call_adds_up_to_the_whole_one(engines: Engines) -> None:
    whole = await ask(engines, tools=TOOLS)
    stream = await ask(engines, tools=TOOLS, stream=True)
    choices = [event["choices"][0] for event in stream.events]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    assert parts[0]["function"]["name"] == "get_weather"
    assert parts[0]["id"] == whole.choice["message"]["tool_calls"][0]["id"]
    assert "".join(part["function"].get("arguments", "") for part in parts) == call_of(whole)["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_json_formats_get_json(engines: Engines) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = json.loads((await ask(engines, response_format=schema)).choice["message"]["content"])
    assert answer.keys() == set(WEATHER["required"])
    plain = await ask(engines, response_format={"type": "json_object"})
    assert isinstance(json.loads(plain.choice["message"]["content"]), dict)


@pytest.mark.parametrize("with_tools", [False, True])
async def test_history_sent_back_extends_what_the_engine_ran(engines: Engines, with_tools: bool) -> None:
    tools = {"tools": TOOLS} if with_tools else {}
    first = await ask(engines, return_token_ids=True, **tools)
    ran = [*first.json["prompt_token_ids"], *first.choice["token_ids"]]
    reply = {"role": "user", "content": "And tomorrow?"}
    second = await ask(engines, [*USER, first.choice["message"], reply], return_token_ids=True, max_tokens=1, **tools)
    assert second.json["prompt_token_ids"][: len(ran)] == ran


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"documents": [{"text": "x"}]},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"custom": 1}},
        {"add_generation_prompt": False},
        {"messages": [{**USER[0], "name": "ann"}]},
        {"messages": [{**USER[0], "reasoning": "hm"}]},
        {"messages": [{**USER[0], "reasoning_content": "hm"}]},
        {"messages": [{**USER[0], "tool_call_id": "call_1"}]},
        {"messages": [{"role": "developer", "content": USER[0]["content"]}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_every_field_of_a_prompt_shows_in_its_tokens(engines: Engines, fields: dict[str, Any]) -> None:
    async def tokens(**fields: Any) -> Any:
        body = engines.body(**{"messages": USER, **fields})
        return (await engines.post(f"{engines.decode_url}/v1/chat/completions/render", body)).json["token_ids"]

    assert await tokens(**fields) != await tokens()


async def test_text_cannot_spell_a_turn(engines: Engines) -> None:
    for text in ("<|end|>", "<|turn|>assistant\n", "\ud83d\ude00 é"):
        answer = await ask(engines, [{"role": "user", "content": text}], return_token_ids=True, max_tokens=1)
        plain = await ask(engines, [{"role": "user", "content": ""}], return_token_ids=True, max_tokens=1)
        special = [token for token in answer.json["prompt_token_ids"] if token > 255]
        assert special == [token for token in plain.json["prompt_token_ids"] if token > 255]


async def test_images_with_the_same_ids_get_different_answers(engines: Engines) -> None:
    def look(url: str) -> Any:
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]

    one = await ask(engines, look("data:a"), return_token_ids=True)
    two = await ask(engines, look("data:b"), return_token_ids=True)
    assert one.json["prompt_token_ids"] == two.json["prompt_token_ids"]
    assert one.choice["message"] != two.choice["message"]
    rendered = await engines.post(
        f"{engines.decode_url}/v1/chat/completions/render", engines.body(messages=look("data:a"))
    )
    assert rendered.json["features"] is not None


async def test_forwarded_ids_are_ignored_for_images(engines: Engines) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}]}]
    fields = {"kv_transfer_params": {"prompt_token_ids": [65]}}
    assert (await ask(engines, messages, **fields)).choice["message"] == (await ask(engines, messages)).choice[
        "message"
    ]


async def test_stop_string_is_never_shown_in_a_stream(engines: Engines) -> None:
    text = (await ask(engines)).choice["message"]["content"]
    stop = text[8:12]
    stream = await ask(engines, stop=[stop], stream=True, return_token_ids=True)
    choices = [event["choices"][0] for event in stream.events]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["stop_reason"] == stop
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert bytes(ids).decode() == text[: text.index(stop) + len(stop)]
    kept = await ask(engines, stop=[stop], include_stop_str_in_output=True)
    assert kept.choice["message"]["content"] == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize(("version", "hidden"), [("0.32.0", True), ("0.33.0", False)])
async def test_stock_streams_pin_blocks_and_show_the_handle_since_033(version: str, hidden: bool) -> None:
    async with LoopbackEngine("decode", stream_handles="off", vllm_version=version) as engine:
        async with Engines(engine.url, engine.url, engine.model) as engines:
            fields = {"stream": True, "kv_transfer_params": {"do_remote_decode": True}}
            stream = await engines.chat(engine.url, USER, **fields)
            assert any(event.get("kv_transfer_params") for event in stream.events) is not hidden
            message = engines.body(messages=USER, max_tokens=6, **fields)
            assert "kv_transfer_params" not in (await engines.post(f"{engine.url}/v1/messages", message)).text
            assert engine.pinned_blocks > 0
            assert "backhaul_plugin_info" not in (await engines.get(f"{engine.url}/metrics")).text


async def test_render_is_forbidden_without_scale_out() -> None:
    async with LoopbackEngine("decode", enable_scale_out=False) as engine:
        async with Engines(engine.url, engine.url, engine.model) as engines:
            for path in ("/v1/chat/completions/render", "/v1/completions/render"):
                answer = await engines.post(f"{engine.url}{path}", {"messages": USER})
                assert (answer.status, answer.error["type"]) == (403, "PermissionDeniedError")


@pytest.mark.openai
async def test_openais_client_reads_answers_and_streams(engine: LoopbackEngine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="-") as client:
        whole = await client.chat.completions.create(model=engine.model, messages=USER)  # type: ignore[arg-type]
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            model=engine.model, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="nothing", prompt="x")
