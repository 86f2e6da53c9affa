"""`backhaul doctor` and the router's own checks: which pairs of engines can exchange KV, found out with a tiny conversation."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from backhaul_cli import main as cli
from backhaul_loopback import LoopbackEngine
from backhaul_router.engines import doctor, pair_probe
from backhaul_router.engines.describe import describe
from backhaul_router.engines.doctor import Diagnosis, Severity, diagnose, table
from backhaul_router.engines.pair_probe import Verdict
from backhaul_router.fleet.engine import Role
from backhaul_router.report import Reason, Route
from router_turns import Cluster, first_turn, opening, run_cluster

TIMEOUT_S = 30.0
KINDS = ("backhaul", "stock")


@asynccontextmanager
async def engines(
    p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
) -> AsyncIterator[tuple[LoopbackEngine, LoopbackEngine]]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(LoopbackEngine("prefill", claim_timeout_s=TIMEOUT_S, **(p or {})))
        decode = await stack.enter_async_context(LoopbackEngine("decode", **(d or {})))
        yield prefill, decode


async def examine(*pair: LoopbackEngine) -> Diagnosis:
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    for engine in pair:
        urls[engine.config.role].append(engine.url)
    return await diagnose(urls["prefill"], urls["decode"], timeout_s=TIMEOUT_S)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a probe, only the request that may hang is given little time: the others must be answered."""
    turn_two = pair_probe._Probe._turn_two

    async def soon_given_up(run: pair_probe._Probe, *args: Any) -> Verdict:
        run.timeout_s = 0.3
        return await turn_two(run, *args)

    monkeypatch.setattr(pair_probe._Probe, "_turn_two", soon_given_up)


