"""Failures that a test orders, what an engine remembers of requests, and engines as processes."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from backhaul_loopback import LoopbackEngine
from conformance.engines import Engines

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = list(range(40, 250))


@pytest.fixture
async def engine() -> AsyncIterator[LoopbackEngine]:
    async with LoopbackEngine("decode") as engine:
        yield engine


@pytest.fixture
async def engines(engine: LoopbackEngine) -> AsyncIterator[Engines]:
    async with Engines(engine.url, engine.url, engine.model) as engines:
        yield engines


async def test_status_fault_hits_as_often_as_ordered(engine: LoopbackEngine, engines: Engines) -> None:
    engine.faults.status, engine.faults.times = 503, 2
    statuses = [(await engines.chat(engine.url, HELLO)).status for _ in range(3)]
    assert statuses == [503, 503, 200]


async def test_faults_hit_the_named_paths_only(engine: LoopbackEngine, engines: Engines) -> None:
    engine.faults.status, engine.faults.paths = 500, ("/tokenize",)
    assert (await engines.chat(engine.url, HELLO)).status == 200
    assert (await engines.post(f"{engine.url}/tokenize", {"prompt": "x"})).status == 500
    engine.faults.clear()
    assert (await engines.post(f"{engine.url}/tokenize", {"prompt": "x"})).status == 200


async def test_dropped_connection_has_no_answer(engine: LoopbackEngine, engines: Engines) -> None:
    engine.faults.drop = True
    with pytest.raises(aiohttp.ClientConnectionError):
        await engines.chat(engine.url, HELLO)


async def test_stalled_request_waits_until_its_client_leaves(engine: LoopbackEngine, engines: Engines) -> None:
    engine.faults.stall = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engines.chat(engine.url, HELLO), 0.1)
    engine.faults.clear()
    assert (await engines.chat(engine.url, HELLO)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_breaks_off_after_the_ordered_bytes(
    engine: LoopbackEngine, engines: Engines, stream: bool
) -> None:
    engine.faults.die_after_bytes = 300
    body = engines.body(messages=HELLO, stream=stream)
    received = bytearray()

    async def read(response: aiohttp.ClientResponse) -> None:
        async for chunk in response.content.iter_any():
            received.extend(chunk)

    async with engines.open_stream(f"{engine.url}/v1/chat/completions", body) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await read(response)
    assert len(received) == 300


async def test_stream_that_breaks_off_pins_nothing(engine: LoopbackEngine, engines: Engines) -> None:
    engine.faults.die_after_bytes = 300
    body = engines.body(messages=HELLO, stream=True, kv_transfer_params={"do_remote_decode": True})
    async with engines.open_stream(f"{engine.url}/v1/chat/completions", body) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    await engines.wait_for_usage(engine.url)


async def test_requests_are_remembered_as_they_came(engine: LoopbackEngine, engines: Engines) -> None:
    await engines.post(f"{engine.url}/v1/chat/completions", {"messages": HELLO}, X_Session_ID="abc")
    (request,) = engine.requests_to("/v1/chat/completions")
    assert request.headers["x-session-id"] == "abc"
    assert request.body == {"messages": HELLO}
    assert b'"messages"' in request.raw


async def test_restart_forgets_cache_leases_and_counters(engine: LoopbackEngine, engines: Engines) -> None:
    await engines.complete(engine.url, PROMPT, kv_transfer_params={"do_remote_decode": True})
    await engine.restart()
    assert engine.usage == 0
    assert (await engines.complete(engine.url, PROMPT)).cached == 0
    assert await engines.metric(engine.url, "vllm:prompt_tokens_total") == len(PROMPT)


async def test_prefix_cache_is_reset_unless_blocks_are_held(engine: LoopbackEngine, engines: Engines) -> None:
    reset = f"{engine.url}/reset_prefix_cache"
    await engines.complete(engine.url, PROMPT, kv_transfer_params={"do_remote_decode": True})
    assert (await engines.post(reset, {})).json == {"success": False}
    engine.forget_lease()
    assert (await engines.post(reset, {})).json == {"success": True}
    assert (await engines.complete(engine.url, PROMPT)).cached == 0


async def test_taken_port_is_an_error_that_leaves_nothing_behind(engine: LoopbackEngine) -> None:
    other = LoopbackEngine("decode", port=engine.config.port)
    with pytest.raises(OSError, match="address already in use"):
        await other.start()
    await engine.stop()
    await other.start()
    await other.stop()


@asynccontextmanager
async def process(role: str, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An engine as a process of its own, and its URL."""
    command = (sys.executable, "-m", "backhaul_loopback", "--role", role, *flags)
    engine = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert engine.stdout is not None
        line = (await asyncio.wait_for(engine.stdout.readline(), 60)).decode()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield engine, found[0]
    finally:
        if engine.returncode is None:
            engine.kill()
        await engine.wait()


@pytest.mark.parametrize("connector", ["stock", "backhaul"])
async def test_engines_in_different_processes_read_each_others_blocks(connector: str) -> None:
    kind = ("--connector", connector)
    async with process("prefill", "--no-prefix-caching", *kind) as (_, p), process("decode", *kind) as (_, d):
        async with Engines(p, d, "loopback") as engines:
            one = await engines.turn(PROMPT)
            prompt = [*PROMPT, *one.choice["token_ids"], *PROMPT[:40]]
            leg = await engines.prefill(prompt, one.handle)
            assert leg.cached == one.handle["remote_num_tokens"]
            two = await engines.decode(prompt, leg.handle)
            assert two.choice["token_ids"] == await engines.reference(prompt)


async def test_engine_process_ends_on_sigterm() -> None:
    async with process("decode") as (engine, _):
        engine.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(engine.wait(), 30) == 0


async def test_engine_process_ends_with_its_parent() -> None:
    parent = (
        "import subprocess, sys, time\n"
        "engine = subprocess.Popen([sys.executable, '-m', 'backhaul_loopback', '--role', 'decode'],"
        " stdout=subprocess.PIPE)\n"
        "engine.stdout.readline()\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), 60))
    process.kill()
    await process.wait()
    async with asyncio.timeout(30):
        while alive(pid):
            await asyncio.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
