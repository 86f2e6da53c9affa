"""What proving a long prompt costs the schedulers of both engines, and the wire: `backhaul bench digests`."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import pytest
from backhaul_bench import digests, idle
from backhaul_cli import main as cli

LIMIT_MS = 2.0
USUAL_MS = 0.85
"""What `yardstick_ms` is at most on a machine on which either side takes about 1.1 ms."""
REPEATS = 10
BLOCKS = 8192
HASHES = [bytes([i % 256]) * 32 for i in range(BLOCKS)]


def yardstick_ms() -> float:
    """A fixed piece of work of the same kind: what the machine needs for it now, whatever the connector's code does."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        base64.b64encode(b"".join([hash[:4] for hash in HASHES]))
        assert len([block for group in (range(1, BLOCKS + 1),) for block in group if block]) == BLOCKS
        taken.append((time.perf_counter() - began) * 1e3)
    return min(taken)


def cost_and_limit() -> tuple[float, float]:
    """In milliseconds. The limit is higher by as much as the machine is slower than usual."""
    before = yardstick_ms()
    costs = digests.measure(digests.Options(repeats=REPEATS))
    slower = max(1.0, min(before, yardstick_ms()) / USUAL_MS)
    return max(costs.publish_ms, costs.locate_ms), LIMIT_MS * slower


@pytest.mark.alone
@pytest.mark.slow
def test_a_prompt_of_128k_tokens_costs_a_scheduler_less_than_two_milliseconds() -> None:
    """The fastest of many, and again where the machine was busy all the time."""
    tries = []
    for _ in range(10):
        tries.append(cost_and_limit())
        cost_ms, limit_ms = tries[-1]
        if cost_ms < limit_ms:
            return
    pytest.fail(f"costs and their limits, in ms: {tries}")


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
