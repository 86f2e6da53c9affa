"""Leases: operations on them, the fences around them, and the channel by which readers claim them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from .connector_turns import FIRST, KEEP, asking, grown, kept_turn, offered, operate, prompt_of, read, refused, release
from .engines import Engines, Json

Ask = Callable[[Json], Awaitable[Json]]


async def released_lease_frees_its_blocks_and_refuses_readers(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, prompt = await grown(engines)
    assert await engines.wait_for_more(engines.decode_url, "vllm:kv_cache_usage_perc", before) > before
    await release(engines, handle)
    await engines.wait_for_usage(engines.decode_url, before)
    assert await refused(engines, prompt, offered(handle)) == "released"


async def expired_lease_frees_its_blocks_and_refuses_readers(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, prompt = await grown(engines, retain_s=0.3)
    assert handle["backhaul"]["lease"]["ttl_s"] <= 0.3
    await engines.wait_for_usage(engines.decode_url, before)
    assert await refused(engines, prompt, offered(handle)) == "expired"


async def leases_are_listed(engines: Engines) -> None:
    size = await engines.block_size()
    await operate(engines, flush=True)
    told = await operate(engines, list=True)
    assert told == {"epoch": told["epoch"], "released": [], "renewed": {}, "unknown": [], **_none_left()}
    handle = (await kept_turn(engines, FIRST, retain_s=200.0)).handle
    told = await operate(engines, list=True)
    whole = 323 // size
    assert told["count"] == 1
    assert told["blocks"] in (whole, whole + 1), "an engine may keep the block that is not full as well"
    (lease,) = told["leases"]
    assert lease.keys() == {"id", "blocks", "tokens", "age_s", "remaining_s", "holds", "shared"}
    assert lease["id"] == handle["remote_request_id"]
    assert (lease["blocks"], lease["tokens"]) == (told["blocks"], whole * size)
    assert (lease["holds"], lease["shared"]) == (0, True)
    assert 0 <= lease["age_s"] < 100 < lease["remaining_s"] <= 200
    await release(engines, handle)


async def renewed_lease_outlives_its_time(engines: Engines) -> None:
    for kept_s in (0.8, 3.0, 12.0):  # a slow machine may renew too late
        handle, prompt = await grown(engines, retain_s=kept_s)
        lease = handle["remote_request_id"]
        told = await operate(engines, renew=[lease, "no-such-lease"], ttl_s=60.0)
        if lease in told["renewed"]:
            break
    assert told["unknown"] == ["no-such-lease"]
    assert told["renewed"].keys() == {lease}
    assert 50 < told["renewed"][lease] <= 60
    await asyncio.sleep(kept_s + 0.1)
    assert (await read(engines, prompt, offered(handle)))["why"] is None
    await release(engines, handle)


async def release_of_what_is_not_there_is_told(engines: Engines) -> None:
    handle, _ = await grown(engines)
    await release(engines, handle)
    told = await operate(engines, release=[handle["remote_request_id"], "no-such-lease"])
    assert (told["released"], told["unknown"]) == ([], [handle["remote_request_id"], "no-such-lease"])


async def flush_ends_every_lease_and_the_epoch(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    one, prompt = await grown(engines)
    two, _ = await grown(engines)
    told = await operate(engines, flush=True, list=True)
    assert told["flushed"] >= 2
    assert told["leases"] == []
    assert told["epoch"] != one["backhaul"]["epoch"] == two["backhaul"]["epoch"]
    await engines.wait_for_usage(engines.decode_url, before)
    assert await refused(engines, prompt, offered(one)) == "epoch"
    three = (await kept_turn(engines, FIRST)).handle
    assert three["backhaul"]["epoch"] == told["epoch"]
    await release(engines, three)


async def request_that_is_not_to_be_retained_pins_nothing(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    for params in ({}, (await engines.prefill(FIRST)).handle):
        answer = await engines.decode(FIRST, params | {"backhaul": KEEP | {"retain": False}})
        assert answer.handle.keys() == {"backhaul"}
        assert answer.handle["backhaul"].keys() == {"version", "account"}
    await engines.wait_for_usage(engines.decode_url, before)


async def lease_operation_retains_nothing(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    count = (await operate(engines, list=True))["count"]
    assert (await operate(engines, list=True))["count"] == count
    await engines.wait_for_usage(engines.decode_url, before)


async def turn_releases_the_leases_that_it_supersedes(engines: Engines) -> None:
    one, prompt = await grown(engines)
    two = (await kept_turn(engines, prompt, one, release=[one["remote_request_id"], "no-such-lease"])).handle
    assert await refused(engines, prompt, offered(one)) == "released"
    assert (await read(engines, prompt, offered(two)))["why"] is None
    await release(engines, two)


async def forged_handles_are_fenced_off(engines: Engines) -> None:
    handle, prompt = await grown(engines)
    fine = offered(handle)
    for forged, why in (
        (fine | {"remote_engine_id": str(uuid.uuid4())}, "other_engine"),
        (fine | {"remote_request_id": "cmpl-no-such-request"}, "unknown_lease"),
        (offered(handle, epoch="0123456789abcdef"), "epoch"),
        (offered(handle, lease=fine["backhaul"]["lease"] | {"port": 1}), "unreachable"),
        (offered(handle, block_size=fine["backhaul"]["block_size"] * 2), "unsupported"),
    ):
        assert await refused(engines, prompt, forged) == why
    await release(engines, handle)


async def locators_of_other_blocks_do_not_make_them_readable(engines: Engines) -> None:
    """Someone who knows a victim's lease writes the locators of a prompt of its own beside it."""
    victim, _ = await grown(engines)
    own = prompt_of(FIRST_LENGTH, seed=8)
    mine = (await kept_turn(engines, own)).handle
    forged = offered(victim, digests=mine["backhaul"]["digests"])
    assert await refused(engines, [*own, *prompt_of(20, seed=2)], forged) == "differs"
    await release(engines, victim, mine)


