"""The examples run as a newcomer runs them: warm turns, and the answers of the run without reuse."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TURN = re.compile(r"(?:(langgraph:\S+) +)?turn (\d+): (\w+) +pulled +(\d+) +computed +(\d+)(?:  (\w+))?")


@pytest.mark.parametrize(("name", "turns"), [("langchain_agent", 6), ("langgraph_agent", 9)])
async def test_an_agents_turns_are_read_back(name: str, turns: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In a thread of this process: to start Python with LangChain takes longer than the example."""
    await asyncio.to_thread(runpy.run_path, str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out, err = capsys.readouterr()
    assert err == ""
    *told, reused, same = out.splitlines()
    found = [turn for line in told if (turn := TURN.fullmatch(line))]
    assert len(found) == len(told) == turns
    first, *later = found
    assert (first[3], first[6]) == ("cold", "first_turn")
    new = {turn[1] for turn in found} if first[1] else {None}
    assert [turn[6] for turn in found if turn[3] == "cold"] == ["first_turn"] * len(new)
    assert sum(int(turn[4]) for turn in later if turn[3] == "warm") > sum(int(turn[5]) for turn in later)
    assert re.fullmatch(r"\d{4,} of \d{4,} prompt tokens were reused", reused)
    assert same == "The answers are those of the run without reuse."
