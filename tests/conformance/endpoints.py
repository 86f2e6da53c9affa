"""`/v1/messages` and `/v1/responses`: their fields and events, where the handle is, and that ids can take the messages' place."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .engines import Answer, Engines, Json
from .shapes import HELLO

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BRIEF = "You are brief. You answer in one line, and never twice the same."
P_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
RESPONSE = {
    "id",
    "created_at",
    "incomplete_details",
    "instructions",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
    "background",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "service_tier",
    "status",
    "text",
    "top_logprobs",
    "truncation",
    "usage",
    "user",
    "presence_penalty",
    "frequency_penalty",
    "kv_transfer_params",
    "ec_transfer_params",
    "input_messages",
    "output_messages",
}


# -- /v1/messages -----------------------------------------------------------------------------------------------------


async def message_has_these_fields_and_no_others(engines: Engines) -> None:
    answer = await _message(engines, engines.decode_url)
    assert answer.json.keys() == {"id", "type", "role", "content", "model", "stop_reason", "usage"}
    assert (answer.json["type"], answer.json["role"]) == ("message", "assistant")
    (block,) = answer.json["content"]
    assert block.keys() == {"type", "text"}
    assert answer.json["stop_reason"] == "max_tokens"
    cached = {"cache_creation_input_tokens", "cache_read_input_tokens"}
    assert answer.usage.keys() == {"input_tokens", "output_tokens"} | cached
    assert answer.usage["output_tokens"] == 6


async def message_stream_has_these_events_and_adds_up_to_the_whole(engines: Engines) -> None:
    whole = await _message(engines, engines.decode_url)
    answer = await _message(engines, engines.decode_url, stream=True)
    events = _events(answer)
    names = [name for name, _ in events]
    middle = names[2:-3]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(middle) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in events)
    assert events[0][1]["message"].keys() == {
        *("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage")
    }
    deltas = [data["delta"] for _, data in events[2:-3]]
    assert "".join(delta["text"] for delta in deltas) == whole.json["content"][0]["text"]
    last = events[-2][1]
    assert last.keys() == {"type", "delta", "usage"}
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 6
    assert "cache_read_input_tokens" in last["usage"]


async def messages_handle_is_at_the_top_of_a_whole_answer(engines: Engines) -> None:
    p = await _message(engines, engines.prefill_url, max_tokens=1, kv_transfer_params=P_LEG)
    assert p.handle["do_remote_prefill"] is True
    d = await _message(engines, engines.decode_url, kv_transfer_params=p.handle)
    assert d.handle["do_remote_decode"] is True
    assert d.handle["remote_num_tokens"] == _prompt_tokens(p.usage) + 6 - 1
    await engines.release(d.handle)


async def messages_handle_and_ids_are_in_the_delta_by_the_plugin(engines: Engines) -> None:
    if not await _has_plugin(engines):
        return
    p = await _message(engines, engines.prefill_url, max_tokens=1, kv_transfer_params=P_LEG)
    d = await _message(engines, engines.decode_url, stream=True, kv_transfer_params=p.handle)
    with_handle = [(name, data) for name, data in _events(d) if "kv_transfer_params" in data]
    ((name, data),) = with_handle
    assert name == "message_delta"
    handle = data["kv_transfer_params"]
    assert handle["do_remote_decode"] is True
    assert len(handle["backhaul"]["token_ids"]) == 6
    await engines.release({key: value for key, value in handle.items() if key != "backhaul"})


async def message_stream_without_transfer_parameters_has_none(engines: Engines) -> None:
    answer = await _message(engines, engines.decode_url, stream=True)
    assert "kv_transfer_params" not in answer.text


async def messages_renderer_gives_the_ids_of_the_same_chat(engines: Engines) -> None:
    blocks = [{"type": "text", "text": BRIEF, "cache_control": {"type": "ephemeral"}}]
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, *blocks]
    chat = await engines.chat(
        engines.decode_url, [{"role": "system", "content": BRIEF}, *HELLO], max_tokens=1, return_token_ids=True
    )
    for system in (BRIEF, blocks, billed):
        body = engines.body(messages=HELLO, system=system, max_tokens=6)
        rendered = await engines.post(f"{engines.decode_url}{MESSAGES}/render", body)
        assert rendered.status == 200, rendered.text
        assert rendered.json["token_ids"] == chat.json["prompt_token_ids"]
        assert rendered.json["features"] is None


async def forwarded_ids_win_over_anthropic_messages(engines: Engines) -> None:
    ids = list(range(40, 120))
    answer = await _message(engines, engines.prefill_url, kv_transfer_params={"prompt_token_ids": ids})
    assert _prompt_tokens(answer.usage) == len(ids)


async def messages_errors_have_anthropics_shape(engines: Engines) -> None:
    answer = await _message(engines, engines.decode_url, model="no-such-model")
    assert answer.status == 404
    assert answer.json.keys() == {"type", "error"}
    assert answer.json["type"] == "error"
    assert answer.error["type"] == ("not_found_error" if engines.speaks_033 else "NotFoundError")
    assert "no-such-model" in answer.error["message"]
    for fields in ({"max_tokens": None}, {"max_tokens": 0}, {"messages": "hello"}, {"system": 3}):
        answer = await _message(engines, engines.decode_url, **fields)
        assert answer.status == 400, (fields, answer.text)


# -- /v1/responses ----------------------------------------------------------------------------------------------------


async def response_has_these_fields_and_no_others(engines: Engines) -> None:
    answer = await _respond(engines, engines.decode_url)
    assert answer.json.keys() == RESPONSE | _since_033(engines)
    assert (answer.json["object"], answer.json["status"]) == ("response", "incomplete")
    assert answer.json["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer.json["id"].startswith("resp_")
    (item,) = answer.json["output"]
    status = "incomplete" if engines.speaks_033 else "completed"
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", status)
    (part,) = item["content"]
    assert part.keys() == {"annotations", "text", "type", "logprobs"}
    usage = answer.usage
    details = {"input_tokens_details", "output_tokens_details"}
    assert usage.keys() == {"input_tokens", "output_tokens", "total_tokens"} | details
    assert usage["output_tokens"] == 6
    assert "cached_tokens" in usage["input_tokens_details"]
    assert answer.json["input_messages"] is answer.json["kv_transfer_params"] is None


async def response_stream_has_these_events_and_adds_up_to_the_whole(engines: Engines) -> None:
    whole = await _respond(engines, engines.decode_url)
    events = _events(await _respond(engines, engines.decode_url, stream=True))
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    end = "incomplete" if engines.speaks_033 else "completed"
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", end]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    text = whole.json["output"][0]["content"][0]["text"]
    assert "".join(data["delta"] for _, data in events[4:-4]) == text
    first, last = events[0][1]["response"], events[-1][1]["response"]
    assert first.keys() == last.keys() == RESPONSE | _since_033(engines)
    assert (first["status"], first["usage"], last["status"]) == ("in_progress", None, "incomplete")
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["output_tokens"] == 6


async def responses_handle_is_in_the_answer_and_in_the_last_event(engines: Engines) -> None:
    for stream in (False, True):
        p = await _respond(engines, engines.prefill_url, max_output_tokens=1, kv_transfer_params=P_LEG)
        assert p.handle["do_remote_prefill"] is True
        d = await _respond(engines, engines.decode_url, stream=stream, kv_transfer_params=p.handle)
        handle = d.handle if not stream else _events(d)[-1][1]["response"]["kv_transfer_params"]
        assert handle["do_remote_decode"] is True
        assert handle["remote_num_tokens"] == p.usage["input_tokens"] + 6 - 1
        if stream:
            assert [bool(data["response"]["kv_transfer_params"]) for _, data in _events(d) if "response" in data] == [
                *(False, False, True)
            ]
        await engines.release(handle)


async def responses_say_which_ids_ran_where_they_are_asked(engines: Engines) -> None:
    ids = list(range(40, 120))
    for stream in (False, True):
        fields = {"enable_response_messages": True, "kv_transfer_params": {"prompt_token_ids": ids}}
        answer = await _respond(engines, engines.decode_url, stream=stream, **fields)
        response = answer.json if not stream else _events(answer)[-1][1]["response"]
        (ran,), (made,) = response["input_messages"], response["output_messages"]
        assert ran["tokens"] == ids
        assert len(made["tokens"]) == 6
        assert response["usage"]["input_tokens"] == len(ids)


async def responses_renderer_gives_the_ids_that_serving_runs(engines: Engines) -> None:
    said = {"type": "output_text", "text": "A coast redwood.", "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "content": [said]}
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How tall?"}]}
    for given in ("What is the tallest tree?", [*HELLO, message, question]):
        body = engines.body(input=given, instructions=BRIEF, max_output_tokens=1)
        rendered = await engines.post(f"{engines.decode_url}{RESPONSES}/render", body)
        assert rendered.status == 200, rendered.text
        served = await _respond(
            engines, engines.decode_url, input=given, max_output_tokens=1, enable_response_messages=True
        )
        assert rendered.json["token_ids"] == served.json["input_messages"][0]["tokens"]


async def responses_errors_have_openais_shape(engines: Engines) -> None:
    for fields, status in (
        ({"model": "no-such-model"}, 404),
        ({"previous_response_id": "resp_unknown"}, 404),
        ({"background": True}, 400),
        ({"max_output_tokens": 0}, 400),
        ({"input": 3}, 400),
    ):
        answer = await _respond(engines, engines.decode_url, **fields)
        assert answer.status == status, (fields, answer.text)
        assert answer.error.keys() == {"message", "type", "param", "code"}, (fields, answer.text)


def _since_033(engines: Engines) -> set[str]:
    added = {"prompt_cache_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    return added if engines.speaks_033 else set()


async def _message(engines: Engines, url: str, **fields: Json) -> Answer:
    given = {"messages": HELLO, "system": BRIEF, "max_tokens": 6, **fields}
    return await engines.post(url + MESSAGES, engines.body(**given))


async def _respond(engines: Engines, url: str, **fields: Json) -> Answer:
    given = {"input": HELLO, "instructions": BRIEF, "max_output_tokens": 6, "ignore_eos": True, **fields}
    return await engines.post(url + RESPONSES, engines.body(**given))


def _events(answer: Answer) -> Sequence[tuple[str, Json]]:
    """Names and data of a stream's events."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for event in answer.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def _prompt_tokens(usage: Json) -> int:
    return sum(usage.get(name, 0) for name in usage if name.endswith("input_tokens"))


async def _has_plugin(engines: Engines) -> bool:
    return "\nbackhaul_plugin_info{" in (await engines.get(f"{engines.decode_url}/metrics")).text
