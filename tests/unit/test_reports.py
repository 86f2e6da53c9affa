"""The log of reports that a server can be asked for."""

from __future__ import annotations

import asyncio
from typing import Any

from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.serve.report_log import ReportLog, Total


def report(conversation: str | None = "c1", turn: int = 1, **values: Any) -> ReuseReport:
    return ReuseReport(**{"conversation": conversation, "turn": turn, "route": Route.COLD, **values})


def test_totals_count_every_turn_and_the_last_reports_are_kept() -> None:
    log = ReportLog(max_reports=2, clock=lambda: 12.5)
    log.record(report(turn=1, reason=Reason.FIRST_TURN, prompt=100, cached=0, computed=100, generated=7))
    log.record(report(turn=2, route=Route.WARM, prompt=200, offered=96, cached=96, computed=104, saved_ms=3.0))
    log.record(report(turn=3, prompt=50, error="client_gone"))
    recorded = log.get("c1")
    assert recorded is not None
    assert [kept.turn for kept in recorded.reports] == [2, 3]
    assert recorded.summary() == {
        "id": "c1",
        "last_active": 12.5,
        "total": {
            "turns": 3,
            "prompt": 350,
            "reused": 96,
            "computed": 204,
            "offered": 96,
            "generated": 7,
            "errors": 1,
            "hit_rate": 0.32,
            "saved_ms": 3.0,
            "routes": {"cold": 2, "warm": 1},
            "reasons": {"first_turn": 1},
        },
    }


def test_what_is_not_known_is_null_and_not_zero() -> None:
    log = ReportLog()
    log.record(report())
    [recorded] = log.newest_first()
    assert (recorded.total.hit_rate, recorded.total.saved_ms) == (None, None)


def test_the_conversation_that_was_silent_for_longest_is_dropped() -> None:
    log = ReportLog(max_conversations=2)
    for conversation in ("a", "b", "a", "c", None):
        log.record(report(conversation))
    assert [recorded.id for recorded in log.newest_first()] == ["c", "a"]
    assert log.get("b") is None


def test_a_conversation_is_forgotten_once() -> None:
    log = ReportLog()
    log.record(report())
    assert [log.forget("c1"), log.forget("c1")] == [True, False]


async def test_whoever_waits_for_a_turn_hears_of_that_turn() -> None:
    log = ReportLog()
    waiting = asyncio.create_task(log.wait_for("c1", 2, 60))
    await asyncio.sleep(0)
    log.record(report(turn=1))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.record(report(turn=2))
    await asyncio.wait_for(waiting, 10)
    await log.wait_for("c1", 2, 60)


async def test_waiting_ends_by_itself_and_leaves_nothing() -> None:
    log = ReportLog()
    await log.wait_for("c1", 1, 0.001)
    assert log._awaited == {}


def test_conversations_without_a_name_make_room_for_each_other() -> None:
    log = ReportLog(max_conversations=4)
    log.record(report("named"))
    for name in "abcd":
        log.record(report(name, identity_source="history"))
    assert [one.id for one in log.newest_first()] == ["d", "c", "named"]
    assert log.forget("d")
    log.record(report("e", identity_source="history"))
    assert [one.id for one in log.newest_first()] == ["e", "c", "named"]


def test_a_total_is_what_its_sums_say() -> None:
    total = Total()
    for one in (report(prompt=100, cached=0), report(turn=2, route=Route.WARM, prompt=300, cached=200, saved_ms=5.0)):
        total.add(one)
    assert Total.of_sums(total.sums()).to_dict() == total.to_dict()
    assert Total.of_sums(Total().sums()).to_dict() == Total().to_dict()