FIRST_LENGTH = len(FIRST)


# -- the lease channel, spoken by hand -------------------------------------------------------------------------


@asynccontextmanager
async def _channel(handle: Json) -> AsyncIterator[Ask]:
    reader, writer = await asyncio.open_connection(handle["remote_host"], handle["backhaul"]["lease"]["port"])

    async def ask(question: Json) -> Json:
        data = question if isinstance(question, bytes) else msgspec.msgpack.encode(question)
        writer.write(len(data).to_bytes(4, "big") + data)
        async with asyncio.timeout(10):
            size = int.from_bytes(await reader.readexactly(4), "big")
            return msgspec.msgpack.decode(await reader.readexactly(size))

    try:
        yield ask
    finally:
        writer.close()


async def _provable(engines: Engines, **wishes: Json) -> tuple[Json, Json]:
    """D's handle of a turn, and a claim of its prompt's whole blocks, proven by the hash that P told."""
    size = await engines.block_size()
    p = await engines.prefill(FIRST)
    answer = await engines.decode(FIRST, asking(p.handle, **wishes))
    handle = answer.handle
    claim = {
        "v": 1,
        "op": "claim",
        "lease": handle["remote_request_id"],
        "engine": handle["remote_engine_id"],
        "epoch": handle["backhaul"]["epoch"],
        "blocks": len(FIRST) // size,
        "hash": bytes.fromhex(p.handle["backhaul"]["prompt_hash"]),
        "hold_s": 30.0,
        "claim": uuid.uuid4().hex,
    }
    return handle, claim


async def claim_is_granted_with_d_s_own_block_numbers(engines: Engines) -> None:
    size = await engines.block_size()
    handle, claim = await _provable(engines)
    blocks = claim["blocks"]
    async with _channel(handle) as ask:
        granted = await ask(claim)
        ids = [group[:blocks] for group in handle["remote_block_ids"]]
        assert granted.items() >= {"ok": True, "block_ids": ids, "tokens": blocks * size}.items()
        assert (await ask(_done(claim)))["ok"] is True
    await release(engines, handle)


async def claim_that_is_not_proven_is_refused(engines: Engines) -> None:
    handle, claim = await _provable(engines)
    async with _channel(handle) as ask:
        for wrong, why in (
            ({"hash": bytes(32)}, "differs"),
            ({"blocks": claim["blocks"] - 1}, "differs"),
            ({"blocks": 10_000}, "malformed"),
            ({"engine": "another"}, "other_engine"),
            ({"epoch": "ffff"}, "epoch"),
            ({"lease": "no-such-lease"}, "unknown_lease"),
            ({"blocks": 0}, "malformed"),
            ({"blocks": "all"}, "malformed"),
            ({"hold_s": -1.0}, "malformed"),
        ):
            answer = await ask(claim | wrong)
            assert (answer["ok"], answer["why"]) == (False, why), (wrong, answer)
    await release(engines, handle)


