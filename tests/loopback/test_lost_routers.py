"""Routers that know nothing of each other, and one that ends without a word: a conversation that comes to another router is
computed once more, and is never answered wrongly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from backhaul_router.drive.router import Router
from backhaul_router.report import Reason, Route
from router_turns import STORY, Cluster, first_turn, run_cluster, user

KINDS = pytest.mark.parametrize("connector", ["stock", "backhaul"])


@asynccontextmanager
async def second_router(cluster: Cluster) -> AsyncIterator[Router]:
    router = Router(cluster.router.config, on_report=cluster.reports.append, seed=0)
    try:
        yield router
    finally:
        await router.aclose()


@KINDS
async def test_a_router_that_was_lost_costs_a_conversation_one_cold_turn(connector: str) -> None:
    async with run_cluster(engine={"connector": connector}, p={"prefix_caching": False}) as cluster:
        cluster.pinned_until_ttl = True  # what the first one had left; nobody knows of it any more
        history = await first_turn(cluster)
        first = cluster.router
        async with second_router(cluster) as cluster.router:
            answer = await cluster.exact({"messages": history})
            assert (answer.reused.route, answer.reused.reason) == (Route.COLD, Reason.FIRST_TURN)
            after = await cluster.exact({"messages": [*history, answer.message, user("Third. " + STORY)]})
            assert after.reused.route is Route.WARM
        cluster.router = first


@KINDS
async def test_turns_scattered_over_routers_with_ledgers_of_their_own_are_exact(connector: str) -> None:
    async with run_cluster(engine={"connector": connector}, p={"prefix_caching": False}) as cluster:
        first = cluster.router
        async with second_router(cluster) as second:
            history = await first_turn(cluster)
            for number in range(5):
                cluster.router = (second, first)[number % 2]
                answer = await cluster.exact({"messages": history, "stream": False})
                history += [answer.message, user(f"Go on, {number}. {STORY}")]
            # each finds what it left itself two turns ago, whose history the other's turn extends
            assert [r.route for r in cluster.reports] == [Route.COLD, Route.COLD, *[Route.WARM] * 4]
        cluster.router = first
