"""Which engine a conversation goes to, where it stays, and when it leaves."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from backhaul_router.fleet.engine import Engine, Role
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.fleet.load import Homes
from backhaul_router.wire.engine_metrics import Gauges, read_gauges
from core_values import D1, D2, P1, P2, engine, fleet
from hypothesis import given
from hypothesis import strategies as st

IDLE, BUSY = Gauges(0, 0, 0.0), Gauges(4, 0, 0.5)
FULL = Gauges(20, 0, 0.97)

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-1
"""


def pick(on: Fleet, role: Role = Role.DECODE, home: str | None = None, moving_ms: float = 0.0) -> Engine:
    found = on.pick(role, home, moving_ms=moving_ms)
    assert found is not None
    return found


def open_conversations(on: Fleet, number: int, first: int = 0) -> Counter[str]:
    """One after the other, none of which overlaps with another."""
    placed: Counter[str] = Counter()
    for name in range(first, first + number):
        decode, prefill = pick(on), pick(on, Role.PREFILL)
        on.load.placed(("", str(name)), decode.url, prefill.url, 0.0)
        placed.update((decode.url, prefill.url))
    return placed


def test_the_load_that_an_engine_shows_is_added_up_over_its_ranks() -> None:
    found = read_gauges(PAGE)
    assert found is not None
    assert (found.running, found.waiting) == (4.0, 2.0)
    assert found.kv_usage == pytest.approx(0.3)


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 1", PAGE.replace("1e-1", "1e")])
def test_a_page_without_the_load_says_nothing(page: str) -> None:
    assert read_gauges(page) is None


# --- where conversations begin -------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 40), st.integers())
def test_conversations_that_never_overlap_are_spread_evenly(engines: int, number: int, seed: int) -> None:
    urls = [f"http://{role}{n}:1" for role in "pd" for n in range(engines)]
    on = Fleet([engine(url) for url in urls], seed)
    placed = open_conversations(on, number)
    for role in "pd":
        counts = [placed[url] for url in urls if url.startswith(f"http://{role}")]
        assert max(counts) - min(counts) <= 1


@given(st.data())
def test_they_stay_spread_while_others_end_and_go_on(data: st.DataObject) -> None:
    """A new one always goes where the fewest live, whatever has happened."""
    on = fleet(P1, D1, D2, "http://d3:1")
    live: dict[str, str] = {}
    for name in map(str, range(30)):
        ended = data.draw(st.sampled_from([None, *sorted(live)]))
        if ended is not None:
            on.load.end_conversation(ended)
            del live[ended]
        decode = pick(on)
        counts = Counter(dict.fromkeys([engine.url for engine in on.decode], 0)) + Counter(live.values())
        assert counts[decode.url] == min(counts[engine.url] for engine in on.decode)
        on.load.placed(("", name), decode.url, None, 0.0)
        live[name] = decode.url


def test_ties_go_to_the_one_that_was_chosen_least_recently() -> None:
    on = fleet(P1, D1, D2)
    for expected in (D1, D2, D1, D2):
        decode = pick(on)
        assert decode.url == expected
        on.load.placed(None, decode.url, None, 0.0)


def test_routers_do_not_all_begin_with_the_same_engine() -> None:
    first = {pick(Fleet([engine(P1), engine(D1), engine(D2)], seed)).url for seed in range(1, 20)}
    assert first == {D1, D2}


def test_tokens_in_flight_weigh_more_than_calls() -> None:
    on = fleet(P1, P2, D1)
    on.load.begin(P1, 30_000)
    for _ in range(3):
        on.load.begin(P2, 100)
    assert pick(on, Role.PREFILL).url == P2
    on.load.end(P1, 30_000)
    assert pick(on, Role.PREFILL).url == P1


def test_what_others_run_there_counts_and_ones_own_is_not_counted_twice() -> None:
    on = fleet(P1, D1, D2)
    for _ in range(3):
        on.load.begin(D1)
    on.load.read(D1, Gauges(3, 0, 0.1), 0.0)
    assert on.load.calls(D1) == 3
    on.load.read(D2, Gauges(5, 0, 0.1), 0.0)
    assert on.load.calls(D2) == 5
    assert pick(on).url == D1


