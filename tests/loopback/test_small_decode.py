"""A decode engine with a small KV cache: nothing waits for blocks that are only kept, in virtual time, where a wait for a lease
to end would last minutes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from backhaul_loopback import CostModel, LoopbackEngine, VirtualClock
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Request, Router
from backhaul_router.engines.retention_polling import poll_retention
from backhaul_router.fleet.retention import Cause
from backhaul_router.report import Reason, ReuseReport, Route
from router_turns import BLOCK, CHAT, STORY, Cluster, opening, run_cluster, system, user

STOCK: dict[str, Any] = {}
OURS = {"connector": "backhaul"}
KINDS = pytest.mark.parametrize("engine", [STOCK, OURS], ids=["stock", "connector"])
LONG = STORY * 4
"""About 350 tokens."""
FITS = 5
"""So many one-shot conversations fit into D."""
ONE_SHOTS = 10 * FITS
ANSWER = 16
SHORT_S = 10.0
"""Less than any lease lasts. Real sockets take a moment, in which virtual time goes on for those who decode."""


class Small:
    """One P, and a D with room for `FITS` conversations, in virtual time. Decoding takes time there, and nothing else does: the
    sum of D's times to first token is how long all requests waited for blocks."""

    def __init__(self, router: Router, clock: VirtualClock, p: LoopbackEngine, d: LoopbackEngine) -> None:
        self.router, self.clock, self.p, self.d = router, clock, p, d
        self.reports: list[ReuseReport] = []

    async def turn(self, messages: list[dict[str, Any]], conversation: str | None = None) -> dict[str, Any]:
        body = {"model": self.d.model, "messages": messages, "max_tokens": ANSWER}
        named = [("X-Conversation-ID", conversation)] if conversation else []
        reply = await self.router.handle(Request("POST", CHAT, named, json.dumps(body).encode()))
        raw = b"".join([chunk async for chunk in reply])
        assert reply.status == 200, raw
        message: dict[str, Any] = json.loads(raw)["choices"][0]["message"]
        return {key: value for key, value in message.items() if value is not None}

    async def one_shots(self, *, named: bool, at_once: int = 2) -> None:
        """Ten times as many as fit, each of which says something of its own from the first token on."""

        async def some(numbers: range) -> None:
            for number in numbers:
                await self.turn([system(f"{number:04}. {LONG}"), user("Hi")], f"one-{number}" if named else None)

        await asyncio.gather(*(some(range(first, ONE_SHOTS, at_once)) for first in range(at_once)))

    @property
    def waited_s(self) -> float:
        return self.d.core.metrics.time_to_first_token_sum


