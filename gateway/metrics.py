"""Numbers for Prometheus: what requests experienced, and what the engine counts.

Owns: a registry of its own, so that several gateways can live in one process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway.config import METRICS_PREFIX
from gateway.timing import Timing
from gateway.token_histogram import TokenHistogram
from jaxengine.stats import ITERATION_TOKEN_BUCKETS, STEP_TIME_BUCKETS, EngineStats

__all__ = ["Metrics", "Outcome"]

Outcome = Literal["stop", "length", "abort", "error", "queue_timeout", "deadline"]

# Half a millisecond to ten minutes: small models decode in 2 to 5 ms, queues can take minutes.
LATENCY_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(5) for m in (1, 2, 5))

# What waiting requests wait for, as in jaxengine.step_log.StepRecord, so that each has its series
# from the start.
WAITING_REASONS = ("seqs", "kv_cache", "tokens", "batch", "preemption")

# Our names, and vLLM's where the meaning is the same.
VLLM_NAMES = {
    "num_requests_running": "num_requests_running",
    "num_requests_waiting": "num_requests_waiting",
    "kv_cache_usage_ratio": "kv_cache_usage_perc",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    "requests_finished": "request_success",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "e2e_request_latency_seconds",
    "request_queue_time_seconds": "request_queue_time_seconds",
    "request_prefill_time_seconds": "request_prefill_time_seconds",
    "request_decode_time_seconds": "request_decode_time_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "iteration_tokens": "iteration_tokens_total",
}

# vLLM's labels of `cache_config_info`, by the gauges of ours that have the same numbers.
CACHE_CONFIG_LABELS = {"kv_block_size": "block_size", "kv_blocks": "num_gpu_blocks"}


class Metrics:
    """All metrics of one gateway and its engine, each labelled with `model_name`.

    Args:
        model_name: the label.
        prefix: "headrace", or "vllm" to export vLLM's names as well.

    Attributes:
        observe_inter_token_latency: takes the seconds between two tokens of a request.
        websockets_open: gauge for the websocket handler to move.
        streams_waiting, resume_bytes: gauges of the streams that can be resumed.
    """

    def __init__(self, model_name: str, *, prefix: str = METRICS_PREFIX) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._families: list[Collector] = []
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token, queue included."
        )
        inter_token_latency = TokenHistogram(
            f"{METRICS_PREFIX}_inter_token_latency_seconds",
            "Between two tokens of one request.",
            self._labels,
            LATENCY_BUCKETS,
        )
        self.observe_inter_token_latency = inter_token_latency.observe
        self._families.append(inter_token_latency)
        self._registry.register(inter_token_latency)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first."
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step that scheduled it."
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first scheduled step to the first token."
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last."
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKEN_BUCKETS
        )
        self._finished = self._counter(
            "requests_finished", "Requests that ended, by reason.", "finished_reason"
        )
        self._rejected = self._counter(
            "requests_rejected", "Requests that were refused, by reason.", "reason"
        )
        self.websockets_open = self._gauge("websockets_open", "Open websocket connections.")
        self.streams_waiting = self._gauge(
            "streams_waiting_for_resume", "Streams that have lost their connection, or ended on it."
        )
        self.resume_bytes = self._gauge(
            "resume_bytes",
            "Output kept of streams to send it again after their connection is lost.",
        )
        if prefix == "vllm":
            self._registry.register(_VllmNames(self._families))

    def watch_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Export an engine's counters, read at each scrape."""
        collector = _EngineCollector(stats, self._labels)
        self._families.append(collector)
        self._registry.register(collector)

    def watch(self, collector: Collector) -> None:
        """Export what somebody else collects, at each scrape."""
        self._registry.register(collector)

    def observe_request(
        self,
        outcome: Outcome,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        timing: Timing,
    ) -> None:
        """Count one request that ended, once. Latencies of its tokens are observed as they come."""
        self._finished.labels(**self._labels, finished_reason=outcome).inc()
        self._request_prompt_tokens.observe(prompt_tokens)
        self._request_generation_tokens.observe(completion_tokens)
        self._queue.observe(timing.queue_s)
        self._e2e.observe(timing.e2e_s)
        if timing.ttft_s is not None:
            self._ttft.observe(timing.ttft_s)
            self._prefill.observe(timing.prefill_s)
            self._decode.observe(timing.decode_s)
        if completion_tokens > 1:
            self._tpot.observe(timing.decode_s / (completion_tokens - 1))

    def count_rejection(self, reason: str) -> None:
        """Count a refused request; `reason` is one of few fixed words, never client text."""
        self._rejected.labels(**self._labels, reason=reason).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type, in the format that the scraper accepts."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        histogram = Histogram(
            f"{METRICS_PREFIX}_{name}",
            text,
            ["model_name"],
            buckets=buckets,
            registry=self._registry,
        )
        self._families.append(histogram)
        return histogram.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"{METRICS_PREFIX}_{name}", text, ["model_name"], registry=self._registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        counter = Counter(
            f"{METRICS_PREFIX}_{name}", text, ["model_name", label], registry=self._registry
        )
        self._families.append(counter)
        return counter


