"""`backhaul bench exact`: random conversations, edited at random, over engines that share everything. Each answer must be that
of the client's own body sent straight to an engine that has none of it cached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from unittest import mock
from uuid import uuid4

import httpx2
from backhaul_cli.options import Count
from backhaul_connector.launch.cluster import Connector, Engines
from backhaul_loopback import LoopbackEngine
from backhaul_loopback.config import Role
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.report import Proof, ReuseReport

from . import answers, clusters
from .answers import CHAT
from .options import OnEngines
from .wanderers import Wanderer

Answer = tuple[int, answers.Choices]
"""Status and choices."""

_SHOWN = 10
"""Wrong answers that are kept in full."""
_STRANGER = 0.05
"""Share of the turns that are run under another conversation's id."""
_TWICE = 0.1
"""Share of the turns that are run twice at once."""
_FLUSH = 0.002
"""Share of the turns before which everything is flushed."""
_FORGET = 0.5
"""Share of the turns before which P is asked to forget its prefix cache, which it does when it is idle: what is proven must
then be read."""


EPILOG = "Exit status: 1 if any answer was wrong."


@dataclass(frozen=True, kw_only=True)
class Options(OnEngines):
    proof: Annotated[Literal["tokens", "connector"], "what shows that KV may be reused"] = "tokens"
    conversations: Annotated[Count, "in all"] = 1000
    seed: Annotated[int, "S", "of the conversations"] = 0


@dataclass(frozen=True, kw_only=True)
class Site:
    """Running engines. P caches prefixes, so that wrong KV in its cache would show later, in other conversations."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    reference: str
    """Answers bodies as they are, under a fresh cache salt each time; it may be one of the others."""
    model: str
    title: str
    proof: Proof
    in_floats: bool
    """Whether answers come from floating-point numbers, in which two tokens can be as good as equal."""
    longest_answer: int = 60
    """Tokens."""
    at_once: int = 4
    """Conversations that run side by side."""


@dataclass
class Tally:
    """What came of it."""

    title: str
    proof: Proof
    seed: int
    conversations: int = 0
    turns: int = 0
    routes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By route and reason."""
    offered: int = 0
    """Tokens that the router offered to P for reading."""
    pulled: int = 0
    """Tokens that the engines' own counters say P has read."""
    near_ties: int = 0
    """Answers that part where the reference has two tokens that are as good as equal."""
    wrong: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)
    wall_s: float = 0.0

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.title}, proof {self.proof}, seed {self.seed}"
        yield f"{self.conversations:,} conversations, {self.turns:,} turns in {self.wall_s:,.0f} s"
        for (route, reason), count in sorted(self.routes.items(), key=lambda item: (item[0][0], -item[1])):
            yield f"  {route:<6} {reason or '-':<18} {count:>9,}"
        yield f"tokens offered {self.offered:,}, pulled {self.pulled:,}"
        if self.near_ties:
            yield f"near ties {self.near_ties:,}"
        yield f"wrong answers {self.wrong:,}"

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        routes = [{"route": r, "reason": why or None, "turns": n} for (r, why), n in sorted(self.routes.items())]
        return {**vars(self), "wall_s": round(self.wall_s, 1), "routes": routes}


async def measure(site: Site, *, conversations: int, seed: int = 0) -> Tally:
    """Runs the conversations. Raises `EngineTrouble` when an engine ends meanwhile."""
    tally = Tally(site.title, site.proof, seed, conversations)
    config = RouterConfig(prefill=site.prefill, decode=site.decode, connect_timeout_s=2.0, check_pairs=False)
    router = Router(config, on_report=lambda report: _count(tally, report))
    limits = httpx2.Limits(max_connections=2 * site.at_once)
    async with httpx2.AsyncClient(timeout=120.0, trust_env=False, limits=limits) as http:
        run = _Run(site, router, http, tally)
        begin = time.perf_counter()
        try:
            await run.all(conversations, seed)
        finally:
            await router.aclose()
        tally.wall_s = time.perf_counter() - begin
    return tally


def _count(tally: Tally, report: ReuseReport) -> None:
    tally.turns += 1
    tally.routes[str(report.route), str(report.reason or "")] += 1
    tally.offered += report.offered


