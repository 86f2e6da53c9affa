"""A served router for tests: the real server as a process of its own, over loopback engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
from backhaul_loopback import LoopbackPair
from backhaul_router.config import RouterConfig
from backhaul_router.serve import server
from backhaul_router.serve.admission import Limits
from backhaul_router.serve.settings import ServerSettings, Settings
from backhaul_router.serve.tenants import NO_TENANTS, Tenants

LIMIT_S = 60.0


@dataclass
class Served:
    """A running `backhaul serve`."""

    process: asyncio.subprocess.Process
    url: str
    """Without `/v1`."""
    http: httpx2.AsyncClient

    async def stop(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal; exit status, and what was printed since the start line."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        out, err = await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def run(*arguments: str) -> asyncio.subprocess.Process:
    """Starts the command line."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "backhaul_cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@asynccontextmanager
async def serving(pair: LoopbackPair, *options: str, port: str = "0") -> AsyncIterator[Served]:
    """A router as a process, until the block ends."""
    engines = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
    process = await run("serve", "--port", port, *engines, *options)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = (await process.stdout.readline()).decode()
        found = re.match(r"router +(http://\S+)/v1$", line)
        if found is None:
            out, err = await process.communicate()
            raise AssertionError(f"it did not start: {line}{out.decode()}{err.decode()}")
        async with httpx2.AsyncClient(base_url=found[1], timeout=LIMIT_S, trust_env=False) as http:
            yield Served(process, found[1], http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def freed(pair: LoopbackPair) -> None:
    """Returns when the decode engine holds nothing any more."""
    async with asyncio.timeout(10):
        while pair.decode.pinned_blocks:
            await asyncio.sleep(0.002)


class _Stop(Exception):
    pass


@asynccontextmanager
async def in_thread(
    pair: LoopbackPair, host: str = "127.0.0.1", tenants: Tenants = NO_TENANTS, **settings: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """The same server in a thread of this process, which starts sooner: a client of it, `base_url` without `/v1`."""
    config = RouterConfig(**{"prefill": [pair.prefill.url], "decode": [pair.decode.url], **settings})
    whole = Settings(router=config, server=ServerSettings(host=host), limits=Limits(), tenants=tenants)
    async with operating(whole) as http:
        yield http


@asynccontextmanager
async def operating(
    settings: Settings, load: Callable[[], Settings] | None = None, verify: ssl.SSLContext | bool = True
) -> AsyncIterator[httpx2.AsyncClient]:
    """A server with all of its settings, which `load` reads again. The port is a free one."""
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    tell = asyncio.get_running_loop().call_soon_threadsafe
    stopping = threading.Event()

    def check() -> None:
        if stopping.is_set():
            raise _Stop

    def serve() -> None:
        with server.listen(settings.server.host, 0) as listener:
            tell_url = lambda url: tell(started.set_result, url)  # noqa: E731
            server.serve_settings(listener, settings, load, started=tell_url, check=check)

    thread = asyncio.create_task(asyncio.to_thread(serve))
    await asyncio.wait((thread, started), return_when=asyncio.FIRST_COMPLETED)
    if thread.done():
        thread.result()
    try:
        url = started.result().removesuffix("/v1")
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False, verify=verify) as http:
            yield http
    finally:
        stopping.set()
        await asyncio.wait((thread,))
        ended = thread.exception()
    assert isinstance(ended, _Stop)