def test_what_an_engine_counted_while_calls_came_and_went_is_not_others() -> None:
    on = fleet(P1, D1, D2)
    on.load.read(D1, Gauges(8, 0, 0.1), 0.0, own=8)  # they have ended since
    assert on.load.calls(D1) == 0
    on.load.read(D1, Gauges(6, 0, 0.1), 2.0)  # they began after it was asked, and have ended again
    assert on.load.calls(D1) == 0
    on.load.read(D1, Gauges(7, 0, 0.1), 4.0)
    assert on.load.calls(D1) == 6


def test_a_full_engine_gets_no_new_conversation_while_another_is_not() -> None:
    on = fleet(P1, D1, D2)
    open_conversations(on, 6)
    on.load.placed(("", "more"), D2, None, 0.0)
    on.load.read(D1, FULL, 0.0)
    assert pick(on).url == D2
    on.load.read(D2, FULL, 0.0)
    assert pick(on).url == D1


def test_what_an_engine_said_long_ago_does_not_count() -> None:
    on = fleet(P1, D1, D2)
    on.load.read(D1, FULL, 10.0)
    on.load.expire(before=11.0, now=20.0)
    assert (on.load.gauges(D1), on.load.is_full(D1), pick(on).url) == (None, False, D1)


def test_a_conversation_that_is_silent_does_not_count_after_a_while() -> None:
    on = fleet(P1, D1, D2)
    for name in "ab":
        on.load.placed(("", name), D1, None, 0.0)
    on.load.placed(("", "c"), D2, None, 500.0)
    on.load.expire(before=0.0, now=700.0)
    assert (on.load.homes.count(D1), on.load.homes.count(D2), len(on.load.homes)) == (0, 1, 1)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from([D1, D2, ""]), st.integers(0, 900))))
def test_homes_are_counted_right(steps: list[tuple[str, str, int]]) -> None:
    homes, live, now = Homes(), dict[str, str](), 0.0
    for name, at, later in steps:
        now += later / 10
        homes.expire(now)
        if at:
            homes.settle(("", name), (at,), now)
            live[name] = at
        else:
            homes.end(("", name))
            live.pop(name, None)
    assert sum(homes.count(at) for at in (D1, D2)) == len(homes) <= len(live)


# --- where they stay -----------------------------------------------------------------------------------------------------


def test_a_conversation_stays_whatever_is_a_little_less_busy() -> None:
    on = fleet(P1, D1, D2)
    for _ in range(8):
        on.load.begin(D1)
    assert pick(on, home=D1).url == D1


def test_it_leaves_where_far_more_runs_than_elsewhere_and_does_not_come_back() -> None:
    on = fleet(P1, D1, D2)
    for _ in range(9):
        on.load.begin(D1)
    assert pick(on, home=D1).url == D2
    on.load.begin(D2)
    assert pick(on, home=D2).url == D2


def test_it_leaves_a_full_decode_engine_for_one_with_room() -> None:
    on = fleet(P1, D1, D2)
    on.load.read(D1, FULL, 0.0)
    on.load.read(D2, BUSY, 0.0)
    assert pick(on, home=D1).url == D2


def test_it_stays_where_all_are_full() -> None:
    on = fleet(P1, D1, D2)
    for one in on.decode:
        on.load.read(one.url, FULL, 0.0)
    assert [pick(on, home=one.url).url for one in on.decode] == [D1, D2]


def test_it_stays_where_the_other_has_hardly_more_room() -> None:
    on = fleet(P1, D1, D2)
    on.load.read(D1, Gauges(4, 0, 0.95), 0.0)
    on.load.read(D2, Gauges(4, 0, 0.94), 0.0)
    assert pick(on, home=D1).url == D1


def test_only_some_leave_between_two_readings() -> None:
    """If all did, the next one would be full, and they would come back."""
    on = fleet(P1, D1, D2)
    homes = dict.fromkeys(map(str, range(32)), engine(D1))
    on.load.read(D2, IDLE, 0.0)
    for expected in (32, 28, 25):
        for name, home in homes.items():
            if (to := pick(on, home=home.url)) != home:
                on.load.left(home.url)
            on.load.placed(("", name), to.url, None, 0.0)
            homes[name] = to
        assert list(homes.values()).count(engine(D1)) == expected
        on.load.read(D1, FULL, 0.0)


