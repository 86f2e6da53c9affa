"""One turn, driven by hand: what is asked of which engine, and what it leaves behind."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from backhaul_router.errors import Leg
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Branch, Held, Taken
from backhaul_router.report import Proof, Reason, Route, View
from backhaul_router.turn.effects import (
    Answered,
    Call,
    Chunk,
    Done,
    DropEngine,
    Ended,
    Event,
    Failed,
    GiveBack,
    Lost,
    Opened,
    Read,
    Respond,
    Send,
    Settle,
    Took,
    UnexpectedEvent,
)
from backhaul_router.wire import Endpoint, Facts
from core_values import BLOCK, D1, D2, P1, P2, encoded, facts, fleet, handle, params
from turn_drive import (
    BODY,
    BROKEN,
    DONE,
    FIRST,
    JSON,
    MESSAGES,
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

# --- the ordinary turns --------------------------------------------------------------------------------------------------


def test_a_first_turn_runs_cold_and_files_what_it_left() -> None:
    drive = Drive(FIRST)
    assert drive.asked(Leg.RENDER).path == "/v1/chat/completions/render"
    drive.feed(rendered())
    assert (drive.asked(Leg.PREFILL).engine.url, drive.asked(Leg.PREFILL).path) == (P1, "/v1/chat/completions")
    assert drive.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": list(PROMPT),
    }
    drive.feed(prefilled(cached=0))
    assert drive.opening().engine.url == D1
    assert drive.body["kv_transfer_params"]["remote_request_id"] == "p-1"
    assert drive.body["kv_transfer_params"]["prompt_token_ids"] == list(PROMPT)
    drive.feed(BODY)
    assert drive.need == Read()
    assert kinds(drive.feed(whole(), Ended())) == ["Settle", "Record", "Respond", "Send"]
    assert drive.state == Done()
    filed = drive.filed
    assert filed.held == Held(handle("d-1", tokens=202), D1, 106.0 + 480 - 10, 202)
    assert filed.blocks == digests.block_chain((*PROMPT, 1, 2), BLOCK)
    assert (filed.decode, filed.prefill, filed.missing) == (D1, P1, None)
    report = drive.report
    assert (report.route, report.reason, report.proof, report.turn) == (Route.COLD, Reason.FIRST_TURN, None, 1)
    assert (report.prompt, report.cached, report.computed, report.generated) == (200, 0, 200, 3)
    assert (report.status, report.error, report.retries, report.offered) == (200, None, 0, 0)
    assert report.handle_remaining_s == 470.0
    assert (report.prefill_engine, report.decode_engine) == (P1, D1)


def test_a_warm_turn_gives_prefill_the_proven_part_of_the_handle_and_the_ids() -> None:
    drive = Drive()
    drive.feed(rendered())
    given = drive.body["kv_transfer_params"]
    assert given == params(OLD, tokens=128) | {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "prompt_token_ids": list(PROMPT),
    }
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert drive.released == []
    report = drive.report
    assert (report.route, report.reason, report.proof, report.offered) == (Route.WARM, None, Proof.TOKENS, 128)
    assert (report.prompt, report.cached, report.computed, report.diverged_at) == (200, 128, 72, None)
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == "d-1"


def test_a_handle_is_cut_to_what_is_common() -> None:
    drive = Drive(history((*PROMPT[:100], *[7] * 28)))
    drive.feed(rendered())
    given = drive.body["kv_transfer_params"]
    assert (given["remote_num_tokens"], given["remote_block_ids"]) == (96, [[1, 2, 3, 4, 5, 6]])
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.report.offered, drive.report.diverged_at) == (96, 1)


def test_the_clients_answer_has_no_handle_no_ids_and_the_report() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    head = dict(drive.one(Respond).headers)
    assert drive.one(Respond).status == 200
    assert head == {"content-type": "application/json", "x-backhaul-route": "warm", "x-backhaul-turn": "2"}
    answer = json.loads(drive.sent)
    assert "kv_transfer_params" not in answer
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None, None)
    assert answer["usage"]["backhaul"] == drive.report.to_dict()


def test_of_the_report_a_client_is_told_what_it_may_see() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    elsewhere = json.loads(View.WITHOUT_ENGINES.of(drive.report))
    hidden = {"prefill_engine": "(url withheld)", "decode_engine": "(url withheld)"}
    assert elsewhere == {**drive.report.to_dict(), **hidden}
    assert json.loads(View.SUMMARY.of(drive.report)) == {
        "conversation": "c",
        "turn": 2,
        "route": "warm",
        "reason": None,
        "offered": 128,
        "cached": 128,
        "computed": 72,
    }


def test_without_a_conversation_nothing_is_looked_up_filed_or_told() -> None:
    drive = Drive(identity=None)
    assert drive.asked(Leg.PREFILL)
    assert drive.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert drive.all(Settle) == []
    assert drive.released == [("d-1", P1)]
    assert dict(drive.one(Respond).headers) == {"content-type": "application/json"}
    assert "backhaul" not in json.loads(drive.sent)["usage"]
    assert drive.report.reason is Reason.NO_CONVERSATION


def test_a_stream_is_relayed_as_it_comes_and_settles_before_its_end() -> None:
    drive = Drive(request=STREAMED)
    drive.feed(rendered(), prefilled(), STREAM)
    assert kinds(drive.feed(sse(delta("a")))) == ["Respond", "Send"]
    assert drive.feed(Chunk(b"data: {")) == ()
    assert drive.feed(Chunk(b'"x": 1}\n\n')) == (Send(b'data: {"x": 1}\n\n'),)
    assert kinds(drive.feed(sse(finish()))) == ["Send"]
    assert drive.feed(sse(USAGE)) == ()
    last = drive.feed(Chunk(DONE))
    assert kinds(last) == ["Settle", "Record", "Send"]
    assert last[-1] == Send(DONE)
    assert b"kv_transfer_params" not in drive.sent
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == "d-1"
    assert drive.filed.blocks == digests.block_chain((*PROMPT, 1, 2), BLOCK)
    assert drive.report.generated == 3


def test_a_stream_in_one_piece_does_as_well() -> None:
    drive = Drive(request=STREAMED)
    drive.feed(rendered(), prefilled(), STREAM)
    pieces = (sse(delta("a")).data, sse(finish()).data, sse(USAGE).data, DONE)
    assert kinds(drive.feed(Chunk(b"".join(pieces)))) == ["Respond", "Send", "Settle", "Record", "Send"]


def test_a_short_suffix_runs_on_decode_alone_and_keeps_the_handle() -> None:
    drive = Drive(local_max_tokens=100)
    drive.feed(rendered())
    assert drive.opening().engine.url == D1
    assert drive.body["kv_transfer_params"] == {"prompt_token_ids": list(PROMPT)}
    drive.feed(BODY, whole(None), Ended())
    assert drive.released == []
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == OLD
    assert (drive.filed.held.tokens, drive.filed.missing) == (128, None)
    assert (drive.report.route, drive.report.reason, drive.report.proof) == (Route.LOCAL, None, Proof.ENGINE)
    assert (drive.report.prefill_engine, drive.report.decode_engine) == (None, D1)


def test_a_local_turn_that_leaves_a_handle_replaces_the_old_one() -> None:
    drive = Drive(local_max_tokens=100)
    drive.feed(rendered(), BODY, whole("d-2"), Ended())
    assert drive.released == [(OLD, P1)]
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == "d-2"


def test_a_kept_handle_is_worth_only_what_the_new_history_shares_with_the_old() -> None:
    """The branch's record is now of other tokens than the handle's blocks from the edit on."""
    edited = (*PROMPT[:112], *range(40))
    drive = Drive(local_max_tokens=100)
    drive.feed(rendered(edited), BODY, whole(None, prompt_token_ids=list(edited)), Ended())
    assert drive.report.route is Route.LOCAL
    assert drive.filed.held is not None
    assert drive.filed.held.handle.request_id == OLD
    assert drive.filed.held.tokens == 112


@pytest.mark.parametrize("common", [True, False])
def test_a_handle_that_shares_no_block_with_a_local_turn_is_not_filed_with_it(common: bool) -> None:
    drive = Drive(history(common=common), route=Route.LOCAL)
    other = tuple(range(200))
    drive.feed(rendered(other), BODY, whole(None, prompt_token_ids=list(other)), Ended())
    assert drive.report.route is Route.LOCAL
    assert drive.filed.held is None
    if common:
        assert drive.released == [(OLD, P1)]
    else:
        assert drive.one(GiveBack).taken.held is not None


def test_a_cold_turn_releases_what_it_supersedes() -> None:
    drive = Drive(route=Route.COLD)
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    assert drive.released == [(OLD, P1)]
    assert drive.report.reason is Reason.REUSE_OFF


def test_another_agents_handle_goes_back() -> None:
    drive = Drive(history(range(128), common=False))
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    assert drive.one(GiveBack).taken.held == history(range(128)).held
    assert drive.released == []
    assert drive.report.reason is Reason.DIVERGED
    assert drive.report.diverged_at == 0


def test_what_the_ledger_dropped_is_released() -> None:
    dropped = (Held(handle("x"), D1, 0.0, 1), Held(handle("y"), D2, 0.0, 1))
    drive = Drive(msgspec.structs.replace(FIRST, drop=dropped))
    assert drive.released == [("x", P1), ("y", P1)]


def test_with_reuse_off_every_turn_is_cold_and_leaves_nothing() -> None:
    drive = Drive(FIRST, reuse=False)
    assert drive.asked(Leg.PREFILL)
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert drive.all(Settle) == []
    assert drive.released == [("d-1", P1)]
    assert drive.report.reason is Reason.REUSE_OFF


def test_a_completions_prompt_of_ids_needs_no_renderer() -> None:
    request = facts({"model": "m", "prompt": list(PROMPT)}, Endpoint.COMPLETIONS)
    drive = Drive(FIRST, request=request)
    assert drive.asked(Leg.PREFILL).path == "/v1/completions"
    assert drive.body["prompt"] == list(PROMPT)
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert drive.filed.held is not None


# --- proofs --------------------------------------------------------------------------------------------------------------


def test_where_nobody_renders_tokenize_is_asked() -> None:
    drive = Drive(on=fleet(renders=False))
    assert drive.asked(Leg.RENDER).path == "/tokenize"
    assert drive.body == {"model": "m", "messages": MESSAGES}
    drive.feed(Answered(200, JSON, encoded({"count": 200, "tokens": list(PROMPT)})))
    assert drive.body["kv_transfer_params"]["remote_request_id"] == OLD


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (facts(messages=MESSAGES, documents=[{"a": 1}]), {"renders": False}),
        (facts(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), {}),
        (facts(messages=MESSAGES, model="adapter"), {"adapters": frozenset({"adapter"})}),
        (facts(messages=MESSAGES, model="loaded later"), {}),
        (facts(messages=MESSAGES), {"block_size": None}),
        (facts({"prompt": [-1, 5]}, Endpoint.COMPLETIONS), {}),
    ],
)
def test_without_a_proof_the_messages_go_as_they_are(request_: Facts, fields: dict[str, Any]) -> None:
    drive = Drive(request=request_, on=fleet(**fields))
    assert drive.asked(Leg.PREFILL)
    assert drive.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert drive.report.reason is Reason.NO_PROOF
    assert drive.report.route is Route.COLD
    assert drive.filed.held is None
    assert sorted(drive.released) == [("d-1", P1), (OLD, P1)]
    assert drive.filed.missing is Reason.NO_PROOF


@pytest.mark.parametrize("answer", [Answered(200, JSON, b"{}"), Answered(500, JSON, b""), Failed(TIMEOUT, "slow")])
def test_a_renderer_that_fails_costs_the_proof_and_not_the_turn(answer: Event) -> None:
    drive = Drive()
    drive.feed(answer)
    while isinstance(drive.need, Call) and drive.need.leg is Leg.RENDER:
        drive.feed(answer)
    assert drive.asked(Leg.PREFILL)
    drive.feed(prefilled(), BODY, whole(), Ended())
    assert (drive.report.route, drive.report.reason) == (Route.COLD, Reason.NO_PROOF)


def test_another_engine_renders_where_the_first_cannot() -> None:
    drive = Drive()
    first = drive.asked(Leg.RENDER).engine.url
    drive.feed(Failed(REFUSED, "down"))
    assert drive.asked(Leg.RENDER).engine.url != first
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    assert (drive.report.route, drive.report.retries) == (Route.WARM, 1)


def test_a_body_that_broke_two_renderers_is_sent_to_nobody_else() -> None:
    drive = Drive(on=fleet(P1, P2, D1, D2))
    first = drive.asked(Leg.RENDER).engine.url
    drive.feed(Failed(BROKEN, "gone"))
    assert drive.asked(Leg.RENDER).engine.url != first
    drive.feed(Failed(BROKEN, "gone"))
    assert drive.state == Done()
    assert (drive.one(Respond).status, drive.error["code"]) == (502, "render_failed")
    assert drive.one(GiveBack)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_a_renderer_rejects_is_decodes_to_judge(status: int) -> None:
    drive = Drive()
    drive.feed(Answered(status, JSON, b"{}"))
    assert drive.one(GiveBack).taken.held is not None
    assert drive.opening().engine.url == D1
    assert drive.body == {"model": "m", "messages": MESSAGES}
    drive.feed(Opened(status, JSON), Chunk(b'{"error": 1}'), Ended())
    assert drive.one(Respond).status == status
    assert drive.sent == b'{"error": 1}'
    assert drive.all(Lost) == []
    assert drive.released == []


@pytest.mark.parametrize("blocks", [[11, 12, 13], [0, *range(2, 14)]], ids=["left out", "as the null block"])
def test_a_window_of_blocks_that_begins_later_cannot_be_cut(blocks: list[int]) -> None:
    """A sliding-window model of one group keeps only the last blocks: the list's first is not the sequence's."""
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled(), BODY)
    drive.feed(whole(kv_transfer_params=params("d-1", tokens=202, remote_block_ids=[blocks])), Ended())
    assert drive.released == [("d-1", P1)]
    assert (drive.filed.held, drive.filed.missing) == (None, Reason.NO_PROOF)


def test_a_hybrid_models_handle_is_released_at_once() -> None:
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled(), BODY)
    drive.feed(whole(kv_transfer_params=params("d-1", remote_block_ids=[[1, 2], [3]])), Ended())
    assert drive.released == [("d-1", P1)]
    assert (drive.filed.held, drive.filed.missing) == (None, Reason.NO_PROOF)


@pytest.mark.parametrize(("claims", "holds"), [(202, 202), (205, 202), (198, 198), (0, 0)])
def test_a_handle_is_trusted_for_what_surely_ran_alone(claims: int, holds: int) -> None:
    """200 prompt tokens and three generated: the last one's KV is not computed."""
    blocks = [list(range(1, 14))]
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled(), BODY)
    drive.feed(whole(kv_transfer_params=params("d-1", tokens=claims, remote_block_ids=blocks)), Ended())
    assert drive.filed.held is not None
    assert drive.filed.held.tokens == holds


