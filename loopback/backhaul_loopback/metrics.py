"""Metrics: the engine's counters and our connector's, in the Prometheus text that vLLM serves under `/metrics`.

Names and labels are those of `v1/metrics/loggers.py` and of the NIXL connector's `stats.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from backhaul_protocol import VERSION

BYTES_PER_TOKEN = 2048
"""What one token's KV counts as in `nixl_bytes_transferred`."""


@dataclass
class Metrics:
    """Counted since the engine's start. Field names are vLLM's metric names without `vllm:` and `_total`."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_deferred: int = 0
    """Of those waiting: how many wait for a read."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    """Counted when the blocks are allocated, before the read succeeds."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    nixl_num_failed_transfers: int = 0
    nixl_num_failed_notifications: int = 0
    nixl_num_kv_expired_reqs: int = 0
    nixl_num_notifications_after_expiry: int = 0
    transfers: int = 0
    transferred_tokens: int = 0
    transfer_seconds: float = 0.0
    time_to_first_token_sum: float = 0.0
    time_to_first_token_count: int = 0
    request_success: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.time)
    """Seconds since 1970, whatever the engine's clock."""

    def exposition(
        self, *, model: str, usage: float, num_blocks: int, block_size: int, prefix_caching: bool, plugin: bool
    ) -> str:
        page = Page(model)
        page.raw(f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.began!r}\n")
        page.gauge("num_requests_running", self.num_requests_running)
        page.gauge("num_requests_waiting", self.num_requests_waiting)
        reasons = {
            "capacity": self.num_requests_waiting - self.num_requests_deferred,
            "deferred": self.num_requests_deferred,
        }
        page.family("num_requests_waiting_by_reason", "gauge", "reason", reasons)
        page.family(
            "engine_sleep_state", "gauge", "sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        )
        page.gauge("kv_cache_usage_perc", usage)
        for name in (
            "prefix_cache_queries",
            "prefix_cache_hits",
            "external_prefix_cache_queries",
            "external_prefix_cache_hits",
            "prompt_tokens",
            "generation_tokens",
            "nixl_num_failed_transfers",
            "nixl_num_failed_notifications",
            "nixl_num_kv_expired_reqs",
            "nixl_num_notifications_after_expiry",
        ):
            page.counter(name, getattr(self, name))
        page.counter("num_preemptions", 0)
        cached = self.local_cache_hit + self.external_kv_transfer
        page.counter("prompt_tokens_cached", cached)
        sources = {
            "local_compute": self.local_compute,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": self.external_kv_transfer,
        }
        page.family("prompt_tokens_by_source_total", "counter", "source", sources)
        tiers = {"device": self.local_cache_hit, "p2p": self.external_kv_transfer}
        page.family("prompt_tokens_cached_by_source_total", "counter", "source", tiers)
        outcomes = {reason: self.request_success[reason] for reason in ("stop", "length", "abort", "error")}
        page.family("request_success_total", "counter", "finished_reason", outcomes)
        page.histogram("nixl_bytes_transferred", self.transferred_tokens * BYTES_PER_TOKEN, self.transfers)
        page.histogram("nixl_xfer_time_seconds", self.transfer_seconds, self.transfers)
        page.histogram("time_to_first_token_seconds", self.time_to_first_token_sum, self.time_to_first_token_count)
        page.raw(
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="{block_size}",enable_prefix_caching="{prefix_caching}",engine="0",'
            f'num_gpu_blocks="{num_blocks}"}} 1.0\n'
        )
        if plugin:
            page.raw(f'# TYPE backhaul_plugin_info gauge\nbackhaul_plugin_info{{version="{VERSION}"}} 1.0\n')
        return page.text


@dataclass
class ConnectorMetrics:
    """Counted since the engine's start. Field names are the metric names without `backhaul_` and `_total`."""

    offered_tokens: int = 0
    verified_tokens: int = 0
    pulled_tokens: int = 0
    pulled_bytes: int = 0
    local_tokens: int = 0
    leases_ended: Counter[str] = field(default_factory=Counter)
    verifications: Counter[str] = field(default_factory=Counter)
    """P's side, one per request that brought a handle: `verified`, or why not."""
    claims: Counter[str] = field(default_factory=Counter)
    """D's side: `granted`, or why a read was fenced off."""

    def exposition(self, model: str, leases: int, leased_blocks: int, oldest_s: float) -> str:
        page = Page(model, prefix="backhaul_")
        page.raw(f'# TYPE backhaul_connector_info gauge\nbackhaul_connector_info{{version="{VERSION}"}} 1.0\n')
        page.gauge("leases", leases)
        page.gauge("leased_blocks", leased_blocks)
        page.gauge("oldest_lease_seconds", oldest_s)
        for name in ("offered_tokens", "verified_tokens", "pulled_tokens", "pulled_bytes", "local_tokens"):
            page.counter(name, getattr(self, name))
        for name, label in (("leases_ended", "how"), ("verifications", "outcome"), ("claims", "outcome")):
            page.family(f"{name}_total", "counter", label, getattr(self, name))
        return page.text


class Page:
    """Prometheus text, with vLLM's two labels on every sample."""

    def __init__(self, model: str, *, prefix: str = "vllm:") -> None:
        name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'engine="0",model_name="{name}"'
        self._prefix = prefix
        self.text = ""

    def raw(self, text: str) -> None:
        self.text += text

    def gauge(self, name: str, value: float) -> None:
        name = self._prefix + name
        self.raw(f"# TYPE {name} gauge\n{name}{{{self._labels}}} {float(value)!r}\n")

    def counter(self, name: str, value: float) -> None:
        name = self._prefix + name
        self.raw(f"# TYPE {name}_total counter\n{name}_total{{{self._labels}}} {float(value)!r}\n")

    def family(self, name: str, kind: str, label: str, values: Mapping[str, int]) -> None:
        name = self._prefix + name
        self.raw(f"# TYPE {name} {kind}\n")
        for key, value in values.items():
            self.raw(f'{name}{{{self._labels},{label}="{key}"}} {float(value)!r}\n')

    def histogram(self, name: str, total: float, count: int) -> None:
        name = self._prefix + name
        self.raw(
            f"# TYPE {name} histogram\n"
            f'{name}_bucket{{{self._labels},le="+Inf"}} {float(count)!r}\n'
            f"{name}_sum{{{self._labels}}} {float(total)!r}\n"
            f"{name}_count{{{self._labels}}} {float(count)!r}\n"
        )
