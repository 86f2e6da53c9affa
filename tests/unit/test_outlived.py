"""A decode engine is found to be another process while a turn runs that has asked the one before."""

from __future__ import annotations

import pytest
from backhaul_router.fleet.engine import Engine
from backhaul_router.report import Reason, Route
from backhaul_router.turn.effects import Checked, DropEngine, Ended, Event, GiveBack, Lost
from core_values import D1, P1, params
from turn_drive import BODY, FIRST, OLD, PROMPT, Drive, prefilled, rendered, whole

RANDOM = "0a8ef1a6-3a0c-4b52-8d3e-5f0f0d1c7e11"
NEW = "7c5b6f0e-90bd-4a6a-b0bb-1f8f6a9a2c55"


def decode_of(drive: Drive) -> Engine:
    engine = drive.fleet.get(D1)
    assert engine is not None
    return engine


def answer(engine_id: str) -> tuple[Event, ...]:
    return BODY, whole(kv_transfer_params=params("d-1", tokens=len(PROMPT) + 2, engine_id=engine_id)), Ended()


@pytest.mark.parametrize("engine_id", ["fixed", RANDOM])
def test_what_the_earlier_process_left_is_released_and_not_filed(engine_id: str) -> None:
    drive = Drive(FIRST)
    drive.fleet.restarts.saw_engine_id(decode_of(drive).url, engine_id)
    drive.feed(rendered(), prefilled())
    drive.fleet.restarts.replaced(D1, 200.0)
    drive.feed(*answer(engine_id))
    assert (drive.filed.held, drive.filed.missing) == (None, Reason.ENGINE_CHANGED)
    assert drive.released == [("d-1", P1)]
    assert drive.fleet.restarts.engine_id(D1) is None


def test_its_id_does_not_void_what_the_present_one_has_made() -> None:
    drive = Drive(FIRST)
    drive.fleet.restarts.saw_engine_id(decode_of(drive).url, RANDOM)
    drive.feed(rendered(), prefilled())
    drive.fleet.restarts.saw_engine_id(decode_of(drive).url, NEW)
    drive.feed(*answer(RANDOM))
    assert drive.all(DropEngine) == []
    assert drive.fleet.restarts.engine_id(D1) == NEW
    assert drive.filed.held is None


def test_what_the_present_process_left_meanwhile_is_filed() -> None:
    drive = Drive(FIRST)
    drive.fleet.restarts.saw_engine_id(decode_of(drive).url, RANDOM)
    drive.feed(rendered(), prefilled())
    drive.fleet.restarts.saw_engine_id(decode_of(drive).url, NEW)
    drive.feed(*answer(NEW))
    assert drive.filed.held is not None


def test_what_an_engine_left_that_was_removed_and_added_again_is_not_filed() -> None:
    drive = Drive(FIRST)
    drive.feed(rendered(), prefilled())
    engine = decode_of(drive)
    drive.fleet.remove(D1)
    drive.fleet.add(engine)
    drive.feed(*answer("fixed"))
    assert drive.filed.held is None


@pytest.mark.parametrize("ends", ["the client leaves", "it is answered without the handle"])
def test_a_handle_that_was_taken_does_not_go_back(ends: str) -> None:
    drive = Drive(route=Route.LOCAL)
    drive.feed(rendered())
    drive.fleet.restarts.replaced(D1, 200.0)
    if ends == "the client leaves":
        drive.leave()
    else:
        drive.feed(BODY, whole(None), Ended())
        assert (drive.filed.held, drive.filed.missing) == (None, Reason.ENGINE_CHANGED)
    assert drive.all(GiveBack) == []
    assert drive.one(Lost).reason is Reason.ENGINE_CHANGED


def test_a_handle_of_which_nobody_knows_whose_it_is_is_released_and_not_read() -> None:
    drive = Drive(check_pairs=True)
    drive.feed(rendered(), Checked(sure=False))
    assert "remote_request_id" not in drive.body["kv_transfer_params"]
    assert drive.released == [(OLD, P1)]
    assert drive.one(Lost).reason is Reason.ENGINE_CHANGED
    drive.feed(prefilled(cached=0), *answer(RANDOM))
    assert (drive.report.route, drive.report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)
    assert drive.filed.held is not None
