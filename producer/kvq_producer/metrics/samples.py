"""One value of a metric, before it is put into Prometheus' form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvq_producer.metrics.table import Metric


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A metric's value for some labels, in the order of the metric's.

    Of a histogram, `value` is the sum, and `classes` count by upper bound (not cumulated).
    """

    metric: Metric
    labels: tuple[str, ...] = ()
    value: float
    classes: Mapping[str, float] = field(default_factory=dict)
