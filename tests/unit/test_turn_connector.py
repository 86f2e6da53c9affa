"""A turn over engines that run our connector: what is asked of them, and that their own account is what is reported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from backhaul_protocol.why import Why
from backhaul_router.errors import Leg
from backhaul_router.fleet.engine import Holder
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.ledger.records import Held, Taken
from backhaul_router.report import Proof, Reason, Route
from backhaul_router.turn.effects import (
    Action,
    Answered,
    Check,
    Checked,
    Chunk,
    Ended,
    EndLease,
    Failed,
    GiveBack,
    Lost,
    Opened,
    Respond,
    Settle,
    Took,
)
from backhaul_router.turn.states import Taking
from backhaul_router.wire.connector_object import VOID
from core_values import D1, D2, ENGINE_ID, P1, P2, encoded, engine, facts, fleet, leased, params, says
from turn_drive import (
    BODY,
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
    finish,
    history,
    kinds,
    prefilled,
    sse,
    whole,
)

DOCS = Path(__file__).parents[2] / "docs"

ACCOUNT = {
    "prompt": 200,
    "offered": 128,
    "verified": 112,
    "local": 16,
    "pulled": 96,
    "computed": 88,
    "bytes": 4096,
    "read_ms": 3.5,
    "claim_ms": 0.5,
    "why": None,
}


def ours(*urls: str, **fields: Any) -> Fleet:
    return fleet(*urls, connector=1, **fields)


def warm(left: Held | None = None, **fields: Any) -> Taken:
    """A history whose handle D's connector made."""
    taken = history()
    left = left or leased(OLD, tokens=128)
    assert taken.branch is not None
    on_file = msgspec.structs.replace(taken.branch, held=left, blocks=b"")
    return msgspec.structs.replace(taken, branch=on_file, held=left, **fields)


def accounted(name: str = "p-1", **fields: Any) -> Answered:
    beside = {"version": 1, "account": ACCOUNT | fields, "prompt_hash": "ab" * 32, "prompt_tokens": 192}
    given = params(name, tokens=200, engine_id="p", do_remote_prefill=True, do_remote_decode=False)
    usage = {"prompt_tokens": 200, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 7}}
    body = {"choices": [], "usage": usage, "kv_transfer_params": {**given, "backhaul": beside}}
    return Answered(200, JSON, encoded(body))


def left_by_ours(name: str = "d-1", **fields: Any) -> dict[str, Any]:
    return {**params(name, tokens=192), "backhaul": says(tokens=192, **fields)}


def answer(name: str = "d-1", **fields: Any) -> Any:
    return whole(kv_transfer_params=left_by_ours(name, **fields))


def drive(taken: Taken | None = None, on: Fleet | None = None, **fields: Any) -> Drive:
    return Drive(warm() if taken is None else taken, on=on or ours(), **fields)


def ended(actions: Sequence[Action]) -> list[str]:
    return [action.id for action in actions if isinstance(action, EndLease)]


# --- what is asked -------------------------------------------------------------------------------------------------------


def test_nothing_is_rendered_and_prefill_gets_messages_and_handle_as_they_are() -> None:
    turn = drive()
    assert turn.asked(Leg.PREFILL).engine.url == P1
    assert turn.body["messages"] == MESSAGES
    assert turn.body["kv_transfer_params"] == {
        **params(OLD, tokens=128),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_num_tokens": 0,
        "backhaul": says(tokens=128),
    }


def test_a_prefill_engine_that_checks_no_digests_would_find_nothing_to_read() -> None:
    """vLLM reads `min(remote_num_tokens, prompt)` tokens of whatever it is given; our connector claims what it has located."""
    turn = drive()
    assert turn.body["kv_transfer_params"]["remote_num_tokens"] == 0


def test_what_engines_told_the_router_is_not_passed_on() -> None:
    turn = drive(warm(leased(OLD, account={"prompt": 1}, token_ids=[1, 2])))
    assert turn.body["kv_transfer_params"]["backhaul"] == says(tokens=128)


