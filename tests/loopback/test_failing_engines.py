"""One of two engines of a role fails, in every way that a client of another router would get as an error: nobody here notices,
and after a few turns nobody is sent there any more."""

from __future__ import annotations

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.fleet.breakers import SEVERAL
from router_turns import CHAT, STORY, Cluster, run_cluster, system, user

FAILURES: dict[str, dict[str, object]] = {
    "500": {"status": 500},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "hangs up": {"drop": True},
    "is dead": {},
}


async def break_(engine: LoopbackEngine, how: str, cluster: Cluster) -> None:
    for name, value in FAILURES[how].items():
        setattr(engine.faults, name, value)
    if not FAILURES[how]:
        await cluster.kill(engine)


async def ask_all(cluster: Cluster, turns: int) -> list[int]:
    """Conversations with histories of their own, one after the other."""
    statuses = []
    for number in range(turns):
        messages = [system(f"Agent {number}. {STORY}"), user(f"Question {number}.")]
        statuses.append((await cluster.ask({"messages": messages}, conversation=str(number))).status)
    return statuses


@pytest.mark.parametrize("how", FAILURES)
async def test_half_of_the_prefill_engines_cost_no_request(how: str) -> None:
    async with run_cluster(prefill=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.pinned_until_ttl = True
        await break_(cluster.p, how, cluster)
        assert await ask_all(cluster, 3 * SEVERAL) == [200] * 3 * SEVERAL
        tried = 0 if how == "is dead" else SEVERAL
        assert len(cluster.p.requests_to(CHAT)) == tried
        assert sum(report.retries for report in cluster.reports) == (tried or 1)


@pytest.mark.parametrize("how", [how for how in FAILURES if how != "503"])
async def test_neither_do_half_of_the_decode_engines(how: str) -> None:
    async with run_cluster(decode=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.pinned_until_ttl = cluster.released_twice = True
        await break_(cluster.d, how, cluster)
        assert await ask_all(cluster, 3 * SEVERAL) == [200] * 3 * SEVERAL
        assert len(cluster.d.requests_to(CHAT)) == (0 if how == "is dead" else SEVERAL)


async def test_a_decode_engine_that_says_it_is_full_is_heard_and_then_left_alone() -> None:
    """503 is its own word on its load, which clients know how to wait for."""
    async with run_cluster(decode=2, engine={"enable_scale_out": False}) as cluster:
        await cluster.router.connect()
        cluster.released_twice = True
        await break_(cluster.d, "503", cluster)
        statuses = await ask_all(cluster, 4 * SEVERAL)
        assert statuses.count(503) == SEVERAL
        assert statuses[-SEVERAL:] == [200] * SEVERAL
