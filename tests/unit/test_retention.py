"""Retention: what decode engines keep is counted exactly, and what is least expected to be used is given up first."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from backhaul_router.fleet.retention import Cause, Retention, Victim
from backhaul_router.ledger import digests
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.ledger.records import Held, Key, Taken
from backhaul_router.report import Reason, Route
from backhaul_router.turn.states import route_turn
from backhaul_router.wire.engine_metrics import kv_tokens_of
from core_values import BLOCK, D1, D2, P1, branch, facts, fleet, held, leased
from turn_drive import FIRST, NAMED, Drive, history

SIZE = 8 * BLOCK
"""Tokens of every handle here, unless a test says otherwise."""


def kept(retention: Retention, name: str, *, turn: int = 1, named: bool = True, now: float = 0.0, **of: Any) -> Held:
    """A whole turn of the conversation `name`, which leaves a handle of that name."""
    left = held(name, **of)
    key = Key("", "m", "", name)
    filed = branch(held=left, decode=left.decode, by_history=not named)
    retention.settled(key, Taken(1, turn), filed, (), now)
    return left


def given_up(retention: Retention) -> list[str]:
    return [victim.key.conversation for victim in retention.take_due()]


def of_three(**settings: Any) -> Retention:
    """A budget of three handles."""
    return Retention(budget=3 * SIZE, **settings)


# --- counting ------------------------------------------------------------------------------------------------------------


def test_what_is_filed_counts_in_whole_blocks_where_it_lies() -> None:
    retention = Retention()
    retention.know(D1, 100 * BLOCK, BLOCK)
    kept(retention, "a", tokens=BLOCK + 1)
    kept(retention, "b", tokens=BLOCK, decode=D2)
    assert (retention.retained(D1), retention.retained("http://d3")) == (2 * BLOCK, 0)
    assert retention.retained(D2) == BLOCK
    assert len(retention) == 2


def test_a_next_turn_takes_the_place_of_the_one_before() -> None:
    retention = Retention()
    before = kept(retention, "a", tokens=SIZE)
    taken = Taken(1, 2, branch(held=before), before)
    retention.took(taken)
    assert retention.retained(D1) == SIZE, "it is not read yet"
    retention.read(before)
    assert retention.retained(D1) == 0
    left = held("a2", tokens=2 * SIZE)
    retention.settled(Key("", "m", "", "a"), taken, branch(held=left), (), 1.0)
    assert retention.retained(D1) == 2 * SIZE
    assert retention.released == {Cause.READ: 1}


def test_a_shared_lease_counts_until_the_ledger_drops_it() -> None:
    retention = Retention()
    before = leased("a")
    retention.settled(Key("", "m", "", "a"), Taken(1, 1), branch(held=before), (), 0.0)
    taken = Taken(1, 2, branch(held=before), before)
    retention.took(taken)
    left = leased("a2")
    retention.settled(Key("", "m", "", "a"), taken, branch(held=left), (before,), 1.0)
    assert retention.retained(D1) == SIZE
    assert retention.released == {Cause.SUPERSEDED: 1}


def test_a_turn_whose_conversation_has_ended_leaves_nothing() -> None:
    retention, left = Retention(), held("a")
    retention.settled(Key("", "m", "", "a"), Taken(1, 1), branch(held=left), (left,), 0.0)
    assert (len(retention), retention.retained(D1)) == (0, 0)


def test_what_nobody_has_told_of_is_forgotten_with_its_lease() -> None:
    retention = Retention()
    kept(retention, "a", deadline=10.0)
    kept(retention, "b", now=11.0)
    assert (len(retention), retention.released) == (1, {Cause.EXPIRED: 1})


def test_a_renewed_lease_counts_on() -> None:
    retention = Retention()
    left = kept(retention, "a", deadline=10.0)
    retention.renewed({left.name: 100.0}, 9.0)
    kept(retention, "b", now=11.0)
    assert len(retention) == 2


BUDGET = 3 * SIZE


class Books:
    """A ledger and the accounts beside it, told of the same as a router tells them."""

    def __init__(self, rng: random.Random, make: Any) -> None:
        self.rng, self.make = rng, make
        self.ledger = MemoryLedger(max_conversations=6, max_branches=2, max_idle_s=50.0)
        self.retention = Retention(budget=BUDGET)
        self.running: list[tuple[Key, bytes, Taken]] = []
        self.now, self.numbers = 0.0, itertools.count()
        self.victims: Counter[str] = Counter()

    def dropped(self, held: Iterable[Held]) -> None:
        self.retention.dropped(tuple(held))

    def step(self) -> None:
        match self.rng.choice(["begin"] * 6 + ["settle"] * 6 + ["give back", "lose", "end", "time", "flush"]):
            case "begin":
                key = Key("", "m", "", self.rng.choice("abcdefgh"))
                chain = digests.chain([b"s", b"q", *[self.rng.choice([b"x", b"y"]) for _ in range(3)]])
                taken = self.ledger.take(key, chain, self.now, lambda _: None)
                self.retention.took(taken)
                self.running.append((key, chain, taken))
            case "settle" if self.running:
                self.settle(*self.pick())
            case "give back" if self.running:
                key, _, taken = self.pick()
                back = self.ledger.give_back(key, taken)
                self.retention.gave_back(taken, back)
            case "lose" if self.running:
                key, _, taken = self.pick()
                gone = self.ledger.lost(key, taken, Reason.NO_HANDLE)
                self.retention.lost(taken, gone)
            case "end":
                self.dropped(self.ledger.forget(self.rng.choice("abcdefgh")))
            case "time":
                self.now += self.rng.choice([1.0, 10.0])
                self.dropped(self.ledger.sweep(self.now))
            case "flush" if self.rng.random() < 0.1:
                self.dropped(self.ledger.flush())
        for victim in self.retention.take_due():
            self.give_up(victim)

    def pick(self) -> tuple[Key, bytes, Taken]:
        return self.running.pop(self.rng.randrange(len(self.running)))

    def settle(self, key: Key, chain: bytes, taken: Taken) -> None:
        used_up = taken.held is not None and not taken.held.shared
        if used_up and taken.held is not None:
            self.retention.read(taken.held)
        left = self.make(str(next(self.numbers)), deadline=self.now + 30.0)
        filed = branch(held=left, chain=chain)
        dropped = self.ledger.settle(key, taken, filed, self.now)
        self.retention.settled(key, taken, filed, dropped, self.now)

    def give_up(self, victim: Victim) -> None:
        name = victim.held.name
        dropped = self.ledger.drop_for(victim.key.conversation, lambda held: held.name == name, Reason.EVICTED)
        assert [one.name for one in dropped] == [name]
        self.victims[name[1]] += 1
        self.dropped(dropped)

    def check(self) -> None:
        on_file = {held.name for held in self.ledger.handles()}
        on_loan = {taken.held.name for _, _, taken in self.running if taken.held is not None}
        assert on_file <= self.retention.names() <= on_file | on_loan
        assert self.retention.retained(D1) == len(self.retention) * SIZE
        assert all(count == 1 for count in self.victims.values())


@pytest.mark.parametrize("make", [held, leased], ids=["stock", "connector"])
@pytest.mark.parametrize("seed", range(4))
def test_the_accounts_are_the_ledgers_whatever_happens(seed: int, make: Any) -> None:
    books = Books(random.Random(seed), make)
    for _ in range(600):
        books.step()
        books.check()
    assert books.victims, "the budget never mattered"
    assert books.retention.retained(D1) <= BUDGET + SIZE * len(books.running)
    for key, _, taken in books.running:
        books.retention.gave_back(taken, books.ledger.give_back(key, taken))
    books.dropped(books.ledger.flush())
    assert (len(books.retention), books.retention.retained(D1)) == (0, 0)


# --- what goes first -----------------------------------------------------------------------------------------------------


def test_nothing_is_given_up_within_the_budget() -> None:
    retention = of_three()
    for name in "abc":
        kept(retention, name)
    assert given_up(retention) == []


def test_of_the_same_kind_the_one_silent_for_longest_goes_first() -> None:
    retention = of_three()
    for now, name in enumerate("abcde"):
        kept(retention, name, now=float(now))
    assert given_up(retention) == ["a", "b"]
    assert retention.released == {Cause.BUDGET: 2}


def test_a_conversation_without_a_name_goes_before_a_named_one_and_a_first_turn_before_a_second() -> None:
    retention = of_three()
    kept(retention, "second", turn=2)
    kept(retention, "first", turn=1, now=1.0)
    kept(retention, "nameless", turn=1, named=False, now=2.0)
    kept(retention, "x", turn=4, now=3.0)
    assert given_up(retention) == ["nameless"]
    kept(retention, "y", turn=4, now=4.0)
    assert given_up(retention) == ["first"]
    kept(retention, "z", turn=4, now=5.0)
    assert given_up(retention) == ["second"]


def test_what_was_just_left_goes_first_where_it_is_worth_least() -> None:
    retention = of_three()
    for name in "abc":
        kept(retention, name, turn=5)
    kept(retention, "nameless", named=False, now=1.0)
    assert given_up(retention) == ["nameless"]


def test_a_long_silence_outweighs_several_turns() -> None:
    retention = of_three(one_shot_s=10.0)
    kept(retention, "old", turn=9)
    for name in "abc":
        kept(retention, name, now=75.0)
    assert given_up(retention) == ["old"]


def test_a_renewal_is_a_sign_of_life() -> None:
    retention = of_three()
    first = kept(retention, "a")
    for now, name in enumerate("bc"):
        kept(retention, name, now=float(now))
    retention.renewed({first.name: 500.0}, 5.0)
    kept(retention, "d", now=6.0)
    assert given_up(retention) == ["b"]


def test_a_pause_counts_as_the_silence_that_is_still_to_come() -> None:
    retention = of_three()
    paused = kept(retention, "paused", now=100.0)
    retention.paused([paused.name], 100.0, 60.0)
    kept(retention, "silent for 30 s", now=70.0)
    kept(retention, "a", now=100.0)
    kept(retention, "b", now=100.0)
    assert given_up(retention) == ["paused"]


def test_a_pause_that_is_nearly_over_is_worth_keeping() -> None:
    retention = of_three()
    paused = kept(retention, "paused", now=100.0)
    retention.paused([paused.name], 100.0, 60.0)
    kept(retention, "silent for 40 s", now=115.0)
    kept(retention, "a", now=155.0)
    kept(retention, "b", now=155.0)
    assert given_up(retention) == ["silent for 40 s"]


def test_what_a_turn_has_taken_is_not_given_up() -> None:
    retention = of_three()
    first = kept(retention, "a")
    taken = Taken(1, 2, branch(held=first), first)
    retention.took(taken)
    for now, name in enumerate("bcd"):
        kept(retention, name, now=float(now + 1))
    assert given_up(retention) == ["b"]
    retention.gave_back(taken, ())
    kept(retention, "e", now=9.0)
    assert given_up(retention) == ["a"]


def test_a_budget_of_nothing_keeps_nothing() -> None:
    retention = Retention(budget=0)
    kept(retention, "a")
    assert (given_up(retention), retention.retained(D1)) == (["a"], 0)


def test_without_a_budget_and_an_engine_that_says_its_size_everything_is_kept() -> None:
    retention = Retention()
    for number in range(50):
        kept(retention, str(number))
    assert (given_up(retention), retention.budget(D1), retention.free(D1)) == ([], None, None)


def test_a_budget_that_changes_counts_from_the_next_turn_on() -> None:
    retention = of_three()
    for now, name in enumerate("abc"):
        kept(retention, name, now=float(now))
    retention.configure(2 * SIZE, 60.0)
    kept(retention, "d", now=3.0)
    assert given_up(retention) == ["a", "b"]


def test_half_of_what_an_engine_has_is_the_budget() -> None:
    retention = Retention()
    retention.know(D1, 4 * SIZE, BLOCK)
    for name in "abc":
        kept(retention, name)
    assert (retention.budget(D1), retention.retained(D1)) == (2 * SIZE, 2 * SIZE)
    assert given_up(retention) == ["a"]


# --- room ----------------------------------------------------------------------------------------------------------------


def with_room_for(handles: int) -> Retention:
    """An engine that has so much, all of which may be kept."""
    retention = Retention(budget=100 * SIZE)
    retention.know(D1, handles * SIZE, BLOCK)
    return retention


def test_a_turn_has_what_is_in_its_way_given_up_before_it_goes() -> None:
    retention = with_room_for(4)
    for now, name in enumerate("abcd"):
        kept(retention, name, now=float(now))
    assert (given_up(retention), retention.free(D1)) == ([], 0)
    _, victims = retention.reserve(D1, SIZE, BLOCK)
    assert [victim.key.conversation for victim in victims] == ["a", "b"]
    assert {victim.cause for victim in victims} == {Cause.ROOM}
    assert retention.take_due() == victims


def test_a_turn_that_fits_costs_nothing() -> None:
    retention = with_room_for(4)
    kept(retention, "a")
    reserved, victims = retention.reserve(D1, 2 * SIZE, SIZE)
    assert (victims, retention.free(D1)) == ((), 0)
    retention.unreserve(reserved)
    assert retention.free(D1) == 3 * SIZE


def test_turns_that_wait_for_others_do_not_wait_for_what_those_leave() -> None:
    retention = with_room_for(2)
    runs = [retention.reserve(D1, SIZE, 0)[0] for _ in range(3)]
    assert retention.free(D1) == -SIZE
    retention.unreserve(runs[0])
    kept(retention, "a")
    assert given_up(retention) == ["a"], "the third one needs these blocks"
    retention.unreserve(runs[1])
    kept(retention, "b")
    assert given_up(retention) == []


def test_an_answer_is_expected_to_be_twice_as_long_as_usual_and_never_longer_than_asked_for() -> None:
    retention = Retention()
    assert (retention.answer_of(None), retention.answer_of(10)) == (512, 10)
    for _ in range(500):
        retention.note_answer(1000)
    assert 1990 <= retention.answer_of(None) <= 2000


# --- what engines say ------------------------------------------------------------------------------------------------------


def test_what_others_keep_there_counts_and_takes_from_the_budget_but_not_all_of_it() -> None:
    retention = Retention(budget=4 * SIZE)
    for now, name in enumerate("abc"):
        kept(retention, name, now=float(now))
    retention.note_kept(D1, 5 * SIZE)
    assert given_up(retention) == ["a"]
    assert retention.retained(D1) == 4 * SIZE
    retention.note_kept(D1, 100 * SIZE)
    assert (given_up(retention), len(retention)) == (["b"], 1)


def test_blocks_that_histories_have_in_common_count_once_when_the_engine_has_said_so() -> None:
    retention = Retention(budget=4 * SIZE)
    for name in "abcd":
        kept(retention, name)
    retention.note_kept(D1, 2 * SIZE)
    assert retention.retained(D1) == 2 * SIZE
    for name in "efgh":
        kept(retention, name)
    assert (given_up(retention), retention.retained(D1)) == ([], 4 * SIZE)


def test_engines_are_asked_now_and_then_once_it_matters() -> None:
    retention = of_three()
    assert retention.to_look_at(0.0) == ()
    kept(retention, "a")
    kept(retention, "b")
    assert [retention.to_look_at(at) for at in (1.0, 6.0, 7.0, 12.0)] == [(), (D1,), (), (D1,)]


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        (['block_size="16",num_gpu_blocks="101"'], 1600),
        (['block_size="16",engine="0",kv_cache_size_tokens="1500",num_gpu_blocks="101"'], 1500),
        ([f'block_size="16",engine="{n}",kv_cache_size_tokens="None",num_gpu_blocks="202"' for n in "01"], 3200),
        ([f'block_size="16",engine="{n}",kv_cache_size_tokens="1500",num_gpu_blocks="202"' for n in "01"], 3000),
        (['block_size="16",num_gpu_blocks="None"'], None),
        ([], None),
    ],
)
def test_an_engine_says_how_much_it_has(labels: list[str], tokens: int | None) -> None:
    page = "".join(f"vllm:cache_config_info{{{label}}} 1.0\n" for label in labels)
    assert kv_tokens_of(page) == tokens


# --- turns ---------------------------------------------------------------------------------------------------------------


def test_a_turn_reserves_what_it_needs_and_returns_it_whatever_comes() -> None:
    drive = Drive(FIRST, request=facts(max_tokens=16))
    retention = drive.fleet.retention
    retention.know(D1, 1000 * BLOCK, BLOCK)
    drive.leave()
    assert retention.free(D1) == 1000 * BLOCK


@pytest.mark.parametrize("route", [Route.LOCAL, Route.COLD])
def test_a_turn_needs_no_room_for_what_is_kept_for_it(route: Route) -> None:
    before = history()
    drive = Drive(before, identity=NAMED, route=route)
    turn, retention = drive.turn, drive.fleet.retention
    retention.know(D1, 1000 * BLOCK, BLOCK)
    turn.token_ids = tuple(range(200))
    turn.draft.prompt = 200
    route_turn(turn, 0.0)
    room = 1000 * BLOCK - (retention.free(D1) or 0)
    answer = retention.answer_of(None)
    assert room == -(-(200 - (128 if route is Route.LOCAL else 0) + answer) // BLOCK) * BLOCK


def test_the_account_of_an_engine_that_was_removed_ends_with_its_last_handle() -> None:
    on = fleet(P1, D1, D2)
    left = kept(on.retention, "a")
    on.remove(D1)
    assert on.retention.retained(D1) == SIZE
    on.retention.dropped([left])
    assert (on.retention.retained(D1), list(on.retention._decodes)) == (0, [D2])


def test_a_turn_that_runs_on_where_its_engine_was_removed_leaves_no_account() -> None:
    on = fleet(P1, D1, D2)
    reserved, _ = on.retention.reserve(D1, 100, 10)
    on.remove(D1)
    on.retention.unreserve(reserved)
    on.retention.note_kept(D1, 1_000)
    late, _ = on.retention.reserve(D1, 100, 10)
    on.retention.unreserve(late)
    assert (on.retention.running(D1), list(on.retention._decodes)) == (0, [D2])


# --- bounds --------------------------------------------------------------------------------------------------------------


def test_the_order_does_not_grow_with_the_turns() -> None:
    retention = Retention(budget=100 * SIZE)
    left, filed = held("x"), branch()
    for number in range(5_000):
        handle = msgspec.structs.replace(left.handle, request_id=str(number % 300))
        of_this = msgspec.structs.replace(left, handle=handle)
        key = Key("", "m", "", str(number % 300))
        retention.settled(key, Taken(1, 1), msgspec.structs.replace(filed, held=of_this), (), number / 100)
        retention.take_due()
    assert len(retention) == 100
    assert max(len(retention._decodes[D1].order), len(retention._deadlines)) <= 2 * 100 + 64