def test_decode_gets_prefills_hash_and_what_the_router_asks() -> None:
    turn = drive()
    turn.feed(accounted())
    given = turn.body["kv_transfer_params"]
    assert given["backhaul"] == {
        "version": 1,
        "prompt_hash": "ab" * 32,
        "prompt_tokens": 192,
        "retain": True,
        "shared": True,
    }
    assert (given["do_remote_prefill"], given["do_remote_decode"]) == (True, False)
    assert "return_token_ids" not in turn.body


def test_leases_that_are_due_ride_along_once() -> None:
    on = ours()
    on.releases.add(Holder(D1), ["a", "b"])
    on.releases.add(Holder(D1, "1"), ["of another rank"])
    turn = drive(on=on)
    turn.feed(accounted())
    assert turn.body["kv_transfer_params"]["backhaul"]["release"] == ["a", "b"]
    assert on.releases.take(Holder(D1)) == ()
    turn.feed(BODY, answer(), Ended())
    assert turn.all(EndLease) == []


@pytest.mark.parametrize("event", [Failed(TIMEOUT, "x"), Failed(REFUSED, "x")])
def test_leases_that_rode_in_vain_are_released_otherwise(event: Failed) -> None:
    on = ours()
    on.releases.add(Holder(D1), ["a", "b"])
    turn = drive(on=on)
    turn.feed(accounted(), event)
    assert ended(turn.actions) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "retain"),
    [({}, True), ({"identity": None}, False), ({"reuse": False, "taken": FIRST}, False)],
)
def test_decode_retains_only_what_a_later_turn_can_use(settings: dict[str, Any], retain: bool) -> None:
    turn = drive(settings.pop("taken", None), **settings)
    turn.feed(accounted())
    assert turn.body["kv_transfer_params"]["backhaul"]["retain"] is retain


@pytest.mark.parametrize(("request_", "retain"), [(facts(messages=MESSAGES), True), (STREAMED, False)])
def test_a_stream_that_hides_its_handle_retains_nothing(request_: Any, retain: bool) -> None:
    turn = drive(on=ours(streams_handles=False), request=request_)
    turn.feed(accounted())
    assert turn.body["kv_transfer_params"]["backhaul"]["retain"] is retain


@pytest.mark.parametrize(("ttl_s", "asked"), [(480.0, None), (900.0, None), (60.0, 60.0)])
def test_a_lease_shorter_than_vllms_own_is_asked_for(ttl_s: float, asked: float | None) -> None:
    turn = drive(decoder_kv_blocks_ttl=ttl_s)
    turn.feed(accounted())
    assert turn.body["kv_transfer_params"]["backhaul"].get("retain_s") == asked


def test_several_sequences_go_to_decode_without_a_word() -> None:
    turn = drive(request=facts(messages=MESSAGES, n=2))
    assert turn.opening().engine.url == D1
    assert "kv_transfer_params" not in turn.body
    assert turn.all(GiveBack)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "adapter", "messages": MESSAGES},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
def test_adapters_and_images_are_read_too(body: dict[str, Any]) -> None:
    turn = drive(request=facts(body), on=ours(adapters=frozenset({"adapter"})))
    assert turn.body["kv_transfer_params"]["remote_request_id"] == OLD


def test_a_handle_of_several_kv_cache_groups_is_read_too() -> None:
    groups = leased(OLD)
    turn = drive(warm(msgspec.structs.replace(groups, handle=msgspec.structs.replace(groups.handle, groups=2))))
    assert turn.body["kv_transfer_params"]["remote_request_id"] == OLD


def test_a_handle_below_the_threshold_is_not_sent() -> None:
    turn = drive(warm(leased(OLD, tokens=48)))
    assert "remote_request_id" not in turn.body["kv_transfer_params"]
    turn.feed(accounted(offered=0, verified=0, pulled=0, local=0), BODY, answer(), Ended())
    assert turn.report.reason is Reason.BELOW_THRESHOLD


# --- the account is the truth --------------------------------------------------------------------------------------------


def test_the_report_is_what_the_engines_say() -> None:
    turn = drive()
    turn.feed(accounted(), BODY, answer(account={"prompt": 200, "received": 96, "local": 80}), Ended())
    report = turn.report
    assert (report.route, report.proof, report.reason) == (Route.WARM, Proof.CONNECTOR, None)
    assert (report.offered, report.verified, report.local, report.pulled) == (128, 112, 16, 96)
    assert (report.prompt, report.cached, report.computed, report.decode_cached) == (200, 112, 88, 80)
    assert (report.read_bytes, report.read_ms, report.claim_ms) == (4096, 3.5, 0.5)


