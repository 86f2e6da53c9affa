"""Engines are asked for their load beside the turns, and what they say decides where conversations go."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.engines.describe import describe
from backhaul_router.engines.http_client import HttpClient
from backhaul_router.engines.load_polling import LoadPolling
from backhaul_router.fleet.engine import Engine, Role
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.wire.engine_metrics import Gauges
from router_turns import first_turn, opening, run_cluster, user

OURS = {"connector": "backhaul"}


def asked(engines: Sequence[LoopbackEngine]) -> list[int]:
    return [sum(r.path == "/metrics" for r in engine.received) for engine in engines]


async def test_only_engines_with_others_of_their_role_are_asked() -> None:
    async with run_cluster(decode=2, load_interval_s=3600) as cluster:
        await first_turn(cluster)
        await cluster.router.settled()
        assert asked(cluster.engines) == [1, 2, 2], "once each when the router connects"
        assert all(cluster.router.fleet.load.gauges(engine.url) for engine in cluster.decode)
        await first_turn(cluster, conversation="d")
        assert asked(cluster.engines) == [1, 2, 2], "not again so soon"


async def test_nobody_is_asked_where_that_is_switched_off() -> None:
    async with run_cluster(decode=2, load_interval_s=0) as cluster:
        await first_turn(cluster)
        await cluster.router.settled()
        assert asked(cluster.decode) == [1, 1]


async def test_a_conversation_leaves_a_full_decode_engine_and_its_history_comes_along() -> None:
    async with run_cluster(engine=OURS, p={"prefix_caching": False}, decode=2, load_interval_s=3600) as cluster:
        messages = await first_turn(cluster)
        await cluster.router.settled()
        home = cluster.reports[0].decode_engine
        assert home == cluster.d.url
        fleet = cluster.router.fleet
        fleet.load.read(engine_at(fleet, home).url, Gauges(4, 0, 0.99), cluster.router.clock())
        report = (await cluster.exact({"messages": messages})).reused
        assert (report.moved, report.decode_engine, report.route) == ("decode:full", cluster.decode[1].url, "warm")
        assert report.pulled
        messages += [{"role": "assistant", "content": "x"}, user("Third")]
        report = (await cluster.exact({"messages": messages})).reused
        assert (report.moved, report.decode_engine) == (None, cluster.decode[1].url)


async def test_conversations_are_spread_though_they_never_overlap() -> None:
    async with run_cluster(prefill=2, decode=3) as cluster:
        for name in range(6):
            await first_turn(cluster, conversation=str(name))
        decodes = [report.decode_engine for report in cluster.reports]
        prefills = [report.prefill_engine for report in cluster.reports]
        assert [decodes.count(engine.url) for engine in cluster.decode] == [2, 2, 2]
        assert [prefills.count(engine.url) for engine in cluster.prefill] == [3, 3]
        await cluster.router.end_conversation("2")
        await cluster.ask({"messages": opening()}, conversation="new")
        assert cluster.reports[-1].decode_engine == decodes[2]


async def test_turns_teach_what_they_cost_and_reports_tell() -> None:
    async with run_cluster(p={"prefix_caching": False}, local_max_tokens=64) as cluster:
        for name in range(12):
            messages = await first_turn(cluster, {"stream": False}, conversation=str(name))
            await cluster.exact({"messages": messages, "stream": True}, conversation=str(name))
        first, *_, last = cluster.reports
        assert (first.decided_by, first.estimates) == (None, None)
        assert (last.route, last.decided_by) == ("warm", "thresholds")
        assert last.estimates is not None
        assert sorted(last.estimates) == ["cold", "warm"]
        assert all(0 < ms < 10_000 for ms in last.estimates.values())
        fleet = cluster.router.fleet
        assert fleet.load.tokens(cluster.p.url) == 0
        assert fleet.costs.handoff(cluster.d.url, 100) > 0


async def test_forks_without_the_handle_run_where_their_parents_prefix_is() -> None:
    async with run_cluster(prefill=2, decode=2) as cluster:
        messages = await first_turn(cluster)
        parent = cluster.reports[0]
        headers = [("X-Backhaul-Parent", "c")]
        for child in "xyz":
            await cluster.exact({"messages": messages}, conversation=child, headers=headers)
        assert {(r.prefill_engine, r.decode_engine) for r in cluster.reports} == {
            (parent.prefill_engine, parent.decode_engine)
        }


# --- engines that do not answer ------------------------------------------------------------------------------------------


def engine_at(fleet: Fleet, url: str | None) -> Engine:
    found = fleet.get(url)
    assert found is not None
    return found


async def test_an_engine_that_does_not_answer_is_told_of_once_and_what_it_said_is_kept_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with LoopbackEngine("decode") as one, LoopbackEngine("decode") as other:
        client = HttpClient(connect_timeout_s=10.0)
        first = await describe(client, one.url, Role.DECODE)
        fleet = Fleet([first, dataclasses.replace(first, url=other.url)])
        polling = LoadPolling(client, fleet, 2.0)
        assert polling.due(0.0)
        await polling.poll(0.0)
        assert fleet.load.gauges(other.url) == Gauges(0.0, 0.0, 0.0)
        await other.stop()
        with caplog.at_level(logging.INFO, "backhaul"):
            for now in (2.0, 4.0, 6.0, 8.0, 10.0):
                assert polling.due(now)
                assert not polling.due(now + 1.9)
                await polling.poll(now)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert other.url in caplog.text
        assert fleet.counters.failed_polls == 5
        assert fleet.load.gauges(other.url) is not None
        assert polling.due(12.0)
        assert fleet.load.gauges(other.url) is None
        assert fleet.load.gauges(one.url) is not None
        await client.aclose()


async def test_no_turn_waits_for_an_engine_that_does_not_say_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_cluster(decode=2) as cluster:
        answered = asyncio.Event()

        async def hangs(_: LoadPolling, now: float) -> None:
            await answered.wait()

        monkeypatch.setattr(LoadPolling, "poll", hangs)
        await first_turn(cluster)
        answered.set()