@pytest.mark.parametrize(("conversations", "moves"), [(40, range(16, 24)), (60, range(36))])
def test_a_fleet_comes_to_rest(conversations: int, moves: range) -> None:
    """All began on one engine, which holds 24 of them: it thrashes while the other is idle. Where both hold all of them, they
    spread; where both together cannot, they stay at last."""
    on, made = fleet(P1, D1, D2), 0
    homes = dict.fromkeys(map(str, range(conversations)), engine(D1))
    for step in range(30):
        live = Counter(home.url for home in homes.values())
        for one in on.decode:
            on.load.read(one.url, Gauges(4, 0, min(1.0, live[one.url] / 24)), float(step))
        before = made
        for name, home in homes.items():
            if (to := pick(on, home=home.url)) != home:
                on.load.left(home.url)
                made += 1
            on.load.placed(("", name), to.url, None, float(step))
            homes[name] = to
    assert made == before, "still moving"
    assert made in moves
    assert abs(live[D1] - live[D2]) <= 12


@pytest.mark.parametrize(
    ("then", "full"),
    [(Gauges(4, 0, 0.9), True), (Gauges(4, 8, 0.5), True), (Gauges(4, 2, 0.85), False), (IDLE, False)],
)
def test_a_full_engine_is_full_until_it_has_clearly_room(then: Gauges, full: bool) -> None:
    on = fleet()
    on.load.read(D1, FULL, 0.0)
    on.load.read(D1, then, 1.0)
    assert on.load.is_full(D1) is full


def test_an_engine_where_many_wait_is_full_whatever_its_cache() -> None:
    on = fleet(P1, D1, D2)
    on.load.read(D1, Gauges(4, 9, 0.2), 0.0)
    on.load.read(D2, BUSY, 0.0)
    assert pick(on, home=D1).url == D2


def test_readings_that_tremble_move_nobody_to_and_fro() -> None:
    """A cache that is full one moment and not the next, on both engines in turns."""
    on, home, moves = fleet(P1, D1, D2), D1, 0
    for step in range(40):
        low, high = Gauges(4, 0, 0.9), Gauges(4, 0, 0.96)
        on.load.read(D1, high if step % 2 else low, float(step))
        on.load.read(D2, low if step % 2 else high, float(step))
        to = pick(on, home=home).url
        if to != home:
            on.load.left(home)
            home, moves = to, moves + 1
        on.load.placed(("", "c"), home, None, float(step))
    assert moves <= 1


def test_a_prefill_queue_is_left_when_waiting_costs_more_than_moving() -> None:
    on = fleet(P1, P2, D1)
    on.load.begin(P1, 4_000)  # 400 ms by the prior
    assert pick(on, Role.PREFILL, P1, moving_ms=500.0).url == P1
    assert pick(on, Role.PREFILL, P1, moving_ms=100.0).url == P2
    on.load.begin(P2, 4_000)
    assert pick(on, Role.PREFILL, P1, moving_ms=100.0).url == P1


@given(st.lists(st.tuples(st.sampled_from([P1, P2, D1, D2]), st.integers(0, 10**6)), max_size=30), st.data())
def test_an_excluded_engine_is_never_picked(calls: list[tuple[str, int]], data: st.DataObject) -> None:
    on = fleet(P1, P2, D1, D2)
    for url, tokens in calls:
        on.load.begin(url, tokens)
    for url in (D1, D2):
        if data.draw(st.booleans()):
            on.load.read(url, FULL, 0.0)
    for role, urls in ((Role.PREFILL, (P1, P2)), (Role.DECODE, (D1, D2))):
        for without, home in itertools.product(({urls[0]}, {urls[1]}, set(urls)), (None, *urls)):
            found = on.pick(role, home, without)
            assert (found is None) == (without == set(urls))
            assert found is None or found.url not in without