@pytest.mark.parametrize(("generated", "blocks"), [(8, 12), (9, 13), (10, 13), (24, 13), (25, 14)])
def test_the_last_generated_token_is_on_record_only_once_another_follows(generated: int, blocks: int) -> None:
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled(), BODY, whole(generated=range(generated)), Ended())
    assert digests.count(drive.filed.blocks) == blocks
    assert drive.filed.held is not None
    assert drive.filed.held.tokens == drive.filed.tokens == 199 + generated


@pytest.mark.parametrize("edited", [None, 3, 700, 1199])
def test_a_long_prompt_s_blocks_are_on_record_whatever_of_them_the_history_had(edited: int | None) -> None:
    def answer(drive: Drive, ids: tuple[int, ...]) -> Branch:
        drive.feed(rendered(ids), prefilled(prompt=len(ids), cached=0), BODY)
        drive.feed(whole(prompt_token_ids=list(ids)), Ended())
        assert drive.filed.blocks == digests.block_chain((*ids, 1, 2), BLOCK)
        return drive.filed

    ids = tuple(range(1200))
    before = answer(Drive(FIRST), ids)
    longer = tuple(7 if at == edited else one for at, one in enumerate((*ids, 1, 2, 3, *range(500))))
    answer(Drive(Taken(1, 2, before, before.held, None, 1)), longer)


