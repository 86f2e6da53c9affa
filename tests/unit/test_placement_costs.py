"""Which route a turn takes where the engines have been measured: the thresholds', unless another is clearly faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Taken
from backhaul_router.report import Basis, Proof, Reason, Route
from backhaul_router.turn.placement import NoEngine, Placement, Prompt, place, why_moved
from backhaul_router.wire.engine_metrics import Gauges
from core_values import BLOCK, D1, D2, P1, P2, branch, config, fleet, held, leased, taken
from hypothesis import given
from hypothesis import strategies as st

RAN = list(range(10_000, 12_048))
"""The history: 128 blocks."""
LENGTHS = (64, 128, 256, 512, 1024, 2048)


def history(**fields: Any) -> Taken:
    return taken(branch(ids=RAN, held=held(tokens=len(RAN)), **fields))


def checked(**fields: Any) -> Taken:
    """The same on a D of ours."""
    return taken(branch(ids=RAN, held=leased(tokens=len(RAN)), **fields))


def prompt(new: int) -> Prompt:
    ids = [*RAN, *range(new)]
    return Prompt(1000, len(ids), digests.block_chain(ids, BLOCK), BLOCK)


def teach(
    on: Fleet,
    *,
    compute: float | None = 0.1,
    read: float | None = 0.01,
    local: float | None = None,
    handoff: float | None = 10.0,
    prefill: str = P1,
) -> Fleet:
    """Milliseconds per token, and of D's first byte."""
    for tokens in LENGTHS:
        if compute is not None:
            on.costs.learn_compute(prefill, 5 + compute * tokens, tokens)
    for tokens in LENGTHS:
        if read is not None and compute is not None:
            on.costs.learn_read(prefill, 5 + compute * 64 + read * tokens, 64, tokens, alone=True)
        if local is not None:
            on.costs.learn_first_byte(D1, local * tokens, tokens, local=True)
        if handoff is not None:
            on.costs.learn_first_byte(D1, handoff, tokens, local=False)
    return on


def told(of: Placement) -> Mapping[Route, float]:
    assert of.estimates is not None
    return of.estimates


def placed(new: int, of: Taken | None = None, on: Fleet | None = None, **settings: Any) -> Placement:
    found = place(prompt(new), of or history(), on or fleet(), config(**settings))
    assert isinstance(found, Placement)
    return found


# --- what decides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "route"), [(60, Route.LOCAL), (500, Route.WARM)])
def test_before_anything_is_measured_the_thresholds_decide(new: int, route: Route) -> None:
    found = placed(new)
    assert (found.route, found.basis, found.estimates or {}) == (route, Basis.THRESHOLDS, {})


def test_a_turn_that_has_no_choice_is_decided_by_nothing() -> None:
    found = placed(500, Taken(reason=Reason.FIRST_TURN), teach(fleet()))
    assert (found.route, found.basis, found.estimates or {}) == (Route.COLD, None, {})


def test_the_estimates_are_told_also_where_they_agree() -> None:
    found = placed(500, on=teach(fleet()))
    assert (found.route, found.basis, found.instead_of) == (Route.WARM, Basis.THRESHOLDS, None)
    assert told(found)[Route.WARM] == pytest.approx(0.01 * 2048 + 5 + 50 + 10, rel=0.05)
    assert told(found)[Route.COLD] == pytest.approx(0.1 * 2548 + 5 + 10, rel=0.05)


def test_reading_that_is_clearly_slower_than_computing_is_left() -> None:
    found = placed(500, on=teach(fleet(), read=0.5))
    assert (found.route, found.reason, found.basis) == (Route.COLD, Reason.SLOWER, Basis.ESTIMATES)
    assert (found.proof, found.blocks, found.instead_of) == (None, 0, Route.WARM)


def test_reading_that_is_a_little_slower_is_not() -> None:
    found = placed(500, on=teach(fleet(), read=0.12))
    assert told(found)[Route.WARM] > told(found)[Route.COLD]
    assert (found.route, found.basis) == (Route.WARM, Basis.THRESHOLDS)


