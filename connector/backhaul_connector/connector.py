"""KV connector for vLLM, `BackhaulConnector`: the NIXL pull connector with leases, and reads proven before they happen.

Loaded by vLLM through `--kv-transfer-config`:

    {"kv_connector": "BackhaulConnector", "kv_connector_module_path": "backhaul_connector.connector",
     "kv_role": "kv_producer" | "kv_consumer", "kv_load_failure_policy": "recompute"}

on prefill and decode engines alike. What it adds to handles and answers, and its settings, are in docs/connector.md.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from . import compat, settings
from .scheduler_side import BackhaulScheduler
from .stats import BackhaulMetrics, BackhaulStats
from .vllm_patches import idle
from .worker_side import BackhaulWorker

__all__ = ["BackhaulConnector"]

logger = logging.getLogger("vllm.backhaul_connector")


class BackhaulConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `compat.IncompatibleEngine` or `settings.BadSetting` where this engine could not be trusted with it."""
        compat.check()
        compat.check_hashes(vllm_config.cache_config.prefix_caching_hash_algo)
        transfer = vllm_config.kv_transfer_config
        transfer.kv_connector_extra_config.setdefault("bidirectional_kv_xfer", True)
        own = settings.read(transfer.kv_connector_extra_config)
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            self.connector_worker = BackhaulWorker(vllm_config, self.engine_id, kv_cache_config)
            return
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                'Backhaul: kv_load_failure_policy is "%s", so a read that fails will be an error 500: "recompute" is safe'
                " with this connector",
                transfer.kv_load_failure_policy,
            )
        if transfer.kv_role == "kv_producer" and transfer.kv_connector_extra_config["bidirectional_kv_xfer"]:
            # This engine reads as well. With overlapping steps vLLM keeps a freed block from being read into while a step
            # may still write to it, but on consumers only (0.32, scheduler.py, `defer_block_free`), which it decides next.
            transfer.kv_role = "kv_both"
        self.connector_scheduler = BackhaulScheduler(vllm_config, self.engine_id, kv_cache_config, own)
        from vllm.v1.engine.core import EngineCoreProc

        idle.install(EngineCoreProc, _rests, _end_leases)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self.connector_scheduler.bind_block_pool(gpu_block_pool)

    def reset_cache(self) -> bool:
        self.connector_scheduler.reset_cache()
        return True

    def get_kv_connector_stats(self) -> Any:
        if self.connector_scheduler is not None:
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BackhaulStats:
        return BackhaulStats() if data is None else BackhaulStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BackhaulMetrics:
        return BackhaulMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _rests(scheduler: Any) -> bool:
    connector = scheduler.connector
    return isinstance(connector, BackhaulConnector) and connector.connector_scheduler.rests()


def _end_leases(scheduler: Any) -> None:
    if isinstance(scheduler.connector, BackhaulConnector):
        scheduler.connector.reset_cache()
