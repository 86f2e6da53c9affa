"""What tells one process of a decode engine from the next."""

from __future__ import annotations

import uuid

import pytest
from backhaul_router.fleet.restarts import Processes, Verdict, is_fixed

D = "http://d1:1"
RANDOM, FIXED = "0b7e1d5c-94a1-4f0e-8c56-3f1d2a7b9e40", "decode-0"


def known(began: float | None = 100.0) -> Processes:
    processes = Processes()
    processes.know(D, began)
    return processes


@pytest.mark.parametrize("engine_id", [RANDOM, f"{RANDOM}_dp3"])
def test_an_id_that_vllm_made_is_not_fixed(engine_id: str) -> None:
    assert not is_fixed(engine_id)


@pytest.mark.parametrize("engine_id", ["decode-0", "decode-0_dp1", str(uuid.UUID(int=7)), RANDOM.upper()])
def test_any_other_is(engine_id: str) -> None:
    assert is_fixed(engine_id)


def test_an_engine_that_nothing_happened_to_is_not_asked() -> None:
    assert not known().in_doubt(D, RANDOM)


def test_one_with_a_fixed_id_is_asked_each_time() -> None:
    processes = known()
    assert processes.in_doubt(D, FIXED)
    processes.confirmed(D, processes.asked(D))
    assert processes.in_doubt(D, FIXED)


def test_one_that_had_a_fixed_id_is_as_good_as_any_without_it() -> None:
    processes = known()
    processes.shared = True
    processes.warn_of_fixed(D, FIXED)
    assert processes.is_never_sure(D, FIXED)
    assert not processes.in_doubt(D, RANDOM)
    assert processes.verdict(D, 100.0, RANDOM) is Verdict.SAME


def test_a_fixed_id_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    processes = known()
    for engine_id in (RANDOM, FIXED, FIXED):
        processes.warn_of_fixed(D, engine_id)
    (record,) = caplog.records
    assert repr(FIXED) in record.message
    assert "Leave engine_id out" in record.message


def test_one_that_refused_a_connection_is_asked_once() -> None:
    processes = known()
    processes.doubt(D)
    assert processes.in_doubt(D, RANDOM)
    processes.confirmed(D, processes.asked(D))
    assert not processes.in_doubt(D, RANDOM)


def test_its_word_from_before_the_doubt_does_not_end_it() -> None:
    processes = known()
    processes.doubt(D)
    asked = processes.asked(D)
    processes.doubt(D)
    processes.confirmed(D, asked)
    processes.made_handle(D, RANDOM, asked)
    assert processes.in_doubt(D, RANDOM)


def test_one_whose_metrics_show_another_beginning_is_asked() -> None:
    processes = known(100.0)
    processes.showed(D, 100.0)
    processes.showed(D, None)
    assert not processes.in_doubt(D, RANDOM)
    processes.showed(D, 200.0)
    assert processes.in_doubt(D, RANDOM)


@pytest.mark.parametrize("began", [200.0, None])
def test_one_that_is_described_again_is_asked_unless_it_is_the_same(began: float | None) -> None:
    processes = known(100.0)
    processes.know(D, 100.0)
    assert not processes.in_doubt(D, RANDOM)
    processes.know(D, began)
    assert processes.in_doubt(D, RANDOM)
    assert processes.began(D) == 100.0


def test_a_doubt_outlasts_a_description() -> None:
    processes = known(100.0)
    processes.doubt(D)
    processes.know(D, 100.0)
    assert processes.in_doubt(D, RANDOM)


@pytest.mark.parametrize("began", [100.0, None])
def test_a_new_handle_with_a_random_id_ends_a_doubt(began: float | None) -> None:
    """Of an engine with several API servers, which never says when it began, nothing else would."""
    processes = known(began)
    processes.doubt(D)
    processes.made_handle(D, FIXED, processes.asked(D))
    assert processes.in_doubt(D, RANDOM)
    processes.made_handle(D, RANDOM, processes.asked(D))
    assert not processes.in_doubt(D, RANDOM)


def test_the_beginning_that_was_shown_before_is_that_of_the_process_that_made_the_handle() -> None:
    processes = known(100.0)
    processes.void(D)  # another id was seen
    assert processes.verdict(D, 200.0, RANDOM) is Verdict.UNKNOWN
    processes.showed(D, 200.0)
    processes.made_handle(D, RANDOM, processes.asked(D))
    assert processes.verdict(D, 200.0, RANDOM) is Verdict.SAME
    processes.showed(D, 200.0)
    assert not processes.in_doubt(D, RANDOM)


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (100.0, 100.0, Verdict.SAME),
        (100.0, 200.0, Verdict.ANOTHER),
        (100.0, None, Verdict.UNKNOWN),
        (None, 100.0, Verdict.UNKNOWN),
        (None, None, Verdict.UNKNOWN),
    ],
)
def test_an_engine_is_another_process_only_where_it_was_seen_to_be(
    before: float | None, now: float | None, verdict: Verdict
) -> None:
    assert known(before).verdict(D, now, FIXED) is verdict
    assert known(before).verdict(D, now, RANDOM) is verdict


@pytest.mark.parametrize(
    ("shared", "began", "sure"), [(False, 100.0, True), (True, 100.0, False), (False, None, False)]
)
def test_a_fixed_id_is_told_apart_by_one_router_that_sees_every_beginning(
    shared: bool, began: float | None, sure: bool
) -> None:
    processes = known(began)
    processes.shared = shared
    assert processes.is_never_sure(D, FIXED) is not sure
    assert not processes.is_never_sure(D, RANDOM)
    assert processes.in_doubt(D, FIXED)
    assert (processes.verdict(D, began, FIXED) is Verdict.SAME) is sure


def test_what_was_taken_before_a_restart_is_void_afterwards() -> None:
    processes = known(100.0)
    taken = processes.restarts(D)
    processes.replaced(D, 200.0)
    assert processes.restarts(D) != taken
    assert processes.verdict(D, 200.0, FIXED) is Verdict.SAME
    assert not processes.in_doubt(D, RANDOM)


def test_an_engine_that_is_gone_is_in_nobodys_doubt_and_what_it_had_is_void() -> None:
    processes = known()
    taken = processes.restarts(D)
    processes.doubt(D)
    processes.forget(D)
    processes.doubt(D)
    assert not processes.in_doubt(D, RANDOM)
    assert processes.restarts(D) != taken