REASONS = {
    "diverged": "diverged",
    "differs": "diverged",
    "below_threshold": "below_threshold",
    "expired": "expired",
    "released": "expired",
    "evicted": "expired",
    "unknown_lease": "expired",
    "epoch": "engine_changed",
    "other_engine": "engine_changed",
    "no_digests": "no_proof",
    "malformed": "no_proof",
    "unsupported": "no_proof",
    "unreachable": "read_failed",
    "read_failed": "read_failed",
    "hold_ended": "read_failed",
    "bidirectional_off": "unsafe_pair",
}
"""What the report says, by what P says."""
NOT_P_S_REASON = {"local_hit", "prompt_differs"}
"""P had it all itself, which is reuse; D's word."""


def test_every_word_of_the_protocol_has_its_reason_here() -> None:
    assert REASONS.keys() | NOT_P_S_REASON == set(Why)


def test_the_page_on_the_connector_lists_the_words_of_the_protocol() -> None:
    page = (DOCS / "connector.md").read_text()
    (table,) = re.findall(r"^\| `why` \|.*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = [word for row in table.splitlines() for word in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(Why)


@pytest.mark.parametrize("page", ["../README.md", "server.md"])
def test_pages_list_the_reasons_of_the_report(page: str) -> None:
    (listed,) = re.findall(r"(`first_turn`, `no_conversation`[^.|]*)", (DOCS / page).read_text())
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(Reason)


@pytest.mark.parametrize("why", REASONS)
def test_a_handle_that_was_not_read_makes_the_turn_cold_with_the_reason(why: str) -> None:
    turn = drive()
    turn.feed(accounted(pulled=0, local=0, verified=0, why=why), BODY, answer(), Ended())
    report = turn.report
    assert (report.route, report.proof, report.reason) == (Route.COLD, None, REASONS[why])
    assert (report.offered, report.verified, report.pulled, report.retries) == (128, 0, 0, 0)
    headers = dict(turn.one(Respond).headers)
    assert (headers["x-backhaul-route"], headers["x-backhaul-reason"]) == ("cold", REASONS[why])


@pytest.mark.parametrize(
    ("account", "route"),
    [
        ({"pulled": 0, "local": 112, "why": "local_hit"}, Route.WARM),
        ({"pulled": 0, "local": 96, "why": "below_threshold"}, Route.WARM),
        ({"pulled": 0, "local": 0, "why": "below_threshold"}, Route.COLD),
        ({"pulled": 0, "local": 96, "why": "read_failed"}, Route.COLD),
        ({"pulled": 0, "local": 96, "verified": 0, "why": "diverged"}, Route.COLD),
    ],
)
def test_what_prefill_had_itself_is_no_reason_to_be_cold(account: dict[str, Any], route: Route) -> None:
    turn = drive()
    turn.feed(accounted(**account), BODY, answer(), Ended())
    assert (turn.report.route, turn.report.pulled) == (route, 0)


def test_a_first_turns_account_is_reported_as_well() -> None:
    turn = drive(FIRST)
    turn.feed(accounted(offered=0, verified=0, pulled=0, local=64), BODY, answer(), Ended())
    report = turn.report
    assert (report.route, report.reason, report.local, report.cached) == (Route.COLD, Reason.FIRST_TURN, 64, 64)


def test_a_word_of_another_release_is_told_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    on = ours()
    for _ in range(2):
        turn = drive(on=on)
        turn.feed(accounted(pulled=0, local=0, verified=0, why="a word of tomorrow"), BODY, answer(), Ended())
        assert (turn.report.status, turn.report.route, turn.report.reason) == (200, Route.COLD, Reason.READ_FAILED)
    assert on.counters.proof_faults == 2
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert P1 in line.getMessage()
    assert "a word of tomorrow" in line.getMessage()
    p = on.get(P1)
    assert p is not None
    assert on.capabilities.verifies(p), "it does check handles"


def test_a_word_of_another_release_does_not_undo_what_was_read() -> None:
    turn = drive()
    turn.feed(accounted(why="a word of tomorrow"), BODY, answer(account={"why": "and another"}), Ended())
    assert (turn.report.route, turn.report.pulled) == (Route.WARM, 96)
    assert turn.fleet.counters.proof_faults == 2


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_an_engine_that_cannot_read_what_it_was_sent_is_told_and_counted(
    leg: Leg, caplog: pytest.LogCaptureFixture
) -> None:
    turn = drive()
    read, refused = {"pulled": 0, "local": 0, "why": "malformed"}, {"received": 0, "why": "malformed"}
    turn.feed(accounted(**(read if leg is Leg.PREFILL else {})), BODY)
    turn.feed(answer(account=refused if leg is Leg.DECODE else {}), Ended())
    assert turn.report.status == 200
    assert turn.fleet.counters.proof_faults == 1
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (P1 if leg is Leg.PREFILL else D1) in line.getMessage()


@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
def test_an_object_of_another_shape_is_an_error_that_is_told_and_counted(
    leg: Leg, caplog: pytest.LogCaptureFixture
) -> None:
    turn = drive()
    if leg is Leg.PREFILL:
        turn.feed(accounted(pulled="96"))
    else:
        turn.feed(accounted(), BODY, answer(digests=5), Ended())
    assert turn.report.status == 502
    assert turn.fleet.counters.proof_faults == 1
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (P1 if leg is Leg.PREFILL else D1) in line.getMessage()


def test_accounts_add_up_in_the_fleet() -> None:
    on = ours()
    for _ in range(2):
        turn = drive(on=on)
        turn.feed(accounted(), BODY, answer(), Ended())
    assert on.accounts.total(P1) == {"offered": 256, "verified": 224, "pulled": 192}


def test_a_streams_account_comes_with_its_last_event() -> None:
    turn = drive(request=STREAMED)
    last = finish() | {"kv_transfer_params": left_by_ours(account={"prompt": 200, "local": 80})}
    turn.feed(accounted(), STREAM, sse(last, USAGE), Chunk(DONE))
    assert turn.report.decode_cached == 80
    assert turn.filed.held is not None
    assert turn.filed.held.shared


def test_a_prompt_that_decode_computed_by_itself_is_counted() -> None:
    turn = drive()
    turn.feed(accounted(), BODY, answer(account={"why": "prompt_differs", "local": 0}), Ended())
    assert turn.fleet.counters.prompts_differed == 1


# --- what a turn leaves --------------------------------------------------------------------------------------------------


def test_the_handle_is_filed_without_ids_and_until_the_lease_ends() -> None:
    turn = drive()
    turn.feed(accounted(), BODY, answer(ttl_s=100.0), Ended())
    filed = turn.filed
    assert filed.held is not None
    assert (filed.held.tokens, filed.held.shared, filed.held.leased) == (192, True, True)
    assert filed.held.deadline == turn.now + 100.0 - 10.0
    assert (filed.blocks, filed.tokens) == (b"", 202)
    assert turn.all(Settle)[0].taken.held is not None


def test_a_lease_shorter_than_its_margin_is_used_for_most_of_its_time() -> None:
    turn = drive()
    turn.feed(accounted(), BODY, answer(ttl_s=8.0), Ended())
    assert turn.report.handle_remaining_s == 6.0


def test_a_superseded_shared_handle_is_the_ledgers_to_release() -> None:
    turn = drive()
    actions = turn.feed(accounted(), BODY, answer(), Ended())
    assert kinds(actions) == ["Settle", "Record", "Respond", "Send"]


def test_an_answer_without_a_handle_leaves_the_shared_one_before_it() -> None:
    turn = drive()
    turn.feed(accounted(), BODY, whole(None), Ended())
    assert turn.filed.held == leased(OLD, tokens=128)
    assert turn.report.handle_remaining_s is not None


@pytest.mark.parametrize("why", sorted(why for why, reason in REASONS.items() if reason in VOID))
def test_a_void_handle_is_dropped_whatever_the_turn_leaves(why: str) -> None:
    turn = drive()
    turn.feed(accounted(pulled=0, local=0, verified=0, why=why), BODY, whole(None), Ended())
    assert turn.one(Lost).reason == REASONS[why]
    assert turn.one(Settle).taken.held is None
    assert (turn.filed.held, turn.filed.missing) == (None, REASONS[why])


def test_a_local_turns_own_handle_is_filed() -> None:
    turn = drive(route=Route.LOCAL)
    assert turn.body["kv_transfer_params"]["backhaul"] == {"version": 1, "retain": True, "shared": True}
    account = {"prompt": 200, "local": 128, "computed": 72}
    turn.feed(BODY, answer(account=account), Ended())
    assert turn.filed.held is not None
    assert turn.filed.held.handle.request_id == "d-1"
    report = turn.report
    assert (report.cached, report.computed, report.decode_cached) == (128, 72, 128)


def test_a_handle_of_a_one_shot_call_is_ended_by_name() -> None:
    turn = drive(identity=None)
    actions = turn.feed(accounted(), BODY, answer(), Ended())
    assert ended(actions) == ["d-1"]
    assert turn.released == []


def test_a_decode_engine_without_digests_is_proven_by_tokens_from_then_on() -> None:
    on = ours()
    turn = drive(FIRST, on)
    beside = {key: value for key, value in says(tokens=192).items() if key != "digests"}
    left = {**params("d-1", tokens=192), "backhaul": beside}
    turn.feed(accounted(), BODY, whole(kv_transfer_params=left), Ended())
    assert (turn.filed.held, turn.filed.missing) == (None, Reason.NO_PROOF)
    assert ended(turn.actions) == ["d-1"]
    assert drive(FIRST, on).asked(Leg.RENDER)


# --- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Failed(TIMEOUT, "x"), Answered(500, JSON, b"{}")], ids=["a timeout", "a status"])
def test_a_prefill_that_fails_is_run_again_cold_and_the_handle_stays(event: Failed | Answered) -> None:
    turn = drive()
    turn.feed(event)
    assert "remote_request_id" not in turn.body["kv_transfer_params"]
    turn.feed(accounted(offered=0, pulled=0, local=0, verified=0), BODY, answer(), Ended())
    report = turn.report
    assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.READ_FAILED, 1)
    assert turn.fleet.accounts.missing(P1) == 1
    assert kinds(turn.actions)[:1] == ["Settle"]


