"""What a conversation takes in memory, and `backhaul bench scale`, which measures it up to a million of them."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
from backhaul_bench import scale
from backhaul_cli import main as cli
from backhaul_router.fleet.fleet import Fleet

MANY = 5_600
"""A little more than what makes dictionaries double: nowhere do they take more for each."""
AIR = 200
"""Bytes: as much below the limit as nobody should add unseen."""


def besides(conversations: scale.Conversations, fleet: Fleet, many: int, turns: int = 1) -> float:
    """Bytes that a conversation takes after so many turns besides its handle and its digests, all that is kept counted."""
    for number in range(100):
        conversations.add(number, fleet)
    conversations.payload = 0
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(turns):
            for number in range(100, many):
                conversations.add(number, fleet)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(conversations.ledger.handles()), len(fleet.retention), len(fleet.load.homes)) == (many, many, many)
    return (after - before - conversations.payload) / (many - 100)


def test_a_conversation_takes_less_than_it_may_besides_its_handle_all_that_a_router_keeps_counted() -> None:
    conversations, fleet = scale.Conversations(MANY, 1_024), scale.engines()
    assert besides(conversations, fleet, MANY) < scale.LIMIT_BYTES - AIR


@pytest.mark.parametrize(("named", "turns"), [(True, 3), (False, 2)])
def test_so_does_one_that_has_gone_on_and_one_without_a_name(named: bool, turns: int) -> None:
    conversations, fleet = scale.Conversations(1_500, 1_024, named=named), scale.engines()
    assert besides(conversations, fleet, 1_500, turns) < scale.LIMIT_BYTES


def test_a_conversation_takes_no_more_however_often_it_goes_on() -> None:
    conversations, fleet = scale.Conversations(10, 1_024), scale.engines()
    for _ in range(50):
        conversations.add(0, fleet)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            conversations.add(0, fleet)
        gc.collect()  # and the interpreter's lists of tuples to use again
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4_000


def test_the_command_prints_a_line_for_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "rows.json"
    options = ("--conversations", "100,200", "--turns", "5", "--json", str(written))
    cli.main(["bench", "scale", *options])
    shown = capsys.readouterr().out
    assert "A turn and a conversation of 1,024 tokens" in shown
    assert [row["conversations"] for row in json.loads(written.read_text())["rows"]] == [100, 200]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--conversations", "0,10"), "--conversations: 1 or more"),
        (("--tokens", "100"), "--tokens 100: 1024 or more"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "scale", *options]) != 0
    assert message in capsys.readouterr().err
