"""The plugin in a real engine: what it adds to a stream, and that it adds nothing else."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from real_engines import (
    EngineSet,
    EngineSets,
    kv_usage,
    metrics,
    post,
    prefill,
    release,
    salted,
    stream,
    wait_for_baseline,
)

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
TEXT = "Let me count the ways in which a cache can be wrong. " * 12
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string", "enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


def request(engines: EngineSet, path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]} if path == CHAT else {"prompt": TEXT}
    return salted({"model": engines.model, "max_tokens": 24, "temperature": 0, **prompt, **fields})


def ending(events: list[str]) -> dict[str, Any]:
    """The event with the finish reason. Fails if another event carries a handle."""
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    (last,) = [event for event in parsed if event["choices"] and event["choices"][0]["finish_reason"]]
    assert not [event for event in parsed if event is not last and event.get("kv_transfer_params")]
    result: dict[str, Any] = last
    return result


def ids_in(events: list[str]) -> list[int]:
    """What `return_token_ids` put into a stream."""
    parsed = [json.loads(event) for event in events if event != "[DONE]"]
    return [token for event in parsed for choice in event["choices"] for token in choice.get("token_ids") or []]


@asynccontextmanager
async def released_after(engines: EngineSet) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Put D's handles into the list: they are released, and D must then hold no more blocks than before."""
    before = await kv_usage(engines.decode[0])
    handles: list[Mapping[str, Any]] = []
    yield handles
    for handle in handles:
        await release(engines.prefill[0], handle)
    await wait_for_baseline(engines.decode[0], before)


async def test_metrics_tell_that_streams_carry_handles(engines: EngineSet) -> None:
    for url in (*engines.prefill, *engines.decode):
        assert (await metrics(url)).total("backhaul_plugin_info", version="1") == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_streamed_turn_ends_with_the_handle_and_all_ids_of_the_answer(engines: EngineSet, path: str) -> None:
    body = request(engines, path, return_token_ids=True)
    (p,), (d,) = engines.prefill, engines.decode
    async with released_after(engines) as handles:
        whole = await post(d, path, {**body, "kv_transfer_params": await prefill(p, path, body)})
        handles.append(whole["kv_transfer_params"])
        events = await stream(d, path, {**body, "kv_transfer_params": await prefill(p, path, body)})
        handle = ending(events)["kv_transfer_params"]
        handles.append(handle)

    ours = handle.pop("backhaul")
    assert ours == {"version": 1, "token_ids": whole["choices"][0]["token_ids"]}
    assert ours["token_ids"] == ids_in(events)
    own = ("remote_block_ids", "remote_request_id", "remote_blocks_expiry_time")
    assert {k: v for k, v in handle.items() if k not in own} == {
        k: v for k, v in whole["kv_transfer_params"].items() if k not in own
    }
    assert set(own) <= set(handle)


