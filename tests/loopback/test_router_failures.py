"""Engines that are down, fail, hang, restart or forget, and clients that leave: what the client gets, and what is left."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from backhaul_loopback import LoopbackEngine, VirtualClock
from backhaul_loopback.clock import CostModel
from backhaul_router.config import RouterConfig
from backhaul_router.drive.router import Reply, Request, Router
from backhaul_router.errors import ConfigError
from backhaul_router.report import Reason, Route
from router_turns import CHAT, STORY, Cluster, first_turn, opening, run_cluster, user

SLOW = {"costs": CostModel(decode_s=0.05)}
"""On D: about a quarter of a second for each word."""


def code(answer: Any) -> str:
    found: str = answer.json["error"]["code"]
    return found


async def third(cluster: Cluster, history: list[dict[str, Any]], **how: Any) -> Any:
    """One more turn, which must be right whatever came before."""
    return (await cluster.exact({"messages": history}, **how)).reused


# --- prefill -------------------------------------------------------------------------------------------------------------


async def test_a_read_that_fails_is_computed_instead() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        history = await first_turn(cluster)
        cluster.p.faults.fail_kv_loads = 1
        report = await third(cluster, history)
        assert (report.route, report.reason, report.retries, report.cached) == (Route.COLD, Reason.READ_FAILED, 1, 0)
        assert (await third(cluster, [*history, user("More. " + STORY)])).route is Route.WARM


@pytest.mark.parametrize("fault", [{"status": 500}, {"drop": True}])
async def test_the_only_prefill_engines_failure_is_told(fault: dict[str, Any]) -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        for name, value in fault.items():
            setattr(cluster.p.faults, name, value)
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, code(answer)) == (502, "prefill_failed")
        assert cluster.p.url in answer.json["error"]["message"]
        assert answer.reused.error == "prefill_failed"
        cluster.p.faults.clear()
        assert (await cluster.exact({"messages": opening()})).reused.reason is Reason.FIRST_TURN


async def test_a_prefill_engine_that_is_gone_is_told_and_the_handle_waits() -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        await cluster.kill(cluster.p)
        answer = await cluster.ask({"messages": history})
        assert (answer.status, code(answer)) == (502, "prefill_failed")
        assert answer.headers["x-should-retry"] == "true"
        await cluster.p.restart()
        assert (await third(cluster, history)).route is Route.WARM


async def test_another_prefill_engine_reads_the_handle_when_the_first_is_down() -> None:
    async with run_cluster(prefill=2, p={"prefix_caching": False}) as cluster:
        history = await first_turn(cluster)
        used = cluster.reports[0].prefill_engine
        down = next(engine for engine in cluster.prefill if engine.url == used)
        await cluster.kill(down)
        report = await third(cluster, history)
        assert (report.route, report.prefill_engine != used) == (Route.WARM, True)
        assert report.retries >= 1


async def test_another_prefill_engine_computes_when_the_first_fails() -> None:
    async with run_cluster(prefill=2) as cluster:
        await cluster.router.connect()
        cluster.prefill[0].faults.status = cluster.prefill[1].faults.status = 500
        cluster.prefill[1].faults.times = 0
        report = await third(cluster, opening())
        assert report.prefill_engine == cluster.prefill[1].url


async def test_a_request_that_breaks_engines_reaches_two_of_them_however_often_it_is_sent() -> None:
    async with run_cluster(prefill=4, engine={"enable_scale_out": False}) as cluster:
        body = {"messages": opening(), "documents": [{"text": "x"}]}
        await cluster.router.connect()
        for engine in cluster.prefill:
            engine.faults.drop = True
        codes = []
        for conversation in ("one", "another", "a third"):
            answer = await cluster.ask(body, conversation=conversation)
            assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
            codes.append(answer.json["error"]["code"])
        assert codes == ["prefill_failed", "breaks_engines", "breaks_engines"]
        assert sum(len(engine.requests_to(CHAT)) for engine in cluster.engines) == 2
        assert cluster.router.fleet.counters.withheld == 2
        other = {**body, "messages": [*opening(), user("Another one.")]}
        for engine in cluster.prefill:
            engine.faults.clear()
        assert (await cluster.ask(other)).status == 200


async def test_a_prefill_that_hangs_is_given_up() -> None:
    async with run_cluster(prefill_timeout_s=0.1) as cluster:
        await cluster.router.connect()
        cluster.p.faults.stall = True
        answer = await cluster.ask({"messages": opening()}, conversation=None)
        assert (answer.status, code(answer)) == (504, "prefill_timeout")


async def test_a_read_that_hangs_is_run_again_cold() -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        cluster.router.reconfigure(dataclasses.replace(cluster.router.config, prefill_timeout_s=2.0))
        cluster.p.faults.stall, cluster.p.faults.times = True, 1
        assert (await third(cluster, history)).reason is Reason.READ_FAILED


async def test_a_prefill_engine_without_a_connector_is_told_apart() -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        cluster.p.faults.lie = lambda handle: {}
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, code(answer)) == (502, "prefill_failed")
        assert "kv_producer" in answer.json["error"]["message"]
        cluster.pinned_until_ttl = True


# --- decode --------------------------------------------------------------------------------------------------------------


async def test_another_decode_engine_takes_over_before_the_first_byte() -> None:
    async with run_cluster(decode=2) as cluster:
        history = await first_turn(cluster)
        used = cluster.reports[0].decode_engine
        failing = next(engine for engine in cluster.decode if engine.url == used)
        failing.faults.status = 500
        cluster.released_twice = True
        report = await third(cluster, history)
        assert (report.route, report.reason) == (Route.COLD, Reason.DECODE_FAILED)
        assert report.decode_engine != used


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_decode_engine_that_is_down_is_passed_over(stream: bool) -> None:
    async with run_cluster(decode=2) as cluster:
        history = await first_turn(cluster)
        used = cluster.reports[0].decode_engine
        down = next(engine for engine in cluster.decode if engine.url == used)
        await cluster.kill(down)
        answer = await cluster.exact({"messages": history, "stream": stream})
        assert answer.reused.decode_engine != used
        await down.restart()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_only_decode_engines_failure_is_told(stream: bool) -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        cluster.d.faults.drop, cluster.d.faults.times = True, 1
        answer = await cluster.ask({"messages": opening(), "stream": stream})
        assert (answer.status, code(answer)) == (502, "decode_failed")
        assert cluster.d.url in answer.json["error"]["message"]


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_full_says_so_itself(status: int) -> None:
    async with run_cluster(decode=2) as cluster:
        await cluster.router.connect()
        for engine in cluster.decode:
            engine.faults.status, engine.faults.times = status, 1
        answer = await cluster.ask({"messages": opening()})
        assert answer.status == status
        assert answer.json["error"]["message"] == "failure ordered by a test"


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async with run_cluster(decode=2) as cluster:
        await cluster.router.connect()
        for engine in cluster.decode:
            engine.faults.die_after_bytes = 700
        answer = await cluster.ask({"messages": opening(), "stream": True})
        *earlier, last, rest = answer.raw.split(b"\n\n")
        assert (answer.status, rest) == (200, b"")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decode_failed"
        assert all(b"choices" in event for event in earlier)
        assert answer.reused.error == "decode_failed"
        assert sum(len(engine.requests_to(CHAT)) for engine in cluster.decode) == 1
        cluster.d.faults.clear()


async def test_an_answer_that_breaks_off_is_an_error_and_not_half_an_answer() -> None:
    async with run_cluster() as cluster:
        await cluster.router.connect()
        cluster.d.faults.die_after_bytes = 50
        answer = await cluster.ask({"messages": opening()})
        assert (answer.status, code(answer)) == (502, "decode_failed")
        cluster.pinned_until_ttl = True  # the handle was in the part that never came


async def test_a_decode_that_falls_silent_is_given_up() -> None:
    async with run_cluster(decode_timeout_s=0.1) as cluster:
        await cluster.router.connect()
        cluster.d.faults.stall, cluster.d.faults.times = True, 1
        answer = await cluster.ask({"messages": opening(), "stream": True})
        assert (answer.status, code(answer)) == (504, "decode_timeout")


# --- handles that are no good any more -----------------------------------------------------------------------------------


async def test_a_handle_is_not_offered_in_the_last_seconds_of_its_lease() -> None:
    now = 0.0
    async with run_cluster(decoder_kv_blocks_ttl=480.0, lease_margin_s=10.0) as cluster:
        cluster.router.services.clock = lambda: now
        history = await first_turn(cluster)
        now = 469.9
        history = [*history, (await cluster.exact({"messages": history})).message, user("Third. " + STORY)]
        assert cluster.reports[-1].route is Route.WARM
        now += 470.0
        assert (await third(cluster, history)).reason is Reason.EXPIRED


async def test_a_lease_that_ended_early_is_computed_again() -> None:
    async with run_cluster(p={"prefix_caching": False}, d={"decoder_kv_blocks_ttl": 4.0}) as cluster:
        history = await first_turn(cluster)
        # P declines to read blocks whose lease ends within five seconds.
        assert (await third(cluster, history)).reason is Reason.READ_FAILED
        cluster.pinned_until_ttl = True


async def test_a_restarted_decode_engine_has_nothing_to_read() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        history = await first_turn(cluster)
        other = await first_turn(cluster, conversation="other")
        await cluster.d.restart()
        report = await third(cluster, history)
        assert (report.route, report.reason) == (Route.COLD, Reason.READ_FAILED)
        # Its new handle has shown the restart: what others left before it is not even tried.
        assert (await third(cluster, other, conversation="other")).reason is Reason.ENGINE_CHANGED
        assert (await third(cluster, [*history, user("More. " + STORY)])).route is Route.WARM


async def test_a_restarted_prefill_engine_costs_nothing_but_its_cache() -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        await cluster.p.restart()
        assert (await third(cluster, history)).route is Route.WARM


# --- turns at once -------------------------------------------------------------------------------------------------------


async def test_two_turns_of_a_conversation_at_once_share_one_handle_between_them() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        history = await first_turn(cluster)
        ways = [[*history[:-1], user(f"Way {n}. {STORY}")] for n in range(4)]
        await asyncio.gather(*(cluster.exact({"messages": way, "stream": n % 2 == 1}) for n, way in enumerate(ways)))
        reports = cluster.reports[1:]
        assert sorted(report.route for report in reports) == [Route.COLD] * 3 + [Route.WARM]
        assert {report.reason for report in reports if report.route is Route.COLD} == {Reason.IN_USE}
        assert sorted(report.turn for report in reports) == [2, 3, 4, 5]
        for way in ways:
            assert (await third(cluster, [*way, user("On. " + STORY)])).route is Route.WARM


async def test_many_conversations_at_once_stay_apart() -> None:
    async with run_cluster(prefill=2, decode=2, p={"prefix_caching": False}) as cluster:

        async def talk(name: str) -> None:
            history = [{"role": "system", "content": f"{name}: {STORY}"}, user(f"{name} begins. {STORY}")]
            for _ in range(3):
                answer = await cluster.exact({"messages": history}, conversation=name)
                history += [answer.message, user(f"{name} goes on. {STORY}")]

        await asyncio.gather(*(talk(f"agent {n}") for n in range(12)))
        assert [r.route for r in cluster.reports].count(Route.WARM) == 24


async def test_a_conversation_that_ends_during_its_turn_leaves_nothing() -> None:
    async with run_cluster(d=SLOW) as cluster:
        reply = await cluster.open({"messages": opening(), "stream": True, "max_tokens": 5})
        await cluster.router.end_conversation("c")
        async for _ in reply:
            pass
        await cluster.until(lambda: cluster.d.usage == 0)
        assert len(cluster.router.ledger) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_router_that_closes_in_the_middle_of_a_turn_ends_it(
    where: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        engine = cluster.p if where == "prefill" else cluster.d
        engine.faults.stall = True
        before = len(engine.received)
        turn = asyncio.create_task(cluster.ask({"messages": history, "stream": stream}))
        await cluster.until(lambda: any(r.path == CHAT for r in list(engine.received)[before:]))
        await cluster.router.aclose()
        assert (await turn).status == 502
        cluster.pinned_until_ttl = True  # there is no way left to tell the engines
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize("steps", range(0, 120, 8))
async def test_a_router_that_closes_while_it_tries_a_pair_leaves_nothing_pinned(steps: int) -> None:
    async with run_cluster(check_pairs=True) as cluster:
        await first_turn(cluster)
        for _ in range(steps):
            await asyncio.sleep(0)
        await cluster.router.aclose()
        await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))


async def test_releases_take_another_way_where_the_first_is_closed() -> None:
    async with run_cluster(prefill=2) as cluster:
        for conversation in "abcd":
            await first_turn(cluster, conversation=conversation)
        await cluster.kill(cluster.prefill[0])
        await cluster.router.flush()
        await cluster.until(lambda: cluster.d.usage == 0)
        assert cluster.router.fleet.counters.failed_releases == 0


async def test_a_release_that_failed_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with run_cluster() as cluster:
        await first_turn(cluster)
        await cluster.kill(cluster.p)
        await cluster.router.flush()
        assert cluster.router.fleet.counters.failed_releases == 1
        assert "pinned until their TTL" in caplog.text
        cluster.pinned_until_ttl = True


# --- the client ----------------------------------------------------------------------------------------------------------


async def first_chunk(reply: Reply) -> tuple[bytes, AsyncIterator[bytes]]:
    chunks = aiter(reply)
    return await anext(chunks), chunks


async def test_the_first_event_leaves_before_the_engine_has_the_second() -> None:
    clock = VirtualClock()
    async with run_cluster(clock=clock, d={"costs": CostModel(decode_s=1.0)}) as cluster:
        turn = asyncio.create_task(cluster.open({"messages": opening(), "stream": True}))
        await cluster.until(lambda: cluster.d.core.metrics.num_requests_running == 1)
        while not turn.done():
            await clock.advance(1.0)
            await asyncio.sleep(0.001)
        first, chunks = await first_chunk(turn.result())
        generated = cluster.d.core.metrics.generation_tokens
        assert b'"content"' in first
        following = asyncio.ensure_future(anext(chunks))
        done, _ = await asyncio.wait([following], timeout=0.05)
        assert not done
        assert cluster.d.core.metrics.generation_tokens - generated < 20
        while not following.done():
            await clock.advance(1.0)
            await asyncio.sleep(0.001)
        await chunks.aclose()  # type: ignore[attr-defined]
        await cluster.idle()


async def test_a_client_that_leaves_early_stops_the_engine() -> None:
    async with run_cluster(d=SLOW) as cluster:
        reply = await cluster.open({"messages": opening(), "stream": True, "ignore_eos": True, "max_tokens": 5000})
        _, chunks = await first_chunk(reply)
        await chunks.aclose()  # type: ignore[attr-defined]
        await cluster.idle()
        assert cluster.d.core.metrics.request_success["abort"] == 1
        assert cluster.reports[-1].error == "client_gone"
        assert cluster.d.usage == 0


async def test_a_reply_that_is_closed_unread_stops_the_engine() -> None:
    async with run_cluster(d=SLOW) as cluster:
        reply = await cluster.open({"messages": opening(), "stream": True, "ignore_eos": True, "max_tokens": 5000})
        await reply.aclose()
        await cluster.idle()
        assert cluster.reports[-1].error == "client_gone"


async def test_a_reply_may_be_closed_twice_at_a_time() -> None:
    async with run_cluster(d=SLOW) as cluster:
        reply = await cluster.open({"messages": opening(), "stream": True, "ignore_eos": True, "max_tokens": 5000})
        await asyncio.gather(reply.aclose(), reply.aclose())
        await cluster.idle()
        assert [report.error for report in cluster.reports] == ["client_gone"]


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_before_the_head_stops_the_engine(where: str) -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        engine = cluster.p if where == "prefill" else cluster.d
        engine.faults.stall = True
        before = len(engine.received)
        turn = asyncio.create_task(cluster.open({"messages": history}))
        await cluster.until(lambda: any(r.path == CHAT for r in list(engine.received)[before:]))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        engine.faults.clear()
        assert cluster.reports[-1].error == "client_gone"
        await cluster.until(lambda: cluster.d.usage == 0)
        report = await third(cluster, history)
        assert report.reason in (Reason.NO_HANDLE, None)


@pytest.mark.parametrize("started", [False, True])
async def test_a_cancelled_scope_leaves_nothing_behind(started: bool) -> None:
    """Servers and clients built on anyio cancel again at every await, cleaning up included."""
    async with run_cluster(d=SLOW) as cluster:
        body = {"messages": opening(), "stream": True, "ignore_eos": True, "max_tokens": 5000}
        with anyio.CancelScope() as scope:
            reply = await cluster.open(body)
            if started:
                async for _ in reply:
                    scope.cancel()
            else:
                scope.cancel()
                await reply.aclose()
        assert scope.cancelled_caught
        await cluster.idle()
        assert [report.error for report in cluster.reports] == ["client_gone"]


async def test_an_agent_that_stops_reading_at_the_finish_reason_reuses_its_turn() -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        messages = opening()
        reply = await cluster.open({"messages": messages, "stream": True})
        text = b""
        async for chunk in reply:
            text += chunk
            if b'"finish_reason":"stop"' in chunk:
                break
        await reply.aclose()
        said = "".join(
            json.loads(e[6:])["choices"][0]["delta"].get("content") or "" for e in text.decode().strip().split("\n\n")
        )
        report = await third(cluster, [*messages, {"role": "assistant", "content": said}, user("Second. " + STORY)])
        assert report.route is Route.WARM


# --- engines that do not fit ---------------------------------------------------------------------------------------------


async def start(prefill: list[LoopbackEngine], decode: list[LoopbackEngine], **config: Any) -> Router:
    router = Router(RouterConfig(prefill=[e.url for e in prefill], decode=[e.url for e in decode], **config))
    try:
        await router.connect()
    except BaseException:
        await router.aclose()
        raise
    return router


async def test_engines_of_different_models_are_refused() -> None:
    async with LoopbackEngine("prefill", model="a") as p, LoopbackEngine("decode", model="b") as d:
        with pytest.raises(ConfigError, match="serve the same model"):
            await start([p], [d])


async def test_engines_of_different_block_sizes_are_refused() -> None:
    async with LoopbackEngine("prefill", block_size=16) as p, LoopbackEngine("decode", block_size=32) as d:
        with pytest.raises(ConfigError, match="--block-size"):
            await start([p], [d])


async def test_a_version_whose_protocol_is_unknown_is_refused() -> None:
    old = {"vllm_version": "0.31.2"}
    async with LoopbackEngine("prefill", **old) as p, LoopbackEngine("decode", **old) as d:
        with pytest.raises(ConfigError, match=r"0\.31\.2.*0\.32"):
            await start([p], [d])


@pytest.mark.parametrize("missing", ["prefill", "decode"])
async def test_a_role_without_an_engine_that_answers_is_refused(missing: str) -> None:
    async with LoopbackEngine("prefill") as p, LoopbackEngine("decode") as d:
        await (p if missing == "prefill" else d).stop()
        with pytest.raises(ConfigError, match=f"no {missing} engine answers.*cannot connect"):
            await start([p], [d])


async def test_an_engine_that_comes_later_is_used() -> None:
    now = 0.0
    async with run_cluster(decode=2) as cluster:
        late = cluster.decode[1]
        await cluster.kill(late)
        cluster.router.services.clock = lambda: now
        await cluster.router.connect()
        assert [e.url for e in cluster.router.fleet.decode] == [cluster.d.url]
        await late.restart()
        await cluster.exact({"messages": opening()}, conversation=None)
        assert len(cluster.router.fleet.decode) == 1
        now = 60.0
        await cluster.exact({"messages": opening()}, conversation=None)
        await cluster.until(lambda: len(cluster.router.fleet.decode) == 2)


async def test_two_first_turns_at_once_ask_the_engines_and_agree() -> None:
    async with run_cluster() as cluster:
        await asyncio.gather(*(cluster.exact({"messages": opening()}, conversation=str(n)) for n in range(5)))
        assert len(cluster.router.fleet.engines) == 2


async def test_the_fleet_is_unknown_before_it_was_asked() -> None:
    router = Router(RouterConfig(prefill=["http://p:1"], decode=["http://d:1"]))
    with pytest.raises(RuntimeError, match="connect"):
        router.fleet  # noqa: B018
    assert "not connected" in repr(router)
    await router.aclose()


async def test_a_report_that_nobody_can_take_costs_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(report: object) -> None:
        raise RuntimeError("no room for reports")

    async with run_cluster() as cluster:
        cluster.router.on_report = refuse
        reply = await cluster.router.handle(
            Request("POST", CHAT, [], json.dumps({"model": "loopback", "messages": [user("Hello.")]}).encode())
        )
        assert reply.status == 200
        assert b"".join([chunk async for chunk in reply])
    assert "could not be handed over" in caplog.text
