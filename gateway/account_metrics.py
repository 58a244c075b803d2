"""What each key has used, for Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.accounts import Account, UsageSoFar
from gateway.config import METRICS_PREFIX

__all__ = ["AccountCollector"]


COUNTERS: tuple[tuple[str, str, Callable[[UsageSoFar], float]], ...] = (
    ("key_requests", "Requests of a key.", lambda usage: usage.num_requests),
    ("key_requests_refused", "Its refused requests.", lambda usage: usage.num_refused),
    ("key_prompt_tokens", "Its prompt tokens.", lambda usage: usage.prompt_tokens),
    ("key_cached_tokens", "Of these, found in the cache.", lambda usage: usage.cached_tokens),
    ("key_generation_tokens", "Tokens sampled for it.", lambda usage: usage.completion_tokens),
    ("key_busy_seconds", "Time that its requests ran.", lambda usage: usage.busy_s),
)


class AccountCollector(Collector):
    """Reads all accounts when Prometheus asks; the label `key` is the key's name.

    Only keys of the file have an account, so nobody can make up series.
    """

    def __init__(self, accounts: Callable[[], Sequence[Account]], model_name: str) -> None:
        self._accounts = accounts
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        accounts = self._accounts()
        running = GaugeMetricFamily(
            f"{METRICS_PREFIX}_key_requests_running",
            "Requests of a key that wait or run.",
            labels=["model_name", "key"],
        )
        for account in accounts:
            running.add_metric([self._model_name, account.name], account.num_running)
        yield running
        for name, text, read in COUNTERS:
            family = CounterMetricFamily(
                f"{METRICS_PREFIX}_{name}", text, labels=["model_name", "key"]
            )
            for account in accounts:
                family.add_metric([self._model_name, account.name], read(account.usage))
            yield family
