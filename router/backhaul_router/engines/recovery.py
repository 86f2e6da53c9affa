"""Recovery probes of open circuit breakers: a real request asks whether an engine generates again, and closes its breaker.

In the background, and only while a breaker is open. The first try is soon and the following ones at most `_LONGEST_S` apart, so
that an engine is back in use about a second after it serves again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from .. import wire
from ..errors import FailureKind, Leg
from ..fleet.breakers import EngineLeg
from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..fleet.restarts import Fence
from ..turn.effects import DropEngine, Release
from .client import EngineCall, EngineClient, EngineFailure

log = logging.getLogger("backhaul")

_FIRST_S = 0.25
_LONGEST_S = 1.0
_TIMEOUT_S = 10.0
"""An engine that needs longer for one token is not well; turns that have nowhere else to go find it all the same."""


class RecoveryProbes:
    """Recovery probes of one fleet's breakers. May be used from several event loops: one of them probes a breaker at a
    time, and where it ends, `start` begins anew in another."""

    def __init__(
        self,
        client: EngineClient,
        fleet: Fleet,
        release: Callable[[Release], Coroutine[Any, Any, None]],
        perform: Callable[[DropEngine], None],
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._release = release
        self._perform = perform
        self._running: dict[EngineLeg, asyncio.Task[None]] = {}
        self.closed = False

    def start(self) -> None:
        """Begins to probe what is open and not probed yet."""
        if self.closed:
            return
        for at in self._fleet.breakers.open_legs():
            task = self._running.get(at)
            if task is None or task.done() or task.get_loop().is_closed():
                self._fleet.breakers.probe_failed(at, None)  # of a loop that ended in the middle
                self._running[at] = asyncio.get_running_loop().create_task(self._probe_until_closed(at))

    async def aclose(self) -> None:
        """Gives up."""
        self.closed = True
        here = asyncio.get_running_loop()
        tasks = [task for task in self._running.values() if task.get_loop() is here]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _probe_until_closed(self, at: EngineLeg) -> None:
        pause_s = _FIRST_S
        while not self.closed:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
            engine = self._fleet.get(at.url)
            if engine is None or self.closed or at not in self._fleet.breakers.open_legs():
                return
            if not self._fleet.breakers.probing(at):
                continue
            kind: FailureKind | None = None
            try:
                kind = await self._probe(engine, at.leg)
            finally:
                self._fleet.breakers.probe_failed(at, kind)

    async def _probe(self, engine: Engine, leg: Leg) -> FailureKind | None:
        """One try, which closes the breaker where it succeeds. Returns how it failed."""
        body = msgspec.json.encode({"model": engine.models[0], "prompt": "a", "max_tokens": 1})
        path: str = wire.Endpoint.COMPLETIONS
        if leg is Leg.RENDER:
            path = f"{path}/render" if engine.renders else "/tokenize"
        asked = self._fleet.restarts.fence(engine.url)
        try:
            answer = await self._client.call(EngineCall(engine.url + path, body, timeout_s=_TIMEOUT_S))
        except EngineFailure as failure:
            log.debug("still shut out: %s", failure.message)
            return failure.kind
        if answer.status != 200:
            log.debug("still shut out: %s answered a probe with %d", engine, answer.status)
            return FailureKind.ERROR
        if leg is not Leg.RENDER and not await self._generated(engine, answer.body, asked):
            return FailureKind.ERROR
        self._fleet.note_answer(engine, leg)
        return None

    async def _generated(self, engine: Engine, body: bytes, asked: Fence) -> bool:
        """Whether the answer is one; what it pins is released. An engine that is another process than before is noticed, and so
        is one that is the same."""
        try:
            answer = wire.read_answer(wire.Endpoint.COMPLETIONS.api, body)
        except (wire.MalformedBody, msgspec.DecodeError) as error:
            log.warning("%s answered a probe with what cannot be read: %s", engine, error)
            return False
        handle = answer.params.handle
        if handle is not None and engine.role is Role.DECODE:
            if not self._fleet.restarts.is_outlived(engine.url, handle.engine_id, asked):
                before = self._fleet.restarts.saw_engine_id(engine.url, handle.engine_id, asked)
                if before is not None:
                    self._perform(DropEngine(engine.url, before))
            other = self._fleet.pick(Role.PREFILL)
            if handle.lease is None and other is not None:
                await self._release(Release(handle.params, other))
        return "choices" in answer.members