def test_another_prefill_engine_that_does_not_check_is_not_given_the_handle() -> None:
    on = Fleet([engine(P1, connector=1), engine(P2), engine(D1, connector=1)])
    turn = drive(on=on)
    turn.feed(Failed(REFUSED, "x"))
    assert turn.asked(Leg.PREFILL).engine.url == P2
    assert "remote_request_id" not in turn.body["kv_transfer_params"]
    turn.feed(prefilled(cached=0), BODY, answer(), Ended())
    assert (turn.report.route, turn.report.reason) == (Route.COLD, Reason.NO_PROOF)


def test_another_prefill_engine_that_checks_is_given_it() -> None:
    on = Fleet([engine(url, connector=1) for url in (P1, P2, D1)])
    turn = drive(on=on)
    turn.feed(Failed(REFUSED, "x"))
    assert turn.body["kv_transfer_params"]["remote_request_id"] == OLD


def test_a_decode_engine_that_fails_takes_its_handle_along() -> None:
    turn = drive(on=ours(P1, D1, D2))
    turn.feed(accounted(), Opened(500, JSON), Ended())
    assert turn.asked(Leg.PREFILL)
    assert "remote_request_id" not in turn.body["kv_transfer_params"]


def test_what_a_prefill_engine_computed_without_checking_is_not_used() -> None:
    """It was restarted without our connector since the router asked it."""
    on = ours()
    turn = drive(on=on)
    turn.feed(prefilled("p-1"))
    assert turn.opening().engine.url == D1
    assert turn.body["messages"] == MESSAGES
    assert "kv_transfer_params" not in turn.body
    turn.feed(BODY, whole(None), Ended())
    assert turn.released == [("p-1", D1)]
    report = turn.report
    assert (report.route, report.reason, report.retries, report.offered) == (Route.LOCAL, Reason.NO_PROOF, 1, 0)
    assert on.counters.proof_faults == 1
    assert drive(on=on).asked(Leg.RENDER)


