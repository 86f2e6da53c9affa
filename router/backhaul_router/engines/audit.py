"""Reconciliation: what prefill engines told the router that they reused, against what they count themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..fleet.accounts import Baseline
from ..fleet.engine import Engine
from ..fleet.fleet import Fleet
from ..wire.engine_metrics import AUDITED, connector_counters, page_of, start_of
from .client import EngineCall, EngineClient, EngineFailure

_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """Reconciliation of one counter of one prefill engine. Counts are tokens since the router connected, or found the
    engine restarted."""

    engine: str
    counter: str
    router: int
    """What the engine's accounts add up to."""
    counted: int
    """What the engine says on its `/metrics`."""
    in_flight: bool
    """Turns were running on it, or ended meanwhile, so that the two could not agree."""
    unaccounted: int
    """Prefills of this router that ended without an account: timeouts, clients that left."""
    alarm: bool
    restarted: bool = False
    """The engine has counted from 0 again: what it did until now cannot be compared, and what comes is."""

    @property
    def difference(self) -> int:
        return self.counted - self.router

    def __str__(self) -> str:
        if self.restarted:
            return f"{self.engine} was restarted: its {self.counter} tokens are compared from here on"
        if self.difference < 0:
            cause = "reuse was reported that the engine did not count"
        elif self.unaccounted:
            cause = f"{self.unaccounted} prefills ended without an account, or another client uses the engine"
        else:
            cause = "another client uses the engine"
        return (
            f"{self.engine} counts {self.counted} {self.counter} tokens and has reported {self.router} to this router: "
            f"{cause}"
        )


async def compare(client: EngineClient, fleet: Fleet, tolerance: float) -> tuple[AuditLine, ...]:
    """Lines for the prefill engines that run our connector and show their metrics."""
    ours = [engine for engine in fleet.prefill if engine.connector is not None]
    lines = await asyncio.gather(*(_lines(client, fleet, engine, tolerance) for engine in ours))
    return tuple(line for of_engine in lines for line in of_engine)


async def _lines(client: EngineClient, fleet: Fleet, engine: Engine, tolerance: float) -> list[AuditLine]:
    before, busy = fleet.accounts.total(engine.url), fleet.load.in_flight[engine.url]
    try:
        answer = await client.call(EngineCall(engine.url + "/metrics", timeout_s=_TIMEOUT_S))
    except EngineFailure:
        return []
    if answer.status != 200:
        return []
    page = page_of(answer.body, engine.url)
    counters, started_at = connector_counters(page), start_of(page)
    accounted = fleet.accounts.total(engine.url)
    in_flight = busy > 0 or fleet.load.in_flight[engine.url] > 0 or accounted != before
    base = fleet.accounts.baseline(engine)
    restarted = _restarted(base, counters, started_at)
    if not restarted:
        fleet.accounts.rebase(engine.url, replace(base, seen=counters))
    elif not in_flight:
        base = Baseline(accounted, counters, counters, started_at)
        fleet.accounts.rebase(engine.url, base)
    lines = []
    for name in AUDITED:
        router = accounted.get(name, 0) - base.accounted.get(name, 0)
        counted = counters[name] - base.counted.get(name, 0)
        off = abs(counted - router) > tolerance * max(abs(counted), router)
        lines.append(
            AuditLine(
                engine=engine.url,
                counter=name,
                router=router,
                counted=counted,
                in_flight=in_flight,
                unaccounted=fleet.accounts.missing(engine.url),
                alarm=off and not in_flight,
                restarted=restarted,
            )
        )
    return lines


def _restarted(base: Baseline, counters: Mapping[str, int], started_at: float | None) -> bool:
    """Whether another process counts than did before. One whose page does not say when it began shows in what it lacks."""
    if started_at is not None and base.started_at is not None:
        return started_at != base.started_at
    return any(counters[name] < base.seen.get(name, 0) for name in AUDITED)
