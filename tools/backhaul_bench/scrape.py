"""Scraping of metrics: what an engine's /metrics says of the turn that it has just run, by the difference of two readings.

vLLM adds up the time of NIXL reads (`vllm:nixl_xfer_time_seconds`) and the time from a request's scheduling to its first token
(`vllm:request_prefill_time_seconds`). It renews both when its engine core steps, so the second reading waits for that.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Mapping

import httpx2

_WAIT_S = 2.0
_SAMPLE = re.compile(r"^vllm:(nixl_xfer_time_seconds|request_prefill_time_seconds)_(sum|count)(?:\{.*\})? (\S+)$", re.M)


READ, COMPUTE = "nixl_xfer_time_seconds", "request_prefill_time_seconds"
Times = Mapping[tuple[str, str], float]
"""By what was done: `sum`, in seconds since the engine's start, and `count`."""


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=30.0, trust_env=False)


async def times(http: httpx2.AsyncClient, url: str) -> Times:
    answer = await http.get(f"{url}/metrics")
    answer.raise_for_status()
    found: dict[tuple[str, str], float] = defaultdict(float)
    for name, kind, value in _SAMPLE.findall(answer.text):
        found[name, kind] += float(value)
    return found


async def spent_ms(http: httpx2.AsyncClient, url: str, what: str, before: Times) -> float | None:
    """Milliseconds that the engine has spent since `before` on what `READ` or `COMPUTE` names; `None` if it does not say so in
    time."""
    deadline = time.monotonic() + _WAIT_S
    while (now := await times(http, url))[what, "count"] <= before[what, "count"]:
        if time.monotonic() > deadline:
            return None
        await asyncio.sleep(0.02)
    return (now[what, "sum"] - before[what, "sum"]) * 1e3
