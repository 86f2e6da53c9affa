"""Loopback engines fall into the traps that vLLM 0.32 falls into, and a wrong reuse changes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from backhaul_loopback import CostModel
from conformance.engines import Answer
from engine_pairs import Bench, bench, until

SIZE = 16
FIRST = [40 + i * i % 70 for i in range(200)]
SUFFIX = [40 + i * 7 % 70 for i in range(40)]


@pytest.fixture
async def engines() -> AsyncIterator[Bench]:
    """P without prefix caching, so that what is reused was read from D."""
    async with bench(prefill={"prefix_caching": False}) as engines:
        yield engines


async def grown(engines: Bench) -> tuple[Any, list[int]]:
    """D's handle of a first turn, and the prompt of the second, which extends it."""
    one = await engines.turn(FIRST)
    return one.handle, [*FIRST, *one.choice["token_ids"], *SUFFIX]


async def test_wrong_handle_poisons_the_prefix_cache_for_requests_without_one() -> None:
    async with bench() as engines:
        handle, _ = await grown(engines)
        other = [*SUFFIX, *FIRST]
        await engines.prefill_and_drop(other, handle)
        d_alone = await engines.complete(
            engines.prefill_url, other, max_tokens=24, ignore_eos=True, return_token_ids=True
        )
        assert d_alone.cached > 0
        assert d_alone.choice["token_ids"] != await engines.reference(other)


