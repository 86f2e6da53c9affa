"""`backhaul serve --workers 2` as processes, on a Redis server: what agents, operators and Prometheus see, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from backhaul_connector.launch.supervise import descendants
from backhaul_loopback import CostModel, LoopbackEngine, LoopbackPair, loopback_pair
from redis_servers import RedisServer, needs_redis, redis_server
from served import LIMIT_S, Served, run, serving

pytestmark = needs_redis

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ADMIN, ON_RECORD = "/backhaul/admin", "/backhaul/conversations"
STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. "
SLOW: Any = {"decode": {"costs": CostModel(decode_s=0.02)}}


@dataclass
class Two:
    """Two workers, and a client of each, which stays with it."""

    served: Served
    pair: LoopbackPair
    one: httpx2.AsyncClient
    two: httpx2.AsyncClient

    @property
    def parent(self) -> int:
        return self.served.process.pid

    async def pids(self) -> dict[int, int]:
        listed = (await self.one.get(f"{ADMIN}/workers")).json()["workers"]
        return {worker["worker"]: worker["pid"] for worker in listed if worker["serves"]}


@asynccontextmanager
async def two_workers(pair: LoopbackPair, redis: RedisServer, *options: str) -> AsyncIterator[Two]:
    warm = ("--local-max-tokens", "0", "--no-place-by-cost", "--no-check-pairs")
    shared = ("--workers", "2", "--redis-url", redis.url, "--redis-timeout-s", "10")
    async with serving(pair, *warm, *shared, *options) as served:
        async with only(served.url, 1) as one, only(served.url, 2) as two:
            yield Two(served, pair, one, two)


@asynccontextmanager
async def only(url: str, worker: int) -> AsyncIterator[httpx2.AsyncClient]:
    """A client whose one connection is with that worker."""
    limits = httpx2.Limits(max_connections=1, keepalive_expiry=600)
    for _ in range(20):
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False, limits=limits) as http:
            if (await http.get("/health")).json()["worker"] == worker:
                yield http
                return
    raise AssertionError(f"worker {worker} gets no connection")


@pytest.fixture
async def no_task_left_running() -> None:
    """The engines of `two` outlive a test, and so do their connections."""


@pytest.fixture(scope="module")
async def two() -> AsyncIterator[Two]:
    with redis_server() as redis:
        async with loopback_pair(prefill={"prefix_caching": False}) as pair, two_workers(pair, redis) as two:
            yield two


def body(pair: LoopbackPair, *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": STORY * 3}, *more]
    return {"model": pair.model, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}


async def turns(two: Two, conversation: str, *clients: httpx2.AsyncClient) -> list[str]:
    """Turns of one conversation, each by its client; the routes that they took."""
    routes: list[str] = []
    more: list[dict[str, Any]] = []
    for client in clients:
        answer = await client.post(CHAT, json=body(two.pair, *more), headers={"x-conversation-id": conversation})
        assert answer.status_code == 200, answer.text
        routes.append(answer.headers["x-backhaul-route"])
        turn = answer.headers["x-backhaul-turn"]
        await client.get(f"{ON_RECORD}/{conversation}", params={"turn": turn, "wait": 5})
        more += [answer.json()["choices"][0]["message"], {"role": "user", "content": STORY * 2}]
    return routes


# --- agents


async def test_turns_of_a_conversation_are_warm_whichever_worker_they_come_to(two: Two) -> None:
    assert await turns(two, "warm", two.one, two.two, two.two, two.one) == ["cold", "warm", "warm", "warm"]


async def test_any_worker_shows_the_reports_of_all_turns(two: Two) -> None:
    await turns(two, "whole", two.one, two.two, two.one)
    for client in (two.one, two.two):
        shown = (await client.get(f"{ON_RECORD}/whole")).json()
        assert [(report["turn"], report["worker"]) for report in shown["reports"]] == [(1, 1), (2, 2), (3, 1)]
        assert (shown["total"]["turns"], shown["total"]["routes"]) == (3, {"cold": 1, "warm": 2})
        assert 0 < shown["total"]["hit_rate"] < 1
        listed = (await client.get(ON_RECORD)).json()["conversations"]
        assert [one["total"] for one in listed if one["id"] == "whole"] == [shown["total"]]


async def test_clients_are_spread_over_the_workers(two: Two) -> None:
    async def worker() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx2.URL(two.served.url).port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(json.loads(answer.partition(b"\r\n\r\n")[2])["worker"])

    workers = await asyncio.gather(*(worker() for _ in range(40)))
    assert 5 < workers.count(1) < 35  # the system draws lots


# --- Prometheus


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"], ids=["text", "open"])
async def test_a_scrape_of_one_worker_has_the_turns_of_all(two: Two, accept: str) -> None:
    before = await turns_counted(two.one, accept)
    await turns(two, f"counted {accept[:4]}", two.one, two.two, two.two)
    for client in (two.one, two.two):
        after = await turns_counted(client, accept)
        assert {worker: after[worker] - before.get(worker, 0) for worker in after} == {"1": 1, "2": 2}


async def turns_counted(client: httpx2.AsyncClient, accept: str) -> dict[str, float]:
    page = (await client.get("/metrics", headers={"accept": accept})).text
    assert page.count("# TYPE backhaul_router_turns") == 1
    assert set(re.findall(r'worker_up{worker="(\d)"} 1.0', page)) == {"1", "2"}
    counted: dict[str, float] = {}
    for worker, value in re.findall(r'^backhaul_router_turns_total{.*worker="(\d)"} (\S+)', page, re.MULTILINE):
        counted[worker] = counted.get(worker, 0) + float(value)
    return counted


# --- operators


async def states(client: httpx2.AsyncClient) -> dict[str, Any]:
    return {one["url"]: one["state"] for one in (await client.get(f"{ADMIN}/engines")).json()["engines"]}


async def test_an_engine_is_added_drained_and_removed_with_all_workers(two: Two) -> None:
    async with LoopbackEngine("decode") as other:
        added = await two.one.post(f"{ADMIN}/engines", json={"role": "decode", "url": other.url})
        assert added.status_code == 200, added.text
        assert (await states(two.two))[other.url] == "available"
        drained = await two.two.post(f"{ADMIN}/engines/drain", params={"url": other.url})
        assert drained.json() == {"url": other.url, "in_flight": 0, "handles": 0, "done": True}
        listed = (await two.one.get(f"{ADMIN}/engines")).json()["engines"]
        assert [(one["state"], "states" in one) for one in listed if one["url"] == other.url] == [("draining", False)]
        removed = await two.one.delete(f"{ADMIN}/engines", params={"url": other.url})
        assert removed.json() == {"removed": other.url}
        assert other.url not in await states(two.two)
        assert (await two.two.delete(f"{ADMIN}/engines", params={"url": other.url})).status_code == 404


async def test_a_change_that_cannot_be_made_is_made_by_no_worker(two: Two) -> None:
    before = await states(two.one)
    refused = await two.one.post(f"{ADMIN}/engines", json={"role": "decode", "url": "http://127.0.0.1:1"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "cannot_be_done")
    assert await states(two.two) == before


# --- processes


async def test_a_worker_that_is_killed_comes_back_with_what_was_changed_and_the_other_serves_on(tmp_path: Path) -> None:
    file = tmp_path / "backhaul.toml"
    file.write_text("[router]\nmax_body_bytes = 100000\n")
    with redis_server() as redis:
        async with (
            loopback_pair() as pair,
            LoopbackEngine("decode") as other,
            two_workers(pair, redis, "--config", str(file)) as two,
        ):
            file.write_text("[router]\nmax_body_bytes = 10\n")
            assert (await two.one.post(f"{ADMIN}/reload")).json()["changed"] == ["[router] max_body_bytes"]
            assert (await two.two.post(CHAT, json=body(pair))).status_code == 413
            await two.two.post(f"{ADMIN}/engines", json={"role": "decode", "url": other.url})
            await two.two.post(f"{ADMIN}/engines/drain", params={"url": other.url})
            pids = await two.pids()
            os.kill(pids[2], signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                while (now := await two.pids()).get(2) in (None, pids[2]):
                    await asyncio.sleep(0.02)
            assert now[1] == pids[1]
            async with only(two.served.url, 2) as again:
                assert (await again.post(CHAT, json=body(pair))).status_code == 413
                listed = (await again.get(f"{ADMIN}/engines")).json()["engines"]
                assert [(one["state"], "states" in one) for one in listed if one["url"] == other.url] == [
                    ("draining", False)
                ]
                page = (await again.get("/metrics")).text
            assert 'backhaul_router_worker_restarts_total{worker="2"} 1.0' in page
            status, _, err = await two.served.stop()
            assert (status, f"worker 2 (process {pids[2]}) was killed by SIGKILL; it is started again" in err) == (
                0,
                True,
            )


async def test_told_to_stop_all_workers_finish_their_requests() -> None:
    """As from a terminal, whose Ctrl-C goes to every process."""
    with redis_server() as redis:
        async with loopback_pair(**SLOW) as pair, two_workers(pair, redis) as two:
            pids = await two.pids()
            asked = body(pair, stream=True, max_tokens=30)
            async with two.one.stream("POST", CHAT, json=asked) as a, two.two.stream("POST", CHAT, json=asked) as b:
                streams = [answer.aiter_raw() for answer in (a, b)]
                for chunks in streams:
                    await anext(chunks)
                for pid in pids.values():
                    os.kill(pid, signal.SIGINT)
                stopping = asyncio.create_task(two.served.stop(signal.SIGINT))
                ends = [b"".join([chunk async for chunk in chunks])[-14:] for chunks in streams]
            assert ends == [b"data: [DONE]\n\n"] * 2
            status, out, _ = await stopping
            assert (status, out.splitlines()[-1]) == (0, "stopped")
            assert not any(map(running, pids.values()))


async def test_requests_that_have_come_by_the_end_are_answered_however_many() -> None:
    """They come while the workers have something else to do."""
    with redis_server() as redis:
        async with loopback_pair() as pair, two_workers(pair, redis) as two:
            pids = (await two.pids()).values()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            clients = [await asyncio.open_connection("127.0.0.1", httpx2.URL(two.served.url).port) for _ in range(100)]
            for _, writer in clients:
                writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
            two.served.process.send_signal(signal.SIGTERM)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            answers = await asyncio.gather(*(reader.readline() for reader, _ in clients), return_exceptions=True)
            for _, writer in clients:
                writer.close()
            assert answers == [b"HTTP/1.1 200 OK\r\n"] * 100
            assert (await two.served.stop())[0] == 0


async def test_a_second_signal_does_not_wait_for_requests() -> None:
    with redis_server() as redis:
        async with loopback_pair(**SLOW) as pair, two_workers(pair, redis, "--grace-s", "600") as two:
            async with two.one.stream("POST", CHAT, json=body(pair, stream=True, max_tokens=4000)) as answer:
                await anext(answer.aiter_raw())
                two.served.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(LIMIT_S):
                    while await accepts(two.served.url):
                        await asyncio.sleep(0.01)
                stopped = await two.served.stop()
                assert stopped[0] == 0, stopped[2]


async def accepts(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", httpx2.URL(url).port)
    except (ConnectionRefusedError, ConnectionResetError):  # reset: as it was closing
        return False
    writer.close()
    return True


async def test_workers_whose_parent_is_killed_finish_their_requests_and_end() -> None:
    with redis_server() as redis:
        async with loopback_pair(**SLOW) as pair, two_workers(pair, redis) as two:
            pids = list((await two.pids()).values())
            assert sorted(descendants(two.parent)) == sorted(pids)
            asked = body(pair, stream=True, max_tokens=60, ignore_eos=True)
            async with two.two.stream("POST", CHAT, json=asked) as answer:
                chunks = answer.aiter_raw()
                await anext(chunks)
                two.served.process.send_signal(signal.SIGSTOP)
                await turns_counted(two.one, "text/plain")  # they need it for nothing
                two.served.process.kill()
                rest = b"".join([chunk async for chunk in chunks])
            assert rest.endswith(b"data: [DONE]\n\n")
            async with asyncio.timeout(LIMIT_S):
                while any(map(running, pids)):
                    await asyncio.sleep(0.01)
            assert not await accepts(two.served.url)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # whom nobody waits for here


async def test_workers_that_cannot_start_end_it_with_what_was_wrong() -> None:
    with redis_server() as redis:
        engines = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1/d")
        process = await run("serve", "--port", "0", *engines, "--workers", "2", "--redis-url", redis.url)
        _, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 2
        assert err.decode().splitlines()[-1].startswith("backhaul serve: no prefill engine answers: ")
