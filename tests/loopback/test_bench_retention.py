"""`backhaul bench retention`, with few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from backhaul_bench import retention
from backhaul_cli import main as cli

OPTIONS = retention.Options(fit=3, requests=12)


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
async def test_with_the_routers_budget_nothing_waits_and_the_agent_is_warm(connector: str) -> None:
    row = await retention.measure_one(OPTIONS, connector, budget=True)
    assert (row.waited, row.agent_turns, row.agent_warm) == (0, 2, 1)
    assert row.took_s < 100


async def test_a_stock_engine_whose_leases_must_end_by_themselves_has_requests_wait_for_that() -> None:
    row = await retention.measure_one(OPTIONS, "stock", budget=False)
    assert row.waited >= 3
    assert row.longest_s > 400
    assert row.took_s > 3 * 400


def test_the_command_prints_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = retention.Row(
        connector="stock",
        budget=True,
        took_s=10.0,
        waited=0,
        median_s=0.3,
        longest_s=0.4,
        most_kept=0.5,
        agent_turns=4,
        agent_warm=3,
    )

    async def measure(options: retention.Options) -> list[retention.Row]:
        assert (options.fit, options.requests) == (5, 7)
        return [row]

    monkeypatch.setattr(retention, "measure", measure)
    file = tmp_path / "rows.json"
    assert cli.main(["bench", "retention", "--fit", "5", "--requests", "7", "--json", str(file)]) == 0
    assert "the router's budget" in capsys.readouterr().out
    assert json.loads(file.read_text())[0]["agent_warm"] == 3
