"""A prefill and a decode engine that a test may stop, kill, or start again with other settings, and routers over them whose
calls can be caught on their way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from backhaul_connector.launch.cluster import Engine, EngineCommand
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.engines.client import EngineAnswer, EngineCall
from backhaul_router.engines.http_client import HttpClient, HttpStream
from backhaul_router.report import ReuseReport
from by_hand import alarms
from real_engines import EngineSet, metrics, wait_for_baseline
from vllm_agents import COMPLETIONS, Agent, Answer

BLOCK = 32
RELEASED_S = 8.0
"""So long after a router is closed its engines hold nothing for it. What ends by itself takes twice as long or longer."""
PREFILL_LEASE_S = 35.0
"""P keeps for 30 s what no D has read, where nobody could tell it that none will."""


class Settings:
    """How engines differ from what their set was started with. An engine is restarted only when a test wants it different."""

    def __init__(self) -> None:
        self._original: dict[Engine, tuple[EngineSet, EngineCommand]] = {}
        self.free_by: dict[Engine, float] = {}
        """When an engine has let go of what nobody could tell it to, on the monotonic clock."""

    def want(self, engines: EngineSet, engine: Engine, *args: str, **extra: Any) -> bool:
        """Sets an engine's further flags and `kv_connector_extra_config`; true if it has to be started again for that."""
        _, original = self._original.setdefault(engine, (engines, engine.command))
        argv = list(original.argv)
        transfer = argv.index("--kv-transfer-config") + 1
        config = json.loads(argv[transfer])
        config["kv_connector_extra_config"] |= extra
        argv[transfer] = json.dumps(config, separators=(",", ":"))
        command = replace(original, argv=(*argv, *args))
        changed = command.argv != engine.command.argv
        engine.command = command
        return changed

    async def apply(self, *engines: Engine) -> None:
        """Starts engines again, all at once, as they were last wanted."""
        for engine in engines:
            engine.ask_to_end()
        for engine in engines:
            await asyncio.to_thread(engine.join)
            self.free_by.pop(engine, None)
        for engine in engines:
            engine.start()
        for engines_of in {
            id(self._original[engine][0].running): self._original[engine][0] for engine in engines
        }.values():
            await asyncio.to_thread(engines_of.running.wait_healthy)


class Catching(HttpClient):
    """The router's HTTP client. The next request to an engine can be changed, or something done, just before it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self._caught: dict[str, Callable[[EngineCall], Awaitable[EngineCall]]] = {}

    def catch(self, engine: Engine, change: Callable[[EngineCall], Awaitable[EngineCall]]) -> None:
        self._caught[engine.url + COMPLETIONS] = change

    def sending(self, engine: Engine) -> asyncio.Event:
        """Set when the next request to the engine is on its way."""
        event = asyncio.Event()

        async def note(call: EngineCall) -> EngineCall:
            event.set()
            return call

        self.catch(engine, note)
        return event

    def rewrite(self, engine: Engine, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes the transfer parameters of the next request to the engine."""

        async def rewritten(call: EngineCall) -> EngineCall:
            body = json.loads(call.body or b"{}")
            change(body["kv_transfer_params"])
            return msgspec.structs.replace(call, body=json.dumps(body).encode())

        self.catch(engine, rewritten)

    async def _changed(self, request: EngineCall) -> EngineCall:
        change = self._caught.pop(request.url, None)
        return await change(request) if change else request

    async def call(self, request: EngineCall) -> EngineAnswer:
        return await super().call(await self._changed(request))

    async def open(self, request: EngineCall) -> HttpStream:
        return await super().open(await self._changed(request))


@dataclass
class Site:
    """One P and one D, with the connector under test."""

    ours: bool
    engines: EngineSet
    settings: Settings
    late_reads: int = 0
    """How many reads the test makes end after their lease."""

    @property
    def p(self) -> Engine:
        return self.engines.running.prefill[0]

    @property
    def d(self) -> Engine:
        return self.engines.running.decode[0]

    async def start_again(self, engine: Engine) -> None:
        await self.settings.apply(engine)

    @asynccontextmanager
    async def router(self, *, audited: bool = True, **settings: Any) -> AsyncIterator[Run]:
        """A router over the pair. When it is gone both engines live and hold nothing for it, and what it counted is what the
        engines did (`audited`: P was neither restarted nor left in the middle of a turn)."""
        async with run(self.engines.prefill, self.engines.decode, self.engines, **settings) as talk:
            yield talk
            if audited and self.ours:
                await agrees(talk.router)
        await self.at_rest()

    async def at_rest(self, *, patiently: bool = False) -> None:
        """Both engines are well and keep nothing but what they are known to keep for a while; with `patiently` not even that,
        when its time has come."""
        for engine in (self.p, self.d):
            engine.check()
            assert await asyncio.to_thread(_healthy, engine), engine
            left_s = self.settings.free_by.get(engine, 0.0) - time.monotonic()
            if patiently or left_s <= 0:
                await wait_for_baseline(engine.url, timeout_s=max(RELEASED_S, left_s))

    def keeps_for_a_while(self, engine: Engine, seconds: float) -> None:
        """Nobody can tell the engine that what it keeps now is not wanted any more."""
        self.settings.free_by[engine] = time.monotonic() + seconds


