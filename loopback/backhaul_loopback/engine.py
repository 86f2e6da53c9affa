"""Facade: one loopback engine, listening: `async with LoopbackEngine(role="decode") as engine: engine.url`."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Self

from aiohttp import web

from .clock import Clock, RealClock
from .config import EngineConfig, Faults, Received, Role
from .connector import Connector
from .core import EngineCore
from .lease_channel import LeaseChannel
from .server import Server
from .side_channel import SideChannel

_REMEMBERED = 1_000


class LoopbackEngine:
    """A vLLM 0.32 engine without a model: same wire protocol, same KV transfers, same traps, no accelerator.

    Takes `EngineConfig`'s fields as keywords. `faults` makes it fail, `received` remembers the last requests,
    `restart()` comes back on the same ports with a new engine id and empty memory.
    """

    def __init__(self, role: Role = "decode", *, clock: Clock | None = None, **settings: Any) -> None:
        self.config = EngineConfig(role=role, **settings)
        self.clock = clock or RealClock()
        self.faults = Faults()
        self.received: deque[Received] = deque(maxlen=_REMEMBERED)
        self.core = EngineCore(self.config, self.clock, self.faults)
        self._ended = False
        self._runner: web.AppRunner | None = None
        self._side_channel: SideChannel | None = None
        self._lease_channel: LeaseChannel | None = None

    def __repr__(self) -> str:
        where = self.url if self.config.port else "not started"
        return f"<LoopbackEngine {self.config.role} {where} {self.core.pool!r} {len(self.core.lease_ids())} leases>"

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.config.port}"

    @property
    def model(self) -> str:
        return self.config.model

    @property
    def engine_id(self) -> str:
        return self.core.engine_id

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are pinned or leased right now."""
        return self.core.pinned_blocks()

    @property
    def lease_ids(self) -> list[str]:
        """The requests whose blocks are pinned or leased right now."""
        return self.core.lease_ids()

    @property
    def usage(self) -> float:
        """What `vllm:kv_cache_usage_perc` says."""
        self.core.reap()
        return self.core.pool.usage

    def requests_to(self, path: str) -> list[Received]:
        return [request for request in self.received if request.path == path]

    def forget_lease(self, request_id: str | None = None) -> None:
        """Frees what is kept of a request (of all for `None`) without anyone having been told."""
        self.core.forget_lease(request_id)

    async def start(self) -> None:
        """Listens. The ports that were found are kept for later starts; what starts after a `stop()` is a new process. Raises
        `OSError` for a port that is taken."""
        if self._ended:
            self.core, self._ended = EngineCore(self.config, self.clock, self.faults), False
        try:
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    async def _listen(self) -> None:
        side_channel = SideChannel(self.core, self.config.host, self.config.side_channel_port)
        await side_channel.start()
        self._side_channel = side_channel
        self.core.side_channel_port = side_channel.port
        if self.core.connector is not None:
            await self._listen_for_claims(self.core.connector)
        app = Server(self.core, self.faults, self.received).app()
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.host, self.config.port, reuse_address=True)
        await site.start()
        port = self._runner.addresses[0][1]
        self.config = replace(self.config, port=port, side_channel_port=side_channel.port)

    async def _listen_for_claims(self, connector: Connector) -> None:
        lease_channel = LeaseChannel(connector.answer, self.faults, self.config.host, self.config.lease_port)
        await lease_channel.start()
        self._lease_channel = lease_channel
        connector.lease_port, connector.side_channel_port = lease_channel.port, self.core.side_channel_port
        self.config = replace(self.config, lease_port=lease_channel.port)

    async def stop(self) -> None:
        """Ends like a killed process: requests break off, connections to it are refused, its memory is gone."""
        self._ended = True
        await self.core.aclose()
        if self._side_channel is not None:
            await self._side_channel.stop()
            self._side_channel = None
        if self._lease_channel is not None:
            await self._lease_channel.stop()
            self._lease_channel = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """A new process on the same ports: new engine id, no blocks, no leases, counters at zero."""
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()


@dataclass(frozen=True)
class LoopbackPair:
    """One P and one D that serve the same model."""

    prefill: LoopbackEngine
    decode: LoopbackEngine

    @property
    def model(self) -> str:
        return self.prefill.model


@contextlib.asynccontextmanager
async def loopback_pair(
    *,
    clock: Clock | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[LoopbackPair]:
    """Starts a P and a D. `settings` go to both, `prefill` and `decode` to one of them."""
    async with (
        LoopbackEngine("prefill", clock=clock, **settings | (prefill or {})) as p,
        LoopbackEngine("decode", clock=clock, **settings | (decode or {})) as d,
    ):
        yield LoopbackPair(p, d)
