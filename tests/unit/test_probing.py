"""What a probe finds out of a decode engine that was shut out, beside that it generates again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from backhaul_router.engines.client import EngineAnswer, EngineCall, EngineClient
from backhaul_router.engines.recovery import RecoveryProbes
from backhaul_router.errors import FailureKind
from backhaul_router.fleet.breakers import FailedRequest
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.turn.effects import DropEngine, Release
from core_values import D1, ENGINE_ID, P1, encoded, engine, params

OTHER = "7c5b6f0e-90bd-4a6a-b0bb-1f8f6a9a2c55"


class Client:
    """Answers each request with a handle."""

    def __init__(self, engine_id: str) -> None:
        self.body = encoded({"choices": [], "kv_transfer_params": params("probe", engine_id=engine_id)})

    async def call(self, call: EngineCall) -> EngineAnswer:
        return EngineAnswer(200, {}, self.body)


@pytest.mark.parametrize("engine_id", [ENGINE_ID, OTHER])
async def test_the_id_in_its_answer_tells_whether_it_is_the_same_process(engine_id: str) -> None:
    """Where an engine does not say when it began, as with several API servers, nothing else tells it."""
    fleet = Fleet([engine(P1), decode := engine(D1)])
    fleet.restarts.saw_engine_id(decode.url, ENGINE_ID)
    fleet.note_failure(decode, None, FailureKind.REFUSED, FailedRequest("", b""), 0.0)
    assert fleet.restarts.in_doubt(D1, ENGINE_ID)
    done: list[Any] = []

    async def release(action: Release) -> None:
        done.append(action)

    probes = RecoveryProbes(cast("EngineClient", Client(engine_id)), fleet, release, done.append)
    probes.start()
    async with asyncio.timeout(20):
        while fleet.breakers.open_legs():
            await asyncio.sleep(0.01)
    await probes.aclose()
    assert not fleet.restarts.in_doubt(D1, engine_id)
    assert [one for one in done if isinstance(one, DropEngine)] == ([DropEngine(D1, ENGINE_ID)] * (engine_id == OTHER))
    assert sum(isinstance(one, Release) for one in done) == 1
