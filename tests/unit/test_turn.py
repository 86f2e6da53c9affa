"""One turn, driven by hand: what is asked of which engine, and what every way out leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from backhaul_router import digests
from backhaul_router.effects import (
    Action,
    Answered,
    Call,
    Chunk,
    DropEngine,
    Ended,
    Event,
    Failed,
    GiveBack,
    Lost,
    Need,
    Open,
    Opened,
    Read,
    Record,
    Release,
    Respond,
    Send,
    Settle,
    Take,
    Took,
)
from backhaul_router.engine_client import FailureKind
from backhaul_router.errors import Leg
from backhaul_router.fleet import Fleet
from backhaul_router.identity import Identity
from backhaul_router.ledger import Branch, Held, Taken
from backhaul_router.report import Proof, Reason, ReuseReport, Route
from backhaul_router.turn import Collecting, Done, Relaying, State, Turn, UnexpectedEvent
from backhaul_router.wire import Endpoint, Facts
from core_values import BLOCK, D1, D2, P1, P2, config, encoded, facts, fleet, handle, params
from hypothesis import given, settings
from hypothesis import strategies as st

REFUSED, TIMEOUT, BROKEN = FailureKind.REFUSED, FailureKind.TIMEOUT, FailureKind.BROKEN
JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"
NAN = float("nan")
A = TypeVar("A")

PROMPT = tuple(range(1000, 1200))
"""The next turn's prompt; its first 128 tokens are what the turn before ran."""
OLD = "old-d"
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
]


def history(ran: Sequence[int] = PROMPT[:128], *, common: bool = True, holds: int | None = None) -> Taken:
    """A branch that was asked with the first of `MESSAGES` and holds a handle named `OLD`."""
    first = (encoded(MESSAGES[0] if common else {"role": "user", "content": "else"}),)
    left = Held(handle(OLD, tokens=len(ran)), D1, 1000.0, len(ran) if holds is None else holds)
    on_file = Branch(
        chain=digests.chain(first),
        blocks=digests.block_chain(ran, BLOCK),
        block_size=BLOCK,
        tokens=len(ran),
        message_bytes=10,
        decode=D1,
        prefill=P1,
        held=left,
    )
    return Taken(1, 2, on_file, left, None, int(common))


FIRST = Taken(1, 1, reason=Reason.FIRST_TURN)


class Drive:
    """A turn and everything that it asked for."""

    def __init__(
        self,
        taken: Taken | None = None,
        *,
        request: Facts | None = None,
        on: Fleet | None = None,
        identity: Identity | None = Identity("c", "header:x-conversation-id"),
        route: Route | None = None,
        **settings: Any,
    ) -> None:
        self.fleet = on or fleet()
        self.now = 100.0
        self.actions: list[Action] = []
        self.needs: list[Need] = []
        given = request or facts(messages=MESSAGES)
        cfg = config(**{"local_max_tokens": 0, **settings})
        self.turn = Turn(given, identity, cfg, self.fleet, self.now, route)
        self.state: State | Done = Done()
        self._follow(self.turn.begin(self.now))
        if identity is not None:
            assert isinstance(self.need, Take)
            self.feed(Took(taken if taken is not None else history()))

    def _follow(self, step: tuple[State | Done, tuple[Action, ...]]) -> tuple[Action, ...]:
        self.state, actions = step
        self.actions += actions
        if not isinstance(self.state, Done):
            self.needs.append(self.state.need)
        return actions

    @property
    def need(self) -> Need:
        return self.needs[-1]

    def feed(self, *events: Event) -> tuple[Action, ...]:
        """Actions of the last event."""
        actions: tuple[Action, ...] = ()
        for one in events:
            assert not isinstance(self.state, Done)
            self.now += 1.0
            actions = self._follow(self.state.next(one, self.now))
        return actions

    def leave(self) -> tuple[Action, ...]:
        """The client leaves."""
        assert not isinstance(self.state, Done)
        self.now += 1.0
        actions = self.state.abandon(self.now)
        self.state = Done()
        self.actions += actions
        return actions

    def all(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        (found,) = self.all(kind)
        return found

    @property
    def report(self) -> ReuseReport:
        return self.one(Record).report

    @property
    def released(self) -> list[tuple[str, str]]:
        """Request ids of the handles to release, and by way of which engine."""
        return [(json.loads(r.params)["remote_request_id"], r.via.url) for r in self.all(Release)]

    @property
    def sent(self) -> bytes:
        return b"".join(action.data for action in self.all(Send))

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sent)["error"]
        return found

    @property
    def filed(self) -> Branch:
        return self.one(Settle).branch

    def asked(self, leg: Leg) -> Call:
        """The current need, which is a call on `leg`."""
        assert isinstance(self.need, Call)
        assert self.need.leg is leg
        return self.need

    def opening(self) -> Open:
        assert isinstance(self.need, Open)
        return self.need

    @property
    def body(self) -> dict[str, Any]:
        """What the engine is sent now."""
        assert isinstance(self.need, Call | Open)
        found: dict[str, Any] = json.loads(self.need.body)
        return found


