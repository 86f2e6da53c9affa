"""Clock of an engine: real, or virtual so that minutes of leases and decoding pass in no time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; every engine may have its own."""

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """`time.perf_counter`, which is what vLLM stamps its leases with."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Time that passes only when told to: by `advance`, or by itself (`auto=True`) once there are only sleepers left.

    One event loop only. With `auto`, "nothing else to do" means that the loop went around a few times without
    a new sleeper, which holds for engines and clients that live in one loop and talk over the loopback device.
    """

    _SETTLE_ROUNDS = 8

    def __init__(self, start: float = 1000.0, *, auto: bool = False) -> None:
        self._now = start
        self._auto = auto
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._pump: asyncio.Task[None] | None = None

    def now(self) -> float:
        return self._now

    @property
    def num_sleepers(self) -> int:
        """How many wait for time to pass, given up ones included."""
        return len(self._sleepers)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wake))
        if self._auto and (self._pump is None or self._pump.done()):
            self._pump = asyncio.create_task(self._run())
        await wake

    async def advance(self, seconds: float) -> None:
        """Moves time on, waking sleepers in order; each gets the loop's attention before the next wakes."""
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            self._wake_next()
            await self._settle()
        self._now = until
        await self._settle()

    async def _run(self) -> None:
        while self._sleepers:
            await self._settle()
            if self._sleepers:
                self._wake_next()

    async def _settle(self) -> None:
        for _ in range(self._SETTLE_ROUNDS):
            await asyncio.sleep(0)

    def _wake_next(self) -> None:
        at, _, wake = heapq.heappop(self._sleepers)
        if not wake.done():
            self._now = max(self._now, at)
            wake.set_result(None)


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """How long things take, in seconds; everything is free by default.

    Prefills wait for each other, as on one accelerator; decoding, reading and rendering do not.
    """

    fixed_s: float = 0.0
    """Per request, before its prefill."""
    prefill_s: float = 0.0
    """Per prompt token that is computed."""
    decode_s: float = 0.0
    """Per generated token."""
    transfer_s: float = 0.0
    """Per token whose KV is read from a peer."""
    render_s: float = 0.0
    """Per token that the chat template and the tokenizer produce."""
