"""What is particular to `/v1/messages` and `/v1/responses`: their histories, their legs, their streams, their errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_protocol.account import Account
from backhaul_router import wire
from backhaul_router.errors import Leg
from backhaul_router.report import Reason, Route
from backhaul_router.serve.asgi import _Out
from backhaul_router.turn.effects import NoteResponse, Respond
from backhaul_router.wire import Endpoint, Facts, read_request
from backhaul_router.wire.stream import StreamFilter
from core_values import D1, D2, P1, encoded, facts, fleet, params
from turn_drive import PROMPT, SSE, STREAM, Chunk, Drive, Opened, prefilled, rendered

MESSAGES, RESPONSES = Endpoint.MESSAGES, Endpoint.RESPONSES
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
MARK = {"cache_control": {"type": "ephemeral"}}


def messages(*said: Any, **fields: Any) -> Facts:
    history = [{"role": "user", "content": one} for one in said or ("hi",)]
    return read_request(MESSAGES, encoded({"model": "m", "max_tokens": 9, "messages": history, **fields}))


def responses(given: Any = "hi", **fields: Any) -> Facts:
    return read_request(RESPONSES, encoded({"model": "m", "input": given, **fields}))


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


# --- histories ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        messages("hi", "so", system=[text("x-anthropic-billing-header: cch=2;"), text("be "), text("brief", **MARK)]),
        messages("hi", [text("so", **MARK)], system="be brief"),
        messages([text("hi")], "so", system=[text("be brief")]),
    ],
    ids=["billing and blocks", "a mark", "a block"],
)
def test_what_engines_ignore_does_not_make_another_history(other: Facts) -> None:
    assert other.parts == messages("hi", "so", system="be brief").parts


@pytest.mark.parametrize(
    "other",
    [
        messages("hi", "So", system="be brief"),
        messages("hi", "so", system="be brief "),
        messages("hi", [text("s"), text("o")], system="be brief"),
        messages("hi", "so"),
    ],
)
def test_every_other_difference_does(other: Facts) -> None:
    assert other.parts != messages("hi", "so", system="be brief").parts


def test_marks_within_tool_results_are_ignored_too() -> None:
    marked = {"type": "tool_result", "tool_use_id": "t", "content": [text("x", **MARK)], **MARK}
    plain = {"type": "tool_result", "tool_use_id": "t", "content": [text("x")]}
    assert messages([marked, text("go")]).parts == messages([plain, text("go")]).parts


def test_system_prompt_and_instructions_are_the_first_message() -> None:
    assert (
        len(messages("hi", system="s").parts)
        == len(responses([{"role": "user", "content": "hi"}], instructions="s").parts)
        == 2
    )
    assert responses(instructions=None).parts == (b'"hi"',)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (messages([text("a"), IMAGE]), "image"),
        (messages([{"type": "tool_result", "tool_use_id": "t", "content": [text("a"), IMAGE]}]), "image"),
        (messages([{"type": "tool_use", "name": "n", "input": {}}]), "tool_use without an id"),
        (messages(thinking={"type": "disabled"}), "thinking"),
        (messages(thinking=3), "thinking"),
        (responses([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]), "input_image"),
        (
            responses([{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]),
            "input_file",
        ),
        (responses([{"type": "web_search_call", "id": "w"}]), "web_search_call"),
        (messages(thinking={"type": "adaptive"}), None),
        (messages([{"type": "tool_use", "id": "t", "name": "n", "input": {}}, text("a")]), None),
        (
            messages(
                [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
            ),
            None,
        ),
        (
            responses(
                [{"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]}]
            ),
            None,
        ),
        (responses([{"type": "function_call_output", "call_id": "c", "output": "x"}]), None),
    ],
)
def test_ids_replace_what_is_text_and_nothing_else(request_: Facts, why: str | None) -> None:
    assert request_.unproven == why
    assert request_.alone is None


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (messages(max_tokens=0), "max_tokens"),
        (messages(max_tokens="many"), "max_tokens"),
        (read_request(MESSAGES, b'{"messages": [{"role": "user", "content": "x"}]}'), "max_tokens"),
        (messages(messages="hello"), "messages"),
        (messages(messages=[]), "messages"),
        (messages(messages=["hello"]), "messages"),
        (messages(system=3), "messages"),
        (messages([3]), "messages"),
        (responses(3), "input"),
        (responses([]), "input"),
        (responses(["hello"]), "input"),
        (responses(max_output_tokens=0), "max_output_tokens"),
        (responses(background=True), "background"),
        (responses(previous_response_id="resp_1"), "previous_response_id"),
        (responses(conversation={"id": "conv_1"}), "conversation"),
        (responses(previous_input_messages=[{}]), "previous_input_messages"),
        (responses(truncation="auto"), "truncation"),
        (responses(truncation=None), "truncation"),
        (responses(tools=[{"type": "web_search_preview"}]), "tools"),
        (responses(tools=[{"type": "mcp", "server_label": "x"}]), "tools"),
        (responses(tools={"type": "function"}), "tools"),
        (responses([{"type": "item_reference", "id": "x"}]), "input"),
        (responses(tools=[{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]), None),
        (responses(background=False, previous_response_id=None, truncation="disabled", tools=[]), None),
    ],
)
def test_what_a_split_would_not_answer_alike_goes_to_decode_alone(request_: Facts, why: str | None) -> None:
    assert request_.alone == why


def test_what_may_name_the_conversation_is_handed_over_as_it_is() -> None:
    body = {"prompt_cache_key": "k", "previous_response_id": "resp_1", "conversation": {"id": "c"}, "session_id": 3}
    assert responses(**body).ids == body
    assert messages(metadata={"user_id": "u", "other": 1}).ids == {"metadata.user_id": "u"}
    assert messages(metadata="u").ids == messages(metadata=None).ids == {}


# --- legs ----------------------------------------------------------------------------------------------------------------


def leg(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)
    return found


def test_p_makes_one_token_of_a_message_and_stops_at_nothing() -> None:
    asked = messages(stream=True, stop_sequences=["x"], thinking={"type": "enabled", "budget_tokens": 4}, tools=[])
    body = leg(wire.prefill_body(asked, (1, 2), None))
    assert (body["max_tokens"], body["stream"], "stop_sequences" in body) == (1, False, False)
    assert (body["thinking"], body["tools"]) == ({"type": "enabled", "budget_tokens": 4}, [])
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": [1, 2],
    }


def test_p_makes_one_token_of_a_response_and_stores_nothing() -> None:
    asked = responses(stream=True, store=True, include=["message.output_text.logprobs"], top_logprobs=3, stop="x")
    body = leg(wire.prefill_body(asked, None, None))
    assert (body["max_output_tokens"], body["stream"], body["store"]) == (1, False, False)
    assert not body.keys() & {"include", "top_logprobs", "stop", "max_tokens"}


@pytest.mark.parametrize("stream", [False, True])
def test_d_says_the_ids_of_a_response_where_it_is_asked(stream: bool) -> None:
    asked = responses(stream=stream)
    assert leg(wire.decode_body(asked, (1, 2), None, ids_back=True))["enable_response_messages"] is True
    assert "enable_response_messages" not in leg(wire.decode_body(asked, None, None, ids_back=False))
    message = leg(wire.decode_body(messages(stream=stream), (1, 2), None, ids_back=True))
    assert message.keys() == {"model", "max_tokens", "messages", "stream", "kv_transfer_params"}


# --- answers -------------------------------------------------------------------------------------------------------------


def raw(tokens: list[int]) -> list[dict[str, Any]]:
    return [{"message": "", "tokens": tokens, "type": "raw_message_tokens"}]


RESPONSE = {
    "id": "resp_1",
    "output": [],
    "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
    "kv_transfer_params": params(),
    "input_messages": raw([1, 2]),
    "output_messages": raw([7, 8]),
}


def test_a_response_says_what_it_ran_and_made() -> None:
    answer = wire.read_answer(RESPONSES.api, encoded(RESPONSE))
    assert (answer.generated, wire.read_ids(answer.ran), answer.id) == ((7, 8), (1, 2), "resp_1")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached) == (9, 3, 4)
    assert answer.params.handle is not None


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [{"role": "system", "content": []}],
        raw([1]) * 2,
        [{"tokens": "x"}],
        [{"tokens": [1.5]}],
        [{"tokens": []}],
    ],
)
def test_messages_of_another_kind_say_nothing_of_ids(said: Any) -> None:
    answer = wire.read_answer(RESPONSES.api, encoded(RESPONSE | {"input_messages": said}))
    assert (answer.generated, bytes(answer.ran)) == (None, b"null")


def test_a_client_sees_the_messages_of_a_response_only_if_it_asked() -> None:
    members = wire.split(encoded(RESPONSE))
    seen = json.loads(wire.join(wire.noted(wire.client_answer(RESPONSES.api, members, shows_ids=False), NOTE)))
    assert (seen["input_messages"], seen["output_messages"]) == (None, None)
    assert seen["usage"] == {**RESPONSE["usage"], "backhaul": {"route": "warm"}}
    assert "kv_transfer_params" not in seen
    asked = responses(enable_response_messages=True)
    shown = wire.client_answer(asked.api, members, shows_ids=asked.wants_token_ids)
    assert json.loads(bytes(shown["input_messages"])) == raw([1, 2])


@pytest.mark.parametrize(
    ("usage", "prompt", "cached"),
    [
        ({"input_tokens": 9, "output_tokens": 3}, 9, None),
        ({"input_tokens": 1, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 2, "output_tokens": 3}, 9, 6),
        ({"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 3}, 9, 0),
    ],
)
def test_a_message_s_tokens_are_counted_with_those_of_caches(
    usage: dict[str, int], prompt: int, cached: int | None
) -> None:
    answer = wire.read_answer(MESSAGES.api, encoded({"id": "msg", "content": [], "usage": usage}))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached, answer.usage.completion_tokens) == (prompt, cached, 3)


# --- streams -------------------------------------------------------------------------------------------------------------


def event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encoded({"type": name, **fields}) + b"\n\n"


class Watched:
    """A filter, and what it told."""

    def __init__(self, request: Facts) -> None:
        self.told: list[object] = []
        self.filter: StreamFilter = request.stream_filter(self.told.append, self.told.append)

    def feed(self, *pieces: bytes) -> bytes:
        return b"".join(map(self.filter.feed, pieces))


NOTE = b'{"route":"warm"}'
START = event("message_start", message={"id": "m", "usage": {"input_tokens": 5, "output_tokens": 0}})
DELTA = event("content_block_delta", index=0, delta={"type": "text_delta", "text": 'é"kv_transfer_params": 1'})
USAGE = {"input_tokens": 5, "output_tokens": 2, "odd": 1e22}
STOP = event("message_stop")
ACCOUNT = {"version": 1, "token_ids": [7, 8], "account": {"prompt": 5}}


def ending(**fields: Any) -> bytes:
    return event("message_delta", delta={"stop_reason": "end_turn"}, usage=USAGE, **fields)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_message_s_events_pass_byte_for_byte_but_for_the_handle(size: int) -> None:
    watched = Watched(messages(stream=True))
    stream = START + event("ping") + DELTA + ending(kv_transfer_params={**params("d"), "backhaul": ACCOUNT}) + STOP
    passed = watched.feed(*(stream[i : i + size] for i in range(0, len(stream), size)))
    assert passed == START + event("ping") + DELTA
    assert (watched.filter.finished, watched.filter.ended()) == (True, ending() + STOP)
    assert watched.filter.handle is not None
    assert watched.filter.generated == (7, 8)
    account, usage = watched.told
    assert account == Account(prompt=5)
    assert isinstance(usage, wire.Usage)


def test_our_note_stands_in_a_message_s_last_usage() -> None:
    watched = Watched(messages(stream=True))
    assert watched.feed(START, ending(), STOP) == START
    comment, delta, stop, rest = watched.filter.ended(NOTE, comment=True).split(b"\n\n")
    assert comment == b": backhaul " + NOTE
    assert json.loads(delta.split(b"data: ")[1])["usage"] == {**USAGE, "backhaul": {"route": "warm"}}
    assert (stop + b"\n\n", rest) == (STOP, b"")


CREATED = event("response.created", response={"id": "resp_1", "usage": None, "kv_transfer_params": None})
CLEAN = event("response.created", response={"id": "resp_1", "usage": None})
TEXT = event("response.output_text.delta", delta="é")


def test_a_response_s_first_events_come_with_the_first_token_and_the_last_one_is_held_back() -> None:
    watched = Watched(responses(stream=True))
    assert watched.feed(CREATED) == b""
    assert watched.filter.events == 0
    assert watched.feed(TEXT) == CLEAN + TEXT
    assert watched.filter.events == 2
    assert watched.feed(event("response.completed", response=RESPONSE)) == b""
    assert watched.filter.finished
    last = json.loads(watched.filter.ended(NOTE).split(b"data: ")[1])["response"]
    assert last["usage"]["backhaul"] == {"route": "warm"}
    assert last["input_messages"] is last["output_messages"] is None
    assert "kv_transfer_params" not in last
    assert (watched.filter.generated, wire.read_ids(watched.filter.ran)) == ((7, 8), (1, 2))
    assert watched.filter.answer_id == "resp_1"


@pytest.mark.parametrize("end", ["completed", "incomplete", "cancelled"])
def test_a_response_without_any_text_is_passed_on_whole(end: str) -> None:
    watched = Watched(responses(stream=True))
    assert watched.feed(CREATED + event(f"response.{end}", response=RESPONSE)) == CLEAN
    assert watched.filter.finished
    assert (watched.filter.error, watched.filter.answer_id) == (None, "resp_1")
    assert b"backhaul" not in watched.filter.ended()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (messages(stream=True), event("error", error={"type": "internal_error", "message": "broken"})),
        (responses(stream=True), event("error", message="broken", error={"message": "broken"})),
        (responses(stream=True), event("response.failed", response={"error": {"message": "broken"}})),
    ],
)
def test_an_error_event_ends_a_stream(request_: Facts, error: bytes) -> None:
    watched = Watched(request_)
    assert watched.feed(error) == b""
    assert watched.filter.error is not None
    assert b"broken" in watched.filter.error
    assert (watched.filter.finished, watched.filter.ended()) == (True, error)


# --- turns ---------------------------------------------------------------------------------------------------------------


def test_an_engine_s_error_before_the_first_token_is_tried_again_elsewhere() -> None:
    drive = Drive(request=facts({"input": "hi", "stream": True}, RESPONSES), on=fleet(P1, D1, D2))
    drive.feed(rendered(), prefilled(usage={"input_tokens": len(PROMPT), "output_tokens": 1}))
    first = drive.opening().engine.url
    drive.feed(Opened(200, SSE), Chunk(CREATED + event("error", message="broken", error={"message": "broken"})))
    assert not drive.all(Respond)
    assert drive.asked(Leg.PREFILL).engine.url == P1
    drive.feed(prefilled("p-2", usage={"input_tokens": len(PROMPT), "output_tokens": 1}))
    assert {first, drive.opening().engine.url} == {D1, D2}


def test_a_response_s_id_is_noted_for_its_conversation() -> None:
    drive = Drive(request=facts({"input": "hi", "stream": True}, RESPONSES))
    drive.feed(rendered(), prefilled(usage={"input_tokens": len(PROMPT), "output_tokens": 1}))
    ran = RESPONSE | {"input_messages": raw(list(PROMPT)), "kv_transfer_params": params("d-1", tokens=len(PROMPT) + 1)}
    drive.feed(STREAM, Chunk(TEXT + event("response.completed", response=ran)))
    assert drive.one(NoteResponse) == NoteResponse("resp_1", "c")
    assert drive.filed.held is not None
    assert drive.report.route is Route.WARM


def test_a_response_whose_ids_are_not_said_leaves_nothing_to_prove() -> None:
    drive = Drive(request=facts({"input": "hi", "stream": True}, RESPONSES))
    drive.feed(rendered(), prefilled(usage={"input_tokens": len(PROMPT), "output_tokens": 1}))
    silent = RESPONSE | {"input_messages": [{"role": "system"}], "kv_transfer_params": params("d-1")}
    drive.feed(STREAM, Chunk(TEXT + event("response.completed", response=silent)))
    assert (drive.filed.held, drive.filed.missing) == (None, Reason.NO_PROOF)
    assert "d-1" in [name for name, _ in drive.released]
    assert not drive.fleet.capabilities.ignores_ids


# --- errors --------------------------------------------------------------------------------------------------------------


def test_errors_have_the_shape_of_their_api() -> None:
    said = {"message": "no", "type_": "server_error", "code": "decode_failed"}
    assert json.loads(MESSAGES.api.error(**said)) == {"type": "error", "error": {"type": "api_error", "message": "no"}}
    assert json.loads(RESPONSES.api.error(**said))["error"]["code"] == "decode_failed"
    assert MESSAGES.api.error_event(**said).startswith(b'event: error\ndata: {"type":"error","error":{')
    broken = RESPONSES.api.error_event(**said, events=4)
    assert json.loads(broken.split(b"data: ")[1]) == {
        "type": "error",
        "sequence_number": 4,
        "code": "decode_failed",
        "message": "no",
        "param": None,
        "error": {"type": "server_error", "code": "decode_failed", "message": "no", "param": None},
    }
    assert wire.api_of("/v1/messages/count_tokens") is MESSAGES.api
    assert wire.api_of("/tokenize") is Endpoint.CHAT.api


@pytest.mark.parametrize(("path", "shape"), [("/v1/messages", b'"api_error"'), ("/v1/responses", b'"sequence_number"')])
async def test_a_served_stream_that_breaks_names_no_engine_to_clients_elsewhere(path: str, shape: bytes) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    out = _Out(send, (b"http://d1:1",), path)
    await out.begin(200, [])
    await out.chunk(b'event: content_block_delta\ndata: {"text":"http://d1:1"}\n\n')
    await out.chunk(
        wire.Endpoint(path).api.error_event("http://d1:1 broke", type_="server_error", code="decode_failed")
    )
    await out.break_off("the router was shut down")
    _, said, broken, shut = [message.get("body") for message in sent[:4]]
    assert b"http://d1:1" in said
    assert b"(url withheld) broke" in broken
    assert shape in broken
    assert shut.startswith(b"event: error\n")