def test_a_difference_of_a_few_milliseconds_decides_nothing() -> None:
    found = placed(500, on=teach(fleet(), compute=0.001, read=0.005))
    assert told(found)[Route.WARM] > 1.25 * told(found)[Route.COLD]
    assert found.route is Route.WARM


def test_a_forced_route_is_not_estimated() -> None:
    on = teach(fleet(), read=0.5)
    found = place(prompt(500), history(), on, config(), force=Route.WARM)
    assert isinstance(found, Placement)
    assert (found.route, found.basis, found.estimates or {}) == (Route.WARM, Basis.FORCED, {})


def test_a_route_that_was_passed_over_for_long_is_measured_again() -> None:
    on = teach(fleet(), read=0.5)
    routes = []
    for _ in range(18):
        found = placed(500, on=on)
        on.costs.took(P1, found.route)
        if found.instead_of:
            on.costs.passed_over(P1, found.instead_of)
        routes.append(found.route)
        if found.basis is Basis.MEASURING:
            assert found.proof is Proof.TOKENS
    assert routes == [*[Route.COLD] * 16, Route.WARM, Route.COLD]


def test_costs_that_are_switched_off_are_told_and_decide_nothing() -> None:
    found = placed(500, on=teach(fleet(), read=0.5), place_by_cost=False)
    assert told(found)[Route.WARM] > 2 * told(found)[Route.COLD]
    assert (found.route, found.basis) == (Route.WARM, Basis.THRESHOLDS)
    on = teach(ours(), compute=0.5, local=0.05)
    assert placed(400, checked(), on, place_by_cost=False).route is Route.WARM


# --- local ---------------------------------------------------------------------------------------------------------------


def ours() -> Fleet:
    return fleet(connector=1)


def test_a_longer_suffix_is_local_where_that_is_measured_to_be_faster() -> None:
    on = teach(ours(), compute=0.5, local=0.05)
    found = placed(400, checked(), on)
    assert (found.route, found.reason, found.prefill, found.basis) == (Route.LOCAL, None, None, Basis.ESTIMATES)
    assert told(found)[Route.LOCAL] < told(found)[Route.WARM]


def test_a_stock_decode_engine_leaves_no_handle_so_there_the_threshold_stays() -> None:
    on = teach(fleet(), compute=0.5, local=0.05)
    assert placed(400, on=on).route is Route.WARM


@pytest.mark.parametrize(("new", "route"), [(1024, Route.LOCAL), (1025, Route.WARM)])
def test_no_rate_makes_more_local_than_sixteen_times_the_threshold(new: int, route: Route) -> None:
    on = teach(ours(), compute=0.5, local=0.001)
    assert placed(new, checked(), on).route is route


def test_a_rate_is_not_believed_far_from_what_was_measured() -> None:
    on = teach(ours(), compute=0.5)
    for tokens in (10, 12, 14, 20, 40, 50):
        on.costs.learn_first_byte(D1, 1.0, tokens, local=True)
    assert [placed(new, checked(), on).route for new in (200, 201)] == [Route.LOCAL, Route.WARM]


def test_local_that_is_switched_off_stays_off() -> None:
    on = teach(ours(), compute=0.5, local=0.001)
    assert placed(10, checked(), on, local_max_tokens=0).route is Route.WARM


def test_a_short_suffix_is_not_local_where_decode_is_slow_with_it() -> None:
    on = teach(ours(), compute=0.01, read=0.001, local=5.0)
    found = placed(60, checked(), on)
    assert (found.route, found.basis, found.instead_of) == (Route.WARM, Basis.ESTIMATES, Route.LOCAL)


def test_a_queue_on_prefill_makes_a_turn_local() -> None:
    on = teach(ours(), local=0.2)
    assert placed(400, checked(), on).route is Route.WARM
    on.load.begin(P1, 20_000)
    assert placed(400, checked(), on).route is Route.LOCAL


