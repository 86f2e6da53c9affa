"""Adapter to vLLM's worker: does what the scheduler's lease table says, and trusts no read that came too late."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from .holds import Holds, Moment
from .stats import BackhaulStats


@dataclass
class Orders:
    """What the scheduler adds to one step's metadata, as its attribute `backhaul`."""

    end: frozenset[str] = frozenset()
    """Leases whose blocks are to be reported as sent, which frees them."""
    keep: frozenset[str] = frozenset()
    """Leases that a reader's notification does not end."""
    holds: dict[str, float] = field(default_factory=dict)
    """For reads that begin in this step: in how many seconds after `sent` the other engine may take the blocks back."""
    sent: Moment = field(default_factory=Moment.now)


class BackhaulWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with _own_cores():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self.xfer_stats = BackhaulStats()
        self._kept: set[str] = set()
        self._to_end: set[str] = set()
        self._holds = Holds()
        self.nixl_wrapper: Any = _Notifications(self.nixl_wrapper, self._kept)

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        orders: Orders | None = getattr(metadata, "backhaul", None)
        if orders is not None:
            self._kept |= orders.keep
            self._holds.begin(orders.holds, orders.sent.age_s(Moment.now()))
        self._kept -= metadata.reqs_not_processed
        super().start_load_kv(metadata)
        if orders is not None:
            self._kept &= self._reqs_to_process  # a lease that a stock engine's read has ended on the way
            self._to_end |= orders.end

    def _get_new_notifs(self) -> set[str]:
        done: set[str] = super()._get_new_notifs()
        for lease in self._to_end & self._reqs_to_send.keys():
            del self._reqs_to_send[lease]
            self._reqs_to_process.discard(lease)
            self.consumer_notification_counts_by_req.pop(lease, None)
            self.expected_consumer_notifications_by_req.pop(lease, None)
            done.add(lease)
        self._to_end.clear()
        self._kept -= done
        return done

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """A read that ends after its hold counts as failed."""
        done, failed = super()._pop_done_transfers(transfers)
        return done, failed | self._holds.late(done, self._recving_metadata)


class _Notifications:
    """NIXL's agent, without the notifications that leases are kept from."""

    def __init__(self, agent: Any, kept: set[str]) -> None:
        self._agent = agent
        self._kept = kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        if not self._kept or not arrived:
            return arrived
        return {peer: [n for n in notes if not self._ends_kept(n)] for peer, notes in arrived.items()}

    def _ends_kept(self, notification: bytes) -> bool:
        return not notification.startswith(b"HB:") and notification.rpartition(b":")[0].decode() in self._kept


@contextlib.contextmanager
def _own_cores() -> Iterator[None]:
    """Undoes what vLLM's worker does on CPUs: it pins itself to the last core of each NUMA node, and with it all engines of
    a machine to the same core (0.32, nixl/base_worker.py)."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    yield
    if before is not None and os.sched_getaffinity(0) != before:
        os.sched_setaffinity(0, before)
