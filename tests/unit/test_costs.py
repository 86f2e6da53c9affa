"""What the legs of turns teach about an engine, and what becomes of wild samples."""

from __future__ import annotations

import pytest
from backhaul_router.fleet.load import ENOUGH, PRIOR_COMPUTE_MS, Costs, Line
from backhaul_router.report import Route
from core_values import D1, P1, P2
from hypothesis import given
from hypothesis import strategies as st

LENGTHS = [100, 400, 800, 1600, 3200, 6400]


def line(*samples: tuple[int, float]) -> Line:
    found = Line()
    for tokens, ms in samples:
        found.add(tokens, ms)
    return found


def taught(fixed: float = 10.0, per_token: float = 0.1) -> Costs:
    costs = Costs()
    for tokens in LENGTHS:
        costs.learn_compute(P1, fixed + per_token * tokens, tokens, alone=True)
    return costs


def test_nothing_is_known_before_enough_was_seen() -> None:
    few = line(*[(100, 10.0)] * (ENOUGH - 1))
    assert few.ms(100) is None
    few.add(100, 10.0)
    assert few.ms(100) == pytest.approx(10.0)


def test_what_is_fixed_and_what_is_per_token_are_told_apart() -> None:
    found = line(*[(tokens, 10 + tokens / 10) for tokens in LENGTHS])
    assert found.fixed_ms == pytest.approx(10.0)
    assert found.per_token_ms == pytest.approx(0.1)
    assert found.ms(10_000) == pytest.approx(1010.0)


def test_samples_of_one_length_say_nothing_of_what_is_fixed() -> None:
    found = line(*[(100, 50.0)] * 8)
    assert (found.fixed_ms, found.ms(100), found.ms(200)) == (0.0, 50.0, 100.0)


def test_wild_samples_hardly_move_the_line() -> None:
    samples = [(tokens, 10 + tokens / 10) for tokens in LENGTHS * 4]
    samples[::5] = [(tokens, 60_000.0) for tokens, _ in samples[::5]]
    assert line(*samples).ms(1000) == pytest.approx(110.0, rel=0.25)


def test_an_engine_that_becomes_slower_is_learned_anew() -> None:
    found = line(*[(tokens, tokens / 10) for tokens in LENGTHS * 4], *[(tokens, tokens) for tokens in LENGTHS * 4])
    assert found.ms(1000) == pytest.approx(1000.0)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e6, 1e9)), min_size=ENOUGH, max_size=40))
def test_no_samples_give_a_cost_below_zero_or_one_that_falls_with_length(samples: list[tuple[int, float]]) -> None:
    found = line(*samples)
    costs = [found.ms(tokens) for tokens in (0, 1, 1000, 10**6)]
    assert costs == sorted(cost for cost in costs if cost is not None and cost >= 0)


def test_a_prefill_that_may_have_waited_teaches_only_where_nothing_is_known() -> None:
    costs = taught()
    for tokens in LENGTHS * 4:
        costs.learn_compute(P1, 1e6, tokens, alone=False)
    assert costs.compute(P1, 1000) == pytest.approx(110.0)
    for tokens in LENGTHS:
        costs.learn_compute(P2, float(tokens), tokens, alone=False)
    assert costs.compute(P2, 1000) == pytest.approx(1000.0)


def test_a_read_is_what_a_prefill_takes_beyond_its_computing() -> None:
    costs = taught()
    for read in LENGTHS:
        costs.learn_read(P1, 20.0 + 5.0 + read / 100, computed=100, read=read, alone=True)
    assert costs.read(P1, 2000) == pytest.approx(25.0)


def test_a_read_teaches_nothing_before_it_is_known_what_computing_takes() -> None:
    costs = Costs()
    for read in LENGTHS:
        costs.learn_read(P1, 100.0, computed=100, read=read, alone=True)
    assert costs.read(P1, 1000) is None


def test_decode_is_believed_up_to_four_times_what_it_has_shown() -> None:
    costs = Costs()
    assert costs.local_reach(D1) == 0
    for tokens in (10, 20, 30, 40, 50, 60):
        costs.learn_first_byte(D1, 5.0, tokens, local=True)
    assert costs.local_reach(D1) == 240


def test_moving_a_history_costs_the_cheaper_of_reading_and_computing() -> None:
    costs = Costs()
    assert costs.moving_ms(P1, 10_000, readable=False) == pytest.approx(10_000 * PRIOR_COMPUTE_MS)
    assert costs.moving_ms(P1, 10_000, readable=True) < 10_000 * PRIOR_COMPUTE_MS / 4
    assert taught().moving_ms(P1, 10_000, readable=False) == pytest.approx(1010.0)


def test_a_route_that_was_passed_over_for_long_is_due_until_it_is_taken() -> None:
    costs = Costs()
    for _ in range(16):
        assert not costs.overdue(P1, Route.WARM)
        costs.passed_over(P1, Route.WARM)
    assert costs.overdue(P1, Route.WARM)
    assert not costs.overdue(P2, Route.WARM)
    costs.took(P1, Route.WARM)
    assert not costs.overdue(P1, Route.WARM)


def test_an_engine_that_is_gone_is_forgotten() -> None:
    costs = taught()
    costs.passed_over(P1, Route.WARM)
    costs.forget(P1)
    assert costs.compute(P1, 1000) is None
