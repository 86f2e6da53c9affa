"""What the connector publishes, verifies and reads: exact, or not at all, with the reason and the numbers."""

from __future__ import annotations

import asyncio
import base64
import uuid

from .connector_turns import (
    FIRST,
    FIRST_TOKENS,
    GENERATED,
    KEEP,
    account,
    asking,
    grown,
    kept_turn,
    offered,
    prompt_of,
    read,
    refused,
    release,
    without_time,
)
from .engines import Engines, Json
from .transfers import handle_fields

_ACCOUNT_OF_P = {
    "prompt",
    "offered",
    "verified",
    "local",
    "pulled",
    "computed",
    "bytes",
    "read_ms",
    "claim_ms",
    "why",
}


async def d_publishes_four_bytes_per_whole_block(engines: Engines) -> None:
    size = await engines.block_size()
    whole = (FIRST_TOKENS + GENERATED - 1) // size
    handle = (await kept_turn(engines, FIRST)).handle
    assert handle.keys() == handle_fields(engines) | {"backhaul"}
    assert (handle["do_remote_prefill"], handle["do_remote_decode"]) == (False, True)
    assert handle["remote_num_tokens"] == whole * size
    assert [len(group) for group in handle["remote_block_ids"]] == [whole]
    ours = handle["backhaul"]
    assert ours.keys() == {"version", "digests", "block_size", "epoch", "lease", "account"}
    assert len(base64.b64decode(ours["digests"], validate=True)) == 4 * whole
    assert (ours["version"], ours["block_size"]) == (1, size)
    assert ours["epoch"]
    assert ours["lease"].keys() == {"port", "ttl_s", "shared"}
    assert ours["lease"]["shared"] is True
    assert 0 < ours["lease"]["ttl_s"] <= 480
    await release(engines, handle)


async def d_accounts_for_what_it_received(engines: Engines) -> None:
    handle = (await kept_turn(engines, FIRST)).handle
    assert handle["backhaul"]["account"] == {
        "prompt": FIRST_TOKENS,
        "received": FIRST_TOKENS,
        "local": 0,
        "computed": 0,
        "generated": GENERATED,
        "why": None,
    }
    await release(engines, handle)


async def p_accounts_for_a_cold_turn(engines: Engines) -> None:
    p = await engines.prefill(FIRST)
    assert p.handle.keys() == handle_fields(engines) | {"remote_prefill_cached_tokens", "backhaul"}
    ours = p.handle["backhaul"]
    assert ours.keys() == {"version", "account", "prompt_hash", "prompt_tail", "prompt_tokens"}
    assert ours["account"].keys() == _ACCOUNT_OF_P
    cold = {"prompt": FIRST_TOKENS, "offered": 0, "verified": 0, "local": 0, "pulled": 0}
    assert without_time(ours["account"]) == cold | {"computed": FIRST_TOKENS, "why": None}
    assert ours["account"]["bytes"] == 0
    assert len(bytes.fromhex(ours["prompt_hash"])) == len(bytes.fromhex(ours["prompt_tail"])) == 32
    assert ours["prompt_tokens"] == FIRST_TOKENS
    await engines.decode(FIRST, asking(p.handle, retain=False), max_tokens=1)


async def warm_turn_reads_the_whole_blocks_of_the_history(engines: Engines) -> None:
    size = await engines.block_size()
    handle, prompt = await grown(engines)
    whole = (FIRST_TOKENS + GENERATED - 1) // size * size
    told = await read(engines, prompt, offered(handle))
    assert without_time(told) == {
        "prompt": len(prompt),
        "offered": whole,
        "verified": whole,
        "local": 0,
        "pulled": whole,
        "computed": len(prompt) - whole,
        "why": None,
    }
    assert told["bytes"] > 0
    assert told["read_ms"] > 0
    await release(engines, handle)


async def edited_history_is_read_up_to_the_edit(engines: Engines) -> None:
    size = await engines.block_size()
    handle, prompt = await grown(engines)
    common = 5 * size
    edited = [*prompt[:common], *[token + 1 for token in prompt[common:]]]
    told = await read(engines, edited, offered(handle))
    assert (told["verified"], told["pulled"], told["computed"]) == (common, common, len(edited) - common)
    await release(engines, handle)


