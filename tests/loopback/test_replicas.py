"""Two served routers on ports of their own that share a Redis: what is asked or ordered of one holds at the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, loopback_pair
from backhaul_router.serve.tenants import NO_TENANTS, Tenants
from redis_servers import RedisServer, needs_redis, redis_server
from served import in_thread

pytestmark = needs_redis

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ADMIN, ON_RECORD = "/backhaul/admin", "/backhaul/conversations"
STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. "
ALICE, BOB = "alice-0123456789", "bob-0123456789abc"
SETTINGS: dict[str, Any] = {
    "local_max_tokens": 0,
    "place_by_cost": False,
    "check_pairs": False,
    "redis_timeout_s": 10.0,
}
NAMED = {"x-conversation-id": "c"}

Client = httpx2.AsyncClient


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as one:
        yield one


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair(prefill={"prefix_caching": False}, connector="backhaul") as pair:
        yield pair


@asynccontextmanager
async def replica(
    pair: LoopbackPair, redis: RedisServer, tenants: Tenants = NO_TENANTS, **settings: Any
) -> AsyncIterator[Client]:
    async with in_thread(pair, tenants=tenants, redis_url=redis.url, **{**SETTINGS, **settings}) as http:
        yield http


@asynccontextmanager
async def two(
    pair: LoopbackPair, redis: RedisServer, tenants: Tenants = NO_TENANTS, **settings: Any
) -> AsyncIterator[tuple[Client, Client]]:
    async with (
        replica(pair, redis, tenants, **settings) as one,
        replica(pair, redis, tenants, **settings) as other,
    ):
        assert one.base_url.port != other.base_url.port
        yield one, other


def body(pair: LoopbackPair, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": STORY * 3}, *more]
    return {"model": pair.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


async def turns(pair: LoopbackPair, *clients: Client, name: str = "c") -> list[str]:
    """Turns of one conversation, each by its client; the routes that they took."""
    routes: list[str] = []
    more: list[dict[str, Any]] = []
    for client in clients:
        answer = await client.post(CHAT, json=body(pair, *more), headers={"x-conversation-id": name})
        assert answer.status_code == 200, answer.text
        routes.append(answer.headers["x-backhaul-route"])
        turn = answer.headers["x-backhaul-turn"]
        await client.get(f"{ON_RECORD}/{name}", params={"turn": turn, "wait": 5})
        more += [answer.json()["choices"][0]["message"], {"role": "user", "content": STORY * 2}]
    return routes


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():
            await asyncio.sleep(0.02)


async def states(client: Client) -> dict[str, str]:
    """Of engines by URL, as all replicas see them."""
    listed = (await client.get(f"{ADMIN}/engines")).json()["engines"]
    assert not [one for one in listed if "states" in one], listed
    return {one["url"]: one["state"] for one in listed}


# --- reports


async def test_either_shows_the_reports_of_all_turns(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other):
        assert await turns(pair, one, other, one) == ["cold", "warm", "warm"]
        await turns(pair, other, name="later")
        for client in (one, other):
            shown = (await client.get(f"{ON_RECORD}/c")).json()
            assert [report["turn"] for report in shown["reports"]] == [1, 2, 3]
            assert (shown["total"]["turns"], shown["total"]["routes"]) == (3, {"cold": 1, "warm": 2})
            assert 0 < shown["total"]["hit_rate"] < 1
            listed = (await client.get(ON_RECORD)).json()["conversations"]
            assert [conversation["id"] for conversation in listed] == ["later", "c"]
            assert listed[1] == {name: shown[name] for name in ("id", "last_active", "total")}
            assert [r["turn"] for r in (await client.get(f"{ON_RECORD}/c?turn=2")).json()["reports"]] == [2]
            assert (await client.get(f"{ON_RECORD}/unknown")).status_code == 404


async def test_a_total_of_replicas_is_what_one_would_have_said(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other), in_thread(pair, **SETTINGS) as alone:
        await turns(pair, one, other, other)
        await turns(pair, alone, alone, alone)
        totals = [(await client.get(f"{ON_RECORD}/c")).json()["total"] for client in (one, alone)]
        for total in totals:
            del total["saved_ms"]  # it is measured
        assert totals[0] == totals[1]


async def test_a_report_is_waited_for_wherever_its_turn_runs(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other):
        waiting = asyncio.create_task(one.get(f"{ON_RECORD}/c", params={"turn": "1", "wait": "5"}))
        await other.post(CHAT, json=body(pair), headers=NAMED)
        async with asyncio.timeout(4):
            assert [report["turn"] for report in (await waiting).json()["reports"]] == [1]
        nothing = await one.get(f"{ON_RECORD}/c", params={"turn": "2", "wait": "0.1"})
        assert nothing.json()["reports"] == []


async def test_a_conversation_that_is_ended_with_one_is_over_with_both(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other):
        await turns(pair, one, other)
        assert pair.decode.pinned_blocks
        assert (await other.delete(f"{ON_RECORD}/c")).status_code == 204
        assert (await one.delete(f"{ON_RECORD}/c")).status_code == 404
        assert (await one.get(f"{ON_RECORD}/c")).status_code == 404
        assert (await one.get(ON_RECORD)).json()["conversations"] == []
        await until(lambda: released(pair))
        assert await turns(pair, one) == ["cold"]


async def released(pair: LoopbackPair) -> bool:
    return not pair.decode.pinned_blocks


async def test_tenants_have_reports_of_their_own_with_either(pair: LoopbackPair, redis: RedisServer) -> None:
    tenants = Tenants.from_mapping({"alice": [ALICE], "bob": [BOB]})
    async with two(pair, redis, tenants) as (one, other):
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        await one.post(CHAT, json=body(pair), headers={**NAMED, **alice})
        shown = await other.get(f"{ON_RECORD}/c", params={"turn": 1, "wait": 5}, headers=alice)
        assert [report["tenant"] for report in shown.json()["reports"]] == ["alice"]
        assert (await other.get(f"{ON_RECORD}/c", headers=bob)).status_code == 404
        assert (await other.delete(f"{ON_RECORD}/c", headers=bob)).status_code == 404
        assert (await other.get(ON_RECORD, headers=bob)).json()["conversations"] == []


# --- what turns go on from


@pytest.mark.parametrize("tenants", [NO_TENANTS, Tenants.from_mapping({"alice": [ALICE], "bob": [BOB]})], ids=repr)
async def test_a_response_can_be_gone_on_from_with_either(
    pair: LoopbackPair, redis: RedisServer, tenants: Tenants
) -> None:
    async with two(pair, redis, tenants) as (one, other):
        alice = {"Authorization": f"Bearer {ALICE}"}
        asked = {"model": pair.model, "input": STORY, "max_output_tokens": 8}
        first = await one.post(RESPONSES, json=asked, headers={**NAMED, **alice})
        following = {**asked, "input": "And then?", "previous_response_id": first.json()["id"]}
        await other.post(RESPONSES, json=following, headers=alice)  # loopback engines store none, and say so
        shown = await one.get(f"{ON_RECORD}/c", params={"turn": 2, "wait": 5}, headers=alice)
        assert [report["identity_source"] for report in shown.json()["reports"]] == ["body:previous_response_id"]
        if tenants:
            bobs = await other.post(RESPONSES, json=following, headers={"Authorization": f"Bearer {BOB}"})
            assert (bobs.status_code, bobs.json()["error"]["code"]) == (404, "unknown_response")


@pytest.mark.parametrize("verb", ["pause?seconds=1800", "renew?ttl_s=1800"])
async def test_what_is_kept_by_one_is_kept_for_the_other(pair: LoopbackPair, redis: RedisServer, verb: str) -> None:
    async with two(pair, redis) as (one, other):
        await turns(pair, one)
        kept = (await other.post(f"{ON_RECORD}/c/{verb}")).json()
        assert 1700 < (kept.get("kept_s") or kept.get("remaining_s")) <= 1810
        again = (await one.post(f"{ON_RECORD}/c/pause", params={"seconds": 1700})).json()
        assert (again["released"], again["kept_s"] > 1700) == (0, True)


# --- operators


async def test_an_engine_is_added_drained_taken_back_and_removed_with_both(
    pair: LoopbackPair, redis: RedisServer
) -> None:
    async with two(pair, redis) as (one, other), LoopbackEngine("decode", connector="backhaul") as new:
        for asked, state in (("in", "available"), ("drain", "draining"), ("in", "available"), ("drain", "draining")):
            if asked == "in":
                answer = await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
            else:
                answer = await other.post(f"{ADMIN}/engines/drain", params={"url": new.url})
                assert answer.json() == {"url": new.url, "in_flight": 0, "handles": 0, "done": True}
            assert answer.status_code == 200, answer.text
            for client in (one, other):
                assert (await states(client))[new.url] == state
        removed = await one.delete(f"{ADMIN}/engines", params={"url": new.url})
        assert removed.json() == {"removed": new.url}
        for client in (one, other):
            assert new.url not in await states(client)
            gone = await client.delete(f"{ADMIN}/engines", params={"url": new.url})
            assert gone.status_code == 404


async def test_a_drain_counts_what_is_left_with_both(redis: RedisServer) -> None:
    async with loopback_pair(decode={"costs": CostModel(decode_s=0.02)}) as pair, two(pair, redis) as (one, other):
        async with LoopbackEngine("decode") as new:
            await turns(pair, one)
            asked = body(pair, stream=True, max_tokens=4000, ignore_eos=True)
            async with other.stream("POST", CHAT, json=asked, headers={"x-conversation-id": "runs"}) as answer:
                chunks = answer.aiter_raw()  # one that is dropped would end the answer
                await anext(chunks)
                await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
                drained = (await one.post(f"{ADMIN}/engines/drain", params={"url": pair.decode.url})).json()
            assert (drained["in_flight"], drained["handles"], drained["done"]) == (1, 1, False)


async def test_the_turns_of_both_end_before_an_engine_is_removed(redis: RedisServer) -> None:
    async with loopback_pair(decode={"costs": CostModel(decode_s=0.02)}) as pair, two(pair, redis) as (one, other):
        async with LoopbackEngine("decode") as new:
            await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
            await one.post(f"{ADMIN}/engines/drain", params={"url": new.url})
            asked = body(pair, stream=True, max_tokens=60, ignore_eos=True)
            async with other.stream("POST", CHAT, json=asked) as answer:
                chunks = answer.aiter_raw()
                await anext(chunks)
                await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
                removing = asyncio.create_task(one.delete(f"{ADMIN}/engines", params={"url": pair.decode.url}))
                rest = b"".join([chunk async for chunk in chunks])
                assert rest.endswith(b"data: [DONE]\n\n")
            assert (await removing).status_code == 200, (await removing).text
            assert pair.decode.url not in await states(other)


async def test_what_cannot_be_done_is_done_by_neither(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other):
        before = await states(one)
        refused = await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": "http://127.0.0.1:1"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cannot_be_done")
        last = await one.delete(f"{ADMIN}/engines", params={"url": pair.decode.url})
        assert (last.status_code, last.json()["error"]["code"]) == (400, "cannot_be_done")
        assert await states(other) == before


async def test_one_that_is_started_later_begins_with_what_was_ordered(pair: LoopbackPair, redis: RedisServer) -> None:
    async with LoopbackEngine("decode") as new, LoopbackEngine("prefill") as third:
        async with replica(pair, redis) as one:
            await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
            await one.post(f"{ADMIN}/engines", json={"role": "prefill", "url": third.url})
            await one.post(f"{ADMIN}/engines/drain", params={"url": third.url})
            await one.delete(f"{ADMIN}/engines", params={"url": pair.decode.url})
            async with replica(pair, redis) as later:
                expected = {pair.prefill.url: "available", new.url: "available", third.url: "draining"}
                assert await states(later) == await states(one) == expected


async def test_a_flush_of_one_is_a_flush_of_both(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis) as (one, other):
        await turns(pair, one, other)
        assert (await one.post(f"{ADMIN}/flush")).status_code == 200
        await until(lambda: released(pair))
        answer = await other.post(CHAT, json=body(pair), headers=NAMED)
        assert (answer.headers["x-backhaul-route"], answer.headers["x-backhaul-reason"]) == ("cold", "flushed")


# --- limits


LIMITED = Tenants.from_mapping({"alice": {"keys": [ALICE], "max_concurrent_turns": 1}, "bob": [BOB]})


async def chat(client: Client, pair: LoopbackPair, key: str = ALICE) -> httpx2.Response:
    return await client.post(CHAT, json=body(pair), headers={"Authorization": f"Bearer {key}"})


async def begun(pair: LoopbackPair) -> bool:
    return bool(pair.prefill.requests_to(CHAT))


async def test_a_tenants_limit_is_that_of_both_together(pair: LoopbackPair, redis: RedisServer) -> None:
    async with two(pair, redis, LIMITED) as (one, other):
        pair.prefill.faults.stall = True
        waiting = asyncio.create_task(chat(one, pair))
        await until(lambda: begun(pair))
        refused = await chat(other, pair)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_turns")
        pair.prefill.faults.stall = False
        assert (await chat(other, pair, BOB)).status_code == 200
        waiting.cancel()
        await asyncio.wait((waiting,))
        await until(lambda: is_let_in(other, pair))
        for client in (one, other) * 5:  # one after the other, as fast as can be
            assert (await chat(client, pair)).status_code == 200


async def is_let_in(client: Client, pair: LoopbackPair) -> bool:
    return (await chat(client, pair)).status_code == 200


async def test_what_one_that_is_gone_had_running_is_nobodys(pair: LoopbackPair, redis: RedisServer) -> None:
    async with replica(pair, redis, LIMITED) as other:
        async with replica(pair, redis, LIMITED) as one:
            pair.prefill.faults.stall = True
            waiting = asyncio.create_task(chat(one, pair))
            await until(lambda: begun(pair))
            assert (await chat(other, pair)).status_code == 429
            pair.prefill.faults.stall = False
        await asyncio.wait((waiting,))
        assert waiting.exception() is not None or waiting.result().status_code != 200
        assert (await chat(other, pair)).status_code == 200


# --- while Redis is away


async def test_what_could_not_be_told_is_told_when_it_is_back(pair: LoopbackPair, redis: RedisServer) -> None:
    """Also where it has lost everything, as one without persistence has that was restarted."""
    async with two(pair, redis, redis_timeout_s=0.5) as (one, other), LoopbackEngine("decode") as new:
        await one.post(f"{ADMIN}/engines", json={"role": "decode", "url": new.url})
        redis.kill()
        drained = await one.post(f"{ADMIN}/engines/drain", params={"url": pair.decode.url})
        assert (drained.status_code, "not_told" in drained.json()) == (200, True)
        refused = await one.delete(f"{ADMIN}/engines", params={"url": pair.decode.url})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "replicas_unavailable")
        assert (await one.post(f"{ADMIN}/flush")).status_code == 502
        answer = await other.post(CHAT, json=body(pair), headers=NAMED)
        assert (answer.status_code, answer.headers["x-backhaul-reason"]) == (200, "ledger_unavailable")
        shown = (await other.get(f"{ON_RECORD}/c", params={"turn": 1, "wait": 5})).json()
        assert [report["turn"] for report in shown["reports"]] == [1]
        redis.start()

        async def drains() -> bool:
            listed = (await other.get(f"{ADMIN}/engines")).json()["engines"]
            return [one["state"] for one in listed if one["url"] == pair.decode.url and "states" not in one] == [
                "draining"
            ]

        async def is_on_record() -> bool:
            return (await one.get(f"{ON_RECORD}/c")).status_code == 200

        await until(drains)
        await until(is_on_record)


async def test_while_it_is_away_each_counts_a_tenants_requests_for_itself(
    pair: LoopbackPair, redis: RedisServer
) -> None:
    async with two(pair, redis, LIMITED, redis_timeout_s=0.5) as (one, other):
        redis.kill()
        pair.prefill.faults.stall = True
        waiting = asyncio.create_task(chat(one, pair))
        await until(lambda: begun(pair))
        assert (await chat(one, pair)).status_code == 429
        pair.prefill.faults.stall = False
        assert (await chat(other, pair)).status_code == 200
        waiting.cancel()
        await asyncio.wait((waiting,))
