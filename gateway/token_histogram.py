"""A histogram for what is observed with every token."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["TokenHistogram"]


class TokenHistogram(Collector):
    """Counts values by bucket and adds up only when Prometheus asks. Use it on one thread only.

    The histogram of prometheus_client takes a lock and looks at every bucket for each value.

    Args:
        name, text: of the metric.
        labels: of its one series.
        buckets: upper bounds, ascending; what is above all of them is counted besides.
    """

    def __init__(
        self, name: str, text: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        buckets, cumulative = [], 0
        bounds = (*(str(float(bound)) for bound in self._bounds), "+Inf")
        for bound, count in zip(bounds, self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family.add_metric(list(self._labels.values()), buckets, sum_value=self._sum)
        yield family
