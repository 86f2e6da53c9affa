"""What opens a breaker, what closes it, and where turns go meanwhile."""

from __future__ import annotations

import pytest
from backhaul_router.errors import FailureKind, Leg
from backhaul_router.fleet.breakers import SEVERAL, WINDOW_S, Breakers, BreakerState, EngineLeg, FailedRequest
from backhaul_router.fleet.engine import Role
from backhaul_router.fleet.fleet import Fleet
from core_values import D1, D2, P1, P2, engine, fleet

AT = EngineLeg(P1, Leg.PREFILL)
LATER = [FailureKind.TIMEOUT, FailureKind.BROKEN, FailureKind.ERROR]


def who(number: int) -> FailedRequest:
    return FailedRequest(f"c{number}", b"%d" % number)


def shut(on: Fleet, url: str, kind: FailureKind = FailureKind.ERROR) -> None:
    found = on.get(url)
    assert found is not None
    for number in range(SEVERAL):
        on.note_failure(found, None, kind, who(number), 0.0)
    assert not on.available(found)


@pytest.mark.parametrize("kind", LATER)
def test_failures_of_several_conversations_open_a_breaker(kind: FailureKind) -> None:
    breakers = Breakers()
    opened = [breakers.failed(AT, kind, who(number), 0.0) for number in range(SEVERAL)]
    assert opened == [False] * (SEVERAL - 1) + [True]
    assert breakers.states() == {AT: BreakerState.OPEN}


@pytest.mark.parametrize("kind", LATER)
def test_one_conversation_cannot_open_a_breaker_however_often_it_fails(kind: FailureKind) -> None:
    breakers = Breakers()
    assert not any(breakers.failed(AT, kind, FailedRequest("c", b"%d" % number), 0.0) for number in range(100))


@pytest.mark.parametrize("named", [True, False])
def test_one_request_cannot_open_a_breaker_under_however_many_names(named: bool) -> None:
    breakers = Breakers()
    names = (f"c{number}" if named else "" for number in range(100))
    assert not any(breakers.failed(AT, FailureKind.BROKEN, FailedRequest(name, b"poison"), 0.0) for name in names)


def test_different_requests_without_a_conversation_are_several() -> None:
    breakers = Breakers()
    assert any(
        breakers.failed(AT, FailureKind.BROKEN, FailedRequest("", b"%d" % number), 0.0) for number in range(SEVERAL)
    )


def test_a_refused_connection_opens_a_breaker_at_once() -> None:
    breakers = Breakers()
    assert breakers.failed(AT, FailureKind.REFUSED, who(0), 0.0)
    assert breakers.rank(*AT) == 2


def test_an_answer_between_failures_begins_anew() -> None:
    breakers = Breakers()
    for number in range(10):
        assert not breakers.failed(AT, FailureKind.ERROR, who(number), 0.0)
        breakers.answered(AT)


def test_failures_of_long_ago_do_not_count() -> None:
    breakers = Breakers()
    assert not any(breakers.failed(AT, FailureKind.ERROR, who(n), n * (WINDOW_S + 1)) for n in range(10))


def test_one_probe_at_a_time_holds_the_half_open_slot() -> None:
    breakers = Breakers()
    breakers.failed(AT, FailureKind.REFUSED, who(0), 0.0)
    assert [breakers.probing(AT), breakers.probing(AT)] == [True, False]
    assert breakers.states() == {AT: BreakerState.HALF_OPEN}
    breakers.probe_failed(AT, FailureKind.ERROR)
    assert breakers.states() == {AT: BreakerState.OPEN}
    assert breakers.rank(*AT) == 1, "somebody listens there now"


def test_an_answer_closes_a_breaker() -> None:
    breakers = Breakers()
    breakers.failed(AT, FailureKind.REFUSED, who(0), 0.0)
    assert breakers.answered(AT)
    assert (breakers.states(), breakers.any_open) == ({}, False)


def test_a_refused_connection_shuts_every_leg_and_another_failure_its_own() -> None:
    on = fleet(P1, P2, D1)
    first = engine(P1)
    on.note_failure(first, Leg.RENDER, FailureKind.REFUSED, who(0), 0.0)
    assert not on.available(first)
    on.note_answer(first, Leg.PREFILL)
    for number in range(SEVERAL):
        on.note_failure(first, Leg.RENDER, FailureKind.ERROR, who(number), 0.0)
    assert on.available(first)
    assert on.breaker_states()[EngineLeg(P1, Leg.RENDER)] is BreakerState.OPEN


def test_every_leg_of_every_engine_has_a_state() -> None:
    on = fleet(P1, D1)
    shut(on, P1)
    assert on.breaker_states() == {
        (P1, Leg.RENDER): BreakerState.CLOSED,
        (P1, Leg.PREFILL): BreakerState.OPEN,
        (D1, Leg.RENDER): BreakerState.CLOSED,
        (D1, Leg.DECODE): BreakerState.CLOSED,
    }


# --- where turns go ------------------------------------------------------------------------------------------------------


def picked(on: Fleet, role: Role, preferred: str | None = None, without: tuple[str, ...] = ()) -> str | None:
    found = on.pick(role, preferred, without)
    return found.url if found else None


def test_an_engine_that_is_shut_out_is_passed_over_even_where_it_is_preferred() -> None:
    on = fleet(P1, P2, D1)
    shut(on, P1)
    assert picked(on, Role.PREFILL, P1) == P2


def test_when_all_are_shut_out_the_least_bad_is_still_tried() -> None:
    on = fleet(P1, P2, D1)
    shut(on, P1, FailureKind.REFUSED)
    shut(on, P2)
    assert picked(on, Role.PREFILL, P1) == P2


def test_an_engine_that_is_shut_out_is_the_last_resort_of_a_turn() -> None:
    on = fleet(P1, P2, D1)
    shut(on, P1)
    assert picked(on, Role.PREFILL, without=(P2,)) == P1
    assert picked(on, Role.PREFILL, without=(P1, P2)) is None


def test_a_draining_decode_engine_gets_its_own_conversations_and_no_new_ones() -> None:
    on = fleet(P1, D1, D2)
    on.drain(D1)
    on.load.begin(D2)
    assert (picked(on, Role.DECODE), picked(on, Role.DECODE, D1)) == (D2, D1)


def test_a_draining_prefill_engine_gets_nothing_while_there_is_another() -> None:
    on = fleet(P1, P2, D1)
    on.drain(P1)
    assert picked(on, Role.PREFILL, P1) == P2
    assert picked(on, Role.PREFILL, without=(P2,)) == P1


def test_a_healthy_engine_that_drains_goes_before_one_that_is_shut_out() -> None:
    on = fleet(P1, P2, D1)
    on.drain(P1)
    shut(on, P2)
    assert picked(on, Role.PREFILL) == P1


def test_a_removed_engine_is_no_last_resort() -> None:
    on = fleet(P1, D1, D2)
    on.close(D1)
    assert picked(on, Role.DECODE, D1, without=(D2,)) is None
    on.remove(D1)
    assert [one.url for one in on.decode] == [D2]
