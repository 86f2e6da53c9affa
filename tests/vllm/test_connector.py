"""BackhaulConnector on real engines: every answer is that of a plain engine, every number of the account is right, and no
handle, however wrong or late, reads what it should not, hangs a request or ends an engine."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from backhaul_connector.lease_channel import LeaseServer
from backhaul_connector.lease_table import LeaseTable
from backhaul_protocol.lease_channel import Answer, Claim, Done, Message
from by_hand import (
    BLOCK,
    BYTES_PER_TOKEN,
    COMPLETIONS,
    Pair,
    Turn,
    alarms,
    ask_d,
    ask_p,
    ask_p_only,
    body,
    expected,
    forget,
    fresh,
    lease_ops,
    raw,
    release,
    turn,
)
from real_engines import EngineSet, metrics, post, restart, stream, wait_for_baseline

SHARED = {"shared": True}


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.fixture
async def engines(connector_engines: EngineSet) -> AsyncIterator[EngineSet]:
    """P without prefix caching, D; when a test is over, nothing is kept and nothing was read too late."""
    before = await alarms(connector_engines)
    yield connector_engines
    await settle(connector_engines)
    assert await alarms(connector_engines) == before


async def settle(engines: EngineSet) -> None:
    for url in (*engines.decode, *engines.prefill):
        await lease_ops(url, engines.model, flush=True)
    for url in (*engines.decode, *engines.prefill):
        await wait_for_baseline(url, timeout_s=40.0)  # P keeps for 30 s what no D has read


async def test_the_second_turn_reads_the_first_and_says_so_exactly(engines: EngineSet) -> None:
    before = [await metrics(url) for url in (engines.prefill[0], engines.decode[0])]
    first = await turn(engines, fresh(300))
    assert first.p == {
        "prompt": 300,
        "offered": 0,
        "verified": 0,
        "local": 0,
        "pulled": 0,
        "computed": 300,
        "bytes": 0,
        "read_ms": None,
        "claim_ms": None,
        "why": None,
    }
    assert first.d == {"prompt": 300, "received": 300, "local": 0, "computed": 0, "generated": 40, "why": None}
    kept = whole(300 + 40 - 1)
    assert first.handle["remote_num_tokens"] == kept
    assert [len(group) for group in first.handle["remote_block_ids"]] == [kept // BLOCK]

    second = await turn(engines, [*first.sequence, *range(50, 90)], first.for_p)
    assert {**second.p, "read_ms": 0, "claim_ms": 0} == {
        "prompt": 380,
        "offered": kept,
        "verified": kept,
        "local": 0,
        "pulled": kept,
        "computed": 380 - kept,
        "bytes": kept * BYTES_PER_TOKEN,
        "read_ms": 0,
        "claim_ms": 0,
        "why": None,
    }
    assert 0 < second.p["claim_ms"] < 1000
    assert second.p["read_ms"] > 0
    assert second.d["received"] + second.d["local"] == 380

    await settle(engines)
    p, d = await metrics(engines.prefill[0]), await metrics(engines.decode[0])

    def rise(now: Any, then: Any, name: str, **labels: str) -> float:
        return float(now.total(name, **labels) - then.total(name, **labels))

    assert p["backhaul_connector_info"] == d["backhaul_connector_info"] == 1
    assert rise(p, before[0], "backhaul_verifications_total", outcome="verified") == 1
    assert rise(p, before[0], "backhaul_offered_tokens_total") == kept
    assert rise(p, before[0], "backhaul_verified_tokens_total") == kept
    assert rise(p, before[0], "backhaul_pulled_tokens_total") == kept
    assert rise(p, before[0], "backhaul_pulled_bytes_total") == kept * BYTES_PER_TOKEN
    assert rise(p, before[0], "vllm:nixl_bytes_transferred_sum") == kept * BYTES_PER_TOKEN
    assert rise(d, before[1], "backhaul_claims_total", outcome="granted") == 1
    assert rise(d, before[1], "backhaul_leases_ended_total", how="read") == 1
    assert rise(d, before[1], "backhaul_leases_ended_total", how="flushed") == 1
    assert d["backhaul_leases"] == d["backhaul_leased_blocks"] == 0


async def test_an_edit_in_the_middle_keeps_what_is_before_it(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300))
    edited = [*first.sequence[:150], 7, *first.sequence[151:], *range(50, 90)]
    second = await turn(engines, edited, first.for_p)
    assert (second.p["verified"], second.p["pulled"]) == (whole(150), whole(150))


async def test_a_prompt_that_is_shorter_than_the_history_reads_its_own_length(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300))
    for length in (256, 250):
        again = await turn(engines, first.sequence[:length], first.for_p, wishes={"retain": False})
        assert again.p["pulled"] == whole(length - 1)
        first = await turn(engines, first.prompt)


async def test_another_prompt_reads_nothing_and_frees_the_lease(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300))
    other = await turn(engines, fresh(300), first.for_p, wishes={"retain": False})
    assert (other.p["offered"], other.p["verified"], other.p["pulled"], other.p["why"]) == (320, 0, 0, "diverged")
    assert (await lease_ops(engines.decode[0], engines.model))["count"] == 0


async def test_a_few_tokens_are_computed_rather_than_read(engines: EngineSet) -> None:
    first = await turn(engines, fresh(40), max_tokens=10)
    second = await turn(engines, [*first.sequence, 5, 6, 7], first.for_p, wishes={"retain": False})
    assert (second.p["verified"], second.p["pulled"], second.p["why"]) == (BLOCK, 0, "below_threshold")
    assert (await lease_ops(engines.decode[0], engines.model))["count"] == 0


async def test_a_shared_lease_is_read_again_and_again_and_by_several_at_once(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    for i in range(3):
        again = await turn(engines, [*first.sequence, *range(50 + i, 90)], first.for_p, wishes={"retain": False})
        assert again.p["pulled"] == 320
    prompts = [[*first.sequence, *range(150 + i, 190)] for i in range(3)]
    for account in await asyncio.gather(*(ask_p_only(engines, prompt, first.for_p) for prompt in prompts)):
        assert account["pulled"] == 320
    for prompt in prompts:
        again = await turn(engines, prompt, first.for_p, wishes={"retain": False})
        assert again.p["pulled"] == 320
    listed = await lease_ops(engines.decode[0], engines.model, list=True)
    assert [(lease["id"], lease["shared"]) for lease in listed["leases"]] == [(first.lease, True)]


async def test_a_lease_that_is_not_shared_is_read_once(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300))
    prompt = [*first.sequence, *range(50, 90)]
    assert (await turn(engines, prompt, first.for_p, wishes={"retain": False})).p["pulled"] == 320
    late = await turn(engines, prompt, first.for_p, wishes={"retain": False})
    assert (late.p["pulled"], late.p["why"]) == (0, "released")


async def fill_d(engines: EngineSet) -> None:
    """Writes over every block of D that is free."""
    blocks = int((await metrics(engines.decode[0])).total("vllm:cache_config_info") or 0)
    assert blocks
    await asyncio.gather(*(expected(engines, fresh(7000), 1) for i in range(3)))


async def test_a_released_lease_cannot_be_read_even_if_d_uses_its_blocks_at_once(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    await release(engines, first.lease)
    await fill_d(engines)
    late = await turn(engines, [*first.sequence, *range(50, 90)], first.for_p, wishes={"retain": False})
    assert (late.p["verified"], late.p["pulled"], late.p["why"]) == (320, 0, "released")


async def test_a_turn_releases_the_leases_that_it_supersedes(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    second = await turn(
        engines, [*first.sequence, 5], first.for_p, wishes={"shared": True, "release": [first.lease, "nobody"]}
    )
    assert second.p["pulled"] == 320
    listed = await lease_ops(engines.decode[0], engines.model, list=True)
    assert [lease["id"] for lease in listed["leases"]] == [second.lease]


async def test_a_lease_expires_unless_it_is_renewed(engines: EngineSet) -> None:
    short = await turn(engines, fresh(300), wishes={"shared": True, "retain_s": 1.0}, check=False)
    assert short.handle["backhaul"]["lease"]["ttl_s"] == 1.0
    for kept_s in (1.0, 4.0, 16.0):  # a slow machine may renew too late
        began = time.monotonic()
        renewed = await turn(engines, fresh(300), wishes={"shared": True, "retain_s": kept_s}, check=False)
        answer = await lease_ops(engines.decode[0], engines.model, renew=[renewed.lease, "nobody"], ttl_s=60.0)
        if renewed.lease in answer["renewed"]:
            break
    assert (answer["renewed"], answer["unknown"]) == ({renewed.lease: 60.0}, ["nobody"])
    await asyncio.sleep(began + kept_s + 0.1 - time.monotonic())
    while (await lease_ops(engines.decode[0], engines.model))["count"] > 1:
        assert time.monotonic() - began < 30
        await asyncio.sleep(0.05)
    late = await turn(engines, [*short.sequence, 5], short.for_p, wishes={"retain": False})
    assert (late.p["pulled"], late.p["why"]) == (0, "expired")
    still = await turn(engines, [*renewed.sequence, 5], renewed.for_p, wishes={"retain": False})
    assert still.p["pulled"] == 320


async def test_a_flush_ends_every_lease_and_its_epoch(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    answer = await lease_ops(engines.decode[0], engines.model, flush=True)
    assert answer["flushed"] == 1
    assert answer["epoch"] != first.handle["backhaul"]["epoch"]
    assert (answer["count"], answer["blocks"]) == (0, 0)
    late = await turn(engines, [*first.sequence, 5], first.for_p, wishes={"retain": False})
    assert (late.p["pulled"], late.p["why"]) == (0, "epoch")


async def test_nothing_is_kept_where_the_router_does_not_want_it(engines: EngineSet) -> None:
    only = await turn(engines, fresh(300), wishes={"retain": False})
    assert only.handle == {"backhaul": {"version": 1, "account": only.d}}
    await wait_for_baseline(engines.decode[0])


async def test_a_turn_that_d_runs_alone_leaves_a_handle_for_p(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    prompt = [*first.sequence, *range(50, 90)]
    generated, returned = await ask_d(engines, prompt, None, 40)
    assert generated == await expected(engines, prompt, 40)
    account = returned["backhaul"]["account"]
    assert account == {"prompt": 380, "received": 0, "local": 320, "computed": 60, "generated": 40, "why": None}
    local = Turn(prompt, generated, {}, account, returned)
    third = await turn(engines, [*local.sequence, 5], local.for_p, wishes={"retain": False})
    assert third.p["pulled"] == whole(380 + 40 - 1)


async def test_parameters_without_any_word_for_d_pin_nothing(engines: EngineSet) -> None:
    for params in ({"do_remote_prefill": False}, {"anything": 1}, {"backhaul": "text"}, {"backhaul": {"version": 9}}):
        asked = body(engines, fresh(300), 5, kv_transfer_params=params)
        answer = await post(engines.decode[0], COMPLETIONS, asked)
        assert "remote_block_ids" not in answer["kv_transfer_params"]
    await wait_for_baseline(engines.decode[0])


async def test_a_handle_is_refused_under_another_salt(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED, cache_salt="tenant-a", check=False)
    same = await ask_p_only(engines, first.sequence, first.for_p, cache_salt="tenant-a")
    other = await ask_p_only(engines, first.sequence, first.for_p, cache_salt="tenant-b")
    assert (same["pulled"], other["pulled"], other["why"]) == (320, 0, "diverged")


async def test_d_computes_by_itself_what_p_did_not_compute_for_this_prompt(engines: EngineSet) -> None:
    prompt = fresh(300)
    _, params = await ask_p(engines, fresh(300))
    generated, returned = await ask_d(engines, prompt, params, 20, {"retain": False})
    assert generated == await expected(engines, prompt, 20)
    account = returned["backhaul"]["account"]
    assert (account["received"], account["why"]) == (0, "prompt_differs")
    await wait_for_baseline(engines.prefill[0])  # P was told, long before its lease ends


async def test_a_forged_handle_with_the_right_locators_is_fenced(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    prompt = [*first.sequence, *range(50, 90)]
    ours = first.for_p["backhaul"]
    forged: list[tuple[dict[str, Any], str]] = [
        ({"remote_engine_id": "another"}, "other_engine"),
        ({"remote_request_id": "another"}, "unknown_lease"),
        ({"backhaul": {**ours, "epoch": "another"}}, "epoch"),
        ({"backhaul": {**ours, "lease": {**ours["lease"], "port": 1}}}, "unreachable"),
        ({"backhaul": {**ours, "digests": ours["digests"][:4]}}, "malformed"),
        ({"backhaul": {**ours, "block_size": 16}}, "unsupported"),
        ({"backhaul": {"version": 1}}, "no_digests"),
    ]
    for change, why in forged:
        account = await ask_p_only(engines, prompt, {**first.for_p, **change})
        assert (account["pulled"], account["why"]) == (0, why), change
    # Other blocks, lengths and layout than D's own make no difference: they come with the claim.
    lied = {**first.for_p, "remote_block_ids": [[0]], "remote_num_tokens": 7, "tp_size": 64, "remote_port": 9}
    assert (await turn(engines, prompt, lied, wishes={"retain": False})).p["pulled"] == 320


HOSTILE: list[dict[str, Any]] = [
    {"remote_block_ids": "1"},
    {"remote_block_ids": [["x"]]},
    {"remote_block_ids": [[-1]]},
    {"remote_block_ids": [[1, 2]]},
    {"remote_block_ids": [[10**7] * 11]},
    {"remote_block_ids": [[2**31 - 1] * 10]},
    {"remote_block_ids": []},
    {"remote_block_ids": None},
    {"remote_block_ids": [[1], [2]]},
    {"remote_engine_id": None},
    {"remote_engine_id": {}},
    {"remote_request_id": 7},
    {"remote_host": 7},
    {"remote_host": ""},
    {"remote_port": "x"},
    {"remote_port": -5},
    {"remote_num_tokens": "many"},
    {"remote_num_tokens": 10**12},
    {"tp_size": 0},
    {"tp_size": "2"},
    {"pp_size": -1},
    {"dcp_size": None},
    {"remote_blocks_expiry_time": "never"},
    {"_remote_blocks_processed": True},
    {"_p_side_truncated": "x"},
    {"backhaul": None},
    {"backhaul": [1]},
    {"backhaul": {"version": 1, "digests": "====", "block_size": 32, "epoch": "", "lease": {"port": 1}}},
    {"backhaul": {"version": 1, "digests": 5}},
    {"backhaul": {"version": 1, "retain_s": "x", "release": "all"}},
    {"backhaul": {"version": 1, "leases": 5}},
    {"backhaul": {"version": 1, "leases": {"release": [1]}}},
    {"backhaul": {"version": 1, "prompt_hash": 5, "prompt_tokens": -1}},
    {"do_remote_prefill": "yes", "do_remote_decode": "yes"},
    {"do_remote_prefill": True, "do_remote_decode": True},
]


async def test_no_hostile_handle_hangs_or_ends_p(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    prompt = [*first.sequence, 5]
    reference = await expected(engines, prompt, 1)
    for change in HOSTILE:
        asked = body(engines, prompt, kv_transfer_params={**first.for_p, **change})
        status, answer = await raw(engines.prefill[0], asked, timeout_s=20.0)
        assert status == 200, (change, answer)
        assert answer["choices"][0]["token_ids"] == reference, change
        if (returned := answer["kv_transfer_params"]).get("do_remote_prefill"):
            await forget(engines.decode[0], returned)
    assert (await turn(engines, [*first.sequence, 6], first.for_p, wishes={"retain": False})).p["pulled"] == 320


async def test_no_hostile_handle_hangs_or_ends_d(engines: EngineSet) -> None:
    """D trusts block ids of P, as vLLM does: they come from a router. It must survive any."""
    prompt = fresh(300)
    honest = (await ask_p(engines, prompt))[1]
    nulls: dict[str, Any] = {key: None for key in honest if key.startswith("remote_")}
    hostile = [{**honest, **change} for change in (*HOSTILE, nulls)]
    for params in (*hostile, {"do_remote_prefill": True}, {"do_remote_prefill": True, "backhaul": {"version": 1}}):
        if params.get("remote_request_id") == honest["remote_request_id"]:
            params["remote_request_id"] = (await ask_p(engines, prompt))[1]["remote_request_id"]
        asked = body(engines, prompt, kv_transfer_params=params)
        status, answer = await raw(engines.decode[0], asked, timeout_s=20.0)
        assert status == 200, (params, answer)
    first = await turn(engines, fresh(300), wishes=SHARED)
    assert (await turn(engines, [*first.sequence, 6], first.for_p, wishes={"retain": False})).p["pulled"] == 320


async def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing_behind(engines: EngineSet) -> None:
    first = await turn(engines, fresh(4000), wishes={"shared": True}, check=False)
    asked = body(engines, [*first.sequence, 5], kv_transfer_params=first.for_p)
    for wait_s in (0.0, 0.005, 0.01, 0.02, 0.05):
        request = asyncio.ensure_future(raw(engines.prefill[0], asked))
        await asyncio.sleep(wait_s)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    began = time.monotonic()
    while any(lease["holds"] for lease in (await lease_ops(engines.decode[0], engines.model, list=True))["leases"]):
        assert time.monotonic() - began < 10
        await asyncio.sleep(0.05)


async def test_streams_end_with_the_handle_and_the_ids(engines: EngineSet) -> None:
    prompt = fresh(300)
    _, params = await ask_p(engines, prompt)
    asked = body(engines, prompt, 20, kv_transfer_params=params)
    *events, done = await stream(engines.decode[0], COMPLETIONS, asked)
    assert done == "[DONE]"
    last = next(e for e in map(json.loads, reversed(events)) if e["choices"] and e["choices"][0].get("finish_reason"))
    ours = last["kv_transfer_params"]["backhaul"]
    assert len(ours["token_ids"]) == 20
    assert ours["account"]["generated"] == 20
    streamed = Turn(prompt, ours["token_ids"], {}, ours["account"], last["kv_transfer_params"])
    assert (await turn(engines, [*streamed.sequence, 5], streamed.for_p, wishes={"retain": False})).p["pulled"] == 288


# --- with P's own prefix cache ----------------------------------------------------------------------------------------


@pytest.fixture
async def caching(connector_engines_prefix_caching: EngineSet) -> AsyncIterator[EngineSet]:
    before = await alarms(connector_engines_prefix_caching)
    yield connector_engines_prefix_caching
    await settle(connector_engines_prefix_caching)
    assert await alarms(connector_engines_prefix_caching) == before


async def test_only_what_p_does_not_have_is_read(caching: EngineSet) -> None:
    first = await turn(caching, fresh(300), max_tokens=130)
    second = await turn(caching, [*first.sequence, *range(50, 90)], first.for_p)
    kept = whole(300 + 130 - 1)
    assert (second.p["local"], second.p["pulled"]) == (whole(300), kept - whole(300))
    assert second.p["computed"] == 470 - kept
    assert second.p["bytes"] == second.p["pulled"] * BYTES_PER_TOKEN


async def test_what_p_has_already_is_not_even_claimed(caching: EngineSet) -> None:
    first = await turn(caching, fresh(300))
    again = await turn(caching, [*first.prompt, 7], first.for_p, wishes={"retain": False})
    assert (again.p["local"], again.p["pulled"], again.p["why"]) == (whole(300), 0, "local_hit")
    assert (await lease_ops(caching.decode[0], caching.model))["count"] == 0


async def test_a_refused_handle_does_not_spoil_ps_cache(caching: EngineSet) -> None:
    first = await turn(caching, fresh(300), wishes=SHARED)
    await release(caching, first.lease)
    prompt = [*first.sequence, *range(50, 200)]
    for _ in range(2):
        late = await turn(caching, prompt, first.for_p, wishes={"retain": False})
        assert late.p["pulled"] == 0


# --- when the other engine fails --------------------------------------------------------------------------------------


async def test_a_read_that_fails_is_computed_instead_and_hangs_nothing(engines: EngineSet) -> None:
    """The claim is granted by someone whose workers cannot be reached."""
    first = await turn(engines, fresh(300), wishes=SHARED)
    prompt = [*first.sequence, 5]
    with FalseHolder() as holder:
        handle = first.for_p
        handle["backhaul"]["lease"] = {"port": holder.port, "shared": True}
        late = await turn(engines, prompt, {**handle, "remote_engine_id": "nobody"}, wishes={"retain": False})
    assert (late.p["pulled"], late.p["bytes"], late.p["why"]) == (0, 0, "read_failed")
    assert holder.told[-1].read is False


async def test_a_d_that_died_costs_no_time_and_one_that_came_back_is_not_mistaken(engines: EngineSet) -> None:
    first = await turn(engines, fresh(300), wishes=SHARED)
    prompt = [*first.sequence, 5]
    reference = await expected(engines, prompt, 1)
    (d,) = engines.running.decode
    d.kill()
    try:
        began = time.monotonic()
        answer = await post(engines.prefill[0], COMPLETIONS, body(engines, prompt, kv_transfer_params=first.for_p))
        assert time.monotonic() - began < 15
        assert answer["choices"][0]["token_ids"] == reference
        assert answer["kv_transfer_params"]["backhaul"]["account"]["why"] == "unreachable"
    finally:
        restart(engines, d)
    late = await turn(engines, prompt, first.for_p, wishes={"retain": False})
    assert (late.p["pulled"], late.p["why"]) == (0, "unreachable")
    second = await turn(engines, fresh(300))
    assert (await turn(engines, [*second.sequence, 5], second.for_p, wishes={"retain": False})).p["pulled"] == 320


# --- few blocks -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def small(small_connector_engines: EngineSet) -> AsyncIterator[EngineSet]:
    yield small_connector_engines
    await settle(small_connector_engines)


async def lease_alone(engines: EngineSet, tokens: int) -> str:
    """A lease of D's own making, of about so many tokens."""
    _, returned = await ask_d(engines, fresh(tokens), None, 1, SHARED)
    return str(returned["remote_request_id"])


