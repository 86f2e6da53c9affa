"""What tells one process of a decode engine from the next."""

from __future__ import annotations

import uuid

import pytest
from backhaul_router.fleet.restarts import ProcessMatch, Restarts, is_fixed

D = "http://d1:1"
RANDOM, FIXED = "0b7e1d5c-94a1-4f0e-8c56-3f1d2a7b9e40", "decode-0"


def known(began: float | None = 100.0) -> Restarts:
    restarts = Restarts()
    restarts.know(D, began)
    return restarts


@pytest.mark.parametrize("engine_id", [RANDOM, f"{RANDOM}_dp3"])
def test_an_id_that_vllm_made_is_not_fixed(engine_id: str) -> None:
    assert not is_fixed(engine_id)


@pytest.mark.parametrize("engine_id", ["decode-0", "decode-0_dp1", str(uuid.UUID(int=7)), RANDOM.upper()])
def test_any_other_is(engine_id: str) -> None:
    assert is_fixed(engine_id)


def test_an_engine_that_nothing_happened_to_is_not_asked() -> None:
    assert not known().in_doubt(D, RANDOM)


def test_one_with_a_fixed_id_is_asked_each_time() -> None:
    restarts = known()
    assert restarts.in_doubt(D, FIXED)
    restarts.confirmed(D, restarts.fence(D))
    assert restarts.in_doubt(D, FIXED)


def test_one_that_had_a_fixed_id_is_as_good_as_any_without_it() -> None:
    restarts = known()
    restarts.shared = True
    restarts.warn_of_fixed(D, FIXED)
    assert restarts.is_never_sure(D, FIXED)
    assert not restarts.in_doubt(D, RANDOM)
    assert restarts.match(D, 100.0, RANDOM) is ProcessMatch.SAME


def test_a_fixed_id_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    restarts = known()
    for engine_id in (RANDOM, FIXED, FIXED):
        restarts.warn_of_fixed(D, engine_id)
    (record,) = caplog.records
    assert repr(FIXED) in record.message
    assert "Leave engine_id out" in record.message


def test_one_that_refused_a_connection_is_asked_once() -> None:
    restarts = known()
    restarts.doubt(D)
    assert restarts.in_doubt(D, RANDOM)
    restarts.confirmed(D, restarts.fence(D))
    assert not restarts.in_doubt(D, RANDOM)


def test_its_word_from_before_the_doubt_does_not_end_it() -> None:
    restarts = known()
    restarts.doubt(D)
    asked = restarts.fence(D)
    restarts.doubt(D)
    restarts.confirmed(D, asked)
    restarts.made_handle(D, RANDOM, asked)
    assert restarts.in_doubt(D, RANDOM)


def test_one_whose_metrics_show_another_beginning_is_asked() -> None:
    restarts = known(100.0)
    restarts.showed(D, 100.0)
    restarts.showed(D, None)
    assert not restarts.in_doubt(D, RANDOM)
    restarts.showed(D, 200.0)
    assert restarts.in_doubt(D, RANDOM)


@pytest.mark.parametrize("began", [200.0, None])
def test_one_that_is_described_again_is_asked_unless_it_is_the_same(began: float | None) -> None:
    restarts = known(100.0)
    restarts.know(D, 100.0)
    assert not restarts.in_doubt(D, RANDOM)
    restarts.know(D, began)
    assert restarts.in_doubt(D, RANDOM)
    assert restarts.began(D) == 100.0


def test_a_doubt_outlasts_a_description() -> None:
    restarts = known(100.0)
    restarts.doubt(D)
    restarts.know(D, 100.0)
    assert restarts.in_doubt(D, RANDOM)


@pytest.mark.parametrize("began", [100.0, None])
def test_a_new_handle_with_a_random_id_ends_a_doubt(began: float | None) -> None:
    """Of an engine with several API servers, which never says when it began, nothing else would."""
    restarts = known(began)
    restarts.doubt(D)
    restarts.made_handle(D, FIXED, restarts.fence(D))
    assert restarts.in_doubt(D, RANDOM)
    restarts.made_handle(D, RANDOM, restarts.fence(D))
    assert not restarts.in_doubt(D, RANDOM)


def test_the_beginning_that_was_shown_before_is_that_of_the_process_that_made_the_handle() -> None:
    restarts = known(100.0)
    restarts.void(D)  # another id was seen
    assert restarts.match(D, 200.0, RANDOM) is ProcessMatch.UNKNOWN
    restarts.showed(D, 200.0)
    restarts.made_handle(D, RANDOM, restarts.fence(D))
    assert restarts.match(D, 200.0, RANDOM) is ProcessMatch.SAME
    restarts.showed(D, 200.0)
    assert not restarts.in_doubt(D, RANDOM)


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (100.0, 100.0, ProcessMatch.SAME),
        (100.0, 200.0, ProcessMatch.ANOTHER),
        (100.0, None, ProcessMatch.UNKNOWN),
        (None, 100.0, ProcessMatch.UNKNOWN),
        (None, None, ProcessMatch.UNKNOWN),
    ],
)
def test_an_engine_is_another_process_only_where_it_was_seen_to_be(
    before: float | None, now: float | None, verdict: ProcessMatch
) -> None:
    assert known(before).match(D, now, FIXED) is verdict
    assert known(before).match(D, now, RANDOM) is verdict


@pytest.mark.parametrize(
    ("shared", "began", "sure"), [(False, 100.0, True), (True, 100.0, False), (False, None, False)]
)
def test_a_fixed_id_is_told_apart_by_one_router_that_sees_every_beginning(
    shared: bool, began: float | None, sure: bool
) -> None:
    restarts = known(began)
    restarts.shared = shared
    assert restarts.is_never_sure(D, FIXED) is not sure
    assert not restarts.is_never_sure(D, RANDOM)
    assert restarts.in_doubt(D, FIXED)
    assert (restarts.match(D, began, FIXED) is ProcessMatch.SAME) is sure


def test_what_was_taken_before_a_restart_is_void_afterwards() -> None:
    restarts = known(100.0)
    taken = restarts.count(D)
    restarts.replaced(D, 200.0)
    assert restarts.count(D) != taken
    assert restarts.match(D, 200.0, FIXED) is ProcessMatch.SAME
    assert not restarts.in_doubt(D, RANDOM)


def test_an_engine_that_is_gone_is_in_nobodys_doubt_and_what_it_had_is_void() -> None:
    restarts = known()
    taken = restarts.count(D)
    restarts.doubt(D)
    restarts.forget(D)
    restarts.doubt(D)
    assert not restarts.in_doubt(D, RANDOM)
    assert restarts.count(D) != taken
