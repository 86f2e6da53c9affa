"""Failures on real engines, with either connector: leases that end, engines that die, stand still, restart or run full, and
pairs that cannot read. Each ends in a right answer or a clear error within its time, ends no engine, and leaves no block in use.

`right` below is what `Agent.ask` checks of every answer with status 200: it is that of the prompt alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backhaul_cli import main as cli
from backhaul_connector.launch.cluster import Engine
from backhaul_router.report import Proof, Reason, Route
from breakable import (
    BLOCK,
    PREFILL_LEASE_S,
    RELEASED_S,
    Run,
    Settings,
    Site,
    agrees,
    rises,
    run,
    runs,
    standing_still,
    taking,
    until,
    waits_for_blocks,
)
from by_hand import fresh, lease_ops, turn
from real_engines import EngineSet, EngineSets, metrics, wait_for_baseline

KINDS = ("ours", "stock")
STOCK_TTL_S = 16.0
HOLD_S = 4.0
SHORT = {"ours_p": {"hold_s": HOLD_S}, "stock_d": {"decoder_kv_blocks_ttl": STOCK_TTL_S}}
"""Our pair with short holds, and vLLM's with a short TTL."""
WORKER = "VLLM::Worker"


@pytest.fixture(scope="module")
def settings(engine_sets: EngineSets) -> Iterator[Settings]:
    yield Settings()
    engine_sets.make_room()


async def _as_wanted(
    settings: Settings, pairs: dict[str, Site], wanted: Mapping[str, Mapping[str, Any]]
) -> dict[str, Site]:
    """The pairs with these settings, by `<kind>_<role>`."""
    restart = []
    for name, pair in pairs.items():
        for role, engine in (("p", pair.p), ("d", pair.d)):
            extra = dict(wanted.get(f"{name}_{role}", {}))
            if settings.want(pair.engines, engine, *extra.pop("args", ()), **extra) or not engine.running:
                restart.append(engine)
    if restart:
        await settings.apply(*restart)
    return pairs


@pytest.fixture
def pairs(mixed_engines: tuple[EngineSet, EngineSet], settings: Settings) -> dict[str, Site]:
    stock, ours = mixed_engines
    return {"ours": Site(True, ours, settings), "stock": Site(False, stock, settings)}


@pytest.fixture
async def both(pairs: dict[str, Site], settings: Settings) -> dict[str, Site]:
    return await _as_wanted(settings, pairs, SHORT)


@pytest.fixture(params=KINDS)
async def site(request: pytest.FixtureRequest, both: dict[str, Site]) -> AsyncIterator[Site]:
    """Either pair."""
    yield both[request.param]
    await both[request.param].at_rest()


@pytest.fixture
async def ours(both: dict[str, Site]) -> AsyncIterator[Site]:
    late = await rises(both["ours"].engines)
    yield both["ours"]
    await both["ours"].at_rest()
    assert await late() <= both["ours"].late_reads


@pytest.fixture
async def stock(both: dict[str, Site]) -> AsyncIterator[Site]:
    yield both["stock"]
    await both["stock"].at_rest()


async def is_warm(talk: Run, prompt: list[int], **how: Any) -> list[int]:
    """The conversation's next turn, which must read what D holds."""
    answer = await talk.say(prompt, **how)
    assert (answer.report.route, answer.report.reason) == (Route.WARM, None), answer.report
    await talk.router.settled()
    return [*prompt, *answer.token_ids, *range(150, 190)]


