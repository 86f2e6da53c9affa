"""The server's log: a line for each turn, and whose turn it was on every other line of one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from backhaul_router.drive import logs
from backhaul_router.drive.logs import JsonFormatter, TextFormatter
from backhaul_router.identity.ids import Identity
from backhaul_router.report import Reason, ReuseReport, Route
from backhaul_router.turn.turn import Turn
from core_values import config, facts, fleet

log = logging.getLogger("backhaul")


class Written:
    """What a formatter makes of what is logged."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._text = io.StringIO()
        self.handler = logging.StreamHandler(self._text)
        self.handler.setFormatter(formatter)

    @property
    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def writing(formatter: logging.Formatter) -> Iterator[Written]:
    written, level = Written(formatter), log.level
    log.addHandler(written.handler)
    log.setLevel(logging.INFO)
    yield written
    log.removeHandler(written.handler)
    log.setLevel(level)


@pytest.fixture
def as_json() -> Iterator[Written]:
    yield from writing(JsonFormatter())


@pytest.fixture
def as_text() -> Iterator[Written]:
    yield from writing(TextFormatter())


def report(**fields: Any) -> ReuseReport:
    given = {"conversation": "c1", "turn": 3, "route": Route.COLD, "reason": Reason.EXPIRED, "prefill_ms": 12.3456}
    return ReuseReport(**{**given, **fields})  # type: ignore[arg-type]


def turn(conversation: str = "c1") -> Turn:
    return Turn(facts(), Identity(conversation, "scope"), config(), fleet(), 0.0, tenant="team")


# --- a turn's own line


def test_a_turn_is_one_json_object(as_json: Written) -> None:
    logs.log_turn(report(tenant="team", status=502, error="prefill_failed"))
    [line] = as_json.json
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO",
        "logger": "backhaul.turns",
        "message": "turn",
        "conversation": "c1",
        "turn": 3,
        "tenant": "team",
        "route": "cold",
        "reason": "expired",
        "status": 502,
        "error": "prefill_failed",
        "prefill_ms": 12.35,
        "total_ms": 0.0,
        "retries": 0,
    }


def test_a_turn_is_one_line_of_text(as_text: Written) -> None:
    logs.log_turn(report())
    [line] = as_text.lines
    assert line.endswith(
        "turn conversation=c1 turn=3 route=cold reason=expired status=200 prefill_ms=12.35 total_ms=0.0 retries=0"
    )


@pytest.mark.parametrize("made_up", ["a\nb", "a b", "a=b", 'a"b', "a\u2028b", "\x1b[31m", "a] [b"], ids=ascii)
def test_what_a_client_makes_up_is_one_value_on_one_line(as_text: Written, made_up: str) -> None:
    logs.log_turn(report(conversation=made_up))
    [line] = as_text.lines
    assert line.isprintable()
    rest = line.partition(" conversation=")[2]
    assert rest[0] == rest[: rest.index(" turn=3")][-1]  # quoted
    assert " turn=3 route=cold" in rest


def test_what_a_client_makes_up_is_not_written_at_any_length(as_json: Written) -> None:
    logs.log_turn(report(model="m" * 10_000))
    assert as_json.json[0]["model"] == "m" * 256 + "..."


# --- the other lines of a turn


def test_every_line_of_a_turn_says_which_it_is(as_json: Written) -> None:
    with logs.request():
        log.info("before it is known")
        running = turn()
        logs.note(running)
        running.draft.turn = 2
        log.warning("an engine failed")
    log.info("after it")
    before, during, after = as_json.json
    assert (during["conversation"], during["turn"], during["tenant"]) == ("c1", 2, "team")
    assert "conversation" not in before | after


def test_in_text_it_follows_the_message(as_text: Written) -> None:
    with logs.request():
        logs.note(turn())
        log.warning("an engine failed")
    assert as_text.lines[0].endswith("an engine failed [conversation=c1 tenant=team]")


async def test_turns_at_a_time_do_not_mix(as_json: Written) -> None:
    async def run(conversation: str) -> None:
        with logs.request():
            logs.note(turn(conversation))
            await asyncio.sleep(0)
            log.info("%s", conversation)

    await asyncio.gather(run("a"), run("b"))
    assert [line["conversation"] for line in as_json.json] == ["a", "b"]


async def test_what_a_turn_left_running_is_nobodys_after_its_end(as_json: Written) -> None:
    ended = asyncio.Event()

    async def background() -> None:
        await ended.wait()
        log.info("probing")

    with logs.request():
        logs.note(turn())
        task = asyncio.create_task(background())
    ended.set()
    await task
    assert "conversation" not in as_json.json[0]


def test_outside_of_a_server_nothing_is_noted(as_json: Written) -> None:
    logs.note(turn())
    log.info("embedded")
    assert "conversation" not in as_json.json[0]


def test_an_exception_stays_in_its_json_line(as_json: Written) -> None:
    try:
        raise ZeroDivisionError("by\nzero")
    except ZeroDivisionError:
        log.exception("it failed")
    [line] = as_json.json
    assert line["message"] == "it failed"
    assert line["exception"].endswith("by\nzero")
