"""`backhaul bench client`: both clients are timed on the same requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backhaul_bench import client
from backhaul_cli import main as cli

pytestmark = pytest.mark.openai


def test_both_clients_are_measured_on_equal_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert cli.main(["bench", "client", "--messages", "2,40", "--repeats", "3", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "What a call costs the client" in shown
    assert "Both sent the same bodies, byte for byte." in shown
    rows = json.loads(file.read_text())["rows"]
    assert [(row["messages"], row["client"], row["repeats"]) for row in rows] == [
        (2, "sync", 3),
        (2, "async", 3),
        (40, "sync", 3),
        (40, "async", 3),
    ]
    assert all(row["same_body"] and row["openai_ms"] > 0 and row["backhaul_ms"] > 0 for row in rows)


def test_clients_that_send_different_bodies_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = client._Samples()
    for body in (b"a", b"b"):
        samples.bodies.add(body)
    samples.openai, samples.backhaul = [1.0], [1.0]
    monkeypatch.setattr(client, "measure", lambda options: [samples.row(2, "sync")])
    assert client.main(client.Options()) == 1
    assert "DIFFERENT BODIES" in capsys.readouterr().out


def test_an_empty_history_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "client", "--messages", "0"]) == 2
    assert capsys.readouterr().err == "backhaul bench: --messages: 1 or more\n"