def test_a_turn_that_fails_over_what_it_took_gives_a_shared_handle_back() -> None:
    """A fault of ours; the handle would otherwise have a taker for ever."""

    class Broken(Fleet):
        def pick(self, *args: Any, **fields: Any) -> Any:
            raise ZeroDivisionError

    turn = Drive(FIRST, on=ours())
    turn.turn.fleet = Broken(())
    state = Taking(turn.turn)
    with pytest.raises(ZeroDivisionError):
        state.next(Took(warm()), 101.0)
    assert kinds(state.abandon(102.0)) == ["GiveBack", "Record"]


def test_a_client_that_leaves_gives_a_shared_handle_back() -> None:
    turn = drive()
    assert kinds(turn.leave())[:1] == ["GiveBack"]


# --- mixed fleets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "d"), [(1, None), (None, 1)])
def test_where_one_side_does_not_check_ids_are_rendered(p: int | None, d: int | None) -> None:
    on = Fleet([engine(P1, connector=p), engine(D1, connector=d)])
    assert drive(FIRST, on).asked(Leg.RENDER)


def test_a_stock_handle_that_was_proven_by_tokens_says_so_to_a_prefill_engine_of_ours() -> None:
    on = Fleet([engine(P1, connector=1), engine(D1)])
    turn = Drive(history(), on=on)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})))
    given = turn.body["kv_transfer_params"]
    assert given["backhaul"] == {"version": 1, "proof": "tokens"}
    assert given["prompt_token_ids"] == list(PROMPT)