@dataclass(frozen=True)
class _Run:
    site: Site
    router: Router
    http: httpx2.AsyncClient
    tally: Tally

    async def all(self, conversations: int, seed: int) -> None:
        before = await self._pulled()
        numbers = iter(range(conversations))
        with answers.first_of_group():
            async with asyncio.TaskGroup() as group:
                for _ in range(self.site.at_once):
                    group.create_task(self._some(numbers, seed))
        self.tally.pulled = round(await self._pulled() - before)

    async def _some(self, numbers: Iterator[int], seed: int) -> None:
        """Conversations one after another, of those that nobody has begun."""
        for number in numbers:
            agent = Wanderer(seed, number, longest_answer=self.site.longest_answer)
            for turn in range(agent.turns):
                await self._turn(agent, turn, f"{seed}-{max(0, number - 1)}")
            await self.router.end_conversation(agent.name)

    async def _turn(self, agent: Wanderer, turn: int, other: str) -> None:
        body = {"model": self.site.model, **agent.next()}
        if agent.chance(_FLUSH):
            await self.router.flush()
        if agent.chance(_FORGET):
            await self._forget()
        name = other if agent.chance(_STRANGER) else agent.name
        status, expected = await self._reference(body)
        times = 2 if agent.chance(_TWICE) else 1
        found = await asyncio.gather(*(self._routed(body, name) for _ in range(times)))
        for one in found:
            if not await self._right(body, one, (status, expected)):
                self.tally.wrong += 1
                if len(self.tally.examples) < _SHOWN:
                    what = {"conversation": agent.name, "turn": turn, "change": agent.change, "under": name}
                    self.tally.examples.append({**what, "body": body, "answer": one, "expected": expected})
        if status == 200:
            agent.heard(answers.message(expected[0]))

    async def _right(self, body: Mapping[str, Any], found: Answer, expected: Answer) -> bool:
        if found[0] != expected[0] or found[0] != 200:
            return found[0] == expected[0]
        if answers.comparable(found[1]) == answers.comparable(expected[1]):
            return True
        if self.site.in_floats and await answers.near_tie(self._ask, CHAT, body, found[1], expected[1]):
            self.tally.near_ties += 1
            return True
        return False

    async def _routed(self, body: Mapping[str, Any], conversation: str) -> Answer:
        headers = [("X-Conversation-ID", conversation)]
        reply = await self.router.handle(Request("POST", CHAT, headers, json.dumps(body).encode()))
        raw = b"".join([chunk async for chunk in reply])
        return _answer(reply.status, raw, body)

    async def _reference(self, body: Mapping[str, Any]) -> Answer:
        answer = await self._post(CHAT, {**body, "cache_salt": uuid4().hex})
        return _answer(answer.status_code, answer.content, body)

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = await self._post(path, {**body, "cache_salt": uuid4().hex})
        if answer.status_code != 200:
            raise answers.EngineTrouble(f"{self.site.reference} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        try:
            return await self.http.post(self.site.reference + path, json=body)
        except httpx2.HTTPError as error:
            raise answers.EngineTrouble(f"{self.site.reference} does not answer: {error!r}") from error

    async def _forget(self) -> None:
        for url in self.site.prefill:
            (await self.http.post(f"{url}/reset_prefix_cache")).raise_for_status()

    async def _pulled(self) -> float:
        """Tokens that the prefill engines say they have read from others, since they started."""
        pages = [(await self.http.get(f"{url}/metrics")).raise_for_status().text for url in self.site.prefill]
        return sum(float(value) for page in pages for value in _PULLED.findall(page))


_OFFERS_RESET = {"VLLM_SERVER_DEV_MODE": "1"}
"""Only so does vLLM offer to reset its prefix cache."""
_PULLED = re.compile(r'^vllm:prompt_tokens_by_source_total\{[^\n]*source="external_kv_transfer"[^\n]*\} (\S+)$', re.M)


def _answer(status: int, raw: bytes, body: Mapping[str, Any]) -> Answer:
    """Status and choices; a stream that broke counts as status 502."""
    if status != 200:
        return status, []
    try:
        return status, answers.choices(raw, stream=bool(body.get("stream")))
    except ValueError:
        return 502, []


# --- engines --------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def loopback(proof: Proof) -> AsyncIterator[Site]:
    """Two P, two D and a reference in the running event loop. Their answers are functions of all the KV that was used."""
    settings: dict[str, Any] = {"connector": "backhaul" if proof is Proof.CONNECTOR else "stock"}
    async with contextlib.AsyncExitStack() as stack:

        async def start(role: Role) -> LoopbackEngine:
            return await stack.enter_async_context(LoopbackEngine(role, **settings))

        prefill = [await start("prefill") for _ in range(2)]
        decode = [await start("decode") for _ in range(2)]
        reference = await start("decode")
        yield Site(
            prefill=tuple(engine.url for engine in prefill),
            decode=tuple(engine.url for engine in decode),
            reference=reference.url,
            model=reference.model,
            title="loopback engines, 2 P and 2 D",
            proof=proof,
            in_floats=False,
        )


@contextlib.contextmanager
def vllm(proof: Proof, model: str, python: str | None) -> Iterator[Site]:
    """One P and one D of vLLM, which takes a minute or two; in float32 on CPUs. Raises `LaunchError`."""
    connector = Connector.BACKHAUL if proof is Proof.CONNECTOR else Connector.STOCK
    found, config = clusters.on_vllm(model, python, connector=connector)
    with mock.patch.dict(os.environ, _OFFERS_RESET), Engines(config, report=clusters.say) as engines:
        yield Site(
            prefill=(engines.prefill[0].url,),
            decode=(engines.decode[0].url,),
            reference=engines.decode[0].url,
            model=engines.model,
            title=f"vLLM {found.vllm}, 1 P and 1 D, model {engines.model}",
            proof=proof,
            in_floats=True,
            longest_answer=40,
            at_once=2,
        )


# --- the command ----------------------------------------------------------------------------------------------------------


def main(options: Options) -> int:
    """Runs, prints, and returns the exit status: 1 if any answer was wrong. Raises `LaunchError`."""
    if options.engines == "loopback":
        tally = asyncio.run(_on_loopback(options))
    else:
        with vllm(Proof(options.proof), options.model, options.python) as site:
            tally = asyncio.run(measure(site, conversations=options.conversations, seed=options.seed))
    for line in tally.lines():
        print(line)
    options.write(tally.to_dict())
    return 1 if tally.wrong else 0


async def _on_loopback(options: Options) -> Tally:
    async with loopback(Proof(options.proof)) as site:
        return await measure(site, conversations=options.conversations, seed=options.seed)