def _healthy(engine: Engine) -> bool:
    return engine.healthy


async def agrees(router: Router) -> None:
    """The prefill engines of ours count what the router was told. An engine renews its metrics with a step's delay."""
    deadline = time.monotonic() + 20.0
    while off := [str(line) for line in await router.audit() if line.difference]:
        assert time.monotonic() < deadline, off
        await asyncio.sleep(0.1)


@dataclass
class Run:
    router: Router
    client: Catching
    agent: Agent

    async def say(self, prompt: Sequence[int], max_tokens: int = 40, **how: Any) -> Answer:
        """One turn, whose answer must be right."""
        extra = how.pop("body", {})
        asked = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **extra,
        }
        return await self.agent.ask(asked, COMPLETIONS, **how)

    async def more(self, prompt: Sequence[int], **how: Any) -> list[int]:
        """One turn; the prompt of the next one."""
        answer = await self.say(prompt, **how)
        await self.router.settled()
        return [*prompt, *answer.token_ids, *range(150, 190)]

    async def broken_stream(self, prompt: Sequence[int], max_tokens: int) -> list[Any]:
        """The data of a stream's events, of one that is not expected to come to its end."""
        asked = {
            "model": self.agent.engines.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        body = json.dumps({**asked, "temperature": 0, "stream": True}).encode()
        headers = [("X-Conversation-ID", self.agent.conversation or "")]
        reply = await self.router.handle(Request("POST", COMPLETIONS, headers, body))
        raw = b"".join([chunk async for chunk in reply])
        return [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n") if event]

    def next_is_kept_for(self, engine: Engine, seconds: float) -> None:
        """D keeps the next turn, and no other one, for so long only: what the test shall see expire must not, however slow
        the machine is, expire again in the turns that shall be warm. For D of ours."""
        self.client.rewrite(engine, lambda params: params["backhaul"].update(retain_s=seconds))

    def believes_in_its_handles(self) -> None:
        """The router does not know that what it holds has ended."""
        assert self.agent.conversation
        held = self.router.ledger.held_for(self.agent.conversation)
        self.router.ledger.renewed(self.agent.conversation, {one.name: time.monotonic() + 300 for one in held})


@asynccontextmanager
async def run(prefill: Sequence[str], decode: Sequence[str], engines: EngineSet, **settings: Any) -> AsyncIterator[Run]:
    """A router with one conversation; `engines` has the model, and the engine that gives the reference."""
    reports: list[ReuseReport] = []
    client = Catching()
    config = RouterConfig(
        prefill=tuple(prefill), decode=tuple(decode), local_max_tokens=0, place_by_cost=False, **settings
    )
    router = Router(config, client=client, on_report=reports.append, seed=0)
    try:
        await router.connect()
        yield Run(router, client, Agent(router, engines, reports))
    finally:
        await router.aclose()


def processes(engine: Engine, title: str = "") -> list[int]:
    """An engine's processes whose titles begin so."""
    return [pid for pid in engine.pids() if _title(pid).startswith(title)]


def _title(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


@contextmanager
def standing_still(engine: Engine, title: str = "") -> Iterator[None]:
    """Stops an engine's processes, or those with such titles, until the block ends."""
    pids = processes(engine, title)
    assert pids, f"{engine} has no process {title!r}: {[_title(pid) for pid in engine.pids()]}"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await holds():
        assert time.monotonic() < deadline, f"it did not come to pass within {timeout_s:g} s"
        await asyncio.sleep(0.02)


async def runs(url: str) -> bool:
    """Whether a request runs on the engine."""
    return (await metrics(url))["vllm:num_requests_running"] > 0


async def waits_for_blocks(engine: Engine) -> bool:
    """Whether a request on the engine waits for another engine's blocks."""
    return (await metrics(engine.url)).total("vllm:num_requests_waiting_by_reason", reason="deferred") > 0


@contextmanager
def taking(limit_s: float) -> Iterator[None]:
    """The block must not take longer."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


async def rises(engines: EngineSet) -> Callable[[], Awaitable[float]]:
    """By how much vLLM's own count of reads that came too late has grown."""
    before = await alarms(engines)

    async def rise() -> float:
        return await alarms(engines) - before

    return rise


Params = Mapping[str, Any]
