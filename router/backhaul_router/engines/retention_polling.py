"""Polling of how much decode engines keep: by their leases, or by how full their KV cache is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from backhaul_protocol.leases import LeaseOperation

from ..errors import LeaseError
from ..fleet.engine import Engine
from ..fleet.fleet import Fleet
from ..wire.engine_metrics import kv_usage_of, page_of
from .client import EngineCall, EngineClient, EngineFailure
from .leases import Leases

log = logging.getLogger("backhaul")

_TIMEOUT_S = 5.0


async def poll_retention(client: EngineClient, fleet: Fleet, leases: Leases, decodes: Iterable[str]) -> None:
    """Tells `fleet.retention` what these keep, those that say it."""
    engines = [engine for url in decodes if (engine := fleet.get(url)) is not None]
    await asyncio.gather(*(_poll(client, fleet, leases, engine) for engine in engines))


async def _poll(client: EngineClient, fleet: Fleet, leases: Leases, engine: Engine) -> None:
    try:
        kept = await (_usage(client, fleet, engine) if engine.connector is None else _leased(fleet, leases, engine))
    except (EngineFailure, LeaseError) as error:
        log.info("%s did not say how much it keeps: %s", engine, error)
    else:
        if kept is not None:
            fleet.retention.note_kept(engine.url, kept)


async def _leased(fleet: Fleet, leases: Leases, engine: Engine) -> int | None:
    """Tokens in blocks that leases keep, each block counted once."""
    answers = await asyncio.gather(
        *(leases.operate(holder, LeaseOperation()) for holder in fleet.restarts.holders(engine))
    )
    if engine.block_size is None or any(answer.blocks is None for answer in answers):
        return None
    return sum(answer.blocks or 0 for answer in answers) * engine.block_size


async def _usage(client: EngineClient, fleet: Fleet, engine: Engine) -> int | None:
    """Tokens that are neither free nor prompts of this router's turns: an upper bound, with what those have answered so far,
    and with all that runs for others."""
    answer = await client.call(EngineCall(f"{engine.url}/metrics", timeout_s=_TIMEOUT_S))
    usage = kv_usage_of(page_of(answer.body, engine.url))
    if answer.status != 200 or engine.kv_tokens is None or usage is None:
        return None
    return max(0, round(usage * engine.kv_tokens) - fleet.retention.running(engine.url))
