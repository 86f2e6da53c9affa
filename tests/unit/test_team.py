"""Several workers of one router: what they tell each other, and how their answers become one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import pytest
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request
from backhaul_router.errors import ConfigError
from backhaul_router.identity.ids import MAX_ID_BYTES, ResponseIds
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.serve.conversation_log import joined, to_join
from backhaul_router.serve.reload import in_force
from backhaul_router.serve.report_log import ReportLog
from backhaul_router.serve.settings import Settings, load
from backhaul_router.serve.team_admin import changed, listed, with_members
from backhaul_router.serve.team_reports import TeamRecord, TeamResponses
from backhaul_router.serve.worker_link import Answers, Ask, How, Member, Message, Stop, Unpacker, Whom, packed
from backhaul_router.serve.worker_process import MOST_FAILURES, STEADY_S, Restarts

ENGINES: dict[str, Any] = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}
REDIS = "redis://127.0.0.1/0"
DRAIN, REMOVE = ("POST", "/engines/drain"), ("DELETE", "/engines")


def answers(missing: tuple[int, ...] = (), **by_worker: Any) -> Answers:
    """`w1=...` is what worker 1 said."""
    return Answers(1, {int(name[1:]): value for name, value in by_worker.items()}, list(missing), [])


def error(status: int, message: str) -> list[Any]:
    return [status, {"error": {"message": message}}]


# --- settings


def test_several_workers_need_a_ledger_that_they_share() -> None:
    with pytest.raises(ConfigError, match=r"^workers: 2 workers share .*--redis-url redis://HOST:6379/0") as caught:
        load(None, {**ENGINES, "workers": 2}, {})
    assert "\n" not in str(caught.value)
    assert load(None, {**ENGINES, "workers": 2}, {"BACKHAUL_REDIS_URL": REDIS}).server.workers == 2


@pytest.mark.parametrize("workers", [0, 1000])
def test_a_number_of_workers_that_cannot_be(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"workers={workers}: from 1 to 256"):
        load(None, {**ENGINES, "workers": workers, "redis_url": REDIS}, {})


def test_a_worker_that_is_started_later_follows_what_a_reload_changed_and_no_more() -> None:
    before = load(None, {**ENGINES, "max_body_bytes": 1, "max_branches": 2, "port": 1}, {})
    after = load(None, {**ENGINES, "max_body_bytes": 9, "max_branches": 9, "port": 9}, {})
    now: Settings = in_force(before, after)
    assert (now.router.max_body_bytes, now.router.max_branches, now.server.port) == (9, 2, 1)


def test_it_begins_with_the_engines_that_the_others_have() -> None:
    config = RouterConfig(**ENGINES)
    members = [Member("prefill", "http://p:2"), Member("decode", "http://d:2", draining=True)]
    assert with_members(config, []) is config
    assert with_members(config, members) == dataclasses.replace(config, prefill=("http://p:2",), decode=("http://d:2",))


# --- messages


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_arrive_whole_in_pieces_of_any_size(size: int) -> None:
    sent: list[Message] = [Ask(7, "show", Whom.ALL, 2.0, ["", "c", None]), Stop(How.NOW), Stop(How.END)]
    data, unpacker = b"".join(map(packed, sent)), Unpacker()
    got = [one for start in range(0, len(data), size) for one in unpacker.feed(data[start : start + size])]
    assert got == sent


# --- what goes over the link at all


class Asked:
    """In place of a `Team`: notes what it is asked, and nobody knows anything."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def does(self, kind: str, work: object) -> None: ...

    async def ask(self, kind: str, whom: Whom, what: Any, limit_s: float = 2.0) -> Answers:
        self.asked.append((kind, what))
        return answers(w1=None, w2=None)


@pytest.mark.parametrize(("size", "asks"), [(MAX_ID_BYTES, True), (MAX_ID_BYTES + 1, False), (0, False)])
async def test_nobody_is_asked_for_a_response_whose_id_cannot_be_one(size: int, asks: bool) -> None:
    team: Any = Asked()
    before = "r" * size
    body = json.dumps({"previous_response_id": before}).encode()
    await TeamResponses(team, ResponseIds()).learn(Request("POST", "/v1/responses", [], body))
    assert team.asked == ([("response", [before, ""])] if asks else [])


