"""What the page about conversations shows runs as it stands, and so does the budget guard; a process that ends with leases kept
alive leaves none."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import backhaul
import pytest
from backhaul_loopback import LoopbackPair, loopback_pair
from served import freed

pytestmark = pytest.mark.openai

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conversations.md"
GUARD = ROOT / "examples" / "budget_guard.py"
PREAMBLE, *BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    ours: Any = {"connector": "backhaul", "claim_timeout_s": 20.0}
    async with loopback_pair(model="smollm2", **ours, prefill={"prefix_caching": False}) as pair:
        yield pair


async def run(program: str, names: dict[str, Any]) -> None:
    """As `python -m asyncio` does."""
    work = eval(compile(program, PAGE.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(work):
        await work


async def shown(block: str, pair: LoopbackPair, capsys: pytest.CaptureFixture[str]) -> str:
    names: dict[str, Any] = {}
    program = PREAMBLE.replace("http://127.0.0.1:8100", pair.prefill.url).replace(
        "http://127.0.0.1:8200", pair.decode.url
    )
    await run(program, names)
    async with names["client"]:
        await run(block, names)
    await freed(pair)
    return capsys.readouterr().out


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
async def test_the_pages_examples_run(block: str, pair: LoopbackPair, capsys: pytest.CaptureFixture[str]) -> None:
    assert await shown(block, pair, capsys)


async def test_the_page_shows_the_collapse_that_it_causes(
    pair: LoopbackPair, capsys: pytest.CaptureFixture[str]
) -> None:
    [block] = [block for block in BLOCKS if "on_collapse" in block]
    [promised] = re.findall(r"# (turn 2 .*)", block)
    assert (await shown(block, pair, capsys)).splitlines() == [promised, promised]


async def guard(*options: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(GUARD), *options), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    return out.decode().splitlines()


async def test_the_guard_compacts_once_and_stops_the_second_time() -> None:
    lines = await guard()
    said = [line.strip() for line in lines if line.startswith((" ", "stopped"))]
    assert [re.sub(r"\d+ of \d+|\d+ tokens lost", "N", line) for line in said] == [
        "guard: turn 5 reused N tokens on record: diverged at message 1; N",
        "guard: the history has 4 messages now",
        "guard: turn 10 reused N tokens on record: diverged at message 1; N",
        "stopped: reuse collapsed 2 times, the last time by message 1",
    ]
    assert lines[-1].startswith("10 turns: ")


async def test_the_guard_stops_at_the_budget() -> None:
    lines = await guard("--budget", "700")
    assert lines[-2].endswith("tokens were computed, and the budget is 700")
    assert lines[-1].startswith("2 turns: ")


@pytest.mark.parametrize("kind", ["OpenAI", "AsyncOpenAI"])
async def test_a_process_that_ends_while_leases_are_kept_leaves_none(pair: LoopbackPair, kind: str) -> None:
    """Neither the client is closed nor the conversation left."""
    wait = "await " if kind == "AsyncOpenAI" else ""
    sleep = "await asyncio.sleep(0.01)" if kind == "AsyncOpenAI" else "time.sleep(0.01)"
    code = textwrap.dedent(f"""
        import asyncio, time, backhaul
        from backhaul import _conversation, _keepalive
        from backhaul_router.drive.background_loop import shared
        _conversation.keeper = _keepalive.KeepAlive(
            lambda: time.monotonic() * 1000, lambda delay_s, call: shared().later(delay_s / 1000, call))
        client = backhaul.{kind}(prefill=[{pair.prefill.url!r}], decode=[{pair.decode.url!r}])
        chat = backhaul.conversation("c1").__enter__()
        {"async " if wait else ""}def main():
            history = [{{"role": "user", "content": "Tell me of blocks. " * 20}}]
            {wait}client.chat.completions.create(model="smollm2", messages=history, max_tokens=8)
            while not chat.renewals:
                {sleep}
        {"asyncio.run(main())" if wait else "main()"}
        print("kept", chat.failed_renewals)
    """)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"kept 0\n", b"")
    await freed(pair)


def test_every_public_name_of_the_page_exists() -> None:
    for name in re.findall(r"backhaul\.(\w+)\(", PAGE.read_text()):
        assert name in backhaul.__all__
