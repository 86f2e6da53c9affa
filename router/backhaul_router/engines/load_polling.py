"""Polling of load: engines are asked in the background what they have to do, while turns come. An idle router asks nothing.

Only where a role has several engines, since only there is something to choose. No turn waits for it.
"""

from __future__ import annotations

import asyncio
import logging

from ..fleet.engine import Engine, Role
from ..fleet.fleet import Fleet
from ..wire.engine_metrics import page_of, read_gauges, start_of
from .client import EngineCall, EngineClient, EngineFailure

log = logging.getLogger("backhaul")

_TIMEOUT_S = 2.0
_STALE = 5
"""What an engine said is forgotten after so many intervals without an answer."""


class LoadPolling:
    """Poller of one fleet. May be used from several event loops; whichever has a turn when it is due asks."""

    def __init__(self, client: EngineClient, fleet: Fleet, interval_s: float) -> None:
        self._client = client
        self._fleet = fleet
        self._interval_s = interval_s
        self._next = 0.0
        self._silent: set[str] = set()

    def due(self, now: float) -> bool:
        """Whether `poll` should run now, and notes that it does. What is stale is forgotten first."""
        if now < self._next or not self._interval_s:
            return False
        self._next = now + self._interval_s
        self._fleet.load.expire(now - _STALE * self._interval_s, now)
        return bool(self._asked)

    @property
    def _asked(self) -> tuple[Engine, ...]:
        fleet = self._fleet
        alike = [fleet.prefill if role is Role.PREFILL else fleet.decode for role in Role]
        return tuple(engine for engines in alike if len(engines) > 1 for engine in engines)

    async def poll(self, now: float) -> None:
        """Asks all of them. What one that does not answer said before is kept for a while."""
        await asyncio.gather(*(self._ask(engine, now) for engine in self._asked))

    async def _ask(self, engine: Engine, now: float) -> None:
        own = self._fleet.load.in_flight[engine.url]
        try:
            answer = await self._client.call(EngineCall(engine.url + "/metrics", timeout_s=_TIMEOUT_S))
        except EngineFailure as failure:
            self._says_nothing(engine, failure.message)
            return
        page = page_of(answer.body, engine.url) if answer.status == 200 else ""
        gauges = read_gauges(page)
        if gauges is None:
            self._says_nothing(engine, f"its /metrics, answered with status {answer.status}, does not show it")
            return
        if engine.url in self._silent:
            self._silent.discard(engine.url)
            log.info("%s shows its load again", engine)
        self._fleet.load.read(engine.url, gauges, now, own)
        self._fleet.restarts.showed(engine.url, start_of(page))

    def _says_nothing(self, engine: Engine, why: str) -> None:
        """Said once for each engine, until it answers again."""
        self._fleet.counters.add("failed_polls")
        if engine.url not in self._silent:
            self._silent.add(engine.url)
            log.warning(
                "%s does not show its load, so turns are placed by what this router runs there: %s", engine, why
            )