async def leases_of(engines: EngineSet) -> list[str]:
    listed = await lease_ops(engines.decode[0], engines.model, list=True)
    return [str(lease["id"]) for lease in listed["leases"]]


async def test_leases_take_no_more_than_their_share_of_the_blocks(small: EngineSet) -> None:
    leases = [await lease_alone(small, 100 * BLOCK) for _ in range(3)]
    assert await leases_of(small) == leases[1:]
    assert (await lease_ops(small.decode[0], small.model))["blocks"] <= 240


async def test_a_request_that_needs_the_blocks_goes_before_the_oldest_lease(small: EngineSet) -> None:
    leases = [await lease_alone(small, 60 * BLOCK) for _ in range(3)]
    prompt = fresh(200 * BLOCK)
    began = time.monotonic()
    answer = await post(small.decode[0], COMPLETIONS, body(small, prompt))
    assert len(answer["choices"][0]["token_ids"]) == 1
    assert time.monotonic() - began < 60
    assert await leases_of(small) == leases[2:]


# --- beside engines with vLLM's own connector -------------------------------------------------------------------------


async def test_a_stock_p_reads_what_our_d_kept(mixed_engines: tuple[EngineSet, EngineSet]) -> None:
    stock, ours = mixed_engines
    engines = Pair(stock.prefill, ours.decode, ours.model)
    first = await turn(engines, fresh(300))
    assert first.d["received"] == 300
    before = await metrics(stock.prefill[0])
    second = await turn(engines, [*first.sequence, *range(50, 90)], first.for_p, wishes={"retain": False})
    assert second.d["received"] + second.d["local"] == 380
    moved = (await metrics(stock.prefill[0])).total("vllm:nixl_bytes_transferred_sum")
    moved -= before.total("vllm:nixl_bytes_transferred_sum")
    assert moved == 320 * BYTES_PER_TOKEN
    assert await leases_of(ours) == []
    for url in (*stock.prefill, *ours.decode):
        await wait_for_baseline(url)


