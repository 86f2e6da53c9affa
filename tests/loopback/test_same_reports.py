"""What a newcomer runs, the demo's agent and the example, has the same reports with a router inside the process and with
one that is served."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import backhaul
import pytest
from backhaul_demo.agent import SCRIPT, converse
from backhaul_loopback import LoopbackPair, loopback_pair
from served import freed, serving
from test_sdk_remote import comparable

pytestmark = pytest.mark.openai

AGENT = Path(__file__).parents[2] / "examples" / "agent.py"


def engines(pair: LoopbackPair) -> dict[str, Any]:
    return {"prefill": [pair.prefill.url], "decode": [pair.decode.url]}


async def demo_reports(pair: LoopbackPair, **client: Any) -> list[dict[str, Any]]:
    """Of the demo's conversation, without times."""
    async with backhaul.AsyncOpenAI(**client, max_retries=0) as agents, backhaul.conversation("demo") as chat:
        turns = [turn async for turn in converse(agents, chat, model=pair.model, salt="s", max_tokens=96)]
        for turn, report in zip(turns, chat.reuse.turns, strict=True):
            assert turn.report == report
    await freed(pair)
    found = [comparable(turn.report, pair) for turn in turns]
    for report in found:
        del report["identity_source"]  # the scope here, the header that it becomes there
    return found


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse on", "reuse off"])
async def test_the_demos_agent(reuse: bool) -> None:
    async with loopback_pair(prefill={"prefix_caching": False}) as pair:
        embedded = await demo_reports(pair, **engines(pair), reuse=reuse)
    async with loopback_pair(prefill={"prefix_caching": False}) as pair:
        async with serving(pair, *([] if reuse else ["--no-reuse"])) as router:
            served = await demo_reports(pair, base_url=f"{router.url}/v1", api_key="none")
    assert served == embedded
    assert len(served) == len(SCRIPT)
    assert {report["route"] for report in served} == ({"cold", "warm", "local"} if reuse else {"cold"})


async def example(*options: str) -> list[list[str]]:
    """What it prints, in words, without the time to first token."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(AGENT), *options), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    head, *turns, total = [line.split() for line in out.decode().splitlines()]
    assert head[6:8] == ["TTFT", "ms"]
    return [*(words[:6] + words[7:] for words in turns), total]


@pytest.mark.parametrize("options", [["--stream"], ["--tools"]], ids=" ".join)
async def test_the_example(options: list[str]) -> None:
    async with loopback_pair() as pair:
        urls = ["--prefill", pair.prefill.url, "--decode", pair.decode.url]
        embedded = await example(*urls, "--model", pair.model, *options)
        await freed(pair)
    async with loopback_pair() as pair, serving(pair) as router:
        served = await example("--base-url", f"{router.url}/v1", "--model", pair.model, *options)
        await freed(pair)
    assert served == embedded
    assert {words[2] for words in served[:-1]} == {"cold", "warm", "local"}


@pytest.mark.parametrize("options", [[], ["--base-url", "http://r:1/v1", "--prefill", "http://p:1"]], ids=len)
async def test_the_example_wants_engines_or_a_router(options: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(AGENT), "--model", "m", *options), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"either --prefill and --decode engines, or a router's --base-url" in err