def test_without_the_generated_ids_only_the_prompt_is_on_record() -> None:
    drive = Drive(FIRST, request=STREAMED)
    drive.feed(rendered(), prefilled(), STREAM, sse(delta(), finish(generated=None), USAGE), Chunk(DONE))
    assert drive.filed.held is not None
    assert drive.filed.held.tokens == 200
    assert drive.filed.blocks == digests.block_chain(PROMPT, BLOCK)


def test_an_answer_that_left_no_handle_is_on_record_without_one() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(), BODY, whole(None), Ended())
    assert (drive.filed.held, drive.filed.missing) == (None, Reason.NO_HANDLE)
    assert drive.report.handle_remaining_s is None


def test_an_engine_that_ran_other_ids_ends_the_trust_in_ids() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(prompt=201))
    assert drive.fleet.capabilities.ignores_ids
    assert drive.released == [("p-1", D1)]
    assert drive.asked(Leg.PREFILL)
    assert drive.body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    drive.feed(prefilled("p-2", prompt=201), BODY, whole(), Ended())
    assert (drive.report.route, drive.report.reason, drive.report.retries) == (Route.COLD, Reason.NO_PROOF, 1)
    assert (drive.filed.held, drive.filed.blocks) == (None, b"")
    assert drive.released == [("p-1", D1), ("d-1", P1)]
    assert drive.fleet.counters.proof_faults == 1
    assert Drive(on=drive.fleet).asked(Leg.PREFILL)