class _EngineCollector(Collector):
    """Reads the engine's snapshot when Prometheus asks."""

    def __init__(self, stats: Callable[[], EngineStats], labels: dict[str, str]) -> None:
        self._stats = stats
        self._names = list(labels)
        self._values = list(labels.values())

    def describe(self) -> Iterable[Metric]:
        return []  # so that registering does not read the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Requests that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait.", stats.num_waiting)
        yield self._waiting_by_reason(stats)
        yield self._gauge(
            "num_waiting_tokens", "Tokens that waiting requests need.", stats.num_waiting_tokens
        )
        yield self._gauge(
            "kv_cache_usage_ratio", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage
        )
        yield self._gauge("kv_blocks", "KV blocks that requests can use.", stats.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that nobody uses.", stats.num_free_blocks)
        yield self._gauge(
            "kv_blocks_cached", "Free KV blocks that hold a prefix.", stats.num_cached_blocks
        )
        yield self._gauge("kv_block_size", "Tokens per KV block.", stats.block_size)
        yield self._gauge(
            "compiles_after_ready", "Programs compiled after start-up.", stats.compiles_after_ready
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits)
        yield self._counter(
            "preemptions", "Times a request gave way to another.", stats.num_preemptions
        )
        yield self._counter(
            "steps_overtaken",
            "Times a step was run before the rest of others.",
            stats.num_steps_overtaken,
        )
        yield self._counter("requests_received", "Requests taken over.", stats.num_received)
        yield self._counter("requests_admitted", "Requests that have started.", stats.num_admitted)
        yield self._counter(
            "prompt_tokens_received", "Tokens of their prompts.", stats.tokens_received
        )
        yield self._counter(
            "prompt_tokens_admitted", "Tokens of the prompts that started.", stats.tokens_admitted
        )
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Sampled tokens.", stats.generation_tokens)
        yield self._counter("draft_tokens", "Guessed tokens computed.", stats.draft_tokens)
        yield self._counter(
            "accepted_draft_tokens", "Those that were right.", stats.accepted_draft_tokens
        )
        yield self._counter("engine_steps", "Passes of the engine.", stats.num_steps)
        yield self._counter("engine_busy_seconds", "Time with a step in flight.", stats.step_busy_s)
        yield self._counter(
            "device_idle_seconds",
            "Time without a step on the device while there were requests.",
            stats.device_idle_s,
        )
        yield self._counter("step_failures", "Steps that raised.", stats.num_step_failures)
        yield self._counter("engine_stalls", "Times that no step ended for long.", stats.num_stalls)
        yield self._wasted_slots(stats)
        yield self._histogram(
            "iteration_tokens",
            "Tokens scheduled per step.",
            zip((*ITERATION_TOKEN_BUCKETS, math.inf), stats.iteration_tokens, strict=True),
            stats.iteration_tokens_sum,
        )
        yield self._histogram(
            "step_time_seconds",
            "Time of a step on the device.",
            zip((*STEP_TIME_BUCKETS, math.inf), stats.step_times, strict=True),
            stats.step_time_sum_s,
        )
        yield self._counter(
            "step_predictions", "Steps whose time was predicted.", stats.num_predicted_steps
        )
        yield self._counter(
            "step_prediction_error_seconds",
            "Sum of the absolute errors of those predictions.",
            stats.step_prediction_error_s,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{METRICS_PREFIX}_{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{METRICS_PREFIX}_{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _waiting_by_reason(self, stats: EngineStats) -> Metric:
        """All that wait, once each: the preempted, and the others by what the first waits for."""
        family = GaugeMetricFamily(
            f"{METRICS_PREFIX}_num_requests_waiting_by_reason",
            "Requests that wait, by what for.",
            labels=[*self._names, "reason"],
        )
        counts = dict.fromkeys((*WAITING_REASONS, "arrival"), 0)
        reason = stats.waiting_for or "arrival"  # no step has looked at them yet
        counts[reason] = stats.num_waiting - stats.num_preempted
        counts["preempted"] = stats.num_preempted
        for reason, count in counts.items():
            family.add_metric([*self._values, reason], count)
        return family

    def _wasted_slots(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            f"{METRICS_PREFIX}_wasted_slots",
            "Token slots computed for nothing, by cause.",
            labels=[*self._names, "cause"],
        )
        for cause, count in (
            ("bucket", stats.padded_tokens),
            ("prompt_padding", stats.wasted_prompt_slots),
            ("finished_row", stats.wasted_row_slots),
        ):
            family.add_metric([*self._values, cause], count)
        return family

    def _histogram(
        self, name: str, text: str, counts: Iterable[tuple[float, int]], total: float
    ) -> Metric:
        """Return a histogram of steps from the count in each bucket, by its upper bound."""
        family = HistogramMetricFamily(f"{METRICS_PREFIX}_{name}", text, labels=self._names)
        cumulative = 0
        buckets = []
        for bound, count in counts:
            cumulative += count
            buckets.append(("+Inf" if bound == math.inf else str(float(bound)), cumulative))
        family.add_metric(self._values, buckets, sum_value=total)
        return family


class _VllmNames(Collector):
    """The same numbers once more under vLLM's names, for existing dashboards and routers."""

    def __init__(self, sources: list[Collector]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        sizes: dict[str, Sample] = {}
        for source in self._sources:
            for family in source.collect():
                ours = family.name.removeprefix(f"{METRICS_PREFIX}_")
                if ours in VLLM_NAMES:
                    yield _renamed(family, f"vllm:{VLLM_NAMES[ours]}")
                if ours in CACHE_CONFIG_LABELS:
                    sizes[ours] = family.samples[0]
        if sizes:
            yield _cache_config_info(sizes)


def _cache_config_info(sizes: dict[str, Sample]) -> Metric:
    """Return the sizes of the KV cache as routers read them: in labels."""
    labels = {CACHE_CONFIG_LABELS[ours]: f"{sample.value:.0f}" for ours, sample in sizes.items()}
    [model_name] = {sample.labels["model_name"] for sample in sizes.values()}
    info = Metric("vllm:cache_config_info", "Sizes of the KV cache.", "gauge")
    info.add_sample(info.name, {**labels, "model_name": model_name, "engine": "0"}, 1.0)
    return info


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [
        Sample(
            name + sample.name.removeprefix(family.name),
            {**sample.labels, "engine": "0"},
            sample.value,
        )
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return copy
