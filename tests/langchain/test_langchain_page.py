"""The programs of docs/langchain.md run as they stand."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from backhaul_langchain import ChatBackhaul
from backhaul_loopback import loopback_pair
from served import freed

PAGE = (Path(__file__).parents[2] / "docs" / "langchain.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["first", "agent", "callback"])
async def test_a_program_reads_its_history_back(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a thread of this process: to start Python with LangChain takes longer than the program."""
    async with loopback_pair(model="smollm2", prefill={"prefix_caching": False}) as pair:
        program = program.replace("http://127.0.0.1:8100", pair.prefill.url)
        program = program.replace("http://127.0.0.1:8200", pair.decode.url)
        await asyncio.to_thread(exec, compile(program, "docs/langchain.md", "exec"), {"__name__": "__main__"})
        await freed(pair)
    out, err = capsys.readouterr()
    assert err == ""
    first, *later = [re.fullmatch(r"(\w+) (\d+) (\d+)", line) for line in out.splitlines()]
    assert first is not None
    assert first.group(1, 2) == ("cold", "0")
    assert later
    assert all(turn and turn[1] in ("warm", "local") and int(turn[2]) > 0 for turn in later)


def test_the_options_exist() -> None:
    section = PAGE.partition("## Options")[2]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    fields = set(ChatBackhaul.model_fields) | {field.alias for field in ChatBackhaul.model_fields.values()}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= fields