@pytest.mark.parametrize("conversation", ["c" * (MAX_ID_BYTES + 1), "a\nb"], ids=["long", "unprintable"])
async def test_nobody_is_asked_for_a_conversation_whose_id_cannot_be_one(conversation: str) -> None:
    team: Any = Asked()
    record = TeamRecord(team, cast("Any", None))
    assert await record.shown("", conversation, 1, 1.0) is None
    assert await record.forget("", conversation) is False
    assert team.asked == []


# --- reports


def recorded(*turns: int, **fields: Any) -> dict[str, Any]:
    log = ReportLog(clock=lambda: float(turns[-1]))
    for turn in turns:
        log.record(ReuseReport(conversation="c", turn=turn, route=Route.WARM, **fields))
    found = log.get("c")
    assert found is not None
    return to_join(found, reports=True)


def test_a_conversations_reports_are_in_the_order_of_its_turns() -> None:
    whole = joined({1: recorded(1, 4), 2: recorded(2, 3)})
    assert [(one["turn"], one["worker"]) for one in whole["reports"]] == [(1, 1), (2, 2), (3, 2), (4, 1)]
    assert (whole["id"], whole["last_active"], whole["total"]["turns"]) == ("c", 4.0, 4)


def test_what_turns_add_up_to_is_what_one_worker_would_have_said() -> None:
    cold = {"prompt": 100, "cached": 0, "reason": Reason.EXPIRED}
    warm = {"prompt": 300, "cached": 200, "saved_ms": 5.0}
    apart = joined({1: recorded(1, **cold), 2: recorded(2, **warm)})["total"]
    log = ReportLog()
    for turn, fields in enumerate((cold, warm), 1):
        log.record(ReuseReport(conversation="c", turn=turn, route=Route.WARM, **fields))  # type: ignore[arg-type]
    together = log.get("c")
    assert together is not None
    assert apart == together.total.to_dict()


def test_what_no_worker_knows_stays_unknown() -> None:
    total = joined({1: recorded(1), 2: recorded(2)})["total"]
    assert (total["hit_rate"], total["saved_ms"]) == (None, None)


# --- operators


def test_an_engine_that_workers_see_differently_is_as_bad_as_the_worst_says() -> None:
    engine = {"url": "http://d:1", "role": "decode", "in_flight": 2, "handles": 1}
    shown = listed(answers(w1=[{**engine, "state": "available"}], w2=[{**engine, "state": "failing"}])).value
    assert shown == {
        "engines": [
            {**engine, "state": "failing", "in_flight": 4, "handles": 2, "states": {1: "available", 2: "failing"}}
        ]
    }


def test_a_drain_is_done_when_it_is_with_all_workers() -> None:
    drained = {"url": "http://d:1", "in_flight": 0, "handles": 2, "done": True}
    busy = {**drained, "in_flight": 1, "done": False}
    assert changed(DRAIN, 1, answers(w1=[200, drained], w2=[200, busy])).value == {
        "url": "http://d:1",
        "in_flight": 1,
        "handles": 4,
        "done": False,
    }


def test_a_change_that_one_worker_did_not_make_says_which_and_why() -> None:
    answer = changed(DRAIN, 1, answers(w1=[200, {}], w2=error(400, "cannot connect"), missing=(3,)))
    assert (answer.status, answer.value["error"]["code"]) == (502, "not_all_workers")
    assert answer.value["error"]["message"].endswith(": worker 2: cannot connect; worker 3 has not answered yet")


def test_a_change_that_the_asked_worker_refuses_is_refused() -> None:
    assert changed(DRAIN, 1, answers(w1=error(400, "no such engine"))).status == 400


def test_an_engine_that_some_workers_had_removed_before_is_removed() -> None:
    gone, done = error(404, "none of these"), [200, {"removed": "http://d:1"}]
    assert changed(REMOVE, 1, answers(w1=gone, w2=done)).value == {"removed": "http://d:1"}
    assert changed(REMOVE, 1, answers(w1=gone, w2=gone)).status == 404


# --- processes


def test_a_worker_that_keeps_ending_is_started_after_longer_and_longer_pauses() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(1.0) for _ in range(12)]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses == sorted(pauses)
    assert (pauses[-1], restarts.hopeless) == (30.0, True)


def test_one_that_fails_for_days_is_still_started_again() -> None:
    assert Restarts(failures=100_000).pause_s(1.0) == 30.0


def test_one_that_has_served_for_long_is_started_soon() -> None:
    restarts = Restarts(failures=MOST_FAILURES)
    assert (restarts.pause_s(STEADY_S + 1), restarts.hopeless) == (0.1, False)
