"""`backhaul bench retention`: one-shot requests on a decode engine that has room for few of them, with the router's budget and
with vLLM's lease time alone.

Loopback engines in virtual time, in which minutes of leases pass at once. One request after another comes that nobody goes on
with, and between them an agent's conversation goes on. What a finished request leaves stays in the decode engine's KV cache.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from backhaul_cli.errors import CommandError
from backhaul_cli.options import Count
from backhaul_loopback import CostModel, LoopbackEngine, VirtualClock
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import ReuseReport, Route

from .answers import CHAT
from .options import Written

_BLOCK = 16
_TEXT = "Nobody goes on from here, and still the engine keeps every block of it until the lease ends. "
_ANSWER = 24
_TTL_S = 480.0
_UNLIMITED = 10**12
_COSTS = CostModel(fixed_s=0.015, prefill_s=2e-5, decode_s=0.01)
_BETWEEN = 10
"""One-shot requests between two turns of the agent."""
_AT_ONCE_S = 5.0
"""A request that takes longer has waited."""


class TurnFailed(CommandError):
    """An engine did not answer as it should."""


@dataclass(frozen=True, kw_only=True)
class Options(Written):
    fit: Annotated[Count, "one-shot requests whose KV fits into D at a time"] = 8
    requests: Annotated[Count, "one-shot requests"] = 80
    interval_s: float = 4.0
    """From an answer to the next request."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; times are virtual seconds, from a request to the end of its answer."""

    connector: str
    budget: bool
    """False: nothing is released before its lease ends, but what its own conversation supersedes."""
    took_s: float
    """Until the last answer."""
    waited: int
    """Requests that did not run at once."""
    median_s: float
    longest_s: float
    most_kept: float
    """Share of D's KV cache that was kept for turns to come, at most."""
    agent_turns: int
    agent_warm: int


@dataclass
class _Load:
    options: Options
    clock: VirtualClock
    decode: LoopbackEngine
    router: Router
    reports: list[ReuseReport]
    times: list[float] = field(default_factory=list)
    most_kept: float = 0.0

    async def ask(self, messages: Sequence[dict[str, Any]], conversation: str | None) -> dict[str, Any]:
        body = {"model": self.decode.model, "messages": list(messages), "max_tokens": _ANSWER}
        headers = [("x-conversation-id", conversation)] if conversation else []
        reply = await self.router.handle(Request("POST", CHAT, headers, json.dumps(body).encode()))
        raw = b"".join([chunk async for chunk in reply])
        if reply.status != 200:
            raise TurnFailed(f"{reply.status}: {raw[:300]!r}")
        self.most_kept = max(self.most_kept, self.decode.pinned_blocks / self.decode.core.pool.usable)
        message: dict[str, Any] = json.loads(raw)["choices"][0]["message"]
        return {key: value for key, value in message.items() if value is not None}

    async def run(self) -> Row:
        """One request at a time: what a table in virtual time shows must not depend on how fast this machine is."""
        began = self.clock.now()
        history = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": _TEXT}]
        for number in range(self.options.requests):
            sent = self.clock.now()
            await self.ask(_opening(f"{number:05}. "), None)
            self.times.append(self.clock.now() - sent)
            if number % _BETWEEN == 0:
                history += [await self.ask(history, "agent"), {"role": "user", "content": "Go on."}]
            await self.router.settled()
            await self.clock.sleep(self.options.interval_s)
        agent = [report for report in self.reports if report.conversation == "agent"]
        return Row(
            connector=self.decode.config.connector,
            budget=self.router.config.retained_tokens_budget is None,
            took_s=round(self.clock.now() - began, 1),
            waited=sum(time > _AT_ONCE_S for time in self.times),
            median_s=round(statistics.median(self.times), 2),
            longest_s=round(max(self.times), 2),
            most_kept=round(self.most_kept, 3),
            agent_turns=len(agent),
            agent_warm=sum(report.route is Route.WARM for report in agent),
        )


def _opening(name: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": name + _TEXT * 8}, {"role": "user", "content": "Hi"}]


async def measure_one(options: Options, connector: Any, *, budget: bool) -> Row:
    """One line."""
    clock = VirtualClock(auto=True)
    tokens = sum(len(message["content"]) + 16 for message in _opening("00000. ")) + _ANSWER
    blocks = options.fit * -(-tokens // _BLOCK) + 1
    engines: dict[str, Any] = {"clock": clock, "costs": _COSTS, "connector": connector, "block_size": _BLOCK}
    async with (
        LoopbackEngine("prefill", prefix_caching=False, kv_recompute_threshold=0, **engines) as p,
        LoopbackEngine("decode", num_blocks=blocks, decoder_kv_blocks_ttl=_TTL_S, **engines) as d,
    ):
        settings: dict[str, Any] = {"local_max_tokens": 0, "kv_recompute_threshold": 0, "check_pairs": False}
        if not budget:
            settings |= {"retained_tokens_budget": _UNLIMITED, "one_shot_s": _TTL_S}
        reports: list[ReuseReport] = []
        config = RouterConfig(prefill=(p.url,), decode=(d.url,), **settings)
        router = Router(config, clock=clock.now, on_report=reports.append)
        try:
            await router.connect()
            if not budget:  # nor is anything released for the sake of a turn
                router.retention.know(d.url, None, None)
            return await _Load(options, clock, d, router, reports).run()
        finally:
            await router.aclose()


async def measure(options: Options) -> list[Row]:
    """Raises `TurnFailed`."""
    return [
        await measure_one(options, connector, budget=budget)
        for connector in ("stock", "backhaul")
        for budget in (False, True)
    ]


def lines(options: Options, rows: Sequence[Row]) -> Iterator[str]:
    """The table."""
    yield (
        f"{options.requests} one-shot requests, {options.interval_s:g} s between, and an agent; D has room for {options.fit}; "
        "loopback engines, virtual time"
    )
    yield (
        f"{'engines':10}{'kept until':>24}{'waited':>8}{'median':>9}{'longest':>10}{'all':>8}{'most kept':>11}{'agent warm':>12}"
    )
    for row in rows:
        until = "the router's budget" if row.budget else f"the lease ends ({_TTL_S:g} s)"
        yield (
            f"{row.connector:10}{until:>24}{row.waited:>8}{row.median_s:>7.2f} s{row.longest_s:>8.2f} s{row.took_s:>6.0f} s"
            f"{row.most_kept:>11.0%}{f'{row.agent_warm} of {row.agent_turns}':>12}"
        )


def main(options: Options) -> int:
    """Prints the table, and returns 0. Raises `TurnFailed`."""
    rows = asyncio.run(measure(options))
    print("\n".join(lines(options, rows)))
    options.write([asdict(row) for row in rows])
    return 0