def test_nothing_is_kept_of_a_turn_whose_ids_decode_did_not_run() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(), BODY, whole(prompt_token_ids=[*PROMPT[:-1], 5]), Ended())
    assert drive.one(Respond).status == 200
    assert (drive.filed.held, drive.filed.blocks) == (None, b"")
    assert drive.released == [("d-1", P1)]
    assert drive.fleet.capabilities.ignores_ids


def test_a_new_engine_id_voids_the_handles_of_the_old_process() -> None:
    on = fleet()
    engine = on.get(D1)
    assert engine is not None
    on.restarts.saw_engine_id(engine.url, "d-0_dp1")
    drive = Drive(FIRST, on=on)
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    assert drive.one(DropEngine) == DropEngine(D1, "d-0")


def test_ids_that_match_the_messages_but_not_the_tokens_point_at_the_answer() -> None:
    drive = Drive(history((*PROMPT[:100], *[7] * 28)))
    drive.feed(rendered())
    assert drive.turn.draft.diverged_at == 1


# --- requests that decode gets alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, Reason.MULTIPLE_CHOICES),
        ({"best_of": 2}, Reason.MULTIPLE_CHOICES),
        ({"use_beam_search": True}, Reason.MULTIPLE_CHOICES),
        ({"echo": True}, Reason.NO_PROOF),
        ({"prompt_logprobs": 1}, Reason.NO_PROOF),
        ({"stream_options": [1], "stream": True}, Reason.NO_PROOF),
        ({"n": "2"}, Reason.NO_PROOF),
    ],
)
def test_decode_gets_the_clients_own_body_and_the_handle_goes_back(fields: dict[str, Any], reason: Reason) -> None:
    drive = Drive(request=facts(messages=MESSAGES, **fields))
    assert drive.one(GiveBack).taken.held is not None
    assert drive.body == {"model": "m", "messages": MESSAGES, **fields}
    drive.feed(BODY, whole(None, choices=[{}, {}]), Ended())
    assert drive.all(Settle) == []
    assert drive.all(Lost) == []
    assert drive.released == []
    assert (drive.report.route, drive.report.reason, drive.report.proof) == (Route.LOCAL, reason, Proof.ENGINE)


