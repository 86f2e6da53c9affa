"""A fleet of which engines die, fail, hang, come back, are added, drain and are removed, while agents go on asking it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.errors import ConfigError, Leg
from backhaul_router.fleet.breakers import SEVERAL, BreakerState, EngineLeg
from backhaul_router.fleet.engine import Role
from backhaul_router.report import Reason, ReuseReport, Route
from router_turns import CHAT, COMPLETIONS, Cluster, first_turn, opening, run_cluster, system, user

AGENTS = 16
TURNS = 4
"""Of a conversation, before its agent begins another."""
THINK_S = 0.1
RAISED_S = 2.0
"""For so long at most an engine's death may be felt."""
BACK_S = 20.0
"""An engine is probed after a second at most: the rest is for machines with much else to do."""


async def until(true: Callable[[], bool], within_s: float = BACK_S, what: str = "") -> float:
    """Waits until something is so; returns how long that took."""
    since = time.monotonic()
    while not true():
        assert time.monotonic() - since < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - since


def breaker(cluster: Cluster, engine: LoopbackEngine, leg: Leg) -> BreakerState:
    return cluster.router.fleet.breaker_states()[EngineLeg(engine.url, leg)]


# --- what opens a breaker, over real sockets -----------------------------------------------------------------------------


async def test_a_dead_prefill_engine_is_paid_for_once() -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        await cluster.kill(cluster.p)
        for number in range(6):
            assert (await cluster.ask({"messages": opening()}, conversation=f"c{number}")).status == 200
        assert sum(report.retries for report in cluster.reports) == 1
        assert breaker(cluster, cluster.p, Leg.PREFILL) is not BreakerState.CLOSED


async def test_a_failing_prefill_engine_is_shut_out_after_a_few_conversations_and_nobody_notices() -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.p.faults.status, cluster.p.faults.times = 500, 10_000
        for number in range(4 * SEVERAL):
            messages = [system(), user(f"Question {number}.")]
            assert (await cluster.ask({"messages": messages}, conversation=f"c{number}")).status == 200
        assert sum(report.retries for report in cluster.reports) == SEVERAL
        cluster.p.faults.clear()
        await until(lambda: breaker(cluster, cluster.p, Leg.PREFILL) is BreakerState.CLOSED, what="a probe closes it")


@pytest.mark.parametrize("named", [True, False], ids=["one conversation", "no conversation"])
async def test_a_poisonous_request_that_is_repeated_shuts_nobody_out(named: bool) -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        for engine in cluster.prefill:
            engine.faults.status, engine.faults.times = 500, 10_000
        for _ in range(3 * SEVERAL):
            answer = await cluster.ask({"messages": opening()}, conversation="c" if named else None)
            assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert set(cluster.router.fleet.breaker_states().values()) == {BreakerState.CLOSED}
        assert {report.retries for report in cluster.reports} == {1}


async def test_health_alone_does_not_close_a_breaker() -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.p.faults.status, cluster.p.faults.times = 500, 10_000
        for number in range(4 * SEVERAL):
            await cluster.ask({"messages": [system(), user(f"Question {number}.")]}, conversation=f"c{number}")
        async with cluster.http.get(cluster.p.url + "/health") as health:
            assert health.status == 200
        probes = len(cluster.p.requests_to(COMPLETIONS))
        await until(lambda: len(cluster.p.requests_to(COMPLETIONS)) > probes, what="a probe is sent")
        assert breaker(cluster, cluster.p, Leg.PREFILL) is not BreakerState.CLOSED
        cluster.p.faults.clear()
        await until(lambda: breaker(cluster, cluster.p, Leg.PREFILL) is BreakerState.CLOSED)


