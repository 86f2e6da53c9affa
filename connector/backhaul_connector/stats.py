"""Metrics of an engine: vLLM's own NIXL numbers and ours, in one object that travels from workers and scheduler to /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backhaul_protocol import VERSION
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

COUNTS = "backhaul_counts"
"""Entries are [metric, value of its label or "", how many]."""
GAUGES = "backhaul_gauges"
"""Entries are [leases, leased blocks, age of the oldest lease in seconds], the newest last."""

LABELLED: Mapping[str, tuple[str, str]] = {
    "backhaul_leases_ended": ("how", "Leases that have ended: read, released, expired, evicted or flushed."),
    "backhaul_verifications": ("outcome", "Handles offered to this engine: verified, or why nothing was read."),
    "backhaul_claims": ("outcome", "Claims on this engine's leases: granted, or why a read was fenced off."),
}
PLAIN: Mapping[str, str] = {
    "backhaul_offered_tokens": "Tokens that offered handles cover.",
    "backhaul_verified_tokens": "Tokens that offered handles have in common with the prompt they came with.",
    "backhaul_pulled_tokens": "Tokens whose KV was read from a decode engine.",
    "backhaul_pulled_bytes": "Bytes of KV that were read from a decode engine.",
    "backhaul_local_tokens": "Prompt tokens that this engine's own prefix cache had.",
}


class BackhaulStats(NixlKVConnectorStats):  # type: ignore[misc]
    def reset(self) -> None:
        super().reset()
        self.data[COUNTS] = []
        self.data[GAUGES] = []

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data[COUNTS] and not self.data[GAUGES]

    @classmethod
    def of(cls, counts: Mapping[tuple[str, str], float], gauges: tuple[int, int, float] | None) -> BackhaulStats:
        stats = cls()
        stats.data[COUNTS] = [[metric, str(label), value] for (metric, label), value in counts.items()]
        stats.data[GAUGES] = [list(gauges)] if gauges is not None else []
        return stats


class BackhaulMetrics(NixlPromMetrics):  # type: ignore[misc]
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labelled = {
            name: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label])
            for name, (label, text) in LABELLED.items()
        }
        plain = {
            name: self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for name, text in PLAIN.items()
        }
        gauges = [
            self._gauge(name, text, labelnames)
            for name, text in (
                ("backhaul_leases", "Leases that this engine keeps."),
                ("backhaul_leased_blocks", "KV blocks that leases pin."),
                ("backhaul_oldest_lease_seconds", "Age of the oldest lease."),
            )
        ]
        self._plain = {
            (name, engine): metric.labels(*values)
            for name, metric in plain.items()
            for engine, values in per_engine_labelvalues.items()
        }
        self._gauges = {
            engine: [gauge.labels(*values) for gauge in gauges] for engine, values in per_engine_labelvalues.items()
        }
        self._gauge("backhaul_connector_info", "Version of Backhaul's additions to handles.", ["version"]).labels(
            str(VERSION)
        ).set(1)

    def _gauge(self, name: str, text: str, labelnames: list[str]) -> Any:
        return self._gauge_cls(name=name, documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for name, label, value in transfer_stats_data.get(COUNTS, ()):
            if name in self._labelled:
                self._labelled[name].labels(*self.per_engine_labelvalues[engine_idx], label).inc(value)
            else:
                self._plain[name, engine_idx].inc(value)
        for newest in transfer_stats_data.get(GAUGES, ())[-1:]:
            for gauge, value in zip(self._gauges[engine_idx], newest, strict=True):
                gauge.set(value)
