"""A P and a D in virtual time, and what tests say to them by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from backhaul_loopback import LoopbackEngine, LoopbackPair, VirtualClock, loopback_pair
from conformance.engines import Engines


class Bench(Engines):
    """A pair, its clock, and the ways to talk to it."""

    pair: LoopbackPair
    clock: VirtualClock

    @property
    def p(self) -> LoopbackEngine:
        return self.pair.prefill

    @property
    def d(self) -> LoopbackEngine:
        return self.pair.decode

    async def second_turn(self, handle: Any, prompt: list[int]) -> list[int]:
        answer = await self.decode(prompt, (await self.prefill(prompt, handle)).handle)
        ids: list[int] = answer.choice["token_ids"]
        return ids


@asynccontextmanager
async def bench(**settings: Any) -> AsyncIterator[Bench]:
    clock = VirtualClock()
    async with loopback_pair(clock=clock, **settings) as pair:
        async with Bench(pair.prefill.url, pair.decode.url, pair.model) as engines:
            engines.pair, engines.clock = pair, clock
            yield engines


async def until(holds: Callable[[], bool]) -> None:
    """Waits for what real sockets take a moment to do."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)
