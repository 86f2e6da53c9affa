"""The example agent, as a newcomer runs it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from backhaul_loopback import loopback_pair

pytestmark = pytest.mark.openai

AGENT = Path(__file__).parents[2] / "examples" / "agent.py"


@pytest.mark.parametrize("options", [[], ["--stream"], ["--tools"], ["--tools", "--stream"]], ids=" ".join)
async def test_the_agent_runs_and_shows_a_line_a_turn(options: list[str]) -> None:
    async with loopback_pair() as pair:
        engines = ["--prefill", pair.prefill.url, "--decode", pair.decode.url, "--model", pair.model]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(AGENT),
            *engines,
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    head, *turns, total = out.decode().splitlines()
    assert head.split()[:3] == ["turn", "prompt", "route"]
    assert [line.split()[0] for line in turns] == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert turns[0].endswith("first_turn")
    assert {line.split()[2] for line in turns[1:]} <= {"warm", "local"}
    assert total.startswith("8 turns: ")
