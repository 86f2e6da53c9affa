"""Loopback engines with the connector: what is read, from which engine, and that whatever goes wrong is computed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from backhaul_loopback import CostModel
from conformance.connector_turns import (
    FIRST,
    account,
    asking,
    grown,
    kept_turn,
    offered,
    operate,
    prompt_of,
    read,
    refused,
    release,
)
from engine_pairs import Bench, bench, until

SIZE = 16
HISTORY = 323 // SIZE * SIZE


def running(**settings: Any) -> Any:
    """P without prefix caching, so that what is reused was read from D. A claim that is answered may take its time, which is
    real, unlike the clock of the engines."""
    settings["prefill"] = {"prefix_caching": False} | settings.get("prefill", {})
    return bench(**{"connector": "backhaul", "claim_timeout_s": 20.0, **settings})


@pytest.fixture
async def engines() -> AsyncIterator[Bench]:
    async with running() as engines:
        yield engines


# -- P's own prefix cache --------------------------------------------------------------------------------------


async def test_p_reads_only_what_it_does_not_have_itself() -> None:
    async with running(prefill={"prefix_caching": True}) as engines:
        handle, prompt = await grown(engines)
        told = await read(engines, prompt, offered(handle))
        assert told["local"] == 300 // SIZE * SIZE
        assert told["pulled"] == 0, "the answer alone is below the threshold"
        assert told["why"] == "below_threshold"
        longer = await kept_turn(engines, prompt, handle)
        prompt = [*prompt, *longer.choice["token_ids"], *prompt_of(30, seed=3)]
        await engines.post(f"{engines.prefill_url}/reset_prefix_cache", {})
        told = await read(engines, prompt, offered(longer.handle))
        assert (told["local"], told["pulled"]) == (0, longer.handle["remote_num_tokens"])


async def test_p_that_has_everything_says_so_and_declines_what_was_kept_for_it() -> None:
    async with running(prefill={"prefix_caching": True}) as engines:
        handle, _ = await grown(engines, shared=False)
        told = await read(engines, FIRST, offered(handle))
        assert (told["local"], told["pulled"], told["why"]) == (299 // SIZE * SIZE, 0, "local_hit")
        await until(lambda: not engines.d.lease_ids)


async def test_what_was_read_serves_later_requests_from_p_s_prefix_cache() -> None:
    async with running(prefill={"prefix_caching": True}) as engines:
        one = await engines.decode(FIRST, {"backhaul": {"version": 1}})
        prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
        assert (await read(engines, prompt, offered(one.handle)))["pulled"] == HISTORY
        alone = await engines.complete(
            engines.prefill_url, prompt, max_tokens=24, ignore_eos=True, return_token_ids=True
        )
        assert alone.cached > 0
        assert alone.choice["token_ids"] == await engines.reference(prompt)


# -- fleets of both kinds --------------------------------------------------------------------------------------


async def test_stock_p_reads_a_lease_that_is_not_shared_once() -> None:
    async with running(prefill={"connector": "stock"}, decode={"connector": "backhaul"}) as engines:
        one = await engines.decode(FIRST, (await engines.prefill(FIRST)).handle)
        prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
        assert (await engines.prefill(prompt, one.handle)).cached == HISTORY
        assert engines.d.lease_ids == []
        ended = engines.d.core.connector
        assert ended is not None
        assert ended.metrics.leases_ended == {"read": 1}


async def test_stock_p_does_not_end_a_shared_lease() -> None:
    async with running(prefill={"connector": "stock"}, decode={"connector": "backhaul"}) as engines:
        p = await engines.prefill(FIRST)
        one = await engines.decode(FIRST, p.handle | {"backhaul": {"version": 1, "shared": True}})
        prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
        for _ in range(2):
            assert await engines.second_turn(one.handle, prompt) == await engines.reference(prompt)
        assert one.handle["remote_request_id"] in engines.d.lease_ids
        assert engines.d.core.metrics.nixl_num_notifications_after_expiry == 0


async def test_stock_d_is_read_on_the_router_s_word_alone() -> None:
    async with running(prefill={"connector": "backhaul"}, decode={"connector": "stock"}) as engines:
        one = await engines.turn(FIRST)
        prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
        p = await engines.prefill(prompt, one.handle)
        assert (account(p)["pulled"], account(p)["why"]) == (0, "no_digests")
        vouched = one.handle | {"backhaul": {"version": 1, "proof": "tokens"}}
        p = await engines.prefill(prompt, vouched)
        assert (account(p)["pulled"], account(p)["why"]) == (HISTORY, None)
        assert (await engines.decode(prompt, p.handle)).choice["token_ids"] == await engines.reference(prompt)


async def test_stock_d_is_let_go_when_nothing_of_it_is_worth_reading() -> None:
    async with running(prefill={"connector": "backhaul"}, decode={"connector": "stock"}) as engines:
        one = await engines.turn(FIRST)
        vouched = one.handle | {"backhaul": {"version": 1, "proof": "tokens"}}
        p = await engines.prefill(FIRST[:10], vouched)
        assert (account(p)["pulled"], account(p)["why"]) == (0, "below_threshold")
        assert engines.d.lease_ids == []


async def test_stock_d_s_handle_of_another_length_than_it_says_is_not_read() -> None:
    async with running(prefill={"connector": "backhaul"}, decode={"connector": "stock"}) as engines:
        one = await engines.turn(FIRST)
        prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
        half_cut = one.handle | {"remote_num_tokens": 160, "backhaul": {"version": 1, "proof": "tokens"}}
        assert account(await engines.prefill(prompt, half_cut))["why"] == "malformed"


async def test_p_without_bidirectional_mode_computes_and_says_so() -> None:
    async with running(prefill={"bidirectional_kv_xfer": False}) as engines:
        handle, prompt = await grown(engines)
        assert await refused(engines, prompt, offered(handle)) == "bidirectional_off"


async def test_d_without_bidirectional_mode_keeps_nothing() -> None:
    async with running(decode={"bidirectional_kv_xfer": False}) as engines:
        assert (await kept_turn(engines, FIRST)).handle.keys() == {"backhaul"}
        assert engines.d.usage == 0


async def test_peers_with_other_block_sizes_do_not_read() -> None:
    async with running(prefill={"block_size": 16}, decode={"block_size": 32}) as engines:
        one = await engines.decode(FIRST, {"backhaul": {"version": 1, "shared": True}})
        p = await engines.prefill([*FIRST, 41], offered(one.handle))
        assert account(p)["why"] == "unsupported"


async def test_parameters_without_a_flag_leak_nothing(engines: Bench) -> None:
    params = {"do_remote_prefill": False}
    answer = await engines.complete(engines.decode_url, FIRST, max_tokens=4, kv_transfer_params=params)
    assert answer.json["kv_transfer_params"] is None
    assert engines.d.usage == 0


@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_block_ids": []}])
async def test_parameters_that_kill_a_stock_engine_are_computed(engines: Bench, params: dict[str, Any]) -> None:
    answer = await engines.decode(FIRST, params | {"backhaul": {"version": 1, "retain": False}})
    assert (account(answer)["received"], account(answer)["why"]) == (0, "malformed")
    assert answer.choice["token_ids"] == await engines.reference(FIRST)


# -- failures --------------------------------------------------------------------------------------------------


async def test_locators_that_lie_are_caught_by_d(engines: Bench) -> None:
    other = prompt_of(300, seed=8)
    theirs = (await kept_turn(engines, other)).handle["backhaul"]["digests"]
    engines.d.faults.lie_digests = lambda _: base64.b64decode(theirs)
    handle, _ = await grown(engines)
    assert await refused(engines, [*other, 41], offered(handle)) == "differs"


async def test_forgotten_lease_is_not_read(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    engines.d.forget_lease(handle["remote_request_id"])
    assert await refused(engines, prompt, offered(handle)) == "released", "as when a stock engine had read it"


@pytest.mark.parametrize("fault", ["stall", "refuse"])
async def test_lease_channel_that_does_not_answer_costs_a_read_and_no_more(fault: Any) -> None:
    async with running(claim_timeout_s=1.0) as engines:
        handle, prompt = await grown(engines)
        engines.d.faults.lease_channel = fault
        assert await refused(engines, prompt, offered(handle)) == "unreachable"
        engines.d.faults.clear()
        assert (await read(engines, prompt, offered(handle)))["pulled"] == HISTORY


@pytest.mark.parametrize("times", [1, 3])
async def test_read_that_breaks_off_is_computed_and_can_be_had_again(engines: Bench, times: int) -> None:
    handle, prompt = await grown(engines, shared=False)
    engines.d.faults.drop_reads = times
    for _ in range(times):
        assert await refused(engines, prompt, offered(handle)) == "read_failed"
    assert (await read(engines, prompt, offered(handle)))["pulled"] == HISTORY


async def test_d_computes_when_p_s_blocks_cannot_be_read(engines: Bench) -> None:
    p = await engines.prefill(FIRST)
    engines.d.faults.fail_kv_loads = 1
    answer = await engines.decode(FIRST, asking(p.handle, retain=False))
    assert (account(answer)["received"], account(answer)["why"]) == (0, "read_failed")
    assert answer.choice["token_ids"] == await engines.reference(FIRST)


async def test_restarted_d_is_another_engine(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    assert (await read(engines, prompt, offered(handle)))["pulled"] == HISTORY
    port = engines.d.config.lease_port
    await engines.d.restart()
    assert engines.d.config.lease_port == port
    assert await refused(engines, prompt, offered(handle)) == "other_engine"


async def test_stopped_d_is_unreachable(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    right = await engines.reference(prompt)
    assert (await read(engines, prompt, offered(handle)))["pulled"] == HISTORY
    await engines.d.stop()
    p = await engines.complete(
        engines.prefill_url,
        prompt,
        max_tokens=24,
        ignore_eos=True,
        return_token_ids=True,
        kv_transfer_params=offered(handle),
    )
    assert account(p)["why"] == "unreachable"
    assert p.choice["token_ids"] == right


async def test_read_that_outlasts_d_s_hold_is_computed() -> None:
    async with running(costs=CostModel(transfer_s=0.1), decode={"costs": CostModel()}, hold_s=20.0) as engines:
        handle, prompt = await grown(engines)
        leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
        await until(lambda: engines.clock.num_sleepers == 1)
        await release(engines, handle)
        assert engines.d.pinned_blocks > 0, "held for the reader"
        await engines.clock.advance(21)
        assert engines.d.pinned_blocks == 0
        await engines.clock.advance(20)
        p = await leg
        assert (account(p)["pulled"], account(p)["why"]) == (0, "hold_ended")
        answer = await engines.decode(prompt, asking(p.handle, retain=False))
        assert answer.choice["token_ids"] == await engines.reference(prompt)


async def test_lease_that_expires_while_it_is_read_lasts_until_then() -> None:
    async with running(costs=CostModel(transfer_s=0.05), decode={"costs": CostModel()}) as engines:
        handle, prompt = await grown(engines, retain_s=5.0)
        leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
        await until(lambda: engines.clock.num_sleepers == 1)
        await engines.clock.advance(10)
        assert engines.d.lease_ids == []
        assert engines.d.pinned_blocks > 0
        await engines.clock.advance(10)
        assert account(await leg)["pulled"] == HISTORY
        await until(lambda: engines.d.pinned_blocks == 0)


# -- requests that end early -----------------------------------------------------------------------------------


async def test_request_aborted_while_it_reads_gives_its_hold_back_afterwards() -> None:
    async with running(costs=CostModel(transfer_s=0.05), decode={"costs": CostModel()}) as engines:
        handle, prompt = await grown(engines)
        leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
        await until(lambda: engines.clock.num_sleepers == 1)
        await abandon(leg)
        assert await holds(engines) == 1
        await engines.clock.advance(20)
        await until(lambda: engines.p.usage == 0)
        await until_nobody_holds(engines)


async def test_request_aborted_as_d_grants_its_claim_gives_its_hold_back(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    connector = engines.d.core.connector
    assert connector is not None
    leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
    async with asyncio.timeout(20):
        while not connector.metrics.claims["granted"]:
            await asyncio.sleep(0)
    await abandon(leg)
    await until_nobody_holds(engines)
    await until(lambda: engines.p.core.metrics.num_requests_running == 0)


async def test_request_aborted_while_it_waits_for_blocks_gives_its_hold_back() -> None:
    async with running(prefill={"num_blocks": 48}) as engines:
        handle, prompt = await grown(engines)
        blocking = (await engines.prefill(prompt_of(500, seed=6))).handle
        leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
        async with asyncio.timeout(20):
            while await holds(engines) == 0:
                await asyncio.sleep(0)
        await abandon(leg)
        await until_nobody_holds(engines)
        await engines.decode(prompt_of(500, seed=6), asking(blocking, retain=False), max_tokens=1)


async def test_request_that_waits_longer_than_its_hold_claims_again() -> None:
    async with running(prefill={"num_blocks": 48, "kv_lease_duration": 60.0}) as engines:
        handle, prompt = await grown(engines)
        blocking = (await engines.prefill(prompt_of(500, seed=6))).handle
        leg = asyncio.create_task(engines.prefill(prompt, offered(handle)))
        async with asyncio.timeout(20):
            while await holds(engines) == 0:
                await asyncio.sleep(0)
        await engines.clock.advance(31)
        assert await holds(engines) == 0
        await engines.decode(prompt_of(500, seed=6), asking(blocking, retain=False), max_tokens=1)
        p = await leg
        assert account(p)["pulled"] == HISTORY
        answer = await engines.decode(prompt, asking(p.handle, retain=False))
        assert answer.choice["token_ids"] == await engines.reference(prompt)


# -- leases ----------------------------------------------------------------------------------------------------


async def test_lease_ends_after_its_ttl(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    assert handle["backhaul"]["lease"]["ttl_s"] == 480
    await engines.clock.advance(479.9)
    assert (await read(engines, prompt, offered(handle)))["pulled"] == HISTORY
    await engines.clock.advance(0.2)
    assert engines.d.pinned_blocks == 0
    assert await refused(engines, prompt, offered(handle)) == "expired"


async def test_oldest_leases_are_evicted_so_that_requests_find_room() -> None:
    async with running(decode={"num_blocks": 101, "max_leased_fraction": 0.5}) as engines:
        turns = [await kept_turn(engines, prompt_of(300, seed=seed)) for seed in (3, 4, 5)]
        ids = [turn.handle["remote_request_id"] for turn in turns]
        assert engines.d.lease_ids == ids[1:]
        assert engines.d.pinned_blocks == 2 * 323 // SIZE
        prompt = [*prompt_of(300, seed=3), *turns[0].choice["token_ids"], 41]
        assert await refused(engines, prompt, offered(turns[0].handle)) == "evicted"


async def test_turn_too_large_to_be_leased_leaves_no_handle() -> None:
    async with running(decode={"num_blocks": 101, "max_leased_fraction": 0.1}) as engines:
        assert (await kept_turn(engines, FIRST)).handle.keys() == {"backhaul"}
        assert engines.d.usage == 0


async def test_turn_that_supersedes_a_lease_finds_room_in_its_blocks() -> None:
    async with running(decode={"num_blocks": 30, "max_leased_fraction": 1.0}) as engines:
        handle, _ = await grown(engines)
        other = prompt_of(320, seed=7)
        p = await engines.prefill(other)
        lets_go = asking(p.handle, release=[handle["remote_request_id"]])
        answer = await asyncio.wait_for(engines.decode(other, lets_go), 10)
        assert engines.d.lease_ids == [answer.handle["remote_request_id"]]


async def test_cache_reset_for_new_weights_ends_every_lease(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    reset = f"{engines.decode_url}/reset_prefix_cache"
    assert (await engines.post(f"{reset}?reset_external=true", {})).json == {"success": False}
    assert engines.d.lease_ids == []
    assert await refused(engines, prompt, offered(handle)) == "epoch"
    assert (await engines.post(reset, {})).json == {"success": True}


async def test_prompt_below_one_block_pins_nothing(engines: Bench) -> None:
    answer = await kept_turn(engines, FIRST[:5], retain=True)
    assert answer.handle["remote_num_tokens"] == (5 + 24 - 1) // SIZE * SIZE
    p = await engines.prefill(FIRST[:5])
    assert p.handle["backhaul"]["prompt_hash"] is None
    answer = await engines.decode(FIRST[:5], asking(p.handle), max_tokens=4)
    assert answer.handle.keys() == {"backhaul"}


async def holds(engines: Bench) -> int:
    return sum(lease["holds"] for lease in (await operate(engines, list=True))["leases"])


async def until_nobody_holds(engines: Bench) -> None:
    async with asyncio.timeout(20):
        while await holds(engines):
            await asyncio.sleep(0.001)


async def abandon(leg: asyncio.Task[Any]) -> None:
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)
