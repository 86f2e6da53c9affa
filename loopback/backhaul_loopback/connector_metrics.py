"""Metrics: the connector's own series on an engine's `/metrics`, beside vLLM's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from backhaul_protocol import VERSION

from .metrics import Page


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
