"""Two prefill engines and a decode engine, real ones: one P dies between turns, is gone, and comes back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from backhaul_router.breakers import BreakerState, Where
from backhaul_router.errors import Leg
from backhaul_router.report import Route
from breakable import run, taking, until
from by_hand import fresh
from real_engines import EngineSet, EngineSets, restart


@pytest.fixture
def two_prefill(engine_sets: EngineSets) -> EngineSet:
    return engine_sets.special(replace(EngineSets.CONNECTOR, prefill_engines=2))


async def test_a_prefill_engine_that_dies_is_gone_round_and_is_used_again_when_it_is_back(
    two_prefill: EngineSet,
) -> None:
    engines = two_prefill.running
    urls = [engine.url for engine in engines.prefill]
    async with run(urls, [engines.decode[0].url], two_prefill) as talk:
        prompt = await talk.more(fresh(300))
        used = talk.agent.reports[-1].prefill_engine
        victim = next(engine for engine in engines.prefill if engine.url == used)
        at = Where(victim.url, Leg.PREFILL)

        await asyncio.to_thread(victim.kill)
        with taking(15.0):
            answer = await talk.say(prompt)
        assert (answer.report.route, answer.report.prefill_engine != used) == (Route.WARM, True)
        assert talk.router.fleet.breakers()[at] is not BreakerState.CLOSED
        prompt = [*prompt, *answer.token_ids, *range(150, 190)]
        assert (await talk.say(prompt)).report.retries == 0, "it was tried again though it is known to be dead"

        await asyncio.to_thread(restart, two_prefill, victim)
        since = time.monotonic()

        async def closed() -> bool:
            return talk.router.fleet.breakers()[at] is BreakerState.CLOSED

        await until(closed, 10.0)
        print(f"its breaker closed {time.monotonic() - since:.1f} s after it was healthy")
        other = next(engine for engine in talk.router.fleet.prefill if engine.url != victim.url)
        talk.router.fleet.begin(other)  # so that a new conversation goes to the one that is back
        try:
            talk.agent.conversation = "another"
            assert (await talk.say(fresh(300))).report.prefill_engine == victim.url
        finally:
            talk.router.fleet.end(other)
