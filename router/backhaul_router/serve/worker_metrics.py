"""`/metrics` of all workers of a server: a scrape reaches one of them, which asks its siblings.

Each worker's series have a label `worker`. They are not added up: a worker that is started anew counts from 0 again, which
Prometheus makes good series by series, and would take for growth in a sum. Needs the extra `server`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .metrics import PREFIX
from .siblings import Worker

LABEL = "worker"


def families_of(registry: CollectorRegistry) -> list[Any]:
    """A worker's series as MessagePack types."""
    return [
        [one.name, one.documentation, one.type, [[sample.name, sample.labels, sample.value] for sample in one.samples]]
        for one in registry.collect()
    ]


def page(accept: str, of_workers: dict[int, list[Any]], workers: Iterable[Worker]) -> tuple[bytes, str]:
    """The text and its content type, of what `families_of` gave for each worker."""
    encode, content_type = choose_encoder(accept)
    return encode(cast("CollectorRegistry", _All(of_workers, workers))), content_type


class _All(Collector):
    """All that an encoder wants of a registry."""

    def __init__(self, of_workers: dict[int, list[Any]], workers: Iterable[Worker]) -> None:
        self._of_workers = of_workers
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for worker, read in sorted(self._of_workers.items()):
            for name, text, type_, samples in read:
                family = families.setdefault(name, Metric(name, text, type_))
                for sample, labels, value in samples:
                    family.add_sample(sample, {**labels, LABEL: str(worker)}, value)
        yield from families.values()
        up = GaugeMetricFamily(f"{PREFIX}_worker_up", "1 for a worker whose series are here.", labels=[LABEL])
        restarts = CounterMetricFamily(f"{PREFIX}_worker_restarts", "Times that it was started anew.", labels=[LABEL])
        for one in self._workers:
            up.add_metric([str(one.worker)], int(one.worker in self._of_workers))
            if one.restarts is not None:
                restarts.add_metric([str(one.worker)], one.restarts)
        yield up
        yield restarts
