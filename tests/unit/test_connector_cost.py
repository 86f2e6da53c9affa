"""What proving a long prompt costs the schedulers of both engines, and the wire: `backhaul bench digests`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from backhaul.bench import digests, idle
from backhaul_router import cli

LIMIT_MS = 2.0


@pytest.mark.slow
def test_a_prompt_of_128k_tokens_costs_a_scheduler_less_than_two_milliseconds() -> None:
    """The fastest of many, and again where the machine was busy all the time."""
    tries = [digests.measure(digests.Options())]
    while len(tries) < 5 and max(tries[-1].publish_ms, tries[-1].locate_ms) >= LIMIT_MS:
        tries.append(digests.measure(digests.Options()))
    assert min(max(costs.publish_ms, costs.locate_ms) for costs in tries) < LIMIT_MS, tries


def test_the_command_prints_its_costs_and_what_is_on_the_wire(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "costs.json"
    assert cli.main(["bench", "digests", "--repeats", "1", "--json", str(written)]) == 0
    costs = json.loads(written.read_text())
    assert (costs["tokens"], costs["block_size"]) == (131_072, 16)
    assert 1 / 3 < costs["bytes_per_token"] < 0.35
    assert f"{costs['publish_ms']:.2f} ms a turn" in capsys.readouterr().out


def test_fewer_tokens_than_a_block_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "digests", "--tokens", "8"]) == 2
    assert "at least one block of 16" in capsys.readouterr().err


def test_processor_time_is_summed_by_process_name_and_processes_that_are_gone_are_left_out() -> None:
    (spent,) = idle._cpu_s([os.getpid(), 2**22 + 1]).values()
    assert spent > 0
