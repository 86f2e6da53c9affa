"""`backhaul bench ttft`: the published experiment. Conversations whose prompts grow, on one P and one D, with reuse off, and
over the routes `warm` and `local`; time to first token at the client, and where it goes.

The three conversations have equal prompts and run turn by turn side by side, in changing order, so that whatever else the
machine does meets all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
from backhaul import _http
from backhaul._conversation import Conversation, entered
from backhaul_router.config import RouterConfig
from backhaul_router.drive.embedded import make_async_transport
from backhaul_router.drive.router import Router
from backhaul_router.report import ReuseReport, Route

from . import scrape
from .clusters import Cluster

ROUTES = ("off", "warm", "local")
ANSWER_TOKENS = 16
_SAFE_IDS = range(32, 256)
"""Ids that are ordinary tokens in every vocabulary at hand."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    prompt_tokens: tuple[int, ...]
    """Ascending."""
    new_tokens: int
    """What a measured turn adds to its history, at most; half of the prompt where that is less."""
    repeats: int = 3

    def history(self, prompt_tokens: int) -> int:
        """Tokens that the conversation has before the turn of this length."""
        return prompt_tokens - min(self.new_tokens, prompt_tokens // 2)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measured turn. Times are milliseconds, `None` means not known."""

    route: str
    prompt_tokens: int
    ttft_ms: float
    prefill_ms: float | None
    """The prefill leg as the router saw it; a `local` turn has none."""
    read_ms: float | None
    """What P spent on reading from D."""
    compute_ms: float | None
    """What the engine that prefilled spent on computing."""
    report: ReuseReport
    answer: tuple[int, ...]

    @property
    def as_meant(self) -> bool:
        """Whether the turn ran on the route that was to be measured."""
        return self.report.route == (Route.COLD if self.route == "off" else self.route)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians over the repeats of one prompt length on one route."""

    prompt_tokens: int
    route: str
    ttft_ms: float
    ttft_min_ms: float
    ttft_max_ms: float
    prefill_ms: float | None
    read_ms: float | None
    compute_ms: float | None
    offered: int
    computed: int | None
    repeats: int
    as_meant: bool
    """False if a repeat did not run on this route."""


@dataclass(frozen=True)
class Result:
    """A whole measurement."""

    cluster: Cluster
    plan: Plan
    samples: tuple[Sample, ...]
    answers_equal: bool
    """Whether every turn, measured or not, had the same answer on all routes."""
    rows: tuple[Row, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(_rows(self.samples)))

    def row(self, prompt_tokens: int, route: str) -> Row:
        return next(row for row in self.rows if (row.prompt_tokens, row.route) == (prompt_tokens, route))

    @property
    def lengths(self) -> list[int]:
        return sorted({row.prompt_tokens for row in self.rows})


async def measure(cluster: Cluster, plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Result:
    """Runs the experiment. Raises `openai.OpenAIError` when an engine fails."""
    samples: list[Sample] = []
    equal = True
    async with _talkers(cluster) as make, scrape.client() as http:
        if not cluster.virtual:
            progress("warming up")
            await _conversation(make, http, plan, plan.prompt_tokens[-1:], random.Random(0), itertools.repeat(ROUTES))
        orders = itertools.cycle((ROUTES, (*ROUTES[1:], ROUTES[0]), (ROUTES[2], *ROUTES[:2])))
        for repeat in range(plan.repeats):
            progress(f"repeat {repeat + 1} of {plan.repeats}")
            found, same = await _conversation(
                make, http, plan, plan.prompt_tokens, random.Random(repeat + 1), orders, progress
            )
            samples += found
            equal = equal and same
    return Result(cluster, plan, tuple(samples), equal)


class _Talker:
    """One conversation on one route."""

    def __init__(
        self, cluster: Cluster, client: openai.AsyncOpenAI, route: str, quiet: Callable[[], Awaitable[None]]
    ) -> None:
        """`quiet` returns when the engines have nothing left to do for earlier turns."""
        self.cluster = cluster
        self.client = client
        self.route = route
        self.quiet = quiet
        self.conversation = Conversation()
        self.salt = uuid.uuid4().hex
        self.ids: list[int] = []
        """The history: everything that was sent and answered."""

    async def turn(self, new: Sequence[int]) -> tuple[float, ReuseReport, tuple[int, ...]]:
        """Sends the history with new tokens: time to first token in milliseconds, the report, the answer."""
        prompt = [*self.ids, *new]
        clock = self.cluster.clock
        first: float | None = None
        answer: list[int] = []
        with entered(self.conversation):
            began = clock()
            stream: Any = await self.client.completions.create(
                model=self.cluster.model,
                prompt=prompt,
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": self.salt},
            )
            async for chunk in stream:
                if chunk.choices:
                    first = first or clock()
                    answer += chunk.choices[0].model_extra.get("token_ids") or []
        report = self.conversation.reuse.last
        if first is None or report is None or report.error is not None:
            raise openai.OpenAIError(f"a turn of {len(prompt)} tokens, {self.route}, ended without an answer: {report}")
        self.ids = [*prompt, *answer]
        return (first - began) * 1e3, report, tuple(answer)

    async def measured(self, http: httpx2.AsyncClient, new: Sequence[int], prompt_tokens: int) -> Sample:
        engine = self.cluster.decode if self.route == "local" else self.cluster.prefill
        await self.quiet()
        before = await scrape.times(http, engine)
        ttft_ms, report, answer = await self.turn(new)
        read_ms: float | None = 0.0
        if report.route is Route.WARM:
            read_ms = await scrape.spent_ms(http, engine, scrape.READ, before)
        costs = self.cluster.costs
        if costs is None:
            compute_ms = await scrape.spent_ms(http, engine, scrape.COMPUTE, before)
        else:
            compute_ms = None if report.computed is None else report.computed * costs.prefill_s * 1e3
        return Sample(
            route=self.route,
            prompt_tokens=prompt_tokens,
            ttft_ms=ttft_ms,
            prefill_ms=report.prefill_ms,
            read_ms=read_ms,
            compute_ms=compute_ms,
            report=report,
            answer=answer,
        )


@asynccontextmanager
async def _talkers(cluster: Cluster) -> AsyncIterator[Callable[[str], _Talker]]:
    """Makes conversations; each route has a client with an embedded router of its own, in the cluster's time."""
    settings: dict[str, dict[str, Any]] = {"off": {"reuse": False}, "warm": {"route": Route.WARM}}
    settings["local"] = {"route": Route.LOCAL}
    module = _http.openais_http_module()
    async with AsyncExitStack() as stack:
        clients: dict[str, openai.AsyncOpenAI] = {}
        routers: list[Router] = []

        async def quiet() -> None:
            for router in routers:
                await router.settled()

        for route in ROUTES:
            config = RouterConfig(
                prefill=(cluster.prefill,), decode=(cluster.decode,), check_pairs=False, **settings[route]
            )
            routers.append(Router(config, clock=cluster.clock))
            transport = make_async_transport(routers[-1], module)
            clients[route] = await stack.enter_async_context(
                openai.AsyncOpenAI(
                    base_url=_http.EMBEDDED_URL,
                    api_key="none",
                    max_retries=0,
                    http_client=module.AsyncClient(transport=transport, timeout=600.0, trust_env=False),
                )
            )
            await clients[route].models.list()
        yield lambda route: _Talker(cluster, clients[route], route, quiet)


async def _conversation(
    make: Callable[[str], _Talker],
    http: httpx2.AsyncClient,
    plan: Plan,
    lengths: Sequence[int],
    source: random.Random,
    orders: Iterable[tuple[str, ...]],
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Sample], bool]:
    """One conversation on each route, through all prompt lengths; and whether their answers were equal throughout."""
    talkers = {route: make(route) for route in ROUTES}
    samples: list[Sample] = []
    equal = True
    turns = iter(orders)

    def missing(up_to: int) -> list[int]:
        return source.choices(_SAFE_IDS, k=max(0, up_to - len(talkers["off"].ids)))

    try:
        for length in lengths:
            order = next(turns)
            if len(opening := missing(plan.history(length) - ANSWER_TOKENS)) > 0:
                answers = {(await talkers[route].turn(opening))[2] for route in order}
                equal = equal and len(answers) == 1
            new = missing(length)
            if not new:
                raise ValueError(f"prompt lengths must be more than {ANSWER_TOKENS} tokens apart: {length} is not")
            found = [await talkers[route].measured(http, new, length) for route in order]
            equal = equal and len({sample.answer for sample in found}) == 1
            samples += found
            times = ", ".join(f"{s.route} {s.ttft_ms:,.0f} ms" for s in sorted(found, key=_by_route))
            progress(f"  {length:,} tokens: {times}")
    finally:
        await asyncio.gather(*(talker.conversation.aend() for talker in talkers.values()))
    return samples, equal


def _by_route(sample: Sample) -> int:
    return ROUTES.index(sample.route)


def _rows(samples: Sequence[Sample]) -> Iterable[Row]:
    for length in sorted({sample.prompt_tokens for sample in samples}):
        for route in ROUTES:
            some = [s for s in samples if (s.prompt_tokens, s.route) == (length, route)]
            ttft = [s.ttft_ms for s in some]
            computed = _median(s.report.computed for s in some)
            yield Row(
                prompt_tokens=length,
                route=route,
                ttft_ms=statistics.median(ttft),
                ttft_min_ms=min(ttft),
                ttft_max_ms=max(ttft),
                prefill_ms=_median(s.prefill_ms for s in some),
                read_ms=_median(s.read_ms for s in some),
                compute_ms=_median(s.compute_ms for s in some),
                offered=math.floor(statistics.median(s.report.offered for s in some)),
                computed=None if computed is None else math.floor(computed),
                repeats=len(some),
                as_meant=all(s.as_meant for s in some),
            )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