async def doctor(site: Site, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The command's exit status, and what it found."""
    found = tmp_path / "found.json"
    urls = ["--prefill", site.p.url, "--decode", site.d.url]
    status = await asyncio.to_thread(cli.main, ["doctor", *urls, "--json", str(found), *options])
    return status, json.loads(found.read_text())


def error_of(raw_answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(raw_answer)["error"]
    return error


# --- pairs that work ------------------------------------------------------------------------------------------------------


async def test_the_doctor_finds_a_good_pair_good(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = await doctor(site, tmp_path)
    assert (status, found["severity"]) == (0, "good"), found["findings"]
    assert [pair["verdict"] for pair in found["pairs"]] == ["warm"]
    assert "all good" in capsys.readouterr().out


@pytest.mark.parametrize("side", ["p", "d"])
async def test_our_connector_on_one_side_only_reads_with_the_routers_proof(
    side: str, both: dict[str, Site], tmp_path: Path
) -> None:
    p, d = (both["ours"], both["stock"]) if side == "p" else (both["stock"], both["ours"])
    async with run([p.p.url], [d.d.url], d.engines) as talk:
        prompt = await talk.more(fresh(300))
        for _ in range(2):
            answer = await talk.say(prompt)
            assert (answer.report.route, answer.report.proof) == (Route.WARM, Proof.TOKENS)
            await talk.router.settled()
            prompt = [*prompt, *answer.token_ids, *range(150, 190)]
        await agrees(talk.router)
    for url in (p.p.url, d.d.url):
        await wait_for_baseline(url, timeout_s=RELEASED_S)
    argv = ["doctor", "--prefill", p.p.url, "--decode", d.d.url, "--json", str(tmp_path / "found.json")]
    assert await asyncio.to_thread(cli.main, argv) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert [pair["verdict"] for pair in found["pairs"]] == ["warm"]
    for pair in (p, d):
        await pair.at_rest()


async def test_another_client_on_the_engines_shows_in_the_audit(ours: Site, caplog: pytest.LogCaptureFixture) -> None:
    async with ours.router(audited=False) as talk:
        prompt = await is_warm(talk, await talk.more(fresh(300)))
        await agrees(talk.router)
        other = await turn(ours.engines, fresh(300))
        await turn(ours.engines, [*other.sequence, 5], other.for_p, wishes={"retain": False})
        await until(lambda: _alarm(talk))
        assert "another client uses the engine" in caplog.text
        await is_warm(talk, prompt)


async def _alarm(talk: Run) -> bool:
    alarmed = [line.counter for line in await talk.router.audit() if line.alarm]
    return len(alarmed) == 3 and talk.router.fleet.counters.audit_alarms >= 3


# --- leases that end ------------------------------------------------------------------------------------------------------


async def test_a_lease_that_expired_is_computed_again(site: Site) -> None:
    """The router believes that it lives. A stock P declines by itself in a lease's last five seconds."""
    async with site.router() as talk:
        if site.ours:
            talk.next_is_kept_for(site.d, 1.0)
        prompt = await talk.more(fresh(300))
        talk.believes_in_its_handles()
        await wait_for_baseline(site.d.url, timeout_s=STOCK_TTL_S + 5)
        with taking(15.0):
            answer = await talk.say(prompt)
        reason = Reason.EXPIRED if site.ours else Reason.READ_FAILED
        assert (answer.report.route, answer.report.reason) == (Route.COLD, reason)
        assert not answer.report.pulled
        talk.believes_in_its_handles()
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


async def test_a_lease_that_expires_during_the_read_is_computed_again(ours: Site) -> None:
    """D's worker stands still with P's read under way, for longer than the lease and the hold. vLLM counts a
    read that came too late; what it read is thrown away."""
    ours.late_reads = 1
    kept_s = 4.0
    async with ours.router() as talk:
        prompt = await is_warm(talk, await talk.more(fresh(300)))
        talk.next_is_kept_for(ours.d, kept_s)
        prompt = await is_warm(talk, prompt, check=False)  # whose reference would take of those seconds
        talk.believes_in_its_handles()
        with standing_still(ours.d, WORKER):
            asked = asyncio.ensure_future(talk.say(prompt))
            await until(lambda: waits_for_blocks(ours.p))
            await asyncio.sleep(max(kept_s, HOLD_S) + 0.5)
            assert not asked.done()
        with taking(15.0):
            answer = await asked
        assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.READ_FAILED)
        assert not answer.report.pulled
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


# --- engines that cannot be reached ---------------------------------------------------------------------------------------


async def test_a_lease_channel_that_says_nothing_costs_a_second(ours: Site) -> None:
    async with ours.router() as talk:
        prompt = await talk.more(fresh(300))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            talk.client.rewrite(ours.p, lambda params: params["backhaul"]["lease"].update(port=port))
            with taking(15.0):
                answer = await talk.say(prompt)
        assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.READ_FAILED)
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


def nowhere() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


async def test_a_side_channel_that_p_cannot_reach_is_one_cold_retry(stock: Site) -> None:
    async with stock.router() as talk:
        prompt = await talk.more(fresh(300))
        talk.client.rewrite(stock.p, lambda params: params.update(remote_port=nowhere(), remote_engine_id="elsewhere"))
        with taking(15.0):
            answer = await talk.say(prompt)
        assert (answer.report.route, answer.report.reason, answer.report.retries) == (Route.COLD, Reason.READ_FAILED, 1)
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


async def test_a_side_channel_that_d_cannot_reach_is_computed_by_ours_and_told_by_stock(site: Site) -> None:
    async with site.router() as talk:
        prompt = await talk.more(fresh(300))
        talk.client.rewrite(site.d, lambda params: params.update(remote_port=nowhere(), remote_engine_id="elsewhere"))
        site.keeps_for_a_while(site.p, PREFILL_LEASE_S)
        with taking(15.0):
            if site.ours:
                answer = await talk.say(prompt)
                assert answer.report.route is Route.WARM
            else:
                answer = await talk.say(prompt, status=502)
                assert error_of(answer.raw)["code"] == "decode_failed"
        answer = await talk.say(prompt)
        assert answer.status == 200


async def test_a_d_that_stands_still_is_given_up_in_time(site: Site) -> None:
    async with site.router(audited=site.ours) as talk:
        prompt = await talk.more(fresh(300))
        patient = talk.router.config
        with standing_still(site.d):
            talk.router.reconfigure(replace(patient, prefill_timeout_s=4.0, decode_timeout_s=3.0))
            with taking(15.0):
                answer = await talk.say(prompt, status=504)
            assert error_of(answer.raw)["code"] == "decode_timeout"
            assert site.d.url in error_of(answer.raw)["message"]
            site.keeps_for_a_while(site.p, PREFILL_LEASE_S)
            site.keeps_for_a_while(site.d, STOCK_TTL_S)
        talk.router.reconfigure(patient)
        answer = await talk.say(prompt)
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


# --- engines that die -----------------------------------------------------------------------------------------------------


async def test_a_d_that_dies_in_mid_answer_and_comes_back_on_its_port_is_no_stranger(site: Site) -> None:
    async with site.router() as talk:
        prompt = await talk.more(fresh(300))
        prompt = await is_warm(talk, prompt)
        asked = asyncio.ensure_future(talk.broken_stream(prompt, 7000))
        await until(lambda: runs(site.d.url))
        with taking(10.0):
            await asyncio.to_thread(site.d.kill)
            events = await asked
        assert events[-1]["error"]["code"] == "decode_failed"
        assert all(event["choices"] for event in events[:-1])
        assert talk.agent.reports[-1].error == "decode_failed"

        with taking(15.0):
            gone = await talk.say(prompt, status=502)
        assert error_of(gone.raw)["code"] == "decode_failed"
        site.keeps_for_a_while(site.p, PREFILL_LEASE_S)

        await site.start_again(site.d)
        answer = await talk.say(prompt)
        assert answer.report.route is Route.COLD
        # decode_failed: the router has not noticed yet that it is back, and tries it for want of another
        changed = (Reason.READ_FAILED, Reason.ENGINE_CHANGED, Reason.NO_HANDLE, Reason.EXPIRED, Reason.DECODE_FAILED)
        assert answer.report.reason in changed
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


async def test_a_p_that_dies_in_mid_read_and_in_mid_prefill_is_told_and_d_lets_go(site: Site) -> None:
    alone = run([site.p.url], [site.d.url], site.engines)
    async with site.router(audited=False) as talk, alone as other:
        prompt = await is_warm(talk, await talk.more(fresh(300)))
        with standing_still(site.d, WORKER):
            reads = asyncio.ensure_future(talk.say(prompt, status=502))
            await until(lambda: waits_for_blocks(site.p))
            with standing_still(site.p, WORKER):
                computes = asyncio.ensure_future(other.say(fresh(300), status=502))
                await other.client.sending(site.p).wait()
                await asyncio.sleep(0.3)
                with taking(10.0):
                    await asyncio.to_thread(site.p.kill)
                    died = [await reads, await computes]
        for answer in died:
            assert error_of(answer.raw)["code"] == "prefill_failed"
            assert site.p.url in error_of(answer.raw)["message"]
            assert answer.report.retries == 0
        site.keeps_for_a_while(site.d, STOCK_TTL_S)

        await site.start_again(site.p)
        answer = await talk.say(prompt)
        assert answer.report.route is (Route.WARM if site.ours else Route.COLD)
        await is_warm(talk, [*prompt, *answer.token_ids, *range(150, 190)])


# --- few blocks, and no bi-directional mode -------------------------------------------------------------------------------

FEW = {
    **SHORT,
    "ours_d": {"args": ("--num-gpu-blocks-override", "300")},
    "stock_p": {"bidirectional_kv_xfer": False},
}
"""Our D with 300 blocks besides; vLLM's P without bi-directional mode."""


@pytest.fixture
async def few(pairs: dict[str, Site], settings: Settings) -> AsyncIterator[dict[str, Site]]:
    yield await _as_wanted(settings, pairs, FEW)
    await pairs["ours"].at_rest()


async def test_a_d_that_is_full_of_leases_goes_on_serving(few: dict[str, Site]) -> None:
    site = few["ours"]
    async with site.router() as talk:
        talk.router.retention.know(site.d.url, None, None)  # the router does not keep it within a budget
        prompts = await eight_conversations(talk)
        held = await lease_ops(site.d.url, site.engines.model)
        assert held["count"] < 8
        assert held["blocks"] <= 240
        assert await evicted_by(site.d) >= 8 - held["count"]
        for name, reason in (("7", None), ("0", Reason.EXPIRED)):
            talk.agent.conversation = name
            answer = await talk.say(prompts[name])
            assert answer.report.reason is reason, answer.report
            await talk.router.settled()


async def test_a_router_keeps_what_d_holds_to_its_budget_before_d_has_to(few: dict[str, Site]) -> None:
    site = few["ours"]
    before = await evicted_by(site.d)
    async with site.router() as talk:
        assert 140 * BLOCK <= (talk.router.retention.budget(site.d.url) or 0) <= 150 * BLOCK
        prompts = await eight_conversations(talk)
        await talk.router.settled()
        held = await lease_ops(site.d.url, site.engines.model)
        assert 0 < held["blocks"] <= 150
        assert await evicted_by(site.d) == before
        for name, reason in (("7", None), ("0", Reason.EVICTED)):
            talk.agent.conversation = name
            answer = await talk.say(prompts[name])
            assert answer.report.reason is reason, answer.report
            await talk.router.settled()


async def eight_conversations(talk: Run) -> dict[str, list[int]]:
    """What each has to go on from."""
    prompts = {}
    for name in map(str, range(8)):
        talk.agent.conversation = name
        with taking(20.0):
            prompts[name] = await talk.more(fresh(60 * BLOCK), body={"max_tokens": 8})
    return prompts


async def evicted_by(engine: Engine) -> float:
    """How many leases a decode engine has ended by itself, for want of blocks."""
    return (await metrics(engine.url)).total("backhaul_leases_ended_total", how="evicted")


async def test_the_router_goes_round_a_stock_p_without_bidirectional_mode(
    few: dict[str, Site], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = few["stock"]
    status, found = await doctor(site, tmp_path, "--timeout", "4")
    assert (status, [pair["verdict"] for pair in found["pairs"]]) == (2, ["hangs"])
    async with run([site.p.url], [site.d.url], site.engines, prefill_timeout_s=4.0) as talk:
        prompt = await talk.more(fresh(300))
        for _ in range(2):
            with taking(15.0):
                answer = await talk.say(prompt)
            assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.UNSAFE_PAIR)
            assert answer.report.retries == 0
    assert "`backhaul doctor`" in caplog.text
    for engine in (site.p, site.d):
        engine.check()
        assert await asyncio.to_thread(lambda engine=engine: engine.healthy)
    await wait_for_baseline(site.d.url, timeout_s=RELEASED_S)


async def test_our_p_without_bidirectional_mode_says_so(
    pairs: dict[str, Site], settings: Settings, tmp_path: Path
) -> None:
    site = (await _as_wanted(settings, pairs, {**FEW, "ours_p": {"bidirectional_kv_xfer": False}}))["ours"]
    status, found = await doctor(site, tmp_path)
    assert (status, found["pairs"][0]["verdict"], found["pairs"][0]["detail"]) == (1, "not_read", "bidirectional_off")
    async with site.router() as talk:
        prompt = await talk.more(fresh(300))
        with taking(15.0):
            answer = await talk.say(prompt)
        assert (answer.report.route, answer.report.reason) == (Route.COLD, Reason.UNSAFE_PAIR)
