"""Parser of Prometheus text: what an engine says of itself on its `/metrics` page."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from .. import ranks

_OF_RANK = re.compile(r'^\w[\w:]*\{[^}\n]*\bengine="(\d+)"')


def page_of(body: bytes, url: str) -> str:
    """Of a server's page what is about the engine at `url`: without the other data-parallel ranks, where it names one."""
    page, rank = body.decode(errors="replace"), ranks.split(url)[1]
    if rank is None:
        return page
    return "\n".join(line for line in page.split("\n") if (found := _OF_RANK.match(line)) is None or found[1] == rank)


_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', re.MULTILINE)


def block_size_of(metrics: str) -> int | None:
    """The block size that an engine's `/metrics` page names."""
    found = _BLOCK_SIZE.search(metrics)
    return int(found[1]) if found else None


def kv_tokens_of(metrics: str) -> int | None:
    """How many tokens fit into the engine's KV cache, by its `/metrics` page. With data parallelism vLLM 0.32 writes the sum of
    `num_gpu_blocks` beside every rank, and what one rank has as `kv_cache_size_tokens` (v1/engine/core_client.py)."""
    lines = re.findall(r"^vllm:cache_config_info\{([^}]*)\}", metrics, re.MULTILINE)
    found = dict(re.findall(r'\b(block_size|num_gpu_blocks|kv_cache_size_tokens)="(\d+)"', lines[0] if lines else ""))
    if size := int(found.get("kv_cache_size_tokens", 0)):
        return size * len(lines)
    blocks = int(found.get("num_gpu_blocks", 0)) - len(lines)  # less the null block of each
    return blocks * int(found["block_size"]) if blocks > 0 and "block_size" in found else None


def ranks_of(metrics: str) -> frozenset[str]:
    """The data-parallel ranks that the engine's `/metrics` page shows; none for a single process."""
    ranks = frozenset(re.findall(r'^vllm:cache_config_info\{[^}]*\bengine="(\d+)"', metrics, re.MULTILINE))
    return ranks if len(ranks) > 1 else frozenset()


def has_plugin(metrics: str) -> bool:
    """Whether the engine's `/metrics` page says that our stream plugin is loaded."""
    return re.search(r'^backhaul_plugin_info\{version="1"\} 1', metrics, re.MULTILINE) is not None


def connector_of(metrics: str) -> int | None:
    """The version of our connector that the engine's `/metrics` page names, where it is one that this router speaks."""
    return 1 if re.search(r'^backhaul_connector_info\{version="1"\} 1', metrics, re.MULTILINE) else None


AUDITED = ("offered", "verified", "pulled")
"""Token counts that both a router and its prefill engines keep."""
_COUNTED = re.compile(
    rf"^backhaul_({'|'.join(AUDITED)})_tokens_total(?:\{{[^}}]*\}})? ([0-9.e+]+)$", re.MULTILINE | re.IGNORECASE
)


def connector_counters(metrics: str) -> dict[str, int]:
    """What the connector on this engine has counted since it started, over all data-parallel ranks."""
    counted: Counter[str] = Counter(dict.fromkeys(AUDITED, 0))
    for name, value in _COUNTED.findall(metrics):
        counted[name] += int(float(value))
    return dict(counted)


_START = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


def start_of(metrics: str) -> float | None:
    """When the process behind an engine's `/metrics` page began, in seconds since 1970 by its own clock."""
    found = _START.search(metrics)
    return float(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load of an engine by its `/metrics` page, over all data-parallel ranks."""

    running: float
    waiting: float
    kv_usage: float
    """0 to 1, the mean of the ranks."""


_KV_USAGE = "kv_cache_usage_perc"
_GAUGE = re.compile(
    rf"^vllm:(num_requests_running|num_requests_waiting|{_KV_USAGE})(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", re.MULTILINE
)


def _gauges(metrics: str) -> dict[str, list[float]]:
    """By name, what each rank says; empty where one of them is no number."""
    found: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(metrics):
        try:
            found.setdefault(name, []).append(float(value))
        except ValueError:
            return {}
    return found


def read_gauges(metrics: str) -> Gauges | None:
    """`None` when the page does not have them."""
    found = _gauges(metrics)
    if len(found) < 3:
        return None
    usage = found[_KV_USAGE]
    return Gauges(sum(found["num_requests_running"]), sum(found["num_requests_waiting"]), sum(usage) / len(usage))


def kv_usage_of(metrics: str) -> float | None:
    """`Gauges.kv_usage`, of a page that may not have the others."""
    usage = _gauges(metrics).get(_KV_USAGE)
    return sum(usage) / len(usage) if usage else None
