"""Scraping of metrics: what an engine's /metrics says of the turn that it has just run, by the difference of two readings.

vLLM adds up the time of NIXL reads (`vllm:nixl_xfer_time_seconds`) and the time from a request's scheduling to its first token
(`vllm:request_prefill_time_seconds`). It renews both when its engine core steps, so the second reading waits for that.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

import httpx2

_WAIT_S = 2.0
_SAMPLE = re.compile(r"^vllm:(nixl_xfer_time_seconds|request_prefill_time_seconds)_(sum|count)(?:\{.*\})? (\S+)$", re.M)


@dataclass(frozen=True)
class Times:
    """Sums since the engine's start, in seconds, and of how many."""

    read_s: float
    reads: int
    compute_s: float
    prefills: int


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=30.0, trust_env=False)


async def times(http: httpx2.AsyncClient, url: str) -> Times:
    answer = await http.get(f"{url}/metrics")
    answer.raise_for_status()
    found: dict[tuple[str, str], float] = {}
    for name, kind, value in _SAMPLE.findall(answer.text):
        found[name, kind] = found.get((name, kind), 0.0) + float(value)
    read, compute = "nixl_xfer_time_seconds", "request_prefill_time_seconds"
    return Times(
        read_s=found.get((read, "sum"), 0.0),
        reads=int(found.get((read, "count"), 0)),
        compute_s=found.get((compute, "sum"), 0.0),
        prefills=int(found.get((compute, "count"), 0)),
    )


async def read_ms(http: httpx2.AsyncClient, url: str, before: Times) -> float | None:
    """Milliseconds that the engine has spent on reads since `before`; `None` if it does not say so in time."""
    deadline = time.monotonic() + _WAIT_S
    while (now := await times(http, url)).reads <= before.reads:
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.02)
    return (now.read_s - before.read_s) * 1e3


async def compute_ms(http: httpx2.AsyncClient, url: str, before: Times) -> float | None:
    """Milliseconds that the engine has spent on prefilling since `before`; `None` if it does not say so in time."""
    deadline = time.monotonic() + _WAIT_S
    while (now := await times(http, url)).prefills <= before.prefills:
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.02)
    return (now.compute_s - before.compute_s) * 1e3
