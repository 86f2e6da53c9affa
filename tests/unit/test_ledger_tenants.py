"""Tenants in one router's memory: each makes room for itself, and a busy one costs a quiet one nothing."""

from __future__ import annotations

from collections import Counter

from backhaul_router.identity.ids import ResponseIds
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Key, Taken
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.serve.report_log import ReportLog, ReportLogs
from core_values import branch, held
from hypothesis import given
from hypothesis import strategies as st

NEW = Taken(reason=Reason.FIRST_TURN)


def leave(ledger: MemoryLedger, name: str, now: float = 0.0) -> list[str]:
    """A turn of the conversation `a/1`, tenant and id; the conversations whose handles are to be released."""
    tenant, _, conversation = name.partition("/")
    key = Key(tenant, "m", "", conversation)
    taken = ledger.take(key, digests.chain([name.encode()]), now, lambda _: None)
    left = branch([name.encode()], held=held(name))
    return [one.handle.request_id for one in (*taken.drop, *ledger.settle(key, taken, left, now))]


def leave_unnamed(ledger: MemoryLedger, name: str, now: float = 0.0) -> list[str]:
    """The same of a conversation without a name."""
    tenant, _, conversation = name.partition("/")
    left = branch([name.encode()], held=held(name), by_history=True)
    return [one.handle.request_id for one in ledger.settle(Key(tenant, "m", "", conversation), NEW, left, now)]


def on_file(ledger: MemoryLedger) -> set[str]:
    return {one.handle.request_id for one in ledger.handles()}


def test_a_tenant_that_is_full_drops_its_own_oldest() -> None:
    ledger = MemoryLedger(max_conversations_per_tenant=2)
    for now, name in enumerate(["b/old", "a/1", "a/2", "b/1"]):
        assert leave(ledger, name, now) == []
    assert leave(ledger, "a/3", 5.0) == ["a/1"]
    assert on_file(ledger) == {"b/old", "b/1", "a/2", "a/3"}


def test_in_a_full_ledger_the_tenant_that_has_most_makes_room() -> None:
    ledger = MemoryLedger(max_conversations=4)
    for name in ("b/old", "a/1", "a/2", "a/3"):
        leave(ledger, name)
    assert leave(ledger, "c/1") == ["a/1"]
    assert leave(ledger, "a/4") == ["a/2"]
    assert on_file(ledger) == {"b/old", "c/1", "a/3", "a/4"}


def test_a_conversation_that_was_active_again_is_not_the_oldest() -> None:
    ledger = MemoryLedger(max_conversations_per_tenant=2)
    leave(ledger, "a/1")
    leave(ledger, "a/2")
    ledger.renewed("1", {}, 1.0, "a")
    assert leave(ledger, "a/3") == ["a/2"]


def test_where_there_are_no_tenants_only_the_whole_counts() -> None:
    ledger = MemoryLedger(max_conversations=3, max_conversations_per_tenant=1)
    for name in ("/1", "/2", "/3"):
        assert leave(ledger, name) == []
    assert leave(ledger, "/4") == ["/1"]


def test_of_tenants_with_one_each_the_newest_stays() -> None:
    ledger = MemoryLedger(max_conversations=2)
    leave(ledger, "c/1")
    ledger.forget("1", "c")
    leave(ledger, "a/1")
    leave(ledger, "b/1")
    assert len(leave(ledger, "c/2")) == 1
    assert "c/2" in on_file(ledger)


def test_calls_without_a_name_make_room_for_those_of_the_same_tenant() -> None:
    ledger = MemoryLedger(max_conversations=100, max_conversations_per_tenant=4)
    leave_unnamed(ledger, "b/quiet")
    assert [leave_unnamed(ledger, f"a/{number}") for number in range(4)] == [[], [], ["a/0"], ["a/1"]]
    assert on_file(ledger) == {"b/quiet", "a/2", "a/3"}


def test_a_call_without_a_name_is_filed_in_a_ledger_that_another_tenant_filled() -> None:
    ledger = MemoryLedger(max_conversations=4)
    leave_unnamed(ledger, "a/unnamed")
    for name in ("a/1", "a/2", "a/3"):
        leave(ledger, name)
    assert leave_unnamed(ledger, "b/1") == ["a/unnamed"]
    assert leave_unnamed(ledger, "b/2") == ["b/1"]
    assert on_file(ledger) == {"a/1", "a/2", "a/3", "b/2"}


def test_named_conversations_of_a_full_tenant_make_no_room_for_a_call_without_a_name() -> None:
    ledger = MemoryLedger(max_conversations_per_tenant=2)
    leave(ledger, "a/1")
    leave(ledger, "a/2")
    assert leave_unnamed(ledger, "a/3") == ["a/3"]


def test_whoever_is_silent_is_forgotten_whatever_others_do() -> None:
    ledger = MemoryLedger(max_idle_s=100.0)
    for tenant, at in (("a", 0.0), ("b", 10.0), ("c", 20.0), ("a", 50.0)):
        leave(ledger, f"{tenant}/{at:g}", now=at)
    ledger.sweep(105.0)
    assert on_file(ledger) == {"b/10", "c/20", "a/50"}
    ledger.forget("b/10", "b")
    leave(ledger, "b/115", now=115.0)
    ledger.sweep(121.0)
    assert on_file(ledger) == {"a/50", "b/115"}
    ledger.sweep(151.0)
    assert on_file(ledger) == {"b/115"}
    ledger.sweep(300.0)
    assert len(ledger) == 0


NAMES = st.tuples(st.sampled_from("abc"), st.sampled_from("1234"), st.booleans())


@given(st.lists(NAMES, max_size=40))
def test_no_bound_is_passed_and_nobody_below_its_share_is_dropped(turns: list[tuple[str, str, bool]]) -> None:
    """A tenant's share is a third of the ledger here; nobody who has no more than that ever makes room for another."""
    ledger = MemoryLedger(max_conversations=6, max_conversations_per_tenant=3)
    kept: Counter[str] = Counter()
    for tenant, conversation, unnamed in turns:
        name = f"{tenant}/{'u' if unnamed else 'n'}{conversation}"
        dropped = [] if unnamed and name in on_file(ledger) else (leave_unnamed if unnamed else leave)(ledger, name)
        assert all(one[0] == tenant or kept[one[0]] > 2 for one in dropped)
        kept = Counter(key.tenant for key in ledger._conversations)
        assert kept.total() == len(ledger) <= 6
        assert all(count <= 3 for count in kept.values())


def test_responses_of_one_tenant_crowd_out_its_own() -> None:
    known = ResponseIds(max_responses=2)
    known.note("r", "bobs", "bob")
    for number in range(3):
        known.note(f"r{number}", "c", "alice")
    known.note("r", "alices", "alice")
    assert known.conversation_of("r", "bob") == "bobs"
    assert [known.conversation_of(name, "alice") for name in ("r", "r0", "r1", "r2")] == ["alices", None, None, "c"]
    assert known.conversation_of("r") is None
    assert len(known) == 3


def test_reports_of_one_tenant_crowd_out_its_own() -> None:
    logs = ReportLogs(lambda: ReportLog(max_conversations=1))
    for tenant, conversation in (("bob", "c"), ("alice", "c"), ("alice", "d")):
        logs.record(ReuseReport(conversation=conversation, tenant=tenant, turn=1, route=Route.COLD))
    assert [one.id for one in logs.of("alice").newest_first()] == ["d"]
    assert [one.id for one in logs.of("bob").newest_first()] == ["c"]
    assert logs.of().newest_first() == []
    assert repr(logs) == "<ReportLogs of 2 conversations>"
