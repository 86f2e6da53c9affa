"""Two routers that share a ledger on Redis: turns come to either, and every answer is that of an engine alone."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from backhaul_loopback import LoopbackPair
from backhaul_router.drive.router import Router
from backhaul_router.ledger.protocol import arrived
from backhaul_router.report import Reason, ReuseReport, Route
from redis_servers import RedisServer, needs_redis, redis_server
from router_turns import STORY, Cluster, first_turn, opening, run_cluster, user
from served import serving

pytestmark = needs_redis

STOCK: dict[str, Any] = {"p": {"prefix_caching": False}}
OURS: dict[str, Any] = {**STOCK, "engine": {"connector": "backhaul"}}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as one:
        yield one


@asynccontextmanager
async def two(server: RedisServer, **settings: Any) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Two routers over the same engines. What they hold for `c` is released in the end."""
    given = {"redis_url": server.url, "redis_timeout_s": 10.0, **STOCK, **settings}
    async with run_cluster(**given) as a:
        reports: list[ReuseReport] = []
        b = dataclasses.replace(a, router=Router(a.router.config, on_report=reports.append), reports=reports)
        try:
            yield a, b
        finally:
            await b.router.end_conversation("c")
            await b.router.aclose()


async def next_turn(cluster: Cluster, messages: list[dict[str, Any]], **how: Any) -> ReuseReport:
    """One more turn, exact, whose answer and next question are put behind `messages`."""
    answer = await cluster.exact({"messages": messages}, **how)
    messages += [answer.message, user("And then? " + STORY)]
    await cluster.router.settled()
    return answer.reused


@pytest.mark.parametrize("engines", [STOCK, OURS], ids=["stock", "ours"])
async def test_turns_that_come_to_either_router_are_warm(server: RedisServer, engines: dict[str, Any]) -> None:
    async with two(server, **engines) as (a, b):
        messages = opening()
        reports = [await next_turn(router, messages) for router in (a, b, a, a, b)]
    assert [report.turn for report in reports] == [1, 2, 3, 4, 5]
    assert [report.route for report in reports] == [Route.COLD, *[Route.WARM] * 4]
    assert [report.reason for report in reports] == [Reason.FIRST_TURN, *[None] * 4]


async def test_a_request_without_a_name_goes_on_with_either_router(server: RedisServer) -> None:
    async with two(server) as (a, b):
        messages = opening()
        first = await next_turn(a, messages, conversation=None)
        second = await next_turn(b, messages, conversation=None)
        assert (second.conversation, second.route) == (first.conversation, Route.WARM)
        assert second.conversation is not None
        await b.router.end_conversation(second.conversation)


async def test_exact_histories_go_on_with_either_router(server: RedisServer) -> None:
    async with two(server, exact_histories=True) as (a, b):
        messages = opening()
        await next_turn(a, messages)
        messages[2] = {**messages[2], "content": f" {messages[2]['content']} "}  # other tokens, and the same words
        answer = await b.ask({"messages": messages})
        assert (answer.reused.route, answer.reused.exact_history) == (Route.WARM, True)


async def test_what_one_router_left_is_released_by_the_other(server: RedisServer) -> None:
    async with two(server) as (a, b):
        await first_turn(a)
        await a.router.settled()
        assert a.d.pinned_blocks
        await b.router.end_conversation("c")
        await b.until(lambda: not a.d.pinned_blocks)


async def test_a_router_that_closes_leaves_what_others_go_on_with(server: RedisServer) -> None:
    async with two(server, **OURS) as (a, b):
        messages = opening()
        await next_turn(b, messages)
        other = dataclasses.replace(a, router=Router(a.router.config, on_report=a.reports.append))
        await next_turn(other, messages)
        await other.router.aclose()
        assert (await next_turn(b, messages)).route is Route.WARM