@asynccontextmanager
async def small(engine: dict[str, Any], **config: Any) -> AsyncIterator[Small]:
    clock = VirtualClock(auto=True)
    blocks = FITS * -(-(len(LONG) + 60 + ANSWER) // BLOCK) + 1
    async with (
        LoopbackEngine("prefill", clock=clock, **engine, prefix_caching=False) as p,
        LoopbackEngine("decode", clock=clock, num_blocks=blocks, costs=CostModel(decode_s=0.001), **engine) as d,
    ):
        given: dict[str, Any] = {"local_max_tokens": 0, "check_pairs": False, "prefill": [p.url], "decode": [d.url]}
        router = Router(RouterConfig(**given | config), clock=clock.now)
        made = Small(router, clock, p, d)
        router.on_report = made.reports.append
        try:
            yield made
        finally:
            await router.aclose()


@KINDS
@pytest.mark.parametrize("named", [True, False], ids=["named", "nameless"])
async def test_no_request_waits_for_what_one_shot_conversations_left(engine: dict[str, Any], named: bool) -> None:
    async with small(engine) as cluster:
        await cluster.one_shots(named=named)
        assert cluster.waited_s < SHORT_S
        await cluster.router.settled()
        assert cluster.router.retention.retained(cluster.d.url) <= (cluster.d.core.pool.usable * BLOCK) / 2
        assert cluster.router.retention.released[Cause.BUDGET] > ONE_SHOTS / 2
    assert len(cluster.reports) == ONE_SHOTS


@pytest.mark.parametrize("at_once", [FITS - 2, FITS + 2], ids=["all fit", "more run than fit"])
@KINDS
async def test_without_a_budget_a_turn_has_what_is_in_its_way_given_up(engine: dict[str, Any], at_once: int) -> None:
    async with small(engine, retained_tokens_budget=10**9) as cluster:
        began = cluster.clock.now()
        await cluster.one_shots(named=True, at_once=at_once)
        took_s = cluster.clock.now() - began
        assert took_s < 60.0, "no lease has ended by itself"
        assert cluster.waited_s < SHORT_S or at_once > FITS
        assert cluster.router.retention.released[Cause.ROOM] > ONE_SHOTS / 2


@KINDS
async def test_an_agent_among_them_stays_warm(engine: dict[str, Any]) -> None:
    async with small(engine) as cluster:
        messages = opening()
        for turn in range(6):
            answer = await cluster.turn(messages, "agent")
            assert [r.conversation for r in cluster.reports[-1:]] == ["agent"]
            assert cluster.reports[-1].route is (Route.WARM if turn else Route.COLD)
            messages += [answer, user("Go on.")]
            for number in range(FITS):
                await cluster.turn([system(f"{turn}/{number:04}. {LONG}"), user("Hi")])
        assert cluster.waited_s < SHORT_S


@KINDS
async def test_what_was_given_up_is_a_cold_turn_with_its_reason(engine: dict[str, Any]) -> None:
    async with run_cluster(engine={**engine, "kv_recompute_threshold": 0}, retained_tokens_budget=1) as cluster:
        messages = opening()
        answer = await cluster.exact({"messages": messages})
        assert cluster.router.retention.released == {Cause.BUDGET: 1}
        await cluster.until(lambda: not cluster.d.usage)
        again = await cluster.exact({"messages": [*messages, answer.message, user("Go on.")]})
        assert (again.reused.route, again.reused.reason) == (Route.COLD, Reason.EVICTED)


@KINDS
async def test_what_the_router_counts_is_what_the_engine_keeps(engine: dict[str, Any]) -> None:
    async with run_cluster(engine={**engine, "kv_recompute_threshold": 0}) as cluster:
        messages = opening()
        for _ in range(3):
            answer = await cluster.exact({"messages": messages})
            messages += [answer.message, user("Go on. " + STORY)]
            await counts_the_same(cluster)
        await cluster.exact({"messages": [system("Another. " + STORY), user("Hi")]}, conversation="other")
        await counts_the_same(cluster)
        await cluster.router.end_conversation("c")
        await counts_the_same(cluster)
        await cluster.router.flush()
        await counts_the_same(cluster)
        assert cluster.router.retention.retained(cluster.d.url) == 0


async def counts_the_same(cluster: Cluster) -> None:
    await cluster.until(lambda: cluster.d.pinned_blocks * BLOCK == cluster.router.retention.retained(cluster.d.url))


@KINDS
async def test_what_another_router_keeps_there_is_known_once_the_engine_was_asked(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine) as cluster:
        other = Router(cluster.router.config)
        theirs = Cluster(cluster.prefill, cluster.decode, cluster.reference, other, cluster.http)
        await theirs.ask({"messages": [system("Theirs. " + LONG), user("Hi")]}, conversation="theirs")
        await cluster.ask({"messages": [system("Ours. " + LONG), user("Hi")]})
        router, url = cluster.router, cluster.d.url
        assert router.retention.retained(url) < cluster.d.pinned_blocks * BLOCK
        await poll_retention(router.client, router.fleet, router.services.leases, [url])
        assert router.retention.retained(url) == cluster.d.pinned_blocks * BLOCK
        await other.aclose()


async def test_leases_that_are_in_the_way_ride_with_the_turn_that_needs_the_room() -> None:
    async with small(OURS, retained_tokens_budget=10**9) as cluster:
        await cluster.one_shots(named=True, at_once=1)
        asked = [r.body["kv_transfer_params"]["backhaul"] for r in cluster.d.requests_to(CHAT)]
        riding = sum(len(one.get("release", ())) for one in asked)
        assert riding == cluster.router.retention.released[Cause.ROOM] > ONE_SHOTS / 2
        assert not cluster.d.requests_to("/v1/completions"), "no request of its own"


@KINDS
async def test_a_conversation_that_announced_a_pause_is_given_up_before_one_that_may_go_on_at_once(
    engine: dict[str, Any],
) -> None:
    async with run_cluster(engine=engine) as cluster:
        cluster.router.services.clock = lambda: 0.0
        await cluster.ask({"messages": opening()}, conversation="goes on")
        await cluster.ask({"messages": opening()}, conversation="pauses", headers=[("X-Backhaul-Pause", "60")])
        router, url = cluster.router, cluster.d.url
        router.retention.know(url, router.retention.retained(url), BLOCK)
        [decode] = router.fleet.decode
        reserved = router.fleet.reserve(decode, BLOCK, 0, sent=True)
        router.services.handles.give_up_retained()
        assert not router.ledger.held_for("pauses")
        assert router.ledger.held_for("goes on")
        router.retention.unreserve(reserved)


@KINDS
async def test_a_turn_that_fails_needs_no_room_any_more(engine: dict[str, Any]) -> None:
    async with run_cluster(engine=engine) as cluster:
        await cluster.ask({"messages": opening()})
        retention, url = cluster.router.retention, cluster.d.url
        await cluster.router.end_conversation("c")
        free = retention.free(url)
        cluster.d.faults.status = 500
        assert (await cluster.ask({"messages": opening()})).status == 502
        cluster.d.faults.clear()
        reply = await cluster.open({"messages": opening(), "stream": True})
        assert retention.free(url) < free
        await reply.aclose()
        await cluster.router.end_conversation("c")
        assert retention.free(url) == free
