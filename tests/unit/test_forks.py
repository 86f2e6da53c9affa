"""Forks in the ledger: a child's first turn finds its parent's branch, and what it takes goes back there."""

from __future__ import annotations

import pytest
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Held, Key, Taken
from backhaul_router.report import Reason
from core_values import branch, held, leased
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from test_ledger import HISTORIES, KEYS, Running, SharedInterleaving, names, settle, take, usable

PARENT = Key("", "m", "", "c")
CHILD = PARENT._replace(conversation="child")
HISTORY = (b"system", b"question", b"answer", b"more")


def fork(ledger: MemoryLedger, *messages: bytes, child: Key = CHILD, now: float = 0.0) -> Taken:
    return ledger.take(child, digests.chain(messages), now, usable, "c")


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


def test_a_child_that_extends_its_parents_history_takes_its_handle(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    taken = fork(ledger, *HISTORY, b"answer 2", b"and else?")
    assert (taken.turn, names((taken.held,) if taken.held else ())) == (1, ["1"])
    assert (taken.forked_from is not None, taken.extends) == (True, False)


def test_any_number_of_children_and_the_parent_share_a_shared_handle(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    forks = [fork(ledger, *HISTORY, b"x", child=CHILD._replace(conversation=f"child{n}")) for n in range(3)]
    own = take(ledger, *HISTORY, b"y")
    assert [taken.held is not None for taken in (*forks, own)] == [True] * 4


def test_a_stock_handle_goes_to_the_first_child_and_the_next_one_knows_why_not(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=held("1"))
    first, second = (fork(ledger, *HISTORY, b"x", child=CHILD._replace(conversation=c)) for c in "ab")
    assert first.held is not None
    assert (second.held, second.reason) == (None, Reason.IN_USE)
    assert second.branch is not None


def test_what_a_child_gives_back_is_the_parents_again(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=held("1"))
    taken = fork(ledger, *HISTORY, b"x")
    assert ledger.give_back(CHILD, taken) == ()
    assert names(ledger.held_for("c")) == ["1"]
    assert ledger.held_for("child") == ()


def test_what_a_child_leaves_is_its_own_and_the_parent_keeps_its_branch(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    taken = fork(ledger, *HISTORY, b"x")
    assert ledger.settle(CHILD, taken, branch((*HISTORY, b"x"), held=leased("2")), 0.0) == ()
    assert (names(ledger.held_for("c")), names(ledger.held_for("child"))) == (["1"], ["2"])
    again = fork(ledger, *HISTORY, b"x", b"y", b"z")
    assert (again.forked_from, again.turn, again.held is not None) == (None, 2, True)


def test_a_handle_that_a_child_found_void_is_dropped_at_the_parent(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    taken = fork(ledger, *HISTORY, b"x")
    assert names(ledger.lost(CHILD, taken, Reason.EXPIRED)) == ["1"]
    assert take(ledger, *HISTORY).reason is Reason.EXPIRED


def test_a_parent_that_ended_meanwhile_releases_when_the_child_is_done(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    taken = fork(ledger, *HISTORY, b"x")
    assert ledger.forget("c") == ()
    assert names(ledger.give_back(CHILD, taken)) == ["1"]


def test_a_stock_handle_whose_parent_ended_meanwhile_is_released(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=held("1"))
    taken = fork(ledger, *HISTORY, b"x")
    ledger.forget("c")
    assert names(ledger.give_back(CHILD, taken)) == ["1"]


@pytest.mark.parametrize(
    ("messages", "handle", "forks"),
    [
        ((b"system", b"else"), leased("1"), False),  # the same instructions, another task
        ((b"system", b"question", b"else"), leased("1"), True),  # branches off behind the opening
        ((b"system", b"question", b"else"), held("1"), False),  # which would cost the parent its handle
        ((b"other",), leased("1"), False),
    ],
)
def test_what_counts_as_a_fork(ledger: MemoryLedger, messages: tuple[bytes, ...], handle: Held, forks: bool) -> None:
    settle(ledger, *HISTORY, handle=handle)
    taken = fork(ledger, *messages)
    assert (taken.forked_from is not None) is forks
    if not forks:
        assert (taken.branch, taken.reason) == (None, Reason.FIRST_TURN)


def test_a_parent_of_another_tenant_model_or_salt_is_none(ledger: MemoryLedger) -> None:
    settle(ledger, *HISTORY, handle=leased("1"))
    for other in (CHILD._replace(tenant="t"), CHILD._replace(model="m2"), CHILD._replace(cache_salt="s")):
        assert fork(ledger, *HISTORY, child=other).reason is Reason.FIRST_TURN


def test_a_parent_whose_children_work_is_not_silent() -> None:
    ledger = MemoryLedger(max_idle_s=100.0)
    settle(ledger, *HISTORY, handle=leased("1"), now=0.0)
    fork(ledger, *HISTORY, now=90.0)
    assert ledger.sweep(150.0) == ()
    assert names(ledger.held_for("c")) == ["1"]


class Forking(SharedInterleaving):
    """The same as for turns of one conversation, with children that fork each other's histories in between."""

    @rule(key=KEYS, parent=st.sampled_from("xy"), history=HISTORIES)
    def a_child_begins(self, key: Key, parent: str, history: tuple[bytes, ...]) -> None:
        taken = self.ledger.take(key, digests.chain(history), self.now, usable, parent)
        self.drop(taken.drop)
        if taken.held is not None:
            assert taken.held.handle.request_id not in self.released
        self.running.append(Running(key, 0, history, taken))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["settle", "carry over", "leave nothing", "give back", "lost"]))
    def a_turn_ends(self, data: st.DataObject, end: str) -> None:
        turn = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if end == "give back":
            self.drop(self.ledger.give_back(turn.key, turn.taken))
        elif end == "lost" and turn.taken.held is not None:
            self.drop(self.ledger.lost(turn.key, turn.taken, Reason.EXPIRED))
        else:
            carried = turn.taken.held if end == "carry over" and turn.taken.forked_from is None else None
            left = self.new_handle() if end == "settle" else carried
            self.drop(self.ledger.settle(turn.key, turn.taken, branch(turn.history, held=left), self.now))


TestForking = Forking.TestCase
TestForking.settings = settings(max_examples=60, stateful_step_count=30)