async def test_a_stock_decode_engine_with_a_fixed_id_is_never_read_from(server: RedisServer) -> None:
    """Another router may have filed what an earlier process left, and the id does not tell."""
    async with two(server, d={"engine_id": "fixed-by-its-operator"}) as (a, b):
        messages = opening()
        reports = [await next_turn(router, messages) for router in (a, a, b)]
    assert [(report.route, report.reason) for report in reports] == [
        (Route.COLD, Reason.FIRST_TURN),
        *[(Route.COLD, Reason.ENGINE_CHANGED)] * 2,
    ]


@pytest.mark.parametrize("by_header", [True, False], ids=["with the turn", "after it"])
async def test_a_pause_told_to_one_router_is_known_to_the_other(server: RedisServer, by_header: bool) -> None:
    async with two(server, **OURS) as (a, b):
        messages = opening()
        await next_turn(a, messages, headers=[("x-backhaul-pause", "1800")] * by_header)
        if not by_header:
            assert (await a.router.pause("c", 1800)).released == 0
        (held,) = await arrived(b.router.ledger.held_for("c"))
        assert 1790 < held.deadline - b.router.clock() <= 1810
        assert (await next_turn(b, messages)).route is Route.WARM


async def test_turns_at_once_with_both_routers_are_exact(server: RedisServer) -> None:
    async with two(server, **OURS) as (a, b):
        messages = opening()
        await next_turn(a, messages)
        bodies = [{"messages": [*messages[:-1], user(f"{n}: {STORY}")]} for n in range(6)]
        await asyncio.gather(*((a if n % 2 else b).exact(body) for n, body in enumerate(bodies)))
        for router in (a, b):
            await router.router.settled()


async def test_while_the_server_stands_still_turns_go_on_and_afterwards_they_are_warm(server: RedisServer) -> None:
    async with two(server, redis_timeout_s=0.5) as (a, _):
        messages = opening()
        await warm(a, messages)
        server.pause()
        try:
            without = [await next_turn(a, messages) for _ in range(2)]
        finally:
            server.resume()
        assert [(r.route, r.reason) for r in without] == [(Route.COLD, Reason.LEDGER_UNAVAILABLE)] * 2
        await warm(a, messages)
        a.pinned_until_ttl = True  # what may have been filed


async def test_a_server_that_is_killed_and_started_again_costs_no_more(server: RedisServer) -> None:
    async with two(server, redis_timeout_s=0.5) as (a, b):
        messages = opening()
        await warm(a, messages)
        server.kill()
        without = await next_turn(b, messages)
        assert (without.route, without.reason) == (Route.COLD, Reason.LEDGER_UNAVAILABLE)
        server.start()
        await warm(b, messages)
        await warm(a, messages)
        a.pinned_until_ttl = True


async def warm(cluster: Cluster, messages: list[dict[str, Any]]) -> None:
    """Turns until one is warm, as they are soon after the server answers."""
    async with asyncio.timeout(20):
        while (await next_turn(cluster, messages)).route is not Route.WARM:
            await asyncio.sleep(0.05)


async def test_what_a_killed_router_had_taken_is_used_by_nobody(server: RedisServer) -> None:
    options = ("--redis-url", server.url, "--redis-timeout-s", "10", "--local-max-tokens", "0", "--no-check-pairs")
    async with two(server) as (a, b), serving(LoopbackPair(a.p, a.d), *options) as other:
        messages = opening()
        await next_turn(a, messages)
        a.p.faults.stall = True
        asked = {"model": a.p.model, "messages": messages}
        turn = asyncio.create_task(
            other.http.post("/v1/chat/completions", json=asked, headers={"x-conversation-id": "c"})
        )
        before = len(a.p.received)
        async with asyncio.timeout(10):
            while len(a.p.received) == before or a.p.received[-1].path != "/v1/chat/completions":
                await asyncio.sleep(0.005)
        other.process.send_signal(signal.SIGKILL)
        await asyncio.wait((turn,))
        assert turn.exception() is not None
        a.p.faults.clear()
        after = await next_turn(b, messages)
        assert (after.route, after.reason, after.turn) == (Route.COLD, Reason.IN_USE, 3)
        assert (await next_turn(a, messages)).route is Route.WARM
        a.pinned_until_ttl = True  # what it had taken