def whats(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{finding.what} -> {finding.advice}" for finding in diagnosis.findings)


async def freed(*pair: LoopbackEngine) -> None:
    """Engines notice what they are told to release within a step."""
    with anyio.fail_after(20.0):
        while any(engine.usage for engine in pair):
            await anyio.sleep(0.002)


@pytest.mark.parametrize("p", KINDS)
@pytest.mark.parametrize("d", KINDS)
async def test_a_pair_that_works_reads_and_keeps_nothing(p: str, d: str) -> None:
    async with engines({"connector": p}, {"connector": d}) as pair:
        found = await examine(*pair)
        (exchanged,) = found.pairs
        assert (exchanged.verdict, exchanged.pulled, exchanged.left_pinned) == (Verdict.WARM, exchanged.offered, ())
        assert exchanged.offered >= 64
        assert found.severity is (Severity.GOOD if p == d else Severity.WARNING), whats(found)
        assert [facts.connector for facts in found.engines] == [p, d]
        assert [facts.bidirectional for facts in found.engines] == [True, True]
        await freed(*pair)
        assert not sum(e.core.metrics.nixl_num_notifications_after_expiry for e in pair)


async def test_what_a_decode_engine_of_ours_says_is_shown() -> None:
    ours = {"connector": "backhaul"}
    async with engines(ours, {**ours, "decoder_kv_blocks_ttl": 77.0}) as pair:
        found = await examine(*pair)
        assert found.engines[1].ttl_s is not None
        assert round(found.engines[1].ttl_s) == 77
        assert found.pairs[0].received
        assert "  77 s  " in table(found)


@pytest.mark.usefixtures("impatient")
async def test_a_prefill_engine_without_bidirectional_mode_hangs_and_is_unsafe() -> None:
    async with engines({"bidirectional_kv_xfer": False}) as pair:
        found = await examine(*pair)
        assert found.pairs[0].verdict is Verdict.HANGS
        assert found.severity is Severity.UNSAFE
        assert "bidirectional_kv_xfer" in whats(found)
        assert found.engines[0].bidirectional is False


async def test_one_of_ours_says_so_instead_of_hanging() -> None:
    ours = {"connector": "backhaul"}
    async with engines({**ours, "bidirectional_kv_xfer": False}, ours) as pair:
        found = await examine(*pair)
        assert (found.pairs[0].verdict, found.pairs[0].detail) == (Verdict.NOT_READ, "bidirectional_off")
        assert found.severity is Severity.WARNING
        await freed(*pair)


async def test_what_one_of_ours_leaves_unread_does_not_stay_pinned_on_a_stock_decode_engine() -> None:
    async with engines({"connector": "backhaul", "bidirectional_kv_xfer": False}) as pair:
        found = await examine(*pair)
        assert (found.pairs[0].verdict, found.pairs[0].detail) == (Verdict.NOT_READ, "bidirectional_off")
        await freed(*pair)


async def test_a_decode_engine_without_bidirectional_mode_leaves_every_turn_cold() -> None:
    async with engines(None, {"bidirectional_kv_xfer": False}) as pair:
        found = await examine(*pair)
        assert found.pairs[0].verdict is Verdict.NO_DECODE_HANDLE
        assert found.severity is Severity.WARNING
        assert found.engines[1].bidirectional is False
        await freed(*pair)


async def test_a_read_that_fails_is_unsafe_and_nothing_stays_pinned() -> None:
    async with engines() as pair:
        pair[0].faults.fail_kv_loads = 1
        found = await examine(*pair)
        assert found.pairs[0].verdict is Verdict.READ_FAILS
        assert found.severity is Severity.UNSAFE
        await freed(*pair)


@pytest.mark.parametrize(("version", "which"), [("0.32.0", "its streams"), ("0.33.0", "its streams of /v1/messages")])
async def test_streams_that_hide_handles_are_a_warning(version: str, which: str) -> None:
    settings = {"vllm_version": version}
    async with engines(settings, {"stream_handles": "off", **settings}) as pair:
        found = await examine(*pair)
        assert found.severity is Severity.WARNING
        assert f"{which} hide the handle" in whats(found)
        assert "each pins its blocks until the TTL" in whats(found)


async def test_engines_of_two_releases_cannot_be_paired() -> None:
    async with engines({"vllm_version": "0.32.0"}, {"vllm_version": "0.33.0"}) as pair:
        found = await examine(*pair)
        assert found.severity is Severity.UNSAFE
        assert "runs vLLM 0.32.0" in whats(found)
        assert "runs 0.33.0: engines exchange KV only between equal builds" in whats(found)
        assert "0.33.0" in table(found)


async def test_engines_that_do_not_render_are_a_warning_unless_they_are_ours() -> None:
    for connector, severity in (("stock", Severity.WARNING), ("backhaul", Severity.GOOD)):
        settings = {"enable_scale_out": False, "connector": connector}
        async with engines(settings, settings) as pair:
            assert (await examine(*pair)).severity is severity


async def test_engines_that_do_not_fit_are_not_tried() -> None:
    async with engines({"block_size": 16}, {"block_size": 32}) as pair:
        found = await examine(*pair)
        assert (found.pairs, found.severity) == ((), Severity.UNSAFE)
        assert "--block-size" in whats(found)


async def test_an_engine_that_does_not_answer_is_told_and_the_others_are_tried() -> None:
    async with engines() as (prefill, decode):
        found = await diagnose([prefill.url, "http://127.0.0.1:9"], [decode.url], timeout_s=TIMEOUT_S)
        assert found.severity is Severity.UNREACHABLE
        assert [facts.answers for facts in found.engines] == [True, False, True]
        assert [pair.verdict for pair in found.pairs] == [Verdict.WARM]


async def test_an_api_key_that_is_missing_is_told_by_its_variable() -> None:
    async with engines() as pair:
        pair[0].faults.status = 401
        pair[0].faults.paths = ("/version", "/v1/models")
        found = await examine(*pair)
        assert found.severity is Severity.UNSAFE
        assert "BACKHAUL_ENGINE_API_KEY" in whats(found)


# --- the command ---------------------------------------------------------------------------------------------------------


async def command(*args: str) -> int:
    return await anyio.to_thread.run_sync(lambda: cli.main(["doctor", *args]))


async def test_the_command_prints_a_table_and_exits_with_the_worst(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "found.json"
    async with engines() as (prefill, decode):
        args = ("--prefill", prefill.url, "--decode", decode.url, "--json", str(written))
        assert await command(*args) == 0
    out = capsys.readouterr().out
    assert prefill.url in out
    assert "all good" in out
    found = json.loads(written.read_text())
    assert (found["severity"], found["pairs"][0]["verdict"]) == ("good", "warm")


async def test_json_can_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    dead = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:8", "--json", "-", "--timeout", "1")
    assert await command(*dead) == 3
    found = json.loads(capsys.readouterr().out)
    assert {finding["severity"] for finding in found["findings"]} == {"unreachable"}


async def test_a_wrong_url_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert await command("--prefill", "nonsense", "--decode", "http://127.0.0.1:8") == 2
    assert "nonsense" in capsys.readouterr().err


# --- what the router does with it ----------------------------------------------------------------------------------------


def sent(engine: LoopbackEngine) -> list[str]:
    return [request.path for request in engine.received if request.path in ("/v1/completions", "/tokenize")]


async def test_a_first_turn_waits_for_no_check() -> None:
    async with run_cluster(check_pairs=True) as cluster:
        reply = await cluster.open({"messages": opening()})
        assert sent(cluster.p) == []
        async for _ in reply:
            pass
        await cluster.router.settled()
        assert sent(cluster.p) != []


async def test_a_pair_is_checked_once_and_then_read_from() -> None:
    async with run_cluster(check_pairs=True) as cluster:
        messages = await first_turn(cluster)
        assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM
        await cluster.router.settled()
        asked = len(sent(cluster.p))
        assert (await cluster.exact({"messages": messages})).reused.status == 200
        await cluster.router.settled()
        assert len([path for path in sent(cluster.p)[asked:] if path == "/tokenize"]) == 0


@pytest.fixture
async def hanging(impatient: None) -> AsyncIterator[Cluster]:
    """P without bi-directional mode."""
    async with run_cluster(check_pairs=True, p={"bidirectional_kv_xfer": False}, prefill_timeout_s=30.0) as cluster:
        cluster.pinned_until_ttl = True  # a request that hangs in vLLM keeps its blocks
        yield cluster


async def test_a_pair_that_hangs_is_not_read_from(hanging: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    messages = await first_turn(hanging)
    for _ in range(2):
        report = (await hanging.exact({"messages": messages})).reused
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.UNSAFE_PAIR, 0)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len([record for record in warnings if "`backhaul doctor`" in record.getMessage()]) == 1


async def test_a_safe_prefill_engine_is_used_instead(hanging: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LoopbackEngine("prefill") as other:
        messages = await first_turn(hanging)
        await hanging.router.settled()
        monkeypatch.undo()  # the other's request does not hang
        hanging.router.fleet.add(await describe(hanging.router.client, other.url, Role.PREFILL))
        report = (await hanging.exact({"messages": messages})).reused
        assert (report.route, report.prefill_engine) == (Route.WARM, other.url)


async def test_a_router_that_closes_does_not_wait_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul_router.engines.pair_checks._TIMEOUT_S", 60.0)
    async with run_cluster(check_pairs=True, p={"bidirectional_kv_xfer": False}) as cluster:
        cluster.pinned_until_ttl = True
        await first_turn(cluster)
        while "/tokenize" not in sent(cluster.p):
            await anyio.sleep(0.002)
        with anyio.fail_after(20.0):
            await cluster.router.aclose()


async def test_engines_of_ours_are_not_checked() -> None:
    async with run_cluster(check_pairs=True, engine={"connector": "backhaul"}) as cluster:
        messages = await first_turn(cluster)
        await cluster.exact({"messages": messages})
        await cluster.router.settled()
        assert "/tokenize" not in sent(cluster.p)


def test_every_verdict_but_the_good_one_has_its_advice() -> None:
    advised: Sequence[Verdict] = list(doctor._PAIR_ADVICE)
    assert set(advised) == set(Verdict) - {Verdict.WARM}
