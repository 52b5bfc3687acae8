"""Samples in Prometheus' form, gathered anew for each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from kvq.errors import QueueUnavailable
from kvq.queue.connection import connect, queue_errors
from kvq.queue.tally import KL_BOUNDS
from kvq_producer.metrics import table
from kvq_producer.metrics.files import StoreFigures
from kvq_producer.metrics.queue import queue_samples
from kvq_producer.metrics.samples import Sample
from kvq_producer.metrics.table import METRICS, Kind

#: How long (seconds) a scrape waits for a Redis that is gone.
_PATIENCE = 2.0


class KvqCollector(Collector):
    """Figures of `queues` in the Redis at `url`, and of `stores`."""

    def __init__(
        self, url: str, queues: Sequence[str], stores: Sequence[StoreFigures], version: str
    ) -> None:
        self._url = url
        self._queues = tuple(queues)
        self._stores = tuple(stores)
        self._version = version
        self._connection: Any = None

    def collect(self) -> Iterator[Metric]:
        """All families that have a value now."""
        samples = [
            *self._of_redis(),
            *(sample for store in self._stores for sample in store.samples()),
            Sample(metric=table.BUILD, labels=(self._version,), value=1),
        ]
        yield from families(samples)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering does not need a Redis that answers."""
        return iter(())

    def _of_redis(self) -> list[Sample]:
        try:
            if self._connection is None:
                self._connection = connect(self._url, patience=_PATIENCE)
            with queue_errors(self._url):
                found = [
                    one for queue in self._queues for one in queue_samples(self._connection, queue)
                ]
        except QueueUnavailable:
            return [Sample(metric=table.REDIS_UP, value=0)]
        # Figures that no queue owns come with each.
        seen = {(one.metric.name, one.labels): one for one in found}
        return [Sample(metric=table.REDIS_UP, value=1), *seen.values()]


def registry(collector: KvqCollector) -> CollectorRegistry:
    """A registry with kvq's metrics alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(collector)
    return made


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """The samples by metric, in the table's order."""
    of_metric: dict[str, list[Sample]] = {}
    for one in samples:
        of_metric.setdefault(one.metric.name, []).append(one)
    for metric in METRICS:
        found = of_metric.get(metric.name)
        if found:
            yield _MAKE[metric.kind](metric, found)


def _gauge(metric: table.Metric, samples: list[Sample]) -> Metric:
    family = GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
    for one in samples:
        family.add_metric(one.labels, one.value)
    return family


def _counter(metric: table.Metric, samples: list[Sample]) -> Metric:
    family = CounterMetricFamily(metric.name, metric.doc, labels=metric.labels)
    for one in samples:
        family.add_metric(one.labels, one.value)
    return family


def _histogram(metric: table.Metric, samples: list[Sample]) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
    for one in samples:
        buckets, below = [], 0.0
        for bound in (*(f"{bound:g}" for bound in KL_BOUNDS), "+Inf"):
            below += one.classes.get(bound, 0.0)
            buckets.append((bound, below))
        family.add_metric(one.labels, buckets, sum_value=one.value)
    return family


_MAKE: dict[Kind, Callable[[table.Metric, list[Sample]], Metric]] = {
    Kind.GAUGE: _gauge,
    Kind.COUNTER: _counter,
    Kind.HISTOGRAM: _histogram,
}
