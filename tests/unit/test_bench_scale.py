"""What a conversation takes in memory, and `backhaul bench scale`, which measures it up to a million of them."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path

import pytest
from backhaul.bench import scale
from backhaul_router import cli

MANY = 10_000


def test_the_ledger_takes_less_for_ten_thousand_conversations_than_they_may_besides_their_handles() -> None:
    conversations = scale.Conversations(MANY, 1_024)
    conversations.add(0)
    conversations.payload = 0
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, MANY):
            conversations.add(number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(conversations.ledger.handles()) == MANY
    assert (after - before - conversations.payload) / (MANY - 1) < scale.LIMIT_BYTES


def test_a_conversation_takes_no_more_however_often_it_goes_on() -> None:
    conversations = scale.Conversations(10, 1_024)
    fleet, config = scale.engines(), scale.settings(10)
    conversations.add(0)
    turns = [scale.decide(conversations, fleet, config, 0) for _ in range(200)]
    turns[0]()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for turn in turns[1:]:
            turn()
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
