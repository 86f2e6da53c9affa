"""A router over engines that run our connector: proof by their digests, leases that are shared, renewed and released by name."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from backhaul_loopback import LoopbackEngine
from backhaul_router.engines.leases import EngineLeases
from backhaul_router.errors import LeaseError
from backhaul_router.fleet.engine import Holder
from backhaul_router.report import Proof, Reason, Route
from router_turns import (
    CHAT,
    COMPLETIONS,
    STORY,
    Cluster,
    first_turn,
    opening,
    run_cluster,
    system,
    user,
)

OURS: Mapping[str, Any] = {"connector": "backhaul"}


def ours(**settings: Any) -> AbstractAsyncContextManager[Cluster]:
    return run_cluster(**{"engine": OURS, "p": {"prefix_caching": False}, **settings})


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with ours() as started:
        yield started


def asked(engine: LoopbackEngine, path: str = CHAT) -> list[dict[str, Any]]:
    """What the router has sent, lease operations aside."""
    return [r.body for r in engine.received if r.path == path and "leases" not in said(r.body)]


def said(body: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (body.get("kv_transfer_params") or {}).get("backhaul") or {}
    return found


def operations(engine: LoopbackEngine) -> list[dict[str, Any]]:
    return [said(r.body)["leases"] for r in engine.received if r.path == COMPLETIONS and "leases" in said(r.body)]


async def kept(cluster: Cluster) -> EngineLeases:
    (found,) = await cluster.router.leases()
    return found


async def only_lease(cluster: Cluster) -> str:
    (lease,) = (await kept(cluster)).leases
    return lease.id


# --- proof by the connector ----------------------------------------------------------------------------------------------


async def test_a_second_turn_reads_by_the_engines_own_proof_and_nothing_is_rendered(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    answer = await cluster.exact({"messages": messages})
    report = answer.reused
    assert (report.route, report.proof, report.reason) == (Route.WARM, Proof.CONNECTOR, None)
    assert report.pulled
    assert report.pulled == report.verified == report.offered
    assert (report.local, report.cached) == (0, report.pulled)
    assert report.prompt == (report.computed or 0) + report.pulled
    assert report.read_bytes
    assert report.read_ms is not None
    assert report.claim_ms is not None
    assert report.decode_cached is not None
    assert not [r for engine in cluster.engines for r in engine.received if r.path == f"{CHAT}/render"]
    assert asked(cluster.p)[1]["messages"] == messages
    assert "prompt_token_ids" not in asked(cluster.p)[1]["kv_transfer_params"]


async def test_prefill_gets_the_handle_as_it_came_but_for_what_is_the_routers(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    await cluster.exact({"messages": messages})
    sent = asked(cluster.p)[1]["kv_transfer_params"]
    assert sorted(sent["backhaul"]) == ["block_size", "digests", "epoch", "lease", "version"]
    assert sent["remote_engine_id"] == cluster.d.engine_id
    assert sent["remote_num_tokens"] == 0, "for an engine that does not check, there is nothing to read"


async def test_decode_is_asked_to_retain_and_gets_prefills_hash_of_the_prompt(cluster: Cluster) -> None:
    await first_turn(cluster)
    sent = said(asked(cluster.d)[0])
    assert (sent["retain"], sent["shared"], sent["version"]) == (True, True, 1)
    assert "retain_s" not in sent
    assert "prompt_hash" in sent
    assert "account" not in sent


async def test_streams_reuse_and_report_as_well(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    report = (await cluster.exact({"messages": messages, "stream": True})).reused
    assert (report.route, report.proof, report.pulled) == (Route.WARM, Proof.CONNECTOR, report.offered)
    messages = [*messages, {"role": "assistant", "content": "x"}, user("Third: " + STORY)]
    assert (await cluster.exact({"messages": messages})).reused.pulled


@pytest.mark.parametrize("field", [{"reasoning_effort": "low"}, {"documents": [{"title": "a", "text": "b"}]}])
async def test_fields_that_no_router_could_prove_are_no_obstacle(cluster: Cluster, field: dict[str, Any]) -> None:
    messages = await first_turn(cluster, field)
    assert (await cluster.exact({"messages": messages, **field})).reused.route is Route.WARM


async def test_an_edited_history_reads_what_is_still_the_same(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    messages[1] = user("Else: " + STORY)
    report = (await cluster.exact({"messages": messages})).reused
    assert report.route is Route.WARM
    assert 0 < (report.verified or 0) < report.offered
    assert report.diverged_at == 1


async def test_another_history_under_the_same_id_is_cold_and_leaves_the_first_one_its_handle(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    other = [system("Other. " + STORY * 2), user("Hello")]
    report = (await cluster.exact({"messages": other})).reused
    assert (report.route, report.reason, report.verified, report.pulled) == (Route.COLD, Reason.DIVERGED, 0, 0)
    assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


async def test_what_prefill_has_in_its_own_cache_is_not_read_again() -> None:
    async with ours(p={"prefix_caching": True}) as cluster:
        messages = opening("First: " + STORY * 3)
        await cluster.exact({"messages": messages, "max_tokens": 8})
        report = (await cluster.exact({"messages": [*messages, user("And?")]})).reused
        assert (report.route, report.reason, report.pulled) == (Route.WARM, None, 0)
        assert report.local


async def test_prefixes_below_the_threshold_are_computed() -> None:
    async with ours(engine={**OURS, "kv_recompute_threshold": 512}, kv_recompute_threshold=0) as cluster:
        messages = await first_turn(cluster)
        report = (await cluster.exact({"messages": messages})).reused
        assert (report.route, report.reason, report.pulled) == (Route.COLD, Reason.BELOW_THRESHOLD, 0)


# --- retention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_one_shot_calls_pin_nothing_where_histories_are_not_gone_by(stream: bool) -> None:
    async with ours(match_history=False) as cluster:
        await cluster.exact({"messages": opening(), "stream": stream}, conversation=None)
        assert said(asked(cluster.d)[0])["retain"] is False
        assert (await kept(cluster)).count == 0
        assert cluster.router.fleet.counters.releases == 0


async def test_without_reuse_nothing_is_pinned() -> None:
    async with ours(reuse=False) as cluster:
        await cluster.exact({"messages": opening()})
        assert (await kept(cluster)).count == 0


async def test_several_sequences_pin_nothing(cluster: Cluster) -> None:
    await cluster.exact({"messages": opening(), "n": 2})
    assert (await kept(cluster)).count == 0
    assert cluster.router.fleet.counters.releases == 0


async def test_streams_that_hide_their_handle_pin_nothing() -> None:
    async with ours(engine=OURS | {"vllm_version": "0.32.0"}, d={"stream_handles": "off"}) as cluster:
        await cluster.exact({"messages": opening(), "stream": True})
        assert (await kept(cluster)).count == 0
        assert cluster.router.fleet.counters.unreachable_pins == 0
        await cluster.exact({"messages": opening()})
        assert (await kept(cluster)).count == 1


async def test_a_shorter_lease_than_vllms_is_asked_for() -> None:
    async with ours(decoder_kv_blocks_ttl=60.0) as cluster:
        report = (await cluster.exact({"messages": opening()})).reused
        (lease,) = (await kept(cluster)).leases
        assert 55 < lease.remaining_s <= 60
        assert report.handle_remaining_s is not None
        assert 45 < report.handle_remaining_s <= 50


async def test_a_superseded_lease_is_released_with_the_next_request_to_its_engine(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    old = await only_lease(cluster)
    await cluster.exact({"messages": messages})
    await cluster.exact({"messages": opening("Else")}, conversation="other")
    assert said(asked(cluster.d)[2])["release"] == [old]
    assert (await kept(cluster)).count == 2


async def test_without_a_next_request_it_is_released_by_itself(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    old = await only_lease(cluster)
    await cluster.exact({"messages": messages})
    await cluster.until(lambda: {"release": [old]} in operations(cluster.d))
    assert (await kept(cluster)).count == 1


async def test_the_end_of_a_conversation_releases_all_of_it_in_one_request(cluster: Cluster) -> None:
    await first_turn(cluster)
    await cluster.exact({"messages": [system("Other " + STORY), user("hi")]})
    assert (await kept(cluster)).count == 2
    await cluster.router.end_conversation("c")
    assert (await kept(cluster)).count == 0
    assert [sorted(o) for o in operations(cluster.d) if "release" in o] == [["release"]]
    counters = cluster.router.fleet.counters
    assert (counters.releases, counters.failed_releases) == (2, 0)


async def test_a_local_turn_leaves_a_handle_of_its_own(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    old = await only_lease(cluster)
    answer = await cluster.exact({"messages": messages}, route=Route.LOCAL)
    assert (answer.reused.route, answer.reused.proof) == (Route.LOCAL, Proof.ENGINE)
    await cluster.router.settled()
    assert await only_lease(cluster) != old
    messages = [*messages, answer.message, user("Third: " + STORY)]
    report = (await cluster.exact({"messages": messages})).reused
    assert report.route is Route.WARM
    assert report.pulled
    assert report.pulled > (answer.reused.prompt or 0) - 32


async def test_a_turn_that_a_stop_string_ended_keeps_the_handle_before_it(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    old = await only_lease(cluster)
    answer = await cluster.ask({"messages": messages, "stop": ["e", "a", "o", "i", " "]})
    assert answer.status == 200
    assert await only_lease(cluster) == old
    assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


# --- sharing -------------------------------------------------------------------------------------------------------------


async def test_turns_at_once_read_one_handle(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    children = [[*messages[:-1], user(f"Child {n}: {STORY}")] for n in range(3)]
    answers = await asyncio.gather(*(cluster.exact({"messages": child}) for child in children))
    routes = [answer.report.route for answer in answers if answer.report]
    assert [report.route for report in cluster.reports[1:]] == [Route.WARM] * 3
    assert {report.reason for report in cluster.reports[1:]} == {None}
    assert len(routes) == 3
    await cluster.router.settled()
    assert (await kept(cluster)).count == 3


async def test_a_lease_is_not_released_while_a_turn_has_it(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    old = await only_lease(cluster)
    reply = await cluster.open({"messages": messages, "stream": True, "max_tokens": 200})
    await cluster.exact({"messages": [*messages[:-1], user("Quick: " + STORY)]})
    await cluster.router.settled()
    assert old in [lease.id for lease in (await kept(cluster)).leases]
    async for _ in reply:
        pass
    await cluster.router.settled()
    assert old not in [lease.id for lease in (await kept(cluster)).leases]


async def test_a_turn_that_is_asked_again_is_warm_again(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    for _ in range(3):
        assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


async def test_a_client_that_leaves_in_mid_stream_can_ask_again(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    reply = await cluster.open({"messages": messages, "stream": True, "max_tokens": 500})
    async for _ in reply:
        break
    await reply.aclose()
    await cluster.idle()
    assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


# --- fences --------------------------------------------------------------------------------------------------------------


async def test_a_lease_that_is_gone_is_not_read_and_does_not_fail_the_turn(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    lease = await only_lease(cluster)
    cluster.router.fleet.releases.add(Holder(cluster.d.url), [lease])
    await cluster.router.settled()
    report = (await cluster.exact({"messages": messages})).reused
    assert (report.route, report.reason, report.retries, report.status) == (Route.COLD, Reason.EXPIRED, 0, 200)


async def test_a_decode_engine_that_restarted_is_not_read_from(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    await cluster.d.restart()
    await cluster.reconnected()
    report = (await cluster.exact({"messages": messages})).reused
    assert report.route is Route.COLD
    assert report.reason in (Reason.ENGINE_CHANGED, Reason.EXPIRED, Reason.READ_FAILED)
    assert report.status == 200


@pytest.mark.parametrize("bidirectional", [True, False])
async def test_a_prefill_engine_that_came_back_without_the_connector_reads_nothing(bidirectional: bool) -> None:
    """It would read without comparing, and keep what it read in its prefix cache; or wait forever."""
    async with ours() as cluster:
        messages = await first_turn(cluster)
        messages[1] = user("Else: " + STORY)
        cluster.p.config = dataclasses.replace(
            cluster.p.config, connector="stock", bidirectional_kv_xfer=bidirectional, prefix_caching=True
        )
        await cluster.p.restart()
        await cluster.reconnected()
        report = (await cluster.exact({"messages": messages})).reused
        assert (report.route, report.reason, report.status) == (Route.LOCAL, Reason.NO_PROOF, 200)
        assert cluster.p.core.metrics.transfers == 0
        await cluster.exact({"messages": messages}, conversation="another")
        assert cluster.router.fleet.counters.proof_faults == 1


async def test_digests_that_lie_are_found_out_by_the_full_hash(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    known: list[bytes] = []

    def remember(digests: bytes) -> bytes:
        known.append(digests)
        return digests

    cluster.d.faults.lie_digests = remember
    await cluster.exact({"messages": [system("Z " + STORY * 3), user("b")]}, conversation="z")
    cluster.d.faults.lie_digests = lambda digests: known[0][: len(digests)]
    messages = opening()
    await cluster.exact({"messages": messages}, conversation="liar")
    report = (await cluster.exact({"messages": [system("Z " + STORY * 3), user("b")]}, conversation="liar")).reused
    assert (report.route, report.reason, report.pulled) == (Route.COLD, Reason.DIVERGED, 0)


# --- renewing, flushing, listing -----------------------------------------------------------------------------------------


async def test_a_conversation_can_be_renewed_past_its_lease() -> None:
    async with ours(engine={**OURS, "decoder_kv_blocks_ttl": 40.0}) as cluster:
        messages = await first_turn(cluster)
        left = await cluster.router.renew("c", 300.0)
        assert left is not None
        assert 280 < left <= 290
        (lease,) = (await kept(cluster)).leases
        assert 290 < lease.remaining_s <= 300
        cluster.router.services.clock = lambda: time.monotonic() + 200
        assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


async def test_a_lease_that_ended_cannot_be_renewed(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    cluster.router.fleet.releases.add(Holder(cluster.d.url), [await only_lease(cluster)])
    await cluster.router.settled()
    assert await cluster.router.renew("c") is None
    assert (await cluster.exact({"messages": messages})).reused.reason is Reason.EXPIRED


async def test_there_is_nothing_to_renew_of_an_unknown_conversation(cluster: Cluster) -> None:
    await cluster.router.connect()
    assert await cluster.router.renew("nobody") is None


async def test_a_flush_ends_every_lease_and_moves_the_epoch(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    await cluster.router.flush()
    assert (await kept(cluster)).count == 0
    assert {"flush": True} in operations(cluster.d)
    report = (await cluster.exact({"messages": messages})).reused
    assert (report.route, report.reason) == (Route.COLD, Reason.FLUSHED)


async def test_a_flush_says_where_it_failed(cluster: Cluster) -> None:
    await first_turn(cluster)
    cluster.d.faults.status = 500
    cluster.d.faults.times = 1
    with pytest.raises(LeaseError, match=f"{cluster.d.url} answered 500"):
        await cluster.router.flush()


async def test_leases_are_listed(cluster: Cluster) -> None:
    await first_turn(cluster)
    found = await kept(cluster)
    (lease,) = found.leases
    assert (found.decode, found.count, found.blocks, found.error) == (cluster.d.url, 1, lease.blocks, None)
    assert (lease.shared, lease.holds, lease.tokens) == (True, 0, lease.blocks * 16)


# --- mixed fleets --------------------------------------------------------------------------------------------------------


async def test_an_engine_of_ours_beside_stock_ones_is_proven_by_tokens() -> None:
    for p, d in (("backhaul", "stock"), ("stock", "backhaul")):
        async with run_cluster(p={"connector": p, "prefix_caching": False}, d={"connector": d}) as cluster:
            messages = await first_turn(cluster)
            answer = await cluster.exact({"messages": messages})
            report = answer.reused
            assert (report.route, report.proof, report.reason) == (Route.WARM, Proof.TOKENS, None)
            sent = asked(cluster.p)[1]["kv_transfer_params"].get("backhaul")
            assert sent == ({"version": 1, "proof": "tokens"} if p == "backhaul" else None)
            messages = [*messages, answer.message, user("Third: " + STORY)]
            assert (await cluster.exact({"messages": messages})).reused.route is Route.WARM


async def test_a_prefill_engine_that_checks_is_preferred_once_stickiness_is_broken() -> None:
    async with ours(prefill=2, p={"prefix_caching": False}) as cluster:
        messages = await first_turn(cluster)
        used = next(engine for engine in cluster.prefill if asked(engine))
        await cluster.kill(used)
        report = (await cluster.exact({"messages": messages})).reused
        assert (report.route, report.proof, report.retries) == (Route.WARM, Proof.CONNECTOR, 1)


# --- audit ---------------------------------------------------------------------------------------------------------------


async def test_what_the_engines_count_is_what_they_told_the_router(cluster: Cluster) -> None:
    messages = await first_turn(cluster)
    await cluster.exact({"messages": messages})
    lines = await cluster.router.audit()
    assert {line.counter for line in lines} == {"offered", "verified", "pulled"}
    assert all(line.router == line.counted > 0 and not line.alarm for line in lines)
    assert cluster.router.fleet.counters.audit_alarms == 0


async def test_another_client_of_the_engines_shows_as_a_difference(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    messages = await first_turn(cluster)
    await cluster.exact({"messages": messages})
    again = asked(cluster.p)[1]
    answer = await cluster.http.post(cluster.p.url + CHAT, json=again)
    assert answer.status == 200
    handle = (await answer.json())["kv_transfer_params"]
    await cluster.http.post(
        cluster.d.url + COMPLETIONS, json={"model": "nobody", "prompt": [1], "kv_transfer_params": handle}
    )
    lines = {line.counter: line for line in await cluster.router.audit()}
    assert lines["offered"].alarm
    assert lines["offered"].difference > 0
    assert "another client uses the engine" in caplog.text
    assert cluster.router.fleet.counters.audit_alarms >= 1