async def test_a_fleet_that_is_shut_out_altogether_is_still_tried() -> None:
    async with run_cluster(engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.p.faults.status, cluster.p.faults.times = 500, 10_000
        for number in range(SEVERAL):
            await cluster.ask({"messages": [system(), user(f"Question {number}.")]}, conversation=f"c{number}")
        assert breaker(cluster, cluster.p, Leg.PREFILL) is not BreakerState.CLOSED
        cluster.p.faults.clear()
        assert (await cluster.ask({"messages": opening()})).status == 200
        assert breaker(cluster, cluster.p, Leg.PREFILL) is BreakerState.CLOSED


async def test_a_prefill_that_hangs_is_tried_on_one_other_engine() -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}, prefill_timeout_s=2.0) as cluster:
        await cluster.router.connect()
        cluster.p.faults.stall = True
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, answer.reused.retries) == (200, 1)
        assert answer.reused.prefill_engine == cluster.prefill[1].url
        cluster.p.faults.clear()
        cluster.pinned_until_ttl = True


async def test_what_a_dead_decode_engine_held_is_not_read() -> None:
    async with run_cluster(decode=2) as cluster:
        history = await first_turn(cluster)
        used = cluster.reports[0].decode_engine
        down = next(engine for engine in cluster.decode if engine.url == used)
        await cluster.kill(down)
        await cluster.ask({"messages": [system("Another."), user("agent")]}, conversation="finds out")
        while not cluster.router.fleet.is_down(down.url):
            await cluster.ask({"messages": [system("Another."), user("agent")]}, conversation=None)
        report = (await cluster.exact({"messages": history})).reused
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.DECODE_FAILED, 0)
        await down.restart()


# --- engines that come and go --------------------------------------------------------------------------------------------


async def test_an_engine_that_is_added_gets_turns() -> None:
    async with run_cluster() as cluster, LoopbackEngine("decode") as more:
        await cluster.router.connect()
        await cluster.router.add_engine(Role.DECODE, more.url + "/")
        cluster.router.fleet.load.begin(cluster.router.fleet.decode[0].url)
        report = (await cluster.exact({"messages": opening()})).reused
        cluster.router.fleet.load.end(cluster.router.fleet.decode[0].url)
        assert report.decode_engine == more.url
        assert more.url.encode() in cluster.router.engine_urls
        await cluster.router.end_conversation("c")


async def test_an_engine_that_cannot_be_added_says_why() -> None:
    async with run_cluster() as cluster, LoopbackEngine("decode", model="another") as other:
        with pytest.raises(ConfigError, match="same model"):
            await cluster.router.add_engine(Role.DECODE, other.url)
        with pytest.raises(ConfigError, match="has to run before it is added"):
            await cluster.router.add_engine(Role.DECODE, f"http://127.0.0.1:{free_port()}")
        with pytest.raises(ConfigError, match="one role"):
            await cluster.router.add_engine(Role.DECODE, cluster.p.url)
        with pytest.raises(ConfigError, match="none of this router's engines"):
            await cluster.router.drain_engine("http://127.0.0.1:1")


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
async def test_a_draining_engine_goes_on_with_its_conversations_and_lets_go_when_it_is_removed(connector: str) -> None:
    async with run_cluster(decode=2, engine={"connector": connector}) as cluster:
        history = await first_turn(cluster)
        drained = next(one for one in cluster.decode if one.url == cluster.reports[0].decode_engine)
        left = await cluster.router.drain_engine(drained.url)
        assert (left.in_flight, left.handles, left.done) == (0, 1, False)
        other = await cluster.exact({"messages": opening("Another agent.")}, conversation="other")
        assert other.reused.decode_engine != drained.url
        mine = await cluster.exact({"messages": history})
        assert (mine.reused.route, mine.reused.decode_engine) == (Route.WARM, drained.url)

        await cluster.router.remove_engine(drained.url)
        await cluster.until(lambda: not drained.usage)
        assert drained.url not in [one.url for one in cluster.router.fleet.engines]
        after = (await cluster.exact({"messages": [*history, mine.message, user("And then?")]})).reused
        assert (after.route, after.reason) == (Route.COLD, Reason.ENGINE_CHANGED)
        assert after.decode_engine != drained.url