async def test_our_p_reads_a_stock_d_only_on_the_routers_proof(mixed_engines: tuple[EngineSet, EngineSet]) -> None:
    stock, ours = mixed_engines
    engines = Pair(ours.prefill, stock.decode, ours.model)
    first = await turn(engines, fresh(300))
    prompt = [*first.sequence, *range(50, 90)]
    unproven = await ask_p_only(engines, prompt, first.for_p)
    assert (unproven["pulled"], unproven["why"]) == (0, "no_digests")
    proven = {**first.for_p, "backhaul": {"version": 1, "proof": "tokens"}}
    second = await turn(engines, prompt, proven)
    assert (second.p["verified"], second.p["pulled"]) == (320, 320)
    await forget(ours.prefill[0], second.for_p)
    for url in (*ours.prefill, *stock.decode):
        await wait_for_baseline(url)


class FalseHolder:
    """A lease channel that grants everything, for an engine that is not there."""

    def __init__(self) -> None:
        self.told: list[Done] = []

    def __enter__(self) -> FalseHolder:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            nowhere = unused.getsockname()[1]
        self._server = _Granting("127.0.0.1", 0, LeaseTable("nobody", 1), lambda: {"remote_port": nowhere})
        self._server.told = self.told
        self.port = self._server.port
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + 5.0
        while not self.told and time.monotonic() < deadline:
            time.sleep(0.01)
        self._server.stop()


class _Granting(LeaseServer):
    told: list[Done]

    def reply(self, message: Message) -> Answer:
        if isinstance(message, Claim):
            return Answer(
                ok=True, block_ids=[list(range(message.blocks))], tokens=message.blocks * BLOCK, peer=dict(self.peer())
            )
        if isinstance(message, Done):
            self.told.append(message)
        return Answer(ok=True)