@pytest.mark.parametrize(
    ("why", "released"),
    [
        ("unsupported", True),
        ("bidirectional_off", True),
        ("read_failed", True),
        ("below_threshold", False),
        (None, False),
    ],
)
def test_a_stock_handle_that_prefill_left_alone_is_released(why: str | None, released: bool) -> None:
    """Where P has neither read it nor had vLLM tell D that it will not, nobody else would before its TTL."""
    on = Fleet([engine(P1, connector=1), engine(D1)])
    turn = Drive(history(), on=on)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})))
    turn.feed(accounted(prompt=200, why=why, **({"pulled": 0} if why else {})))
    assert turn.opening()
    assert turn.released == ([(OLD, P1)] if released else [])


def test_a_stock_prefill_engine_asks_for_a_lease_that_one_read_ends() -> None:
    on = Fleet([engine(P1), engine(D1, connector=1)])
    turn = drive(FIRST, on)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})), prefilled(cached=0))
    assert turn.body["kv_transfer_params"]["backhaul"] == {"version": 1, "retain": True, "shared": False}


# --- pairs that have not been tried --------------------------------------------------------------------------------------


def test_a_stock_pair_is_checked_before_it_is_first_read_from() -> None:
    turn = Drive(history(), check_pairs=True)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})))
    assert turn.need == Check(engine(P1), D1, ENGINE_ID)
    turn.fleet.pairs.note(P1, D1, None)
    turn.feed(Checked())
    assert turn.body["kv_transfer_params"]["remote_request_id"] == OLD


def test_a_pair_that_was_found_unsafe_is_cold_and_the_handle_goes_on() -> None:
    turn = Drive(history(), check_pairs=True)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})))
    turn.fleet.pairs.note(P1, D1, "hangs")
    turn.feed(Checked())
    assert "remote_request_id" not in turn.body["kv_transfer_params"]
    turn.feed(prefilled(cached=0), BODY, whole(), Ended())
    assert (turn.report.route, turn.report.reason) == (Route.COLD, Reason.UNSAFE_PAIR)
    assert turn.released == [(OLD, P1)]


def test_a_check_that_brings_nothing_is_not_asked_for_twice() -> None:
    turn = Drive(history(), check_pairs=True)
    turn.feed(Answered(200, JSON, encoded({"token_ids": list(PROMPT), "features": None})))
    turn.feed(Checked())
    assert json.loads(turn.asked(Leg.PREFILL).body)["kv_transfer_params"]["remote_request_id"] == OLD
