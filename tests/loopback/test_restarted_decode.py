"""A stock P reads whatever lies in the blocks that a handle names. A decode engine that was started again may name them as its
earlier process did, or P may not have noticed: nothing of that process is read, whoever notices first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.drive.services import Services
from backhaul_router.engines.doctor import Severity, diagnose
from backhaul_router.fleet.engine import Role
from backhaul_router.ledger.memory import MemoryLedger
from backhaul_router.report import Reason, Route
from router_turns import STORY, Cluster, first_turn, opening, run_cluster, system, user

NO_CACHE = {"prefix_caching": False}
FIXED = {"engine_id": "fixed-by-its-operator"}


async def restart(engine: LoopbackEngine, cluster: Cluster) -> None:
    """Another process, whose blocks hold something else by now."""
    await engine.restart()
    body = {"model": engine.model, "messages": [system("Something else entirely. " * 90)], "max_tokens": 1}
    async with cluster.http.post(engine.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200


async def asked(cluster: Cluster, history: list[Any], **how: Any) -> Any:
    return (await cluster.exact({"messages": history}, **how)).reused


async def test_an_id_that_outlives_its_process_reads_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        histories = {name: await first_turn(cluster, conversation=name) for name in "ab"}
        await restart(cluster.d, cluster)
        for name, history in histories.items():
            report = await asked(cluster, history, conversation=name)
            assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.ENGINE_CHANGED, 0)
            again = await asked(cluster, [*history, user("Third. " + STORY)], conversation=name)
            assert again.route is Route.WARM
    assert caplog.text.count("has a fixed engine_id") == 1


async def test_the_same_id_is_read_while_the_process_is_the_same() -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        history = await first_turn(cluster)
        for turn in range(2):
            before = len(cluster.d.requests_to("/metrics"))
            assert (await asked(cluster, history)).route is Route.WARM
            assert len(cluster.d.requests_to("/metrics")) == before + 1
            history = [*history, user(f"Go on, {turn}. {STORY}")]


async def test_what_turns_had_taken_before_one_of_them_noticed_is_not_read_either() -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        histories = {name: await first_turn(cluster, conversation=name) for name in "abcd"}
        await restart(cluster.d, cluster)
        reports = await asyncio.gather(*(asked(cluster, h, conversation=name) for name, h in histories.items()))
        assert {(report.route, report.reason) for report in reports} == {(Route.COLD, Reason.ENGINE_CHANGED)}


@pytest.mark.parametrize("what", ["the engine does not say when it began", "another router may have filed it before"])
async def test_where_nobody_can_tell_nothing_is_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what.startswith("the engine"):
        monkeypatch.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
    else:
        monkeypatch.setattr(MemoryLedger, "shared", True)
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        history = await first_turn(cluster)
        await cluster.until(lambda: not cluster.d.usage)
        report = await asked(cluster, history)
        assert (report.route, report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)


async def test_what_was_filed_before_an_engine_stopped_telling_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        history = await first_turn(cluster)
        monkeypatch.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
        report = await asked(cluster, history)
        assert (report.route, report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)


async def test_an_engine_that_once_does_not_say_costs_the_turn_that_asked_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        histories = {name: await first_turn(cluster, conversation=name) for name in "ab"}
        with monkeypatch.context() as slow:
            slow.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
            report = await asked(cluster, histories["a"], conversation="a")
        assert (report.route, report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)
        for name, history in histories.items():
            again = await asked(cluster, [*history, user("Third. " + STORY)], conversation=name)
            assert again.route is Route.WARM


@pytest.mark.parametrize("says", [True, False])
async def test_one_that_is_added_again_after_a_restart_is_another_process(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
        history = await first_turn(cluster)
        await cluster.router.drain_engine(cluster.d.url)
        await restart(cluster.d, cluster)
        await cluster.reconnected()
        with monkeypatch.context() as silent:
            if not says:
                silent.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
            await cluster.router.add_engine(Role.DECODE, cluster.d.url)
        left = await cluster.router.drain_engine(cluster.d.url)
        assert left.handles == (0 if says else 1)
        report = await asked(cluster, history)
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.ENGINE_CHANGED, 0)


async def test_one_that_begins_to_say_when_it_began_is_sure_from_when_it_is_added_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as silent:
        silent.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
        async with run_cluster(p=NO_CACHE, d=FIXED) as cluster:
            history = await first_turn(cluster)
            silent.undo()
            await cluster.router.add_engine(Role.DECODE, cluster.d.url)
            await asked(cluster, history)
            assert (await asked(cluster, [*history, user("Third. " + STORY)])).route is Route.WARM


async def test_what_is_dropped_of_a_process_that_may_be_the_same_is_released() -> None:
    """Its id was new, so when it began was not known: added again, it says so for the first time."""
    async with run_cluster(p=NO_CACHE) as cluster:
        await first_turn(cluster)
        await restart(cluster.d, cluster)
        await cluster.reconnected()
        history = await first_turn(cluster, conversation="other")
        await cluster.router.settled()
        await cluster.router.add_engine(Role.DECODE, cluster.d.url)
        await cluster.until(lambda: not cluster.d.usage)
        assert (await asked(cluster, history, conversation="other")).route is Route.COLD


async def test_it_is_asked_too_where_the_pair_has_not_been_checked_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Services, "_check_pair_in_time", lambda services, by, decode: None)
    async with run_cluster(p=NO_CACHE, d=FIXED, check_pairs=True) as cluster:
        history = await first_turn(cluster)
        await restart(cluster.d, cluster)
        report = await asked(cluster, history)
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.ENGINE_CHANGED, 0)


async def test_with_several_api_servers_one_new_handle_tells_that_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pages do not say when the engine began; its random id does."""
    monkeypatch.setattr("backhaul_router.engines.describe.start_of", lambda page: None)
    async with run_cluster(p=NO_CACHE) as cluster:
        histories = {name: await first_turn(cluster, conversation=name) for name in "ab"}
        cluster.router.fleet.restarts.doubt(cluster.d.url)
        report = await asked(cluster, histories["a"], conversation="a")
        assert (report.route, report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)
        assert (await asked(cluster, histories["b"], conversation="b")).route is Route.WARM