def rendered(ids: Sequence[int] = PROMPT) -> Answered:
    return Answered(200, JSON, encoded({"token_ids": list(ids), "features": None}))


def prefilled(name: str = "p-1", *, prompt: int = len(PROMPT), cached: int | None = 128, **fields: Any) -> Answered:
    usage = {"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    given = params(name, tokens=prompt, engine_id="p", do_remote_prefill=True, do_remote_decode=False)
    return Answered(200, JSON, encoded({"choices": [], "usage": usage, "kv_transfer_params": given, **fields}))


def whole(name: str | None = "d-1", *, generated: Sequence[int] = (1, 2, 3), **fields: Any) -> Chunk:
    """D's answer, not streamed."""
    tokens = len(PROMPT) + len(generated) - 1
    body = {
        "choices": [{"index": 0, "message": {"content": "ok"}, "token_ids": list(generated), "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": len(generated)},
        "prompt_token_ids": list(PROMPT),
        "kv_transfer_params": params(name, tokens=tokens) if name else None,
    }
    return Chunk(encoded(body | fields))


def sse(*data: object) -> Chunk:
    return Chunk(b"".join(b"data: " + encoded(one) + b"\n\n" for one in data))


def delta(text: str = "a", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def finish(name: str | None = "d-1", *, generated: Sequence[int] | None = (1, 2, 3)) -> dict[str, Any]:
    tokens = len(PROMPT) + len(generated or (0,)) - 1
    found: dict[str, Any] = params(name, tokens=tokens) if name else {}
    if generated is not None:
        found["backhaul"] = {"version": 1, "token_ids": list(generated)}
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "kv_transfer_params": found}


USAGE = {"choices": [], "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 3}}
BODY, STREAM = Opened(200, JSON), Opened(200, SSE)
STREAMED = facts(messages=MESSAGES, stream=True)


def kinds(actions: Sequence[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


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


def test_the_clients_answer_has_no_handle_no_ids_and_a_note() -> None:
    drive = Drive()
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    head = dict(drive.one(Respond).headers)
    assert drive.one(Respond).status == 200
    assert head == {"content-type": "application/json", "x-backhaul-route": "warm", "x-backhaul-turn": "2"}
    answer = json.loads(drive.sent)
    assert "kv_transfer_params" not in answer
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (None, None)
    assert answer["usage"]["backhaul"] == {
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
    drive = Drive(dataclasses.replace(FIRST, drop=dropped))
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


def test_a_body_that_broke_a_renderer_is_sent_to_nobody_else() -> None:
    drive = Drive(on=fleet(P1, P2, D1, D2))
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


def test_a_window_of_blocks_that_begins_later_cannot_be_cut() -> None:
    """A sliding-window model of one group keeps only the last blocks: the list's first is not the sequence's."""
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled(), BODY)
    drive.feed(whole(kv_transfer_params=params("d-1", tokens=202, remote_block_ids=[[11, 12, 13]])), Ended())
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
    blocks = [list(range(13))]
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
    assert drive.fleet.ignores_ids
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
    assert drive.fleet.ignores_ids


def test_a_new_engine_id_voids_the_handles_of_the_old_process() -> None:
    on = fleet()
    engine = on.get(D1)
    assert engine is not None
    on.saw_engine_id(engine, "d-0_dp1")
    drive = Drive(FIRST, on=on)
    drive.feed(rendered(), prefilled(), BODY, whole(), Ended())
    assert drive.one(DropEngine) == DropEngine(D1, "d-0")


def test_ids_that_match_the_messages_but_not_the_tokens_point_at_the_answer() -> None:
    drive = Drive(history((*PROMPT[:100], *[7] * 28)))
    drive.feed(rendered())
    assert drive.turn.draft["diverged_at"] == 1


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


def test_a_request_that_broke_prefill_is_not_sent_again() -> None:
    drive = Drive(on=fleet(P1, P2, D1))
    drive.feed(rendered(), Failed(BROKEN, "gone"))
    assert drive.state == Done()
    assert drive.one(Respond).status == 502
    assert dict(drive.one(Respond).headers)["x-should-retry"] == "false"
    assert [name for name, _ in drive.released] == [OLD]
    assert drive.one(Lost).reason is Reason.READ_FAILED


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


def test_a_cold_prefill_that_hangs_is_a_timeout() -> None:
    drive = Drive(FIRST, on=fleet(P1, P2, D1))
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


@pytest.mark.parametrize(("kind", "status"), [(BROKEN, 502), (TIMEOUT, 504)])
@pytest.mark.parametrize(
    "before", [[], [BODY], [STREAM], [STREAM, Chunk(b'data: {"cho')], [BODY, Chunk(b'{"choices"')]]
)
def test_a_request_that_coincided_with_a_broken_decode_is_not_sent_again(
    kind: FailureKind, status: int, before: list[Event]
) -> None:
    drive = prefilled_drive(P1, D1, D2)
    drive.feed(*before, Failed(kind, "gone"))
    assert drive.state == Done()
    assert drive.one(Respond).status == status
    assert [name for name, _ in drive.released] == ["p-1"]


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


# --- drivers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [Took(FIRST), BODY, Chunk(b""), Ended()])
def test_a_driver_that_answers_another_question_is_told(wrong: Event) -> None:
    with pytest.raises(UnexpectedEvent, match="Rendering got"):
        Drive().feed(wrong)


# --- any turn at all -----------------------------------------------------------------------------------------------------


class Journey:
    """Feeds a turn whatever may come, and keeps the books on every handle that turns up."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.names = itertools.count()
        self.owed: dict[str, str] = {}
        """Handles whose blocks are pinned for us, by who pins them: every one must be filed, sent on, or released."""
        self.read: set[str] = set()
        """Handles that an engine has read, or may have."""
        self.broken = False
        self.parts: list[bytes] = []
        """Of D's whole answer, as far as it has come."""
        self.has_handle = False
        urls = [P1, P2][: self.draw(st.integers(1, 2))] + [D1, D2][: self.draw(st.integers(1, 2))]
        renders = self.draw(st.booleans())
        taken = self.draw(st.sampled_from([FIRST, history(), history(range(128)), history(common=False)]))
        if self.draw(st.booleans()):
            taken = dataclasses.replace(taken, drop=(Held(handle("dropped"), D1, 0.0, 1),))
            self.owed["dropped"] = "d"
        if taken.held is not None:
            self.owed[OLD] = "d"
        identity = self.draw(st.sampled_from([Identity("c", "scope"), None]))
        if identity is None:
            self.owed.clear()
        self.drive = Drive(
            taken,
            request=self.draw(st.sampled_from(REQUESTS)),
            on=fleet(*urls, renders=renders),
            identity=identity,
            route=self.draw(st.sampled_from([None, None, *Route])),
            local_max_tokens=self.draw(st.sampled_from([0, 100])),
            reuse=self.draw(st.sampled_from([True, True, True, False])) if taken is FIRST else True,
        )

    def draw(self, strategy: st.SearchStrategy[A]) -> A:
        return self.data.draw(strategy)

    def one_of(self, *makers: Callable[[], Event]) -> Event:
        return self.draw(st.sampled_from(makers))()

    def run(self) -> None:
        for _ in range(40):
            if self.drive.state == Done():
                break
            if self.draw(st.integers(0, 19)) == 0:
                self.leave()
                break
            self.answer()
        assert self.drive.state == Done(), "the turn goes on for ever"
        self.check()

    def leave(self) -> None:
        need = self.drive.need
        if isinstance(need, Call) and need.leg is Leg.PREFILL:
            self.sent_to_prefill(need, unread=False)
        self.drive.leave()

    # -- what engines may say

    def failed(self) -> Event:
        return Failed(self.draw(st.sampled_from([REFUSED, TIMEOUT, BROKEN])), "x")

    def the_handle(self) -> str:
        """An answer ends once."""
        self.has_handle = True
        return self.new("d")

    def new(self, engine: str) -> str:
        name = f"{engine}-{next(self.names)}"
        self.owed[name] = engine
        return name

    def answer(self) -> None:
        need = self.drive.need
        assert not (self.broken and isinstance(need, Call | Open)), "a request went out again after a connection broke"
        match need:
            case Call(Leg.RENDER):
                come = self.one_of(
                    rendered, rendered, lambda: Answered(self.status(), JSON, b"{}"), self.failed, lambda: rendered(())
                )
                self.broken = isinstance(come, Failed) and come.kind is BROKEN
                self.drive.feed(come)
            case Call(Leg.PREFILL):
                self.answer_prefill(need)
            case Open():
                come = self.one_of(
                    lambda: STREAM, lambda: BODY, lambda: BODY, lambda: Opened(self.status(), JSON), self.failed
                )
                self.broken = isinstance(come, Failed) and come.kind is BROKEN
                self.reading, self.parts, self.has_handle = need, [], False
                self.drive.feed(come)
                if come == BODY:  # it is sent when the answer is complete
                    self.decode_has_read()
            case Read():
                self.answer_read()
            case _:
                raise AssertionError(need)

    def status(self) -> int:
        return self.draw(st.sampled_from([400, 401, 404, 413, 422, 429, 500, 502, 503]))

    def sent_to_prefill(self, call: Call, *, unread: bool) -> None:
        name = json.loads(call.body)["kv_transfer_params"].get("remote_request_id")
        if name is not None and not unread:
            assert name not in self.read, "a handle was read twice"
            self.read.add(name)

    def answer_prefill(self, call: Call) -> None:
        def good() -> Event:
            return prefilled(self.new("p"))

        come = self.one_of(
            good,
            good,
            good,
            lambda: prefilled(self.new("p"), prompt=77),
            lambda: prefilled(kv_transfer_params=None),
            lambda: Answered(200, JSON, b"odd"),
            lambda: Answered(self.status(), JSON, b"{}"),
            self.failed,
        )
        refused = isinstance(come, Failed) and come.kind is REFUSED
        self.broken = isinstance(come, Failed) and come.kind is BROKEN
        self.sent_to_prefill(call, unread=refused or (isinstance(come, Answered) and 400 <= come.status < 500))
        if isinstance(come, Answered) and come.status == 200:
            name = json.loads(call.body)["kv_transfer_params"].get("remote_request_id")
            if (name is not None and b"remote_request_id" in come.body) or come.body == b"odd":
                self.owed.pop(name, None)  # P has read it, which frees it
        self.drive.feed(come)

    def decode_has_read(self) -> None:
        name = json.loads(self.reading.body).get("kv_transfer_params", {}).get("remote_request_id")
        if name is not None:
            self.owed.pop(name, None)

    def answer_read(self) -> None:
        handles = "kv_transfer_params" in json.loads(self.reading.body) and not self.has_handle
        stream = isinstance(self.drive.state, Relaying)
        if stream:
            come = self.one_of(
                lambda: sse(delta()),
                lambda: sse(delta()),
                lambda: sse(finish(self.the_handle() if handles else None)),
                lambda: sse(finish(None)),
                lambda: sse(USAGE),
                lambda: sse({"error": {"message": "x"}}),
                lambda: sse({**finish(), "kv_transfer_params": 5}),
                lambda: Chunk(DONE),
                lambda: Chunk(DONE),
                lambda: Chunk(b": ping\n\n"),
                Ended,
                self.failed,
            )
        else:
            come = self.one_of(
                lambda: whole(f"d-{next(self.names)}" if handles else None),
                lambda: whole(None),
                lambda: Chunk(b"{"),
                Ended,
                Ended,
                Ended,
                self.failed,
            )
            if isinstance(come, Chunk):
                self.parts.append(come.data)
            elif come == Ended():
                self.owe_for(b"".join(self.parts))
        self.broken = isinstance(come, Failed) and come.kind is BROKEN
        self.drive.feed(come)
        if any(isinstance(action, Respond) and action.status == 200 for action in self.drive.actions):
            self.decode_has_read()

    def owe_for(self, body: bytes) -> None:
        """The handle of a whole answer."""
        with contextlib.suppress(ValueError):
            if isinstance(self.drive.state, Collecting) and self.drive.state.status == 200:
                given = json.loads(body)["kv_transfer_params"]
                if given is not None:
                    self.owed[given["remote_request_id"]] = "d"

    # -- what holds for every turn

    def check(self) -> None:
        drive = self.drive
        self.check_answer(drive)
        released = [name for name, _ in drive.released]
        back = [g.taken.held for g in drive.all(GiveBack)]
        filed = [s.branch.held for s in drive.all(Settle) if s.branch.held is not None]
        assert len(released) == len(set(released)), "a handle was released twice"
        assert len(back) <= 1
        assert None not in back
        assert len(drive.all(Settle)) <= 1
        assert not (back and drive.all(Lost)), "a handle went back, and was then noted as lost"
        for name in ("dropped", OLD, *self.owed):
            places = [name in released, bool(back) and name == OLD, any(f.handle.request_id == name for f in filed)]
            assert sum(places) <= 1, f"{name} went to several places"
            if name in self.owed:
                assert sum(places) == 1, f"{name} stays pinned and no one knows"
        if OLD in self.read:
            assert not back, "a handle that may have been read went back"
            assert not any(f.handle.request_id == OLD for f in filed)
        assert drive.turn.spare is None or drive.all(Settle)

    @staticmethod
    def check_answer(drive: Drive) -> None:
        order = kinds(drive.actions)
        assert order.count("Record") == 1
        assert order.count("Respond") == 1 or (drive.report.error == "client_gone" and "Send" not in order)
        if "Respond" in order:
            assert "Send" not in order[: order.index("Respond")]
        assert set(order[order.index("Record") + 1 :]) <= {"Respond", "Send"}
        assert b"remote_" not in drive.sent
        calls = [need for need in drive.needs if isinstance(need, Call | Open)]
        assert drive.report.retries < len(calls) or not calls


REQUESTS = [
    facts(messages=MESSAGES),
    STREAMED,
    facts(messages=MESSAGES, stream=True, stream_options={"include_usage": True}),
    facts(messages=MESSAGES, n=2),
    facts(messages=MESSAGES, prompt_logprobs=1, stream=True),
    facts(messages=[*MESSAGES, {"role": "user", "content": [{"type": "image_url"}]}]),
    facts({"model": "m", "prompt": list(PROMPT)}, Endpoint.COMPLETIONS),
]


@settings(max_examples=6 * settings().max_examples)
@given(st.data())
def test_every_turn_answers_once_and_accounts_for_every_handle(data: st.DataObject) -> None:
    Journey(data).run()
