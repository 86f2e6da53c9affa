"""What tells one process of a decode engine from the next."""

from __future__ import annotations

import uuid

import pytest
from backhaul_router.processes import Processes, is_fixed

D = "http://d1:1"


def known(began: float | None = 100.0) -> Processes:
    processes = Processes()
    processes.know(D, began)
    return processes


@pytest.mark.parametrize("engine_id", [str(uuid.uuid4()), f"{uuid.uuid4()}_dp3"])
def test_an_id_that_vllm_made_is_not_fixed(engine_id: str) -> None:
    assert not is_fixed(engine_id)


@pytest.mark.parametrize("engine_id", ["decode-0", "decode-0_dp1", str(uuid.UUID(int=7)), str(uuid.uuid4()).upper()])
def test_any_other_is(engine_id: str) -> None:
    assert is_fixed(engine_id)


def test_an_engine_that_nothing_happened_to_is_not_asked() -> None:
    assert not known().in_doubt(D, str(uuid.uuid4()))


def test_one_with_a_fixed_id_is_asked_each_time_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    processes = known()
    assert processes.in_doubt(D, "decode-0")
    processes.confirmed(D)
    assert processes.in_doubt(D, "decode-0")
    (record,) = caplog.records
    assert "'decode-0'" in record.message
    assert "Leave engine_id out" in record.message


def test_one_that_refused_a_connection_is_asked_once() -> None:
    processes = known()
    processes.doubt(D)
    assert processes.in_doubt(D)
    processes.confirmed(D)
    assert not processes.in_doubt(D)


def test_one_whose_metrics_show_another_beginning_is_asked() -> None:
    processes = known(100.0)
    processes.showed(D, 100.0)
    processes.showed(D, None)
    assert not processes.in_doubt(D)
    processes.showed(D, 200.0)
    assert processes.in_doubt(D)


@pytest.mark.parametrize(("before", "now"), [(100.0, 200.0), (100.0, None), (None, 100.0), (None, None)])
def test_only_an_engine_that_says_the_same_as_before_is_the_same(before: float | None, now: float | None) -> None:
    assert known(before).is_another(D, now)
    assert not known(100.0).is_another(D, 100.0)


@pytest.mark.parametrize(
    ("shared", "began", "sure"), [(False, 100.0, True), (True, 100.0, False), (False, None, False)]
)
def test_a_fixed_id_is_told_apart_by_one_router_that_sees_every_beginning(
    shared: bool, began: float | None, sure: bool
) -> None:
    processes = known(began)
    processes.shared = shared
    assert processes.is_never_sure(D, "decode-0") is not sure
    assert not processes.is_never_sure(D, str(uuid.uuid4()))
    assert processes.in_doubt(D, "decode-0")
    assert processes.is_another(D, began) is not sure


def test_what_was_taken_before_a_restart_is_void_afterwards() -> None:
    processes = known(100.0)
    taken = processes.restarts(D)
    processes.replaced(D, 200.0)
    assert processes.restarts(D) != taken
    assert not processes.is_another(D, 200.0)
    assert not processes.in_doubt(D)


def test_an_engine_that_once_did_not_say_is_sure_again_when_it_says_the_same() -> None:
    processes = known(100.0)
    processes.replaced(D, None)
    assert not processes.is_another(D, 100.0)
    assert not processes.is_never_sure(D, "decode-0")


def test_an_engine_that_is_gone_is_in_nobodys_doubt() -> None:
    processes = known()
    assert processes.in_doubt(D, "decode-0")
    processes.forget(D)
    processes.doubt(D)
    assert not processes.in_doubt(D)