async def test_an_engine_that_drains_can_be_taken_back() -> None:
    async with run_cluster(prefill=2) as cluster:
        await cluster.router.connect()
        await cluster.router.drain_engine(cluster.p.url)
        assert (await cluster.exact({"messages": opening()})).reused.prefill_engine == cluster.prefill[1].url
        await cluster.router.add_engine(Role.PREFILL, cluster.p.url)
        engine = cluster.router.fleet.get(cluster.p.url)
        assert engine is not None
        assert cluster.router.fleet.available(engine)


async def test_the_last_engine_of_a_role_stays() -> None:
    async with run_cluster() as cluster:
        with pytest.raises(ConfigError, match="the only decode engine"):
            await cluster.router.remove_engine(cluster.d.url)
        assert (await cluster.exact({"messages": opening()})).status == 200


# --- engines as processes, killed under load -----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class Process:
    """A loopback engine as a process of its own, which can be killed and started again on its port."""

    role: str
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        costs = ("--decode-s", "0.002")
        given = ("--role", self.role, "--port", str(self.port), "--side-channel-port", "0", *costs)
        module = ("-m", "backhaul_loopback")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *module, *given, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert self.url.encode() in line, line

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@dataclass
class Turn:
    """One turn as its agent saw it."""

    began: float
    first_byte: float
    ended: float
    error: str | None
    """The code of the error that it got."""
    mid_stream: bool
    report: ReuseReport


@dataclass
class Load:
    """Agents that go on asking, and what became of it."""

    router: Router
    reports: list[ReuseReport]
    turns: list[Turn] = field(default_factory=list)
    stopping: bool = False
    names: Any = field(default_factory=count)

    async def agent(self) -> None:
        while not self.stopping:
            await self._conversation(f"agent-{next(self.names)}")

    async def _conversation(self, name: str) -> None:
        messages = [system(f"You are {name}. " * 8)]
        for number in range(TURNS):
            messages.append(user(f"{name} asks for the {number}th time. " * 4))
            text = await self._ask(name, messages)
            if text is None or self.stopping:
                break
            messages.append({"role": "assistant", "content": text})
            await asyncio.sleep(THINK_S)
        await self.router.end_conversation(name)

    async def _ask(self, name: str, messages: list[dict[str, Any]]) -> str | None:
        """The answer's text; `None` when there is none."""
        body = {"model": "loopback", "messages": messages, "stream": True, "max_tokens": 16}
        began = time.monotonic()
        reply = await self.router.handle(
            Request("POST", CHAT, [("x-conversation-id", name)], json.dumps(body).encode())
        )
        first_byte, raw = 0.0, b""
        async for chunk in reply:
            first_byte = first_byte or time.monotonic()
            raw += chunk
        report = next(one for one in reversed(self.reports) if one.conversation == name)
        ended, error, text = time.monotonic(), None, ""
        if reply.status != 200:
            error = json.loads(raw)["error"]["code"]
        else:
            for event in raw.decode().strip().split("\n\n"):
                if event != "data: [DONE]":
                    data = json.loads(event.removeprefix("data: "))
                    error = data["error"]["code"] if "error" in data else error
                    text += "".join(choice["delta"].get("content") or "" for choice in data.get("choices", ()))
        self.turns.append(Turn(began, first_byte, ended, error, reply.status == 200 and error is not None, report))
        return None if error else text

    def since(self, when: float) -> list[Turn]:
        return [turn for turn in self.turns if turn.began >= when]

    def placed(self, when: float) -> list[Turn]:
        """First turns, which no earlier one draws to an engine."""
        return [turn for turn in self.since(when) if turn.report.turn == 1]


def reached(url: str, turns: list[Turn]) -> int:
    return sum(1 for turn in turns if url in (turn.report.prefill_engine, turn.report.decode_engine))