async def test_second_read_gives_a_wrong_answer(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    right = await engines.reference(prompt)
    engines.salt = "first"
    assert await engines.second_turn(handle, prompt) == right
    engines.salt = "second"
    assert await engines.second_turn(handle, prompt) != right


async def test_handle_cut_in_its_token_count_alone_is_read_wrongly(engines: Bench) -> None:
    handle, _ = await grown(engines)
    prompt = [*FIRST[: 6 * SIZE], *SUFFIX]
    half_cut = handle | {"remote_num_tokens": 6 * SIZE}
    assert await engines.second_turn(half_cut, prompt) != await engines.reference(prompt)


@pytest.mark.parametrize(
    "broken", [{"remote_block_ids": [[1, 2]]}, {"remote_block_ids": None, "do_remote_prefill": True}]
)
async def test_forged_block_list_kills_the_engine(engines: Bench, broken: dict[str, Any]) -> None:
    handle, prompt = await grown(engines)
    answer = await engines.complete(engines.prefill_url, prompt, max_tokens=1, kv_transfer_params=handle | broken)
    assert answer.status == 500
    assert (await engines.get(f"{engines.prefill_url}/health")).status == 503
    assert (await engines.complete(engines.prefill_url, prompt, max_tokens=1)).status == 500


async def test_lease_on_d_ends_after_its_ttl_and_is_counted(engines: Bench) -> None:
    await grown(engines)
    await engines.clock.advance(479.9)
    assert engines.d.pinned_blocks > 0
    await engines.clock.advance(0.2)
    assert engines.d.pinned_blocks == 0
    assert await engines.metric(engines.decode_url, "vllm:nixl_num_kv_expired_reqs_total") == 1


@pytest.mark.parametrize(("left_s", "status"), [(5.5, 200), (4.5, 500)])
async def test_p_declines_reads_in_the_last_five_seconds(engines: Bench, left_s: float, status: int) -> None:
    handle, prompt = await grown(engines)
    await engines.clock.advance(480 - left_s)
    answer = await engines.complete(engines.prefill_url, prompt, max_tokens=1, kv_transfer_params=handle)
    assert answer.status == status
    assert await engines.metric(engines.prefill_url, "vllm:nixl_num_kv_expired_reqs_total") == (status == 500)


async def test_d_that_comes_after_p_s_lease_answers_wrongly(engines: Bench) -> None:
    handle = (await engines.prefill(FIRST)).handle
    await engines.clock.advance(31)
    answer = await engines.decode(FIRST, handle)
    assert answer.choice["token_ids"] != await engines.reference(FIRST)
    after = "vllm:nixl_num_notifications_after_expiry_total"
    assert await engines.metric(engines.prefill_url, after) == 1


async def test_request_waits_for_blocks_that_leases_hold_and_keeps_p_s_lease_alive() -> None:
    async with bench(decode={"num_blocks": 24, "decoder_kv_blocks_ttl": 100.0}) as engines:
        right = await engines.reference(FIRST)
        await grown(engines)
        handle = (await engines.prefill(FIRST, cache_salt="other")).handle
        waiting = asyncio.create_task(engines.decode(FIRST, handle, cache_salt="other"))
        await until(lambda: engines.d.core.metrics.num_requests_waiting == 1)
        lease, request_id = engines.p.core.pins, handle["remote_request_id"]
        for _ in range(19):
            await engines.clock.advance(5)
            await until(lambda: lease.remaining(request_id, engines.clock.now()) >= 20)
        assert not waiting.done()
        await engines.clock.advance(5)
        assert (await waiting).choice["token_ids"] == right


async def test_release_lets_a_waiting_request_in() -> None:
    async with bench(decode={"num_blocks": 24}) as engines:
        handle, _ = await grown(engines)
        waiting = asyncio.create_task(engines.complete(engines.decode_url, SUFFIX * 5, max_tokens=4))
        await until(lambda: engines.d.core.metrics.num_requests_waiting == 1)
        assert not waiting.done()
        await engines.release(handle)
        assert (await waiting).status == 200


async def test_restarted_engine_refuses_old_handles(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    url, old = engines.d.url, engines.d.engine_id
    await engines.d.restart()
    assert engines.d.url == url
    assert engines.d.engine_id != old
    answer = await engines.complete(engines.prefill_url, prompt, max_tokens=1, kv_transfer_params=handle)
    assert answer.error == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert await engines.metric(engines.prefill_url, "vllm:nixl_num_failed_transfers_total") == 1


async def test_engine_that_is_started_after_a_stop_is_a_new_process_which_releases(engines: Bench) -> None:
    handle, _ = await grown(engines)
    old = engines.p.engine_id
    await engines.p.stop()
    await engines.p.start()
    assert engines.p.engine_id != old
    await engines.release(handle)
    await until(lambda: engines.d.usage == 0)


async def test_stopped_engine_refuses_connections_and_fails_reads(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    await engines.d.stop()
    answer = await engines.complete(engines.prefill_url, prompt, max_tokens=1, kv_transfer_params=handle)
    assert answer.status == 500
    with pytest.raises(OSError):
        await engines.get(f"{engines.decode_url}/health")


async def test_parameters_without_a_flag_leak_blocks_on_d(engines: Bench) -> None:
    params = {"do_remote_prefill": False}
    answer = await engines.complete(engines.decode_url, FIRST, max_tokens=4, kv_transfer_params=params)
    assert answer.handle["do_remote_decode"] is True
    await engines.clock.advance(10_000)
    assert engines.d.pinned_blocks > 0
    await engines.release(answer.handle)
    after = "vllm:nixl_num_notifications_after_expiry_total"
    await engines.wait_for_more(engines.decode_url, after, 0)
    assert engines.d.pinned_blocks > 0


async def test_d_without_bidirectional_mode_keeps_nothing() -> None:
    async with bench(decode={"bidirectional_kv_xfer": False}) as engines:
        answer = await engines.turn(FIRST)
        assert answer.json["kv_transfer_params"] is None
        assert engines.d.usage == 0


async def test_p_without_bidirectional_mode_hangs_on_a_handle() -> None:
    async with bench(prefill={"bidirectional_kv_xfer": False, "prefix_caching": False}) as engines:
        handle, prompt = await grown(engines)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engines.prefill(prompt, handle), 0.2)
        assert engines.d.pinned_blocks > 0


async def test_handle_that_lacks_a_key_is_ignored_by_p(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    del handle["remote_host"]
    answer = await engines.prefill(prompt, handle)
    assert answer.cached == 0
    assert engines.d.pinned_blocks > 0


async def test_forgotten_lease_makes_a_read_wrong_and_counted(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    engines.d.forget_lease(handle["remote_request_id"])
    assert await engines.second_turn(handle, prompt) != await engines.reference(prompt)
    after = "vllm:nixl_num_notifications_after_expiry_total"
    assert await engines.metric(engines.decode_url, after) == 1


async def test_failed_read_is_a_500_and_leaves_the_lease(engines: Bench) -> None:
    handle, prompt = await grown(engines)
    engines.p.faults.fail_kv_loads = 1
    answer = await engines.complete(engines.prefill_url, prompt, max_tokens=1, kv_transfer_params=handle)
    assert answer.status == 500
    assert engines.p.usage == 0
    assert await engines.second_turn(handle, prompt) == await engines.reference(prompt)


async def test_failed_read_in_a_stream_is_an_event_after_status_200(engines: Bench) -> None:
    handle = (await engines.prefill(FIRST)).handle
    engines.d.faults.fail_kv_loads = 1
    answer = await engines.complete(engines.decode_url, FIRST, stream=True, kv_transfer_params=handle)
    assert answer.status == 200
    (event,) = answer.events
    assert event["error"]["message"] == "Internal server error"


async def test_lying_handle_goes_out_as_it_was_rewritten(engines: Bench) -> None:
    engines.d.faults.lie = lambda handle: handle | {"remote_num_tokens": 10_000}
    assert (await engines.turn(FIRST)).handle["remote_num_tokens"] == 10_000


async def test_request_aborted_while_it_reads_still_frees_the_peer() -> None:
    async with bench(prefill={"prefix_caching": False, "costs": CostModel(transfer_s=0.01)}) as engines:
        handle, prompt = await grown(engines)
        leg = asyncio.create_task(engines.prefill(prompt, handle))
        await until(lambda: engines.p.core.metrics.num_requests_deferred == 1)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        while engines.d.pinned_blocks or engines.p.usage:
            await engines.clock.advance(1)
        assert await engines.metric(engines.prefill_url, "vllm:nixl_bytes_transferred_count") == 1


async def test_request_aborted_before_it_is_admitted_frees_p_s_blocks() -> None:
    async with bench(decode={"num_blocks": 24}) as engines:
        await grown(engines)
        handle = (await engines.prefill(FIRST, cache_salt="other")).handle
        leg = asyncio.create_task(engines.decode(FIRST, handle, cache_salt="other"))
        await until(lambda: engines.d.core.metrics.num_requests_waiting == 1)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await engines.wait_for_usage(engines.prefill_url)


async def test_several_choices_read_a_handle_that_is_good_for_one(engines: Bench) -> None:
    fields = {"n": 2, "temperature": 1, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    right = await engines.complete(engines.prefill_url, FIRST, **fields)
    handle = (await engines.prefill(FIRST)).handle
    answer = await engines.complete(engines.decode_url, FIRST, kv_transfer_params=handle, **fields)
    pairs = zip(answer.json["choices"], right.json["choices"], strict=True)
    assert [a["token_ids"] == b["token_ids"] for a, b in pairs] == [True, False]
    assert await engines.metric(engines.prefill_url, "vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_peers_with_other_block_sizes_cannot_read() -> None:
    async with bench(prefill={"block_size": 16}, decode={"block_size": 32}) as engines:
        handle = (await engines.prefill(FIRST)).handle
        answer: Answer = await engines.complete(engines.decode_url, FIRST, kv_transfer_params=handle)
        assert answer.status == 500
