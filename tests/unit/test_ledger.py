"""The ledger: handles are conserved and used once, histories find their branch, and nothing grows without bound."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Branch, Held, Key, Taken
from backhaul_router.report import Reason
from core_values import D1, D2, branch, held, leased
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

KEY = Key("", "m", "", "c")


def usable(_: Held) -> Reason | None:
    return None


def take(ledger: MemoryLedger, *messages: bytes, key: Key = KEY, now: float = 0.0) -> Taken:
    return ledger.take(key, digests.chain(messages), now, usable)


def settle(
    ledger: MemoryLedger,
    *messages: bytes,
    handle: Held | None = None,
    key: Key = KEY,
    now: float = 0.0,
    **fields: object,
) -> tuple[Held, ...]:
    """A whole turn that asked with `messages` and left `handle`."""
    taken = take(ledger, *messages, key=key, now=now)
    return ledger.settle(key, taken, branch(messages, held=handle, **fields), now)


def names(handles: tuple[Held, ...]) -> list[str]:
    return [h.handle.request_id for h in handles]


# --- taking --------------------------------------------------------------------------------------------------------------


def test_the_first_turn_finds_nothing() -> None:
    taken = take(MemoryLedger(), b"a")
    assert (taken.turn, taken.branch, taken.held, taken.reason) == (1, None, None, Reason.FIRST_TURN)


def test_the_next_turn_takes_what_the_last_one_left() -> None:
    ledger, left = MemoryLedger(), held("1")
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a", b"answer", b"b")
    assert (taken.turn, taken.held, taken.reason, taken.common, taken.diverged_at) == (2, left, None, 1, None)
    assert ledger.handles() == ()


def test_a_handle_is_taken_once() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    assert take(ledger, b"a").held is not None
    again = take(ledger, b"a")
    assert (again.held, again.reason) == (None, Reason.IN_USE)


@pytest.mark.parametrize(
    "other",
    [
        KEY._replace(tenant="t"),
        KEY._replace(model="m2"),
        KEY._replace(cache_salt="s"),
        KEY._replace(conversation="c2"),
        KEY._replace(conversation="C"),
        KEY._replace(conversation=""),
    ],
)
def test_nothing_crosses_any_part_of_the_key(other: Key) -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    assert take(ledger, b"a", key=other).reason is Reason.FIRST_TURN


@pytest.mark.parametrize(("now", "reason"), [(99.9, None), (100.0, Reason.EXPIRED), (1000.0, Reason.EXPIRED)])
def test_a_handle_is_not_used_from_its_deadline_on(now: float, reason: Reason | None) -> None:
    ledger, left = MemoryLedger(), held("1", deadline=100.0)
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a", now=now)
    assert taken.reason is reason
    assert taken.drop == (() if reason is None else (left,))


def test_a_handle_that_is_declared_unusable_is_dropped_with_the_reason() -> None:
    ledger, left = MemoryLedger(), held("1")
    settle(ledger, b"a", handle=left)
    taken = ledger.take(KEY, digests.chain([b"a"]), 0.0, lambda _: Reason.ENGINE_CHANGED)
    assert (taken.held, taken.reason, taken.drop) == (None, Reason.ENGINE_CHANGED, (left,))
    assert take(ledger, b"a").reason is Reason.ENGINE_CHANGED


def test_the_branch_with_the_longest_common_history_is_found() -> None:
    ledger = MemoryLedger()
    agents = [(b"x", b"1"), (b"y", b"1"), (b"y", b"2")]
    for number, messages in enumerate(agents):
        first = ledger.take(KEY, digests.chain(messages), 0.0, usable)
        ledger.give_back(KEY, first)
        fresh = msgspec.structs.replace(first, branch=None, held=None)
        ledger.settle(KEY, fresh, branch(messages, held=held(str(number))), 0.0)
    taken = take(ledger, b"y", b"1", b"more")
    assert taken.held is not None
    assert (taken.held.handle.request_id, taken.common) == ("1", 2)


def test_of_equal_histories_the_one_with_a_handle_is_found() -> None:
    ledger = MemoryLedger()
    fresh = msgspec.structs.replace(take(ledger, b"a"), branch=None)
    for handle in (held("1"), None):
        ledger.settle(KEY, fresh, branch((b"a",), held=handle), 0.0)
    assert names(tuple(filter(None, [take(ledger, b"a").held]))) == ["1"]


def test_the_first_message_that_differs_is_told() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", b"b", b"c")
    assert take(ledger, b"a", b"B", b"c").diverged_at == 1
    assert take(ledger, b"a", b"b").diverged_at == 2  # shortened
    assert take(ledger, b"A").diverged_at == 0
    assert take(ledger, b"a", b"b", b"c").diverged_at is None


# --- what turns leave ----------------------------------------------------------------------------------------------------


def test_an_extension_replaces_its_branch() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    taken = take(ledger, b"a", b"b")
    assert ledger.settle(KEY, taken, branch((b"a", b"b"), held=held("2")), 0.0) == ()
    assert names(ledger.handles()) == ["2"]


def test_what_was_given_back_is_returned_when_it_is_superseded() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    taken = take(ledger, b"a")
    assert ledger.give_back(KEY, taken) == ()
    assert names(ledger.settle(KEY, taken, branch((b"a",), held=held("2")), 0.0)) == ["1"]


def test_a_history_that_shares_nothing_stands_beside() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    taken = take(ledger, b"other")
    assert taken.common == 0
    ledger.give_back(KEY, taken)
    assert ledger.settle(KEY, taken, branch((b"other",), held=held("2")), 0.0) == ()
    assert sorted(names(ledger.handles())) == ["1", "2"]


def test_agents_that_share_an_id_and_a_system_prompt_stand_beside_each_other() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"s", b"x", handle=leased("x1"))
    assert settle(ledger, b"s", b"y", handle=leased("y1")) == ()
    assert names(settle(ledger, b"s", b"x", b"more", handle=leased("x2"))) == ["x1"]
    assert names(settle(ledger, b"s", b"y", b"more", handle=leased("y2"))) == ["y1"]
    taken = take(ledger, b"s", b"x", b"more", b"still")
    assert (names((taken.held,)) if taken.held else None, taken.common) == (["x2"], 3)


def test_a_handle_that_reading_uses_up_is_left_to_its_branch_by_another_agent() -> None:
    ledger, left = MemoryLedger(), held("x")
    settle(ledger, b"s", b"x", b"answer", b"tool", handle=left)
    taken = take(ledger, b"s", b"y")
    assert (taken.held, taken.reason, taken.common, taken.diverged_at) == (None, Reason.DIVERGED, 1, 1)
    assert ledger.settle(KEY, taken, branch((b"s", b"y"), held=held("y")), 0.0) == ()
    assert take(ledger, b"s", b"x", b"answer", b"tool", b"more").held == left


def test_an_edit_behind_the_first_message_replaces_the_branch_whose_lease_is_released() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"s", b"x", b"answer", b"question", handle=leased("1"))
    assert names(settle(ledger, b"s", b"x", b"a summary", handle=leased("2"))) == ["1"]
    assert names(ledger.handles()) == ["2"]


def test_an_edit_behind_the_first_message_takes_the_handle_along() -> None:
    ledger, left = MemoryLedger(), held("1")
    settle(ledger, b"s", b"x", b"answer", b"question", handle=left)
    taken = take(ledger, b"s", b"x", b"answer", b"another")
    assert (taken.held, taken.extends, taken.diverged_at) == (left, False, 3)
    assert ledger.settle(KEY, taken, branch((b"s", b"x", b"answer", b"another"), held=held("2")), 0.0) == ()
    assert names(ledger.handles()) == ["2"]


def test_the_least_recently_used_branch_goes_where_there_are_too_many() -> None:
    ledger = MemoryLedger(max_branches=2)
    settle(ledger, b"x", handle=leased("x"))
    settle(ledger, b"y", handle=leased("y"))
    running = take(ledger, b"x", b"more")
    assert names(settle(ledger, b"z", handle=leased("z"))) == ["y"]
    assert names(ledger.settle(KEY, running, branch((b"x", b"more"), held=leased("x2")), 0.0)) == ["x"]


def test_the_oldest_branch_goes_where_there_are_too_many() -> None:
    ledger = MemoryLedger(max_branches=2)
    dropped = [names(settle(ledger, bytes([n]), handle=held(str(n)))) for n in range(1)]
    for n in (1, 2, 3):
        taken = take(ledger, bytes([n]))
        ledger.give_back(KEY, taken)
        dropped.append(names(ledger.settle(KEY, taken, branch((bytes([n]),), held=held(str(n))), 0.0)))
    assert dropped == [[], [], ["0"], ["1"]]


def test_two_turns_at_once_leave_two_branches() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    first, second = take(ledger, b"a", b"b"), take(ledger, b"a", b"c")
    assert ledger.settle(KEY, first, branch((b"a", b"b"), held=held("2")), 0.0) == ()
    assert ledger.settle(KEY, second, branch((b"a", b"c"), held=held("3")), 0.0) == ()
    assert sorted(names(ledger.handles())) == ["2", "3"]


def test_a_handle_that_went_unread_can_be_taken_again() -> None:
    ledger, left = MemoryLedger(), held("1")
    settle(ledger, b"a", handle=left)
    assert ledger.give_back(KEY, take(ledger, b"a")) == ()
    assert take(ledger, b"a").held == left


def test_a_handle_whose_branch_is_gone_is_returned_when_it_is_given_back() -> None:
    ledger, left = MemoryLedger(), held("1")
    settle(ledger, b"a", handle=left)
    slow, quick = take(ledger, b"a"), take(ledger, b"a")
    ledger.settle(KEY, quick, branch((b"a",)), 0.0)
    assert ledger.give_back(KEY, slow) == (left,)


def test_giving_back_nothing_changes_nothing() -> None:
    ledger = MemoryLedger()
    assert ledger.give_back(KEY, take(ledger, b"a")) == ()
    assert ledger.handles() == ()


def test_a_handle_that_was_used_up_leaves_its_reason() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    ledger.lost(KEY, take(ledger, b"a"), Reason.READ_FAILED)
    assert take(ledger, b"a").reason is Reason.READ_FAILED


def test_a_turn_that_left_no_handle_says_why() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a")
    assert take(ledger, b"a").reason is Reason.NO_HANDLE
    settle(ledger, b"b", missing=Reason.NO_PROOF)
    assert take(ledger, b"b").reason is Reason.NO_PROOF


# --- shared handles ------------------------------------------------------------------------------------------------------


def test_a_shared_handle_is_taken_by_as_many_turns_as_ask() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    for _ in range(3):
        taken = take(ledger, b"a", b"b")
        assert (taken.held, taken.reason) == (left, None)
    assert ledger.handles() == (left,)


def test_a_superseded_shared_handle_is_returned_when_its_last_taker_is_done() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    first, second, third = (take(ledger, b"a", bytes([n])) for n in range(3))
    assert ledger.settle(KEY, first, branch((b"a", b"b"), held=leased("2")), 0.0) == ()
    assert ledger.give_back(KEY, second) == ()
    assert names(ledger.settle(KEY, third, branch((b"a", b"c"), held=leased("3")), 0.0)) == ["1"]
    assert sorted(names(ledger.handles())) == ["2", "3"]


def test_a_shared_handle_that_nobody_else_has_is_superseded_at_once() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=leased("1"))
    assert names(settle(ledger, b"a", b"b", handle=leased("2"))) == ["1"]


def test_a_turn_of_another_history_leaves_a_shared_handle_where_it_is() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    assert settle(ledger, b"other", handle=leased("2")) == ()
    assert left in ledger.handles()
    assert take(ledger, b"a").held == left


def test_a_shared_handle_that_a_turn_found_void_is_gone_for_all() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=leased("1"))
    first, second = take(ledger, b"a"), take(ledger, b"a")
    assert ledger.lost(KEY, first, Reason.EXPIRED) == ()
    assert take(ledger, b"a").reason is Reason.EXPIRED
    assert names(ledger.give_back(KEY, second)) == ["1"]


def test_a_turn_can_leave_the_shared_handle_that_it_took() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a", b"b")
    assert ledger.settle(KEY, taken, branch((b"a", b"b"), held=left), 0.0) == ()
    assert take(ledger, b"a", b"b").held == left


def test_what_was_flushed_while_a_turn_ran_is_not_left_again() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a", b"b")
    assert ledger.flush() == ()
    assert ledger.settle(KEY, taken, branch((b"a", b"b"), held=left), 0.0) == (left,)
    assert ledger.handles() == ()


def test_the_end_of_a_conversation_waits_for_the_turn_that_reads() -> None:
    ledger, left = MemoryLedger(), leased("1")
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a", b"b")
    assert ledger.forget("c") == ()
    new = leased("2")
    assert sorted(names(ledger.settle(KEY, taken, branch((b"a", b"b"), held=new), 0.0))) == ["1", "2"]


def test_a_renewed_handle_is_used_until_its_new_deadline() -> None:
    ledger, left = MemoryLedger(), leased("1", deadline=100.0)
    settle(ledger, b"a", handle=left)
    assert ledger.held_for("c") == (left,)
    assert ledger.held_for("nobody") == ()
    ledger.renewed("c", {left.name: 200.0})
    assert ledger.sweep(150.0) == ()
    taken = take(ledger, b"a", now=199.0)
    assert taken.held is not None
    ledger.give_back(KEY, taken)
    assert names(ledger.sweep(200.0)) == ["1"]


# --- ends ----------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_conversation_returns_its_handles_under_every_model_and_salt() -> None:
    ledger = MemoryLedger()
    keys = [KEY, KEY._replace(model="m2"), KEY._replace(cache_salt="s")]
    others = [KEY._replace(tenant="t"), KEY._replace(conversation="c2")]
    for n, key in enumerate([*keys, *others]):
        settle(ledger, b"a", handle=held(str(n)), key=key)
    assert sorted(names(ledger.forget("c"))) == ["0", "1", "2"]
    assert sorted(names(ledger.handles())) == ["3", "4"]
    assert ledger.forget("c") == ()
    assert names(ledger.forget("c", "t")) == ["3"]
    assert take(ledger, b"a").reason is Reason.FIRST_TURN


def test_a_turn_that_outlives_its_conversation_gets_its_handle_back_to_release() -> None:
    ledger, left = MemoryLedger(), held("2")
    settle(ledger, b"a", handle=held("1"))
    running = take(ledger, b"a")
    assert ledger.forget("c") == ()
    assert ledger.settle(KEY, running, branch((b"a",), held=left), 0.0) == (left,)
    assert ledger.give_back(KEY, running) == (running.held,)
    assert len(ledger) == 0


def test_a_turn_does_not_settle_into_a_later_conversation_of_the_same_name() -> None:
    ledger, left = MemoryLedger(), held("1")
    running = take(ledger, b"a")
    ledger.forget("c")
    assert take(ledger, b"a").turn == 1
    assert ledger.settle(KEY, running, branch((b"a",), held=left), 0.0) == (left,)
    assert take(ledger, b"a").reason is Reason.FIRST_TURN


def test_a_flush_returns_every_handle_and_keeps_the_histories() -> None:
    ledger = MemoryLedger()
    for n, key in enumerate([KEY, KEY._replace(tenant="t")]):
        settle(ledger, b"a", handle=held(str(n)), key=key)
    assert sorted(names(ledger.flush())) == ["0", "1"]
    taken = take(ledger, b"a", b"b")
    assert (taken.turn, taken.common, taken.reason) == (2, 1, Reason.FLUSHED)


@pytest.mark.parametrize("rank", ["", "_dp0", "_dp12"])
def test_a_restart_voids_the_handles_of_that_engines_earlier_process_alone(rank: str) -> None:
    ledger = MemoryLedger()
    left = {"old": (D1, "old"), "new": (D1, "new"), "other": (D2, "old")}
    for name, (decode, engine_id) in left.items():
        key = KEY._replace(conversation=name)
        settle(ledger, b"a", handle=held(name, decode=decode, engine_id=engine_id + rank), key=key)
    assert names(ledger.drop_engine(D1, "old")) == ["old"]
    assert sorted(names(ledger.handles())) == ["new", "other"]
    assert take(ledger, b"a", key=KEY._replace(conversation="old")).reason is Reason.ENGINE_CHANGED


def test_handles_past_their_deadline_are_swept() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1", deadline=100.0))
    settle(ledger, b"a", handle=held("2", deadline=50.0), key=KEY._replace(tenant="t"))
    assert ledger.sweep(49.9) == ()
    assert names(ledger.sweep(50.0)) == ["2"]
    assert names(ledger.sweep(1000.0)) == ["1"]
    assert take(ledger, b"a", now=1000.0).reason is Reason.EXPIRED


def test_a_handle_that_comes_back_after_its_deadline_is_swept_as_well() -> None:
    ledger, left = MemoryLedger(), held("1", deadline=100.0)
    settle(ledger, b"a", handle=left)
    taken = take(ledger, b"a")
    assert ledger.sweep(100.0) == ()
    returned = ledger.give_back(KEY, taken)
    assert returned + ledger.sweep(101.0) == (left,)


def test_a_silent_conversation_is_forgotten() -> None:
    ledger, left = MemoryLedger(max_idle_s=60.0), held("1")
    settle(ledger, b"a", handle=left)
    assert ledger.sweep(60.0) == ()
    assert ledger.sweep(60.1) == (left,)
    assert len(ledger) == 0


def test_a_conversation_is_silent_from_its_last_turns_end() -> None:
    ledger = MemoryLedger(max_idle_s=60.0)
    slow, silent = KEY, KEY._replace(conversation="silent")
    taken = take(ledger, b"a", key=slow, now=0.0)
    settle(ledger, b"a", handle=held("silent"), key=silent, now=1.0)
    ledger.settle(slow, taken, branch((b"a",), held=held("slow")), 50.0)
    assert names(ledger.sweep(70.0)) == ["silent"]
    assert names(ledger.sweep(111.0)) == ["slow"]


def test_the_conversation_that_was_silent_longest_makes_room() -> None:
    ledger = MemoryLedger(max_conversations=2)
    a, b, c = (KEY._replace(conversation=name) for name in "abc")
    running = take(ledger, b"a", key=a, now=0.0)
    settle(ledger, b"a", handle=held("b"), key=b, now=1.0)
    ledger.settle(a, running, branch((b"a",), held=held("a")), 2.0)
    assert names(take(ledger, b"a", key=c, now=3.0).drop) == ["b"]
    assert len(ledger) == 2


def test_the_ledger_tells_its_size() -> None:
    ledger = MemoryLedger()
    settle(ledger, b"a", handle=held("1"))
    assert repr(ledger) == "<MemoryLedger 1 conversations, 1 handles>"


# --- whatever the interleaving -------------------------------------------------------------------------------------------

MESSAGES = (b"a", b"b", b"c")
HISTORIES = st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=3).map(tuple)
KEYS = st.sampled_from([Key("", "m", salt, name) for salt, name in (("", "x"), ("", "y"), ("s", "y"))])
MAX_CONVERSATIONS, MAX_BRANCHES, MAX_IDLE_S, LEASE_S = 2, 2, 20.0, 15.0


@dataclasses.dataclass
class Running:
    """A turn between its beginning and its end."""

    key: Key
    generation: int
    history: tuple[bytes, ...]
    taken: Taken


@dataclasses.dataclass
class Conversation:
    generation: int
    seen: float
    turns: int = 0
    branches: list[tuple[int, tuple[bytes, ...]]] = dataclasses.field(default_factory=list)


class Interleaving(RuleBasedStateMachine):
    """Turns, ends and the clock in any order. `where` says for each handle ever made who has it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(
            max_conversations=MAX_CONVERSATIONS, max_branches=MAX_BRANCHES, max_idle_s=MAX_IDLE_S
        )
        self.now = 0.0
        self.made = itertools.count()
        self.generations = itertools.count()
        self.where: dict[str, str] = {}
        self.made_by: dict[str, Held] = {}
        self.running: list[Running] = []
        self.known: dict[Key, Conversation] = {}
        self.restarts = 0

    # -- the model

    def dropped(self, handles: tuple[Held, ...], *, of: str = "ledger") -> None:
        """Handles that the ledger returns leave it, and are nobody else's."""
        for name in names(handles):
            assert self.where[name] == of
            self.where[name] = "dropped"

    def new_handle(self) -> Held:
        name = str(next(self.made))
        made = held(name, deadline=self.now + LEASE_S, engine_id=f"process-{self.restarts}")
        self.where[name], self.made_by[name] = "turn", made
        return made

    def why_unusable(self, handle: Held) -> Reason | None:
        return None if handle.handle.engine_id == f"process-{self.restarts}" else Reason.ENGINE_CHANGED

    def conversation_of(self, turn: Running) -> Conversation | None:
        conversation = self.known.get(turn.key)
        return conversation if conversation and conversation.generation == turn.generation else None

    def pick(self, data: st.DataObject) -> Running:
        return self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    def end_of_taken(self, turn: Running, fate: str) -> None:
        if turn.taken.held is not None:
            self.where[turn.taken.held.handle.request_id] = fate

    # -- what can happen

    @rule(seconds=st.sampled_from([5.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, history=HISTORIES)
    def a_turn_begins(self, key: Key, history: tuple[bytes, ...]) -> None:
        self.now += 0.1
        taken = self.ledger.take(key, digests.chain(history), self.now, self.why_unusable)
        if key not in self.known and len(self.known) == MAX_CONVERSATIONS:
            del self.known[min(self.known, key=lambda k: self.known[k].seen)]
        conversation = self.known.setdefault(key, Conversation(next(self.generations), self.now))
        conversation.seen = self.now
        conversation.turns += 1
        assert taken.turn == conversation.turns
        self.dropped(taken.drop)
        assert (taken.held is None) == (taken.reason is not None)
        assert (taken.reason is Reason.FIRST_TURN) == (not conversation.branches)
        if conversation.branches:
            shared = {number: self.shared(messages, history) for number, messages in conversation.branches}
            assert taken.branch is not None
            assert taken.common == shared[taken.branch.number] == max(shared.values())
            record = dict(conversation.branches)[taken.branch.number]
            assert taken.extends == (history[: len(record)] == record)
            if taken.extends:
                others = [one for one in conversation.branches if one[0] != taken.branch.number]
                conversation.branches = [*others, (taken.branch.number, record)]
        if taken.held is not None:
            name = taken.held.handle.request_id
            assert self.where[name] == "ledger"
            assert self.now < taken.held.deadline
            assert self.why_unusable(taken.held) is None
            self.where[name] = "turn"
        self.running.append(Running(key, conversation.generation, history, taken))

    @staticmethod
    def shared(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fate=st.sampled_from(["sent", "given back", "carried over"]), leaves=st.booleans())
    def a_turn_settles(self, data: st.DataObject, fate: str, leaves: bool) -> None:
        self.now += 0.1
        turn = self.pick(data)
        if fate == "carried over" and turn.taken.held is not None:
            left: Held | None = turn.taken.held
        else:
            left = self.new_handle() if leaves else None
            if fate == "given back":
                self.give_back(turn)
            else:
                self.end_of_taken(turn, "sent")
        new = branch(turn.history, held=left)
        dropped = self.ledger.settle(turn.key, turn.taken, new, self.now)
        if left is not None:
            self.where[left.handle.request_id] = "ledger"
        self.dropped(dropped)
        conversation = self.conversation_of(turn)
        if conversation is None:
            assert dropped == (() if left is None else (left,))
            return
        conversation.seen = self.now
        if turn.taken.branch is not None and (turn.taken.extends or turn.taken.common > 1):
            conversation.branches = [b for b in conversation.branches if b[0] != turn.taken.branch.number]
        conversation.branches = [*conversation.branches, (new.number, turn.history)][-MAX_BRANCHES:]

    def give_back(self, turn: Running) -> None:
        returned = self.ledger.give_back(turn.key, turn.taken)
        if turn.taken.held is None:
            assert returned == ()
            return
        conversation = self.conversation_of(turn)
        at_home = conversation is not None and any(
            turn.taken.branch is not None and number == turn.taken.branch.number for number, _ in conversation.branches
        )
        self.end_of_taken(turn, "ledger" if at_home else "turn")
        self.dropped(returned, of="turn")
        assert returned == (() if at_home else (turn.taken.held,))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_turn_gives_its_handle_back(self, data: st.DataObject) -> None:
        self.give_back(self.pick(data))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_turn_uses_its_handle_up(self, data: st.DataObject) -> None:
        turn = self.pick(data)
        if turn.taken.held is not None:  # as the turn does: what was not taken cannot be lost
            self.end_of_taken(turn, "sent")
            self.ledger.lost(turn.key, turn.taken, Reason.READ_FAILED)

    @rule(name=st.sampled_from("xy"))
    def a_conversation_ends(self, name: str) -> None:
        self.dropped(self.ledger.forget(name))
        for key in [key for key in self.known if key.conversation == name]:
            del self.known[key]

    @rule()
    def everything_is_flushed(self) -> None:
        self.dropped(self.ledger.flush())
        assert self.ledger.handles() == ()

    @rule()
    def the_decode_engine_restarts(self) -> None:
        before = f"process-{self.restarts}"
        self.restarts += 1
        self.dropped(self.ledger.drop_engine(D1, before))
        assert not [h for h in self.ledger.handles() if h.handle.engine_id == before]

    @rule()
    def the_ledger_is_swept(self) -> None:
        self.dropped(self.ledger.sweep(self.now))
        for key in [key for key, c in self.known.items() if self.now - c.seen > MAX_IDLE_S]:
            del self.known[key]
        assert not [h for h in self.ledger.handles() if h.deadline <= self.now]

    # -- what always holds

    @invariant()
    def every_handle_is_in_one_place(self) -> None:
        assert sorted(names(self.ledger.handles())) == sorted(n for n, place in self.where.items() if place == "ledger")

    @invariant()
    def the_ledger_is_bounded(self) -> None:
        assert len(self.ledger) == len(self.known) <= MAX_CONVERSATIONS
        assert len(self.ledger.handles()) <= MAX_CONVERSATIONS * MAX_BRANCHES


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=200, stateful_step_count=30)


class SharedInterleaving(RuleBasedStateMachine):
    """The same with handles that several turns can have: each is released once, never while a turn has it, and never lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(
            max_conversations=MAX_CONVERSATIONS, max_branches=MAX_BRANCHES, max_idle_s=MAX_IDLE_S
        )
        self.now = 0.0
        self.made: dict[str, Held] = {}
        self.released: set[str] = set()
        self.running: list[Running] = []

    def drop(self, handles: tuple[Held, ...]) -> None:
        for name in names(handles):
            assert name not in self.released
            assert name not in self.taken()
            self.released.add(name)

    def taken(self) -> set[str]:
        return {turn.taken.held.handle.request_id for turn in self.running if turn.taken.held is not None}

    def new_handle(self) -> Held:
        name = str(len(self.made))
        self.made[name] = leased(name, deadline=self.now + LEASE_S)
        return self.made[name]

    @rule(seconds=st.sampled_from([0.1, 5.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=KEYS, history=HISTORIES)
    def a_turn_begins(self, key: Key, history: tuple[bytes, ...]) -> None:
        taken = self.ledger.take(key, digests.chain(history), self.now, usable)
        self.drop(taken.drop)
        assert taken.reason is not Reason.IN_USE
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
            left = self.new_handle() if end == "settle" else turn.taken.held if end == "carry over" else None
            new = branch(turn.history, held=left)
            self.drop(self.ledger.settle(turn.key, turn.taken, new, self.now))

    @rule(name=st.sampled_from("xy"))
    def a_conversation_ends(self, name: str) -> None:
        self.drop(self.ledger.forget(name))

    @rule()
    def everything_is_flushed(self) -> None:
        self.drop(self.ledger.flush())

    @rule()
    def the_ledger_is_swept(self) -> None:
        self.drop(self.ledger.sweep(self.now))

    @rule(name=st.sampled_from("xy"))
    def a_conversation_is_renewed(self, name: str) -> None:
        deadlines = {held.name: self.now + LEASE_S for held in self.ledger.held_for(name)}
        self.ledger.renewed(name, deadlines)

    @invariant()
    def every_handle_is_on_file_or_taken_or_released(self) -> None:
        on_file = set(names(self.ledger.handles()))
        assert on_file.isdisjoint(self.released)
        assert on_file | self.taken() | self.released == self.made.keys()

    @invariant()
    def what_nobody_has_is_forgotten(self) -> None:
        assert self.ledger._left.keys() <= {(D1, name) for name in self.taken()}
        assert {name for _, name in self.ledger._takers} == self.taken()


TestSharedInterleaving = SharedInterleaving.TestCase
TestSharedInterleaving.settings = settings(max_examples=200, stateful_step_count=30)


def test_a_branch_keeps_its_number_when_its_handle_changes() -> None:
    one: Branch = branch(held=held("1"))
    assert msgspec.structs.replace(one, held=None).number == one.number != branch().number
