"""`backhaul demo`: one agent's conversation on one prefill and one decode engine, with reuse off and then on."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backhaul._client import AsyncOpenAI
from backhaul._conversation import Conversation
from backhaul._totals import ReuseTotal
from backhaul_bench import clusters
from backhaul_bench.clusters import Cluster
from backhaul_bench.options import MovesKv, OnEngines
from backhaul_bench.setups import DEMO
from backhaul_connector.launch.command import Connector

from .agent import Turn, converse
from .screen import Screen

_VLLM_MAX_TOKENS = 12
_LOOPBACK_MAX_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class Options(OnEngines):
    connector: MovesKv = Connector.BACKHAUL


@dataclass(frozen=True)
class Result:
    """The two runs."""

    cluster: Cluster
    off: tuple[Turn, ...]
    on: tuple[Turn, ...]
    total: ReuseTotal
    """Of the run with reuse."""

    @property
    def different(self) -> list[int]:
        """Numbers of the turns whose answers differ."""
        pairs = enumerate(zip(self.off, self.on, strict=True), 1)
        return [number for number, (off, on) in pairs if off.answer != on.answer]

    @property
    def identical(self) -> bool:
        return not self.different

    def to_dict(self) -> dict[str, Any]:
        turns = [
            {**turn.report.to_dict(), "reuse": reuse, "what": turn.step.what, "ttft_ms": turn.ttft_ms}
            for reuse, turns in (("off", self.off), ("on", self.on))
            for turn in turns
        ]
        return {"engines": self.cluster.describe(), "identical": self.identical, "turns": turns}

    def summary(self) -> str:
        """The totals, in a line."""
        off, on = (sum(turn.ttft_ms for turn in turns) / 1e3 for turns in (self.off, self.on))
        hit_rate = "unknown" if self.total.hit_rate is None else f"{self.total.hit_rate:.0%}"
        numbers = ", ".join(map(str, self.different))
        answers = f"all {len(self.on)} answers identical" if self.identical else f"answers DIFFER in turn {numbers}"
        saved = f"{off - on:.1f} s of waiting saved ({off:.1f} s to first tokens before, {on:.1f} s now)"
        return (
            f"{self.total.reused:,} of {self.total.prompt:,} prompt tokens not computed (hit rate {hit_rate}), "
            f"{saved}, {answers}"
        )


def main(options: Options) -> int:
    """Runs the demo, and returns the exit status: 1 if an answer with reuse was another than without. Raises
    `LaunchError`."""
    screen = Screen()
    try:
        with clusters.termination_interrupts():
            result = _run_on_engines(options, screen)
    except KeyboardInterrupt:
        screen.say("stopped")
        return clusters.INTERRUPTED
    return conclude(result, screen, options.json)


def _run_on_engines(options: Options, screen: Screen) -> Result:
    if options.engines == "loopback":
        return asyncio.run(_on_loopback(options, screen))
    with clusters.vllm(
        options.model, python=options.python, connector=options.connector, vllm_args=_TOOLS, report=screen.say
    ) as cluster:
        return asyncio.run(play(cluster, screen))


_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


async def _on_loopback(options: Options, screen: Screen) -> Result:
    async with clusters.loopback(DEMO, connector=options.connector) as cluster:
        return await play(cluster, screen)


def conclude(result: Result, screen: Screen, file: Path | None = None) -> int:
    """Says what came out, in a file too; returns the exit status."""
    screen.say("")
    screen.say(result.summary())
    if file is not None:
        file.write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    return 0 if result.identical else 1


async def play(cluster: Cluster, screen: Screen) -> Result:
    """Runs the conversation twice, each time under a salt of its own, so that the second finds nothing of the first."""
    screen.say(f"{cluster.title}; prefill {cluster.prefill}, decode {cluster.decode}, no prefix caching on prefill")
    with screen:
        off, _ = await _run(cluster, screen, reuse=False)
        on, total = await _run(cluster, screen, reuse=True)
    return Result(cluster, off, on, total)


async def _run(cluster: Cluster, screen: Screen, *, reuse: bool) -> tuple[tuple[Turn, ...], ReuseTotal]:
    screen.begin(reuse=reuse)
    turns = []
    max_tokens = _VLLM_MAX_TOKENS if cluster.costs is None else _LOOPBACK_MAX_TOKENS
    async with (
        AsyncOpenAI(prefill=[cluster.prefill], decode=[cluster.decode], reuse=reuse, max_retries=0) as client,
        Conversation() as chat,
    ):
        await client.models.list()  # the router looks at its engines at the first request, which no turn is to pay for
        agent = converse(client, chat, model=cluster.model, salt=uuid.uuid4().hex, max_tokens=max_tokens)
        async for turn in agent:
            turns.append(turn)
            screen.add(turn, reuse=reuse)
    return tuple(turns), chat.reuse.total