@pytest.mark.parametrize(
    "end",
    [
        [Failed(REFUSED, "down")],
        [Failed(BROKEN, "gone")],
        [Opened(400, JSON), Ended()],
        [Opened(500, JSON), Ended()],
        [STREAM, sse(delta()), Failed(BROKEN, "gone")],
    ],
)
def test_a_handle_that_went_back_is_not_lost_when_the_turn_fails(end: list[Event]) -> None:
    drive = Drive(request=facts(messages=MESSAGES, n=2))
    drive.feed(*end)
    assert drive.state == Done()
    assert drive.one(GiveBack)
    assert drive.all(Lost) == []


def test_decode_alone_is_tried_on_another_engine() -> None:
    drive = Drive(request=facts(messages=MESSAGES, n=2), on=fleet(P1, D1, D2))
    first = drive.opening().engine.url
    drive.feed(Opened(500, JSON), Ended())
    assert drive.opening().engine.url != first
    assert drive.body == {"model": "m", "messages": MESSAGES, "n": 2}
    drive.feed(BODY, whole(None), Ended())
    assert (drive.one(Respond).status, drive.report.retries) == (200, 1)
    assert drive.report.reason is Reason.MULTIPLE_CHOICES


# --- drivers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [Took(FIRST), BODY, Chunk(b""), Ended()])
def test_a_driver_that_answers_another_question_is_told(wrong: Event) -> None:
    with pytest.raises(UnexpectedEvent, match="Rendering got"):
        Drive().feed(wrong)