async def test_after_a_refused_connection_nobody_tries_to_read_what_is_gone() -> None:
    async with run_cluster(decode=2, p=NO_CACHE) as cluster:
        histories = {name: await first_turn(cluster, conversation=name) for name in "abcd"}
        hit = [report.conversation for report in cluster.reports if report.decode_engine == cluster.d.url]
        await cluster.kill(cluster.d)
        while not cluster.router.fleet.is_down(cluster.d.url):
            await asked(cluster, opening("Another agent, who finds out."), conversation=None)
        await cluster.d.restart()
        await cluster.until(lambda: not cluster.router.fleet.is_down(cluster.d.url))  # a probe has found it
        reads = len(cluster.reports)
        for name in hit:
            report = await asked(cluster, histories[str(name)], conversation=name)
            assert (report.route, report.reason) == (Route.COLD, Reason.ENGINE_CHANGED)
        assert sum(report.retries for report in cluster.reports[reads:]) == 0
        assert len(hit) == 2


async def test_a_load_that_was_read_in_between_shows_it_too() -> None:
    async with run_cluster(decode=2, p=NO_CACHE, load_interval_s=0.001) as cluster:
        history = await first_turn(cluster)
        used = next(engine for engine in cluster.decode if engine.url == cluster.reports[0].decode_engine)
        await cluster.router.settled()
        await restart(used, cluster)
        await cluster.reconnected()
        cluster.router.services.clock = lambda: time.monotonic() + 1.0  # by when the load is to be read again
        await asked(cluster, opening("Another agent."), conversation=None)
        await cluster.router.settled()
        report = await asked(cluster, history)
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.ENGINE_CHANGED, 0)


async def test_the_doctor_names_an_engine_with_a_fixed_id_once() -> None:
    async with run_cluster(prefill=2, d=FIXED) as cluster:
        found = await diagnose([p.url for p in cluster.prefill], [cluster.d.url])
    (finding,) = found.findings
    assert (finding.severity, finding.where) == (Severity.WARNING, cluster.d.url)
    assert repr(FIXED["engine_id"]) in finding.what


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
async def test_engines_of_ours_refuse_a_lease_of_an_earlier_process_by_themselves(connector: str) -> None:
    """Where only D is ours, the router's fence is what there is."""
    ours = {"connector": "backhaul"}
    async with run_cluster(p={**NO_CACHE, "connector": connector}, d={**FIXED, **ours}) as cluster:
        history = await first_turn(cluster)
        await restart(cluster.d, cluster)
        report = await asked(cluster, history)
        assert report.route is Route.COLD
        assert report.reason in (Reason.ENGINE_CHANGED, Reason.EXPIRED, Reason.READ_FAILED)
