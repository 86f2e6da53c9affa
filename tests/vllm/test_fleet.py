"""Two prefill engines and a decode engine, real ones: a P dies and comes back, and then D dies."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from backhaul_router.errors import Leg
from backhaul_router.fleet.breakers import BreakerState, EngineLeg
from backhaul_router.fleet.engine import Engine
from backhaul_router.report import Reason, Route
from breakable import Run, processes, run, runs, taking, until
from by_hand import fresh
from real_engines import EngineSet, EngineSets, assert_none_is_left, kv_usage, restart


@pytest.fixture
def two_prefill(engine_sets: EngineSets) -> EngineSet:
    return engine_sets.special(replace(EngineSets.CONNECTOR, prefill_engines=2))


@contextmanager
def busy(talk: Run, engine: Engine) -> Iterator[None]:
    """So that a new conversation goes to another one."""
    talk.router.fleet.load.begin(engine.url)
    try:
        yield
    finally:
        talk.router.fleet.load.end(engine.url)


async def test_engines_that_die_at_work_cost_no_request_but_a_stream_that_had_begun(
    two_prefill: EngineSet,
) -> None:
    engines = two_prefill.running
    urls = [engine.url for engine in engines.prefill]
    async with run(urls, [engines.decode[0].url], two_prefill) as talk:
        prompt = await talk.more(fresh(300))
        used = talk.agent.reports[-1].prefill_engine
        victim = next(engine for engine in engines.prefill if engine.url == used)
        other = next(engine for engine in talk.router.fleet.prefill if engine.url != used)
        at = EngineLeg(victim.url, Leg.PREFILL)

        for pid in processes(victim):
            os.kill(pid, signal.SIGSTOP)  # so that the turn is there when it dies
        there = talk.client.sending(victim)
        turn = asyncio.create_task(talk.say(prompt))
        await there.wait()
        await asyncio.sleep(0.2)
        family = victim.pids()
        with taking(15.0):
            await asyncio.to_thread(victim.kill)
            answer = await turn
        assert_none_is_left(family, within_s=0)
        assert not victim.healthy
        assert (answer.report.route, answer.report.reason, answer.report.retries) == (Route.COLD, Reason.READ_FAILED, 1)
        assert answer.report.prefill_engine != used
        prompt = [*prompt, *answer.token_ids, *range(150, 190)]

        with busy(talk, other):
            talk.agent.conversation = "another"
            another = await talk.say(fresh(300))
        assert (another.report.prefill_engine, another.report.retries) == (other.url, 1)
        assert talk.router.fleet.breaker_states()[at] is not BreakerState.CLOSED
        with busy(talk, other):
            talk.agent.conversation = "a third"
            assert (await talk.say(fresh(300))).report.retries == 0, "it was tried again though it is known to be dead"

        await asyncio.to_thread(restart, two_prefill, victim)
        assert await kv_usage(victim.url) == 0
        since = time.monotonic()

        async def closed() -> bool:
            return talk.router.fleet.breaker_states()[at] is BreakerState.CLOSED

        await until(closed, 60.0)
        print(f"its breaker closed {time.monotonic() - since:.1f} s after it was healthy")
        with busy(talk, other):
            talk.agent.conversation = "a fourth"
            prompt = await talk.more(fresh(300))
        assert talk.agent.reports[-1].prefill_engine == victim.url

        decode = engines.decode[0]
        stream = asyncio.create_task(talk.broken_stream(prompt, max_tokens=7000))
        await until(lambda: runs(decode.url))
        with taking(15.0):
            decode.kill()
            *_, error = await stream
        assert error["error"]["code"] == "decode_failed"
        with taking(15.0):
            assert (await talk.say(prompt, status=502)).report.error == "decode_failed"