# --- prefill engines -----------------------------------------------------------------------------------------------------


def test_a_queue_of_others_counts_too() -> None:
    on = fleet(P1, P2, D1)
    on.load.read(P1, Gauges(6, 6, 0.1), 0.0)
    found = placed(500, on=on)
    assert found.prefill is not None
    assert (found.prefill.url, found.route) == (P2, Route.WARM)
    assert why_moved(found, history().branch, on, frozenset()) == {P1: "prefill:busy"}


def test_a_conversation_without_a_handle_stays_longer_with_the_prefill_that_has_its_prefix() -> None:
    on = fleet(P1, P2, D1)
    on.load.begin(P1, 1500)
    without = Taken(branch=history().branch, reason=Reason.IN_USE, common=1)
    assert [p.prefill and p.prefill.url for p in (placed(500, on=on), placed(500, without, on))] == [P2, P1]


def test_what_a_turn_left_is_told() -> None:
    on = fleet(P1, P2, D2)
    found = placed(500, history(decode=D1), on)
    assert why_moved(found, history().branch, on, frozenset()) == {D1: "decode:gone"}
    on = fleet(P1, P2, D1, D2)
    failed = frozenset({P1, D1})
    found_after = place(prompt(500), history(), on, config(), without=failed)
    assert isinstance(found_after, Placement)
    assert why_moved(found_after, history().branch, on, failed) == {P1: "prefill:failed", D1: "decode:failed"}


# --- whatever was measured -----------------------------------------------------------------------------------------------

MS = st.floats(0, 1e9)
URLS = (P1, P2, D1, D2)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    connector = draw(st.sampled_from([None, 1]))
    on = fleet(*URLS, connector=connector)
    for url in (P1, P2):
        for ms, tokens in draw(st.lists(st.tuples(MS, st.integers(0, 10**6)), max_size=10)):
            on.costs.learn_compute(url, ms, tokens)
            on.costs.learn_read(url, ms, 10, tokens, alone=draw(st.booleans()))
    for url in (D1, D2):
        for ms, tokens in draw(st.lists(st.tuples(MS, st.integers(1, 10**6)), max_size=10)):
            on.costs.learn_first_byte(url, ms, tokens, local=draw(st.booleans()))
    for url in URLS:
        on.load.begin(url, draw(st.integers(0, 10**9)))
        if draw(st.booleans()):
            on.load.read(url, Gauges(*(draw(MS) for _ in range(3))), 0.0)
    if draw(st.booleans()):
        on.pairs.note(P1, D1, "hangs")
    return on


@given(fleets(), st.integers(0, 4000), st.booleans(), st.sets(st.sampled_from(URLS)), st.sampled_from([0, 64]))
def test_whatever_was_measured_a_placement_is_legal(
    on: Fleet, new: int, by_connector: bool, without: set[str], local: int
) -> None:
    of = checked() if by_connector else history()
    found = place(prompt(new), of, on, config(local_max_tokens=local), without=frozenset(without))
    if isinstance(found, NoEngine):
        assert {url for url in URLS if on.get(url).role is found.role} <= without  # type: ignore[union-attr]
        return
    used = {found.decode.url, found.prefill.url if found.prefill else None}
    assert not used & without
    if found.route is Route.LOCAL:
        assert (found.decode.url, found.prefill) == (D1, None)
        assert found.computes <= 16 * local
    else:
        assert found.prefill is not None
    if found.route is Route.WARM:
        assert found.reason is None
        assert found.proof is not None
        assert found.prefill is not None
        assert found.prefill.url not in on.pairs.unsafe_for(D1)
    assert (found.route is Route.COLD) == (found.reason is not None)


@given(fleets(), st.integers(1, 4000))
def test_placing_changes_nothing(on: Fleet, new: int) -> None:
    assert place(prompt(new), history(), on, config()) == place(prompt(new), history(), on, config())
