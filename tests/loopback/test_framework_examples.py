"""The example of each framework runs as a newcomer runs it: the framework's own agent loop, warm turns, the same answers."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from backhaul_loopback import loopback_pair
from served import freed

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
NAMES = ("openai_agents_sdk", "pydantic_ai_agent", "smolagents_agent", "raw_openai", "raw_http")


@pytest.mark.parametrize("name", NAMES)
async def test_the_agent_reads_its_history_back_and_answers_as_without_reuse(name: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / f"{name}.py"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")},
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    *turns, reused, same = out.decode().splitlines()
    assert len(turns) == 6
    assert turns[0].startswith("turn 1: cold")
    assert len([line for line in turns if re.match(r"turn \d+: warm  pulled +[1-9]", line)]) >= 2
    assert re.fullmatch(r"\d{4,} of \d{4,} prompt tokens were reused", reused)
    assert same == "The answers are those of the run without reuse."
    assert os.listdir(tmp_path) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", programs(), ids=("openai", "agents", "pydantic_ai", "smolagents"))
async def test_the_pages_programs_run_as_they_stand(program: str) -> None:
    """But for the engines' ports."""
    async with loopback_pair(model="smollm2", prefill={"prefix_caching": False}) as pair:
        for page, url in (("http://127.0.0.1:8100", pair.prefill.url), ("http://127.0.0.1:8200", pair.decode.url)):
            assert page in program
            program = program.replace(page, url)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        await freed(pair)
    assert (process.returncode, err.decode()) == (0, "")
    first, second = out.decode().splitlines()
    assert re.fullmatch(r"cold 0 \d+", first)
    assert re.fullmatch(r"(warm|local) [1-9]\d* \d+", second)