async def prompt_that_ends_within_the_history_is_read_but_for_its_last_block(engines: Engines) -> None:
    size = await engines.block_size()
    handle, _ = await grown(engines)
    for length in (6 * size, 6 * size + 1, 6 * size + size // 2):
        told = await read(engines, FIRST[:length], offered(handle))
        assert told["pulled"] == (length - 1) // size * size, length
    await release(engines, handle)


async def handle_of_another_prompt_is_not_read(engines: Engines) -> None:
    handle, prompt = await grown(engines)
    assert await refused(engines, prompt_of(350, seed=4), offered(handle)) == "diverged"
    assert (await read(engines, prompt, offered(handle)))["why"] is None
    await release(engines, handle)


async def handle_of_another_salt_is_not_read(engines: Engines) -> None:
    handle, prompt = await grown(engines)
    engines.salt = uuid.uuid4().hex
    assert await refused(engines, prompt, offered(handle)) == "diverged"
    await release(engines, handle)


async def few_common_tokens_are_not_worth_a_read(engines: Engines) -> None:
    size = await engines.block_size()
    handle, _ = await grown(engines)
    few = 63 // size * size
    told = await refused(engines, [*FIRST[:few], *prompt_of(100, seed=3)], offered(handle))
    assert told == ("below_threshold" if few else "diverged")
    await release(engines, handle)


async def shared_handle_is_read_time_and_again(engines: Engines) -> None:
    handle, prompt = await grown(engines)
    for _ in range(3):
        assert (await read(engines, prompt, offered(handle)))["why"] is None
    await release(engines, handle)


async def shared_handle_is_read_by_several_at_once(engines: Engines) -> None:
    size = await engines.block_size()
    handle, prompt = await grown(engines)
    branches = [[*prompt, *prompt_of(40, seed=seed)] for seed in (5, 6, 7)]
    told = await asyncio.gather(*(read(engines, branch, offered(handle)) for branch in branches))
    assert [each["pulled"] for each in told] == [323 // size * size] * 3
    await release(engines, handle)


async def unshared_handle_is_read_once(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, prompt = await grown(engines, shared=False)
    assert handle["backhaul"]["lease"]["shared"] is False
    assert (await read(engines, prompt, offered(handle)))["why"] is None
    await engines.wait_for_usage(engines.decode_url, before)
    assert await refused(engines, prompt, offered(handle)) in ("released", "unknown_lease")


async def unshared_handle_that_is_not_worth_reading_is_let_go(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, _ = await grown(engines, shared=False)
    await refused(engines, prompt_of(30, seed=4), offered(handle))
    await engines.wait_for_usage(engines.decode_url, before)


async def turn_that_d_ran_alone_leaves_a_handle(engines: Engines) -> None:
    size = await engines.block_size()
    answer = await engines.decode(FIRST, {"backhaul": KEEP})
    told = account(answer)
    assert (told["received"], told["generated"], told["why"]) == (0, GENERATED, None)
    assert told["local"] + told["computed"] == FIRST_TOKENS
    prompt = [*FIRST, *answer.choice["token_ids"], *prompt_of(50, seed=2)]
    assert (await read(engines, prompt, offered(answer.handle)))["pulled"] == 323 // size * size
    await release(engines, answer.handle)


async def router_that_knows_nothing_of_the_connector_gets_a_lease_for_one_read(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    p = await engines.prefill(FIRST)
    stock = {name: value for name, value in p.handle.items() if name != "backhaul"}
    one = await engines.decode(FIRST, stock)
    assert one.handle["backhaul"]["lease"]["shared"] is False
    prompt = [*FIRST, *one.choice["token_ids"], *prompt_of(50, seed=2)]
    assert (await read(engines, prompt, offered(one.handle)))["why"] is None
    await engines.wait_for_usage(engines.decode_url, before)


async def handle_without_digests_is_read_only_on_the_router_s_word(engines: Engines) -> None:
    size = await engines.block_size()
    handle, prompt = await grown(engines, shared=False)
    bare = {name: value for name, value in handle.items() if name != "backhaul"}
    assert await refused(engines, prompt, bare) == "no_digests"
    told = await read(engines, prompt, bare | {"backhaul": {"version": 1, "proof": "tokens"}})
    assert (told["pulled"], told["why"]) == (323 // size * size, None)


async def d_computes_a_prompt_that_p_did_not(engines: Engines) -> None:
    right = await engines.reference(FIRST)
    for wrong in ({"prompt_hash": "00" * 32}, {"prompt_tail": "00" * 32}, {"prompt_tokens": FIRST_TOKENS - 1}):
        p = await engines.prefill(FIRST)
        answer = await engines.decode(FIRST, asking(p.handle, retain=False, **wrong))
        told = account(answer)
        assert (told["received"], told["why"]) == (0, "prompt_differs"), wrong
        assert told["local"] + told["computed"] == FIRST_TOKENS
        assert answer.choice["token_ids"] == right


async def d_computes_a_prompt_of_which_p_computed_another_end(engines: Engines) -> None:
    """No whole block differs, nor the length."""
    before = await engines.usage(engines.prefill_url)
    assert FIRST_TOKENS % await engines.block_size() > 1
    other = [*FIRST[:-1], FIRST[-1] + 1]
    p = await engines.prefill(other)
    answer = await engines.decode(FIRST, asking(p.handle, retain=False))
    assert (account(answer)["received"], account(answer)["why"]) == (0, "prompt_differs")
    assert answer.choice["token_ids"] == await engines.reference(FIRST)
    await engines.wait_for_usage(engines.prefill_url, before)


async def d_computes_a_short_prompt_of_which_p_computed_another_tenants(engines: Engines) -> None:
    """Below one block there is no block hash: the salt is in the hash of the rest."""
    p = await engines.prefill(FIRST[:10])
    engines.salt = uuid.uuid4().hex
    answer = await engines.decode(FIRST[:10], asking(p.handle, retain=False))
    assert (account(answer)["received"], account(answer)["why"]) == (0, "prompt_differs")


async def stream_carries_digests_and_ids_together(engines: Engines) -> None:
    if not await engines.metric(engines.decode_url, "backhaul_plugin_info"):
        return
    p = await engines.prefill(FIRST)
    answer = await engines.complete(
        engines.decode_url, FIRST, max_tokens=8, ignore_eos=True, stream=True, kv_transfer_params=asking(p.handle)
    )
    (handle,) = [event["kv_transfer_params"] for event in answer.events if event.get("kv_transfer_params")]
    assert handle["backhaul"].keys() >= {"version", "digests", "epoch", "lease", "account", "token_ids"}
    assert len(handle["backhaul"]["token_ids"]) == 8
    await release(engines, handle)


async def hostile_handles_are_computed_instead(engines: Engines) -> None:
    handle, prompt = await grown(engines)
    fine = offered(handle)
    told: dict[str, Json] = {}
    for name, value in (
        ("remote_block_ids", [1, 2]),
        ("remote_block_ids", [["x"]]),
        ("remote_block_ids", {"a": 1}),
        ("remote_engine_id", 7),
        ("remote_request_id", None),
        ("remote_host", ["localhost"]),
        ("remote_port", "many"),
        ("remote_port", 10**9),
        ("remote_num_tokens", -5),
        ("remote_num_tokens", "all"),
        ("backhaul", {"version": 1, "digests": 5}),
        ("backhaul", fine["backhaul"] | {"digests": "???"}),
        ("backhaul", fine["backhaul"] | {"digests": "AAAA"}),
        ("backhaul", fine["backhaul"] | {"lease": {"port": -1, "ttl_s": 1.0, "shared": True}}),
        ("backhaul", fine["backhaul"] | {"lease": None}),
        ("backhaul", fine["backhaul"] | {"epoch": 3}),
    ):
        told[f"{name}={value}"] = await refused(engines, prompt, fine | {name: value})
    assert set(told.values()) == {"malformed"}, told
    assert await refused(engines, prompt, fine | {"backhaul": "yes"}) in ("malformed", "no_digests")
    assert (await read(engines, prompt, fine))["why"] is None
    await release(engines, handle)


async def d_computes_what_a_hostile_handle_does_not_give(engines: Engines) -> None:
    before = await engines.usage(engines.prefill_url)
    right = await engines.reference(FIRST)
    for name, value in (("remote_block_ids", None), ("remote_port", "x"), ("remote_block_ids", [[1]])):
        p = await engines.prefill(FIRST)
        fine = asking(p.handle, retain=False)
        answer = await engines.decode(FIRST, fine | {name: value}, cache_salt=uuid.uuid4().hex)
        assert account(answer)["received"] == 0, (name, value)
        assert answer.choice["token_ids"] == right
        if name == "remote_port":  # of the others D can tell P that its blocks will not be read
            await engines.decode(FIRST, fine, max_tokens=1)
        await engines.wait_for_usage(engines.prefill_url, before)
    assert (await engines.get(f"{engines.decode_url}/health")).status == 200