async def test_a_streamed_message_ends_with_the_handle_and_all_ids_of_the_answer(engines: EngineSet) -> None:
    body = request(engines, CHAT)
    (p,), (d,) = engines.prefill, engines.decode
    async with released_after(engines) as handles:
        whole = await post(d, CHAT, salted({**body, "return_token_ids": True}))
        first = await prefill(p, MESSAGES, body)
        events = await stream(d, MESSAGES, {**body, "kv_transfer_params": first})
        told = [json.loads(event.split("data: ", 1)[1]) for event in events]
        with_handle = [event for event in told if "kv_transfer_params" in event]
        handles += [event["kv_transfer_params"] for event in with_handle]
    assert [event["type"] for event in with_handle] == ["message_delta"]
    assert with_handle[0]["kv_transfer_params"]["remote_num_tokens"]
    assert with_handle[0]["kv_transfer_params"]["backhaul"] == {
        "version": 1,
        "token_ids": whole["choices"][0]["token_ids"],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_empty_parameters_ask_for_the_ids_without_a_handle(engines: EngineSet, path: str) -> None:
    events = await stream(engines.decode[0], path, request(engines, path, return_token_ids=True, kv_transfer_params={}))
    assert ending(events)["kv_transfer_params"] == {"backhaul": {"version": 1, "token_ids": ids_in(events)}}


async def test_prompt_ids_among_the_parameters_do_not_hide_the_ids_of_the_answer(engines: EngineSet) -> None:
    body = request(engines, CHAT, return_token_ids=True, kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
    events = await stream(engines.decode[0], CHAT, body)
    assert ending(events)["kv_transfer_params"] == {"backhaul": {"version": 1, "token_ids": ids_in(events)}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_cut_by_a_stop_string_has_ids_and_no_handle(engines: EngineSet, path: str) -> None:
    (p,), (d,) = engines.prefill, engines.decode
    body = request(engines, path)
    answer = (await post(d, path, body))["choices"][0]
    text = answer["message"]["content"] if path == CHAT else answer["text"]
    body["stop"] = [text[12:16]]
    async with released_after(engines):
        events = await stream(d, path, {**body, "kv_transfer_params": await prefill(p, path, request(engines, path))})
    last = ending(events)
    assert last["choices"][0]["stop_reason"] == text[12:16]
    assert list(last["kv_transfer_params"]) == ["backhaul"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "temperature": 1, "kv_transfer_params": {}}], ids=["no parameters", "two choices"]
)
async def test_other_streams_carry_nothing(engines: EngineSet, path: str, fields: dict[str, Any]) -> None:
    events = await stream(engines.decode[0], path, request(engines, path, **fields))
    assert len(events) > 2
    assert not [event for event in events if "kv_transfer_params" in without_null(event)]


async def test_several_prompts_in_one_request_carry_nothing(engines: EngineSet) -> None:
    body = request(engines, COMPLETIONS, kv_transfer_params={}, prompt=["one", "two"])
    events = await stream(engines.decode[0], COMPLETIONS, body)
    assert not [event for event in events if "kv_transfer_params" in without_null(event)]


async def test_a_streamed_tool_call_ends_with_the_ids(engines: EngineSet) -> None:
    body = request(
        engines,
        CHAT,
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=128,
        return_token_ids=True,
        kv_transfer_params={},
    )
    events = await stream(engines.decode[0], CHAT, body)
    last = ending(events)
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert last["kv_transfer_params"]["backhaul"]["token_ids"] == ids_in(events)


@pytest.fixture
def stock(engine_sets: EngineSets) -> Iterator[EngineSet]:
    """The same engines without the plugin: VLLM_PLUGINS names the only ones to load."""
    yield engine_sets.special(EngineSets.DEFAULT, beside_default=True, VLLM_PLUGINS="none")
    engine_sets.make_room(keep_default=True)


async def test_every_other_byte_of_a_stream_is_that_of_an_engine_without_the_plugin(
    engines: EngineSet, stock: EngineSet
) -> None:
    """One token an answer: vLLM may send several tokens in one event, which would make longer streams differ."""
    assert "backhaul_plugin_info" not in await metrics(stock.decode[0])
    for path in (CHAT, COMPLETIONS):
        for fields in (
            {},
            {"stream_options": {"include_usage": True}},
            {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3},
            {"return_token_ids": True},
        ):
            body = request(engines, path, max_tokens=1, **fields)
            asked = {**body, "kv_transfer_params": {}}
            same_id = {"X-Request-Id": uuid.uuid4().hex}
            expected = await stream(stock.decode[0], path, salted(asked), **same_id)
            plain = await stream(engines.decode[0], path, salted(body), **same_id)
            ours = await stream(engines.decode[0], path, salted(asked), **same_id)
            assert [at_one_time(event) for event in plain] == [at_one_time(event) for event in expected]
            assert [at_one_time(without_ours(event)) for event in ours] == [
                at_one_time(without_null(event)) for event in expected
            ]
            assert ours != plain


def at_one_time(event: str) -> str:
    return re.sub(r'"created":\d+', '"created":0', event)


def without_null(event: str) -> str:
    """vLLM 0.33 says in every chunk that it has no parameters."""
    return event.replace(',"kv_transfer_params":null', "")


def without_ours(event: str) -> str:
    ours = r',"kv_transfer_params":\{"backhaul":\{"version":1,"token_ids":\[[\d,]*\]\}\}'
    return re.sub(ours, "", without_null(event))