async def unshared_lease_is_held_by_one_reader_at_a_time(engines: Engines) -> None:
    handle, claim = await _provable(engines, shared=False)
    async with _channel(handle) as ask:
        assert (await ask(claim))["ok"] is True
        assert (await ask(claim | {"claim": uuid.uuid4().hex}))["why"] == "released"
        assert (await ask(_done(claim, read=False)))["ok"] is True
        assert (await ask(claim))["ok"] is True
        assert (await ask(_done(claim)))["ok"] is True
        assert (await ask(claim))["why"] == "released"


async def declined_lease_ends_unless_it_is_shared(engines: Engines) -> None:
    for shared in (True, False):
        handle, claim = await _provable(engines, shared=shared)
        async with _channel(handle) as ask:
            assert (await ask({"op": "decline", "lease": claim["lease"]}))["ok"] is True
            assert (await ask(claim))["ok"] is shared
            assert (await ask(_done(claim)))["ok"] is True
        await operate(engines, release=[claim["lease"]])


async def held_lease_outlives_its_release_but_takes_no_new_readers(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, claim = await _provable(engines)
    async with _channel(handle) as ask:
        assert (await ask(claim))["ok"] is True
        (lease,) = [one for one in (await operate(engines, list=True))["leases"] if one["id"] == claim["lease"]]
        assert lease["holds"] == 1
        await release(engines, handle)
        assert await engines.usage(engines.decode_url) > before
        assert (await ask(claim | {"claim": uuid.uuid4().hex}))["why"] == "released"
        assert (await ask(_done(claim)))["ok"] is True
    await engines.wait_for_usage(engines.decode_url, before)


async def hold_ends_by_itself(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    handle, claim = await _provable(engines)
    async with _channel(handle) as ask:
        assert (await ask(claim | {"hold_s": 0.5}))["ok"] is True
        await release(engines, handle)
        await engines.wait_for_usage(engines.decode_url, before)


async def what_is_no_question_ends_the_connection(engines: Engines) -> None:
    handle, claim = await _provable(engines)
    for noise in (b"\xc1", b"", bytes(2**20 + 1)):
        async with _channel(handle) as ask:
            try:
                answer = await ask(noise)
            except (asyncio.IncompleteReadError, ConnectionError):
                continue
            raise AssertionError(f"{noise!r} was answered: {answer}")
    async with _channel(handle) as ask:
        assert (await ask(claim))["ok"] is True
        assert (await ask(_done(claim)))["ok"] is True
    await release(engines, handle)


async def reads_and_refusals_are_counted(engines: Engines) -> None:
    p, d = engines.prefill_url, engines.decode_url
    assert await engines.metric(d, "backhaul_connector_info") == await engines.metric(p, "backhaul_connector_info") == 1
    handle, prompt = await grown(engines)
    names = {
        "backhaul_offered_tokens_total": p,
        "backhaul_verified_tokens_total": p,
        "backhaul_pulled_tokens_total": p,
        "backhaul_pulled_bytes_total": p,
        "backhaul_verifications_total": p,
        "backhaul_claims_total": d,
        "backhaul_leases_ended_total": d,
    }
    before = {name: await engines.metric(url, name) for name, url in names.items()}
    told = await read(engines, prompt, offered(handle))
    await release(engines, handle)
    for name, url in names.items():
        await engines.wait_for_more(url, name, before[name])
    grew = {name: await engines.metric(url, name) - before[name] for name, url in names.items()}
    assert grew == {
        "backhaul_offered_tokens_total": told["offered"],
        "backhaul_verified_tokens_total": told["verified"],
        "backhaul_pulled_tokens_total": told["pulled"],
        "backhaul_pulled_bytes_total": told["bytes"],
        "backhaul_verifications_total": 1,
        "backhaul_claims_total": 1,
        "backhaul_leases_ended_total": 1,
    }


def _done(claim: Json, *, read: bool = True) -> Json:
    return {"op": "done", "lease": claim["lease"], "claim": claim["claim"], "read": read}


def _none_left() -> Json:
    return {"count": 0, "blocks": 0, "leases": []}
