"""Engines that fail and clients that leave, at every point of a turn: what is tried again, what is told, what is freed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.errors import FailureKind, Leg
from backhaul_router.ledger.records import Taken
from backhaul_router.report import Reason, Route
from backhaul_router.turn.effects import (
    Answered,
    Call,
    Chunk,
    Done,
    Ended,
    Event,
    Failed,
    GiveBack,
    Lost,
    Opened,
    Respond,
    Send,
    Settle,
)
from backhaul_router.wire import Facts
from core_values import D1, D2, P1, P2, encoded, fleet, params
from turn_drive import (
    BODY,
    BROKEN,
    DONE,
    FIRST,
    JSON,
    MESSAGES,
    NAN,
    OLD,
    PROMPT,
    REFUSED,
    STREAM,
    STREAMED,
    TIMEOUT,
    USAGE,
    Drive,
    delta,
    finish,
    history,
    kinds,
    prefilled,
    rendered,
    sse,
    whole,
)

# --- prefill fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TIMEOUT, FailureKind.ERROR])
def test_a_warm_read_that_failed_is_run_again_cold_without_the_handle(kind: FailureKind) -> None:
    drive = Drive()
    drive.feed(rendered(), Failed(kind, "x") if kind is TIMEOUT else Answered(500, JSON, b"{}"))
    assert drive.asked(Leg.PREFILL).engine.url == P1
    assert drive.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": list(PROMPT),
    }
    assert drive.released == [(OLD, P1)]
    drive.feed(prefilled(), BODY, whole(), Ended())
    report = drive.report
    assert (report.route, report.reason, report.retries, report.offered) == (Route.COLD, Reason.READ_FAILED, 1, 0)
    assert drive.released == [(OLD, P1)]
    assert drive.filed.held is not None


def test_a_prefill_engine_that_is_down_leaves_the_handle_to_another() -> None:
    drive = Drive(on=fleet(P1, P2, D1))
    drive.feed(rendered(), Failed(REFUSED, "down"))
    assert drive.asked(Leg.PREFILL).engine.url == P2
    assert drive.body["kv_transfer_params"]["remote_request_id"] == OLD
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.report.route, drive.report.retries, drive.report.prefill_engine) == (Route.WARM, 1, P2)
    assert drive.released == []


def test_a_handle_that_no_engine_was_sent_goes_back() -> None:
    drive = Drive()
    drive.feed(rendered(), Failed(REFUSED, "cannot connect"))
    assert drive.one(GiveBack).taken.held is not None
    assert (drive.all(Lost), drive.released) == ([], [])
    assert drive.one(Respond).status == 502
    assert dict(drive.one(Respond).headers)["x-should-retry"] == "true"
    assert drive.error["code"] == "prefill_failed"
    assert "cannot connect" in drive.error["message"]


def test_a_request_whose_prefill_broke_goes_to_one_other_engine_cold() -> None:
    drive = Drive(on=fleet(P1, P2, D1))
    drive.feed(rendered(), Failed(BROKEN, "gone"))
    assert drive.asked(Leg.PREFILL).engine.url == P2
    assert "remote_request_id" not in drive.body["kv_transfer_params"]
    assert [name for name, _ in drive.released] == [OLD]
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.report.route, drive.report.reason, drive.report.retries) == (Route.COLD, Reason.READ_FAILED, 1)


@pytest.mark.parametrize("deaths", [0, 1], ids=["in this turn", "in an earlier one"])
def test_a_request_that_two_engines_broke_with_is_not_sent_again(deaths: int) -> None:
    drive = Drive(FIRST, on=fleet(P1, P2, "http://p3:1", D1))
    drive.turn.deaths = deaths
    drive.feed(rendered(), *[Failed(BROKEN, "gone")] * (2 - deaths))
    assert drive.state == Done()
    assert drive.one(Respond).status == 502
    assert dict(drive.one(Respond).headers)["x-should-retry"] == "false"


def test_a_renderer_that_breaks_is_one_of_the_two() -> None:
    drive = Drive(FIRST, on=fleet(P1, P2, D1))
    drive.feed(Failed(BROKEN, "gone"), rendered(), Failed(BROKEN, "gone"))
    assert (drive.state, drive.one(Respond).status) == (Done(), 502)


def test_a_cold_prefill_that_fails_is_tried_on_one_other_engine() -> None:
    drive = Drive(FIRST, on=fleet(P1, P2, D1))
    drive.feed(rendered(), Answered(500, JSON, b"{}"))
    assert drive.asked(Leg.PREFILL).engine.url == P2
    drive.feed(Answered(500, JSON, encoded({"error": {"message": "no memory"}})))
    assert drive.one(Respond).status == 502
    assert "no memory" in drive.error["message"]
    assert (drive.report.retries, drive.report.error, drive.report.status) == (1, "prefill_failed", 502)


def test_a_request_that_makes_engines_fail_reaches_two_of_them_at_most() -> None:
    urls = [f"http://p{n}:1" for n in range(5)]
    drive = Drive(FIRST, on=fleet(*urls, D1))
    drive.feed(rendered(), Answered(500, JSON, b"{}"), Answered(500, JSON, b"{}"))
    assert drive.state == Done()


def test_engines_that_are_down_are_passed_over_until_one_answers() -> None:
    urls = [f"http://p{n}:1" for n in range(4)]
    drive = Drive(FIRST, on=fleet(*urls, D1))
    drive.feed(rendered(), *[Failed(REFUSED, "down")] * 3)
    assert drive.asked(Leg.PREFILL)
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.one(Respond).status, drive.report.retries) == (200, 3)


def test_a_cold_prefill_that_hangs_is_tried_on_one_other_engine() -> None:
    drive = Drive(FIRST, on=fleet(P1, P2, "http://p3:1", D1))
    drive.feed(rendered(), Failed(TIMEOUT, "slow"))
    assert drive.asked(Leg.PREFILL).engine.url != P1
    drive.feed(Failed(TIMEOUT, "slow"))
    assert (drive.one(Respond).status, drive.report.retries) == (504, 1)
    assert dict(drive.one(Respond).headers)["x-should-retry"] == "false"


def test_the_only_prefill_engine_that_hangs_is_a_timeout() -> None:
    drive = Drive(FIRST, on=fleet(P1, D1))
    drive.feed(rendered(), Failed(TIMEOUT, "slow"))
    assert (drive.one(Respond).status, drive.error["code"]) == (504, "prefill_timeout")


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_what_prefill_rejects_is_decodes_to_judge_and_the_handle_goes_back(status: int) -> None:
    drive = Drive()
    drive.feed(rendered(), Answered(status, JSON, b'{"error": "p"}'))
    assert drive.one(GiveBack)
    assert drive.body == {"model": "m", "messages": MESSAGES}
    drive.feed(Opened(status, {**JSON, "retry-after": "7"}), Chunk(b'{"error": "d"}'), Ended())
    assert (drive.one(Respond).status, drive.sent) == (status, b'{"error": "d"}')
    assert dict(drive.one(Respond).headers)["retry-after"] == "7"
    assert (drive.all(Lost), drive.released) == ([], [])
    assert drive.report.error == f"status_{status}"


@pytest.mark.parametrize("status", [401, 403, 429])
def test_prefills_word_on_keys_and_limits_goes_to_the_client(status: int) -> None:
    drive = Drive()
    drive.feed(rendered(), Answered(status, {**JSON, "retry-after": "3", "server": "x"}, b'{"error": "p"}'))
    assert (drive.one(Respond).status, drive.sent) == (status, b'{"error": "p"}')
    assert dict(drive.one(Respond).headers)["retry-after"] == "3"
    assert "server" not in dict(drive.one(Respond).headers)
    assert drive.one(GiveBack)


def test_a_prefill_engine_without_a_connector_is_told_apart() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(kv_transfer_params=None))
    assert (drive.one(Respond).status, drive.error["code"]) == (502, "prefill_failed")
    assert "kv_producer" in drive.error["message"]
    assert drive.released == [(OLD, P1)]
    assert drive.one(Lost)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"kv_transfer_params": 5}', b'{"usage": []}'])
def test_a_prefill_answer_that_cannot_be_read_is_an_error(body: bytes) -> None:
    drive = Drive(FIRST)
    drive.feed(rendered(), Answered(200, JSON, body))
    assert drive.one(Respond).status == 502
    assert drive.report.error == "prefill_failed"


# --- decode fails before the first byte ----------------------------------------------------------------------------------


def prefilled_drive(*urls: str, request: Facts | None = None, taken: Taken = FIRST) -> Drive:
    drive = Drive(taken, request=request, on=fleet(*urls))
    drive.feed(rendered(), prefilled())
    return drive


def test_a_decode_engine_that_is_down_leaves_the_blocks_to_another() -> None:
    drive = prefilled_drive(P1, D1, D2)
    first = drive.opening().engine.url
    drive.feed(Failed(REFUSED, "down"))
    assert drive.opening().engine.url != first
    assert drive.body["kv_transfer_params"]["remote_request_id"] == "p-1"
    drive.feed(BODY, whole(), Ended())
    assert (drive.report.retries, drive.released) == (1, [])


def test_blocks_that_prefill_may_have_freed_by_then_are_left_to_nobody() -> None:
    drive = prefilled_drive(P1, D1, D2)
    drive.now += 30.0  # nobody answered the connection
    drive.feed(Failed(REFUSED, "no answer"))
    assert drive.asked(Leg.PREFILL)
    assert drive.released == [("p-1", D1)]
    drive.feed(prefilled("p-2"))
    assert drive.body["kv_transfer_params"]["remote_request_id"] == "p-2"


ERRORS: dict[str, list[Event]] = {
    "a status": [Opened(500, JSON), Chunk(b"{}"), Ended()],
    "an error event": [STREAM, sse({"error": {"message": "no memory"}})],
}


@pytest.mark.parametrize("error", ERRORS)
def test_a_decode_engine_that_fails_costs_a_new_prefill_on_the_way_to_another(error: str) -> None:
    drive = prefilled_drive(P1, D1, D2, taken=history())
    first = drive.opening().engine.url
    drive.feed(*ERRORS[error])
    assert drive.asked(Leg.PREFILL)
    assert "remote_request_id" not in drive.body["kv_transfer_params"]
    assert drive.released == [("p-1", first)]
    drive.feed(prefilled("p-2"))
    assert drive.opening().engine.url != first
    assert drive.body["kv_transfer_params"]["remote_request_id"] == "p-2"
    drive.feed(BODY, whole(), Ended())
    assert (drive.report.route, drive.report.reason) == (Route.COLD, Reason.DECODE_FAILED)
    assert drive.report.decode_engine != first
    assert len(drive.all(Respond)) == 1


def test_decode_is_tried_on_one_other_engine_at_most() -> None:
    drive = prefilled_drive(P1, *(f"http://d{n}:1" for n in range(5)))
    drive.feed(*ERRORS["a status"], prefilled("p-2"), *ERRORS["a status"])
    assert drive.state == Done()
    assert [name for name, _ in drive.released] == ["p-1", "p-2"]


@pytest.mark.parametrize("error", ERRORS)
def test_the_only_decode_engines_error_is_ours_to_tell(error: str) -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(*ERRORS[error])
    assert (drive.one(Respond).status, drive.error["code"]) == (502, "decode_failed")
    assert drive.released == [("p-1", D1)]


BEFORE: list[list[Event]] = [[], [BODY], [STREAM], [STREAM, Chunk(b'data: {"cho')], [BODY, Chunk(b'{"choices"')]]


@pytest.mark.parametrize("before", BEFORE)
def test_a_decode_engine_that_is_silent_is_not_given_up_for_another(before: list[Event]) -> None:
    drive = prefilled_drive(P1, D1, D2)
    drive.feed(*before, Failed(TIMEOUT, "silent"))
    assert drive.state == Done()
    assert drive.one(Respond).status == 504
    assert [name for name, _ in drive.released] == ["p-1"]


@pytest.mark.parametrize("before", BEFORE)
def test_a_decode_engine_that_breaks_before_the_first_byte_costs_a_new_prefill_and_no_more(before: list[Event]) -> None:
    drive = prefilled_drive(P1, D1, D2)
    first = drive.opening().engine.url
    drive.feed(*before, Failed(BROKEN, "gone"))
    assert drive.asked(Leg.PREFILL)
    drive.feed(prefilled("p-2"))
    assert drive.opening().engine.url != first
    drive.feed(*before, Failed(BROKEN, "gone"))
    assert (drive.state, drive.one(Respond).status) == (Done(), 502)
    assert [name for name, _ in drive.released] == ["p-1", "p-2"]


def test_a_stream_that_ends_before_it_began_is_an_error() -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(STREAM, Ended())
    assert (drive.one(Respond).status, drive.error["code"]) == (502, "decode_failed")


@pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
def test_decodes_own_word_goes_to_the_client_untouched(status: int) -> None:
    drive = prefilled_drive(P1, D1, D2)
    drive.feed(Opened(status, {**JSON, "retry-after": "3"}), Chunk(b'{"err'), Chunk(b'or": 1}'), Ended())
    assert (drive.one(Respond).status, drive.sent) == (status, b'{"error": 1}')
    assert dict(drive.one(Respond).headers)["retry-after"] == "3"
    assert [name for name, _ in drive.released] == ["p-1"]


def test_an_error_that_quotes_a_handle_is_not_passed_on() -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(Opened(400, JSON), Chunk(encoded({"error": {"message": str(params())}})), Ended())
    assert drive.one(Respond).status == 400
    assert b"remote_engine_id" not in drive.sent
    assert drive.error["code"] == "rejected"


def test_no_error_of_ours_quotes_a_handle_either() -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(Opened(500, JSON), Chunk(encoded({"error": {"message": f"cannot read {params()}"}})), Ended())
    assert drive.one(Respond).status == 502
    assert b"10.0.0.1" not in drive.sent


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": 5}', b'{"usage": 5}', b'{"kv_transfer_params": "x"}'])
def test_a_decode_answer_that_cannot_be_read_is_an_error(body: bytes) -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(BODY, Chunk(body), Ended())
    assert (drive.one(Respond).status, drive.error["code"]) == (502, "decode_failed")


@pytest.mark.parametrize(
    "bad", [{**finish(), "kv_transfer_params": "x"}, {**USAGE, "usage": {"prompt_tokens": "x"}}, {**finish(), "x": NAN}]
)
@pytest.mark.parametrize("started", [False, True])
def test_an_event_that_cannot_be_read_breaks_the_stream_and_not_the_router(bad: object, started: bool) -> None:
    drive = prefilled_drive(P1, D1, request=STREAMED)
    drive.feed(STREAM, *([sse(delta())] if started else []), sse(bad))
    assert drive.state == Done()
    assert drive.report.error == "decode_failed"
    assert drive.one(Respond).status == (200 if started else 502)
    assert b"cannot be read" in drive.sent


@pytest.mark.parametrize("failure", [[Failed(REFUSED, "down")], [Opened(500, JSON), Ended()]])
def test_a_local_turn_whose_decode_engine_fails_moves(failure: list[Event]) -> None:
    drive = Drive(local_max_tokens=100, on=fleet(P1, D1, D2))
    drive.feed(rendered(), *failure)
    assert drive.asked(Leg.PREFILL)
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.report.decode_engine, drive.one(Respond).status) == (D2, 200)


def test_with_no_engine_left_the_handle_goes_back() -> None:
    on = fleet(P1, D1)
    drive = Drive(on=on)
    drive.turn.failed_on = frozenset({D1})
    drive.feed(rendered())
    assert drive.one(Respond).status == 503
    assert drive.one(GiveBack)


# --- failures after the first byte ---------------------------------------------------------------------------------------


def streaming(taken: Taken | None = None, *urls: str, **settings: Any) -> Drive:
    """A turn whose client has seen the first event."""
    drive = Drive(taken, request=STREAMED, on=fleet(*urls) if urls else None, **settings)
    drive.feed(rendered())
    if isinstance(drive.need, Call):
        drive.feed(prefilled())
    drive.feed(STREAM, sse(delta()))
    return drive


@pytest.mark.parametrize("end", [Ended(), Failed(BROKEN, "gone"), Failed(TIMEOUT, "silent")])
def test_a_stream_that_breaks_ends_with_an_error_event(end: Event) -> None:
    drive = streaming(history(), P1, D1, D2)
    actions = drive.feed(end)
    assert drive.state == Done()
    assert kinds(actions) == ["Lost", "Record", "Send"]
    *_, last = drive.sent.strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_failed"
    assert (drive.report.error, drive.report.status) == ("decode_failed", 200)
    assert drive.released == []


def test_an_error_event_in_mid_stream_is_passed_on_and_nothing_is_filed() -> None:
    drive = streaming()
    error = {"error": {"message": "no memory"}}
    assert drive.feed(sse(error)) == (Send(sse(error).data),)
    assert kinds(drive.feed(Chunk(DONE))) == ["Lost", "Record", "Send"]
    assert drive.all(Settle) == []
    assert drive.report.error == "decode_failed"


def test_a_local_turn_that_breaks_gives_its_handle_back() -> None:
    drive = streaming(local_max_tokens=100)
    assert kinds(drive.feed(Failed(BROKEN, "gone"))) == ["GiveBack", "Record", "Send"]


def test_a_handle_that_came_before_the_stream_broke_is_released() -> None:
    drive = streaming()
    drive.feed(sse(finish()), Failed(BROKEN, "gone"))
    assert drive.released == [("d-1", P1)]
    assert drive.report.error == "decode_failed"


def test_a_stream_that_hides_its_handle_pins_where_no_one_can_reach() -> None:
    drive = Drive(request=STREAMED, on=fleet(streams_handles=False))
    drive.feed(rendered(), prefilled(), STREAM, sse(delta(), USAGE), Chunk(DONE))
    assert drive.fleet.counters.unreachable_pins == 1
    assert drive.filed.missing is Reason.NO_HANDLE


# --- the client leaves ---------------------------------------------------------------------------------------------------


def test_leaving_while_the_prompt_is_rendered_gives_the_handle_back() -> None:
    drive = Drive()
    assert kinds(drive.leave()) == ["GiveBack", "Record"]


def test_leaving_a_cold_prefill_leaves_nothing() -> None:
    drive = Drive(FIRST)
    drive.feed(rendered())
    assert kinds(drive.leave()) == ["Record"]


def test_leaving_a_warm_prefill_releases_the_handle() -> None:
    drive = Drive()
    drive.feed(rendered())
    drive.leave()
    assert drive.released == [(OLD, P1)]
    assert drive.one(Lost)
    assert drive.all(GiveBack) == []


@pytest.mark.parametrize(
    "before", [[], [STREAM], [STREAM, Chunk(b"data: {")], [Opened(500, JSON)], [Opened(429, JSON)]]
)
def test_leaving_before_decode_has_answered_releases_what_prefill_holds(before: list[Event]) -> None:
    drive = prefilled_drive(P1, D1)
    drive.feed(*before)
    drive.leave()
    assert drive.released == [("p-1", D1)]


def test_leaving_a_stream_early_leaves_nothing() -> None:
    drive = streaming()
    assert kinds(drive.leave()) == ["Lost", "Record"]
    assert drive.report.error == "client_gone"


def test_leaving_after_the_last_token_keeps_what_the_turn_left() -> None:
    """Many agents stop reading at the finish reason."""
    drive = streaming()
    drive.feed(sse(finish()))
    drive.leave()
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == "d-1"
    assert drive.report.error == "client_gone"


def test_leaving_a_local_turn_gives_the_handle_back() -> None:
    drive = streaming(local_max_tokens=100)
    assert kinds(drive.leave()) == ["GiveBack", "Record"]
