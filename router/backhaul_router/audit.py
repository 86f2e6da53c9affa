"""What prefill engines told the router that they reused, against what they count themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .engine_client import EngineCall, EngineClient, EngineFailure
from .fleet import AUDITED, Engine, Fleet, connector_counters

_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """One counter of one prefill engine. Counts are tokens since the router connected."""

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

    @property
    def difference(self) -> int:
        return self.counted - self.router

    def __str__(self) -> str:
        if self.difference < 0:
            cause = "reuse was reported that the engine did not count: it may have restarted"
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
    before, busy = fleet.accounted(engine), fleet.busy(engine)
    try:
        answer = await client.call(EngineCall(engine.url + "/metrics", timeout_s=_TIMEOUT_S))
    except EngineFailure:
        return []
    if answer.status != 200:
        return []
    counters = connector_counters(answer.body.decode(errors="replace"))
    accounted = fleet.accounted(engine)
    in_flight = busy > 0 or fleet.busy(engine) > 0 or accounted != before
    lines = []
    for name in AUDITED:
        router, counted = accounted.get(name, 0), counters[name] - engine.at_start.get(name, 0)
        off = abs(counted - router) > tolerance * max(abs(counted), router)
        lines.append(
            AuditLine(
                engine=engine.url,
                counter=name,
                router=router,
                counted=counted,
                in_flight=in_flight,
                unaccounted=fleet.unaccounted(engine),
                alarm=off and not in_flight,
            )
        )
    return lines