@dataclass
class Directly:
    """What small requests take that an engine gets without the router, at worst: the machine's part of a delay, whether it keeps
    the engine waiting or this process."""

    worst_s: float = 0.0

    async def watch(self, engine: Process) -> None:
        body = {"model": "loopback", "messages": [user("Are you there?")], "max_tokens": 1}
        async with aiohttp.ClientSession() as http:
            while True:
                due = time.monotonic() + 0.02
                await asyncio.sleep(0.02)
                async with http.post(engine.url + CHAT, json=body) as answer:
                    assert answer.status == 200
                    await answer.read()
                self.worst_s = max(self.worst_s, time.monotonic() - due)


@asynccontextmanager
async def asked_directly(*engines: Process) -> AsyncIterator[list[Directly]]:
    asking = [Directly() for _ in engines]
    tasks = [asyncio.create_task(one.watch(engine)) for one, engine in zip(asking, engines, strict=True)]
    try:
        yield asking
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


@asynccontextmanager
async def under_load() -> AsyncIterator[tuple[list[Process], Load]]:
    """Two P, two D, and agents on them."""
    engines = [Process("prefill"), Process("prefill"), Process("decode"), Process("decode")]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.kill)
        await asyncio.gather(*(engine.start() for engine in engines))
        urls = [engine.url for engine in engines]
        reports: list[ReuseReport] = []
        config = RouterConfig(prefill=tuple(urls[:2]), decode=tuple(urls[2:]), local_max_tokens=0)
        router = Router(config, on_report=reports.append)
        stack.push_async_callback(router.aclose)
        await router.connect()
        load = Load(router, reports)
        agents = [asyncio.create_task(load.agent()) for _ in range(AGENTS)]
        try:
            yield engines, load
            load.stopping = True
            async with asyncio.timeout(20):
                await asyncio.gather(*agents)
        finally:
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)


@pytest.mark.alone
@pytest.mark.slow
async def test_engines_that_are_killed_and_restarted_under_load_cost_nothing_but_the_streams_that_had_begun() -> None:
    async with under_load() as (engines, load):
        victims = [engines[0], engines[2]]
        await until(
            lambda: all(reached(one.url, load.turns) >= AGENTS // 2 for one in engines), 60, "turns run everywhere"
        )

        killed: dict[str, float] = {}
        dead: dict[str, float] = {}
        async with asked_directly(engines[1], engines[3]) as direct:
            for victim in victims:
                killed[victim.role] = time.monotonic()
                await victim.kill()
                dead[victim.role] = since = time.monotonic() + 0.1
                await until(lambda: len(load.since(since)) >= AGENTS, 60, "turns go on without it")  # noqa: B023
                given = reached(victim.url, load.since(since))
                assert not given, "turns were given to an engine that was known to be dead"

            await asyncio.gather(*(victim.start() for victim in victims))
            serves = time.monotonic()
            back = {one.url: await until(lambda: reached(one.url, load.since(serves)) >= 2) for one in victims}  # noqa: B023
            again = time.monotonic()
            await until(lambda: len(load.placed(again)) >= 3 * AGENTS, 60, "conversations begin with them")

    # a stream that has begun cannot be taken back: it is told at once, and nothing else fails
    hit = [turn for turn in load.turns if turn.error]
    limit_s = RAISED_S + sum(one.worst_s for one in direct)  # the router's part, and the machine's
    for turn in hit:
        assert (turn.mid_stream, turn.error) == (True, "decode_failed"), turn
        assert turn.began < dead["decode"], turn
        assert killed["decode"] < turn.ended < killed["decode"] + limit_s, turn
    assert len(hit) <= AGENTS
    first = min(killed.values())
    usual = max(turn.first_byte - turn.began for turn in load.turns if turn.began < first and not turn.error)
    slowest = max(turn.first_byte - turn.began for turn in load.since(first))
    assert slowest < usual + limit_s
    placed = load.placed(again)[AGENTS:]  # the first ones make up for what ran elsewhere meanwhile
    for victim in victims:
        share = reached(victim.url, placed) / len(placed)
        assert 0.2 < share < 0.8, f"{share:.0%} of the conversations began on {victim.url}, which came back ({back})"
