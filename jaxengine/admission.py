"""Whether a request may join the queue: bounds, and a prediction of how long it would wait."""

import math
from collections.abc import Mapping, Sequence

from jaxengine.config import EngineConfig
from jaxengine.errors import QueueFullError
from jaxengine.stats import EngineStats
from jaxengine.token_engine import TokenRequest

__all__ = ["Admission"]

# Drain rates are measured over at least so long, and forgotten over so long.
SAMPLE_S = 0.25
MEMORY_S = 10.0

# Rows turn over in waves: requests that start together end at about the same time, a whole batch
# of a static server does. So the memory also spans so many turns of all rows.
MEMORY_TURNS = 2

# What a refused caller is told to wait, at least and at most.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0

# Tenants below their share of a full queue may still join, up to so many times its bound.
MOST_OVERFLOW = 2


class Admission:
    """Counts what was let in, and refuses what the queue cannot hold or would not serve in time.

    How long the queue takes is learned from how fast it drained lately, in requests and in prompt
    tokens, whatever the bottleneck is: rows, blocks, or time.

    The bounds are for all tenants together. Once they are reached, with `fair` scheduling, a
    tenant that holds less than its share may still join: one that floods the queue shuts out
    itself only.

    Owns: the loop's view of the backlog. The engine's own counts arrive with each step; what was
    let in since is in its inbox.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        self._config = config
        self._stats = stats
        self._tokens_accepted = 0
        self._tenant_of: dict[str, str] = {}
        self._num_present: dict[str, int] = {}  # requests of each tenant
        self._weights = dict(config.tenant_weights)
        self._total_weight = 0.0
        self._sample = stats
        self._sampled_s = 0.0
        self._requests_per_s = 0.0
        self._tokens_per_s = 0.0

    def note(self, stats: EngineStats, now_s: float) -> None:
        """Take note of the state after a step."""
        self._stats = stats
        elapsed_s = now_s - self._sampled_s
        if elapsed_s < SAMPLE_S and self._sample.num_waiting:
            return
        if self._sample.num_waiting and stats.num_waiting:
            # Only a queue that stood all the time says how fast queues drain.
            # What was known is never quite forgotten: after a standstill the rates are low, not 0.
            keep = math.exp(-elapsed_s / self._memory_s()) if self._requests_per_s else 0.0
            requests = stats.num_admitted - self._sample.num_admitted
            tokens = stats.tokens_admitted - self._sample.tokens_admitted
            self._requests_per_s += (1 - keep) * (requests / elapsed_s - self._requests_per_s)
            self._tokens_per_s += (1 - keep) * (tokens / elapsed_s - self._tokens_per_s)
        self._sample, self._sampled_s = stats, now_s

    def _memory_s(self) -> float:
        return max(MEMORY_S, MEMORY_TURNS * self._config.max_num_seqs / self._requests_per_s)

    def queue_timeout_s(self, request: TokenRequest) -> float | None:
        """Return how long the request may wait."""
        own = request.queue_timeout_s
        return self._config.queue_timeout_s if own is None else own

    def predicted_wait_s(self, tenant: str) -> float:
        """Return how long a request that joins now will wait; 0 if nothing is known."""
        if self._num_queued < self._num_free_rows:
            return 0.0
        waits_s = [
            count / rate
            for count, rate in (
                (self._num_queued, self._requests_per_s),
                (self._tokens_queued, self._tokens_per_s),
            )
            if rate > 0
        ]
        wait_s = max(waits_s, default=0.0)
        if self._config.scheduling_policy == "fair" and self._requests_per_s > 0:
            # A tenant waits behind its own requests; the others' take their share of the time.
            own_rate = self._requests_per_s * self._share(tenant)
            wait_s = min(wait_s, self._num_present.get(tenant, 0) / own_rate)
        return wait_s

    def check_count(self, num_requests: int, tenant: str) -> None:
        """Raise QueueFullError if the queue cannot take so many requests, whatever they are."""
        queued = self._num_queued + num_requests
        most = self._config.max_num_queued_requests + self._num_free_rows
        if queued > most and not self._may_overflow(tenant, num_requests, queued, most):
            raise QueueFullError(
                f"{len(self._tenant_of)} requests are running or waiting, and at most "
                f"{self._config.max_num_queued_requests} may wait",
                retry_after_s=_retry_s(queued - most, self._requests_per_s),
                reason="queued_requests",
            )

    def check(self, requests: Sequence[TokenRequest]) -> None:
        """Raise QueueFullError unless all of these requests may join."""
        if not requests:
            return
        tenant = requests[0].tenant
        self.check_count(len(requests), tenant)
        most = self._config.max_num_queued_tokens
        tokens = self._tokens_queued + sum(len(request.prompt_token_ids) for request in requests)
        # What can start at once does not queue.
        if (
            most is not None
            and tokens > most
            and self._num_queued + len(requests) > self._num_free_rows
            and not self._may_overflow(tenant, len(requests), tokens, most)
        ):
            raise QueueFullError(
                f"{self._tokens_queued} prompt tokens wait, {most} may",
                retry_after_s=_retry_s(tokens - most, self._tokens_per_s),
                reason="queued_tokens",
            )
        timeouts_s = [self.queue_timeout_s(request) for request in requests]
        timeout_s = min(
            (timeout_s for timeout_s in timeouts_s if timeout_s is not None), default=None
        )
        if timeout_s is not None:
            wait_s = self.predicted_wait_s(tenant)
            if wait_s > timeout_s:
                raise QueueFullError(
                    f"the request would wait about {wait_s:.1f} s, longer than its queue timeout "
                    f"of {timeout_s:g} s",
                    retry_after_s=min(max(wait_s - timeout_s, MIN_RETRY_S), MAX_RETRY_S),
                    reason="queue_timeout",
                )

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Let these weights hold from now on."""
        self._weights = dict(weights)
        self._total_weight = sum(self._weight(tenant) for tenant in self._num_present)

    def accept(self, request_id: str, request: TokenRequest) -> None:
        """Count a request that joins."""
        tenant = request.tenant
        self._tokens_accepted += len(request.prompt_token_ids)
        self._tenant_of[request_id] = tenant
        if tenant not in self._num_present:
            self._num_present[tenant] = 0
            self._total_weight += self._weight(tenant)
        self._num_present[tenant] += 1

    def end(self, request_id: str) -> None:
        """Count out a request that ended."""
        tenant = self._tenant_of.pop(request_id)
        self._num_present[tenant] -= 1
        if not self._num_present[tenant]:
            del self._num_present[tenant]
            self._total_weight -= self._weight(tenant)

    @property
    def _num_free_rows(self) -> int:
        """Rows that requests can have at once, as far as is known."""
        return 0 if self._stats.num_waiting else self._config.max_num_seqs - self._stats.num_running

    @property
    def _num_queued(self) -> int:
        """Requests that do not run yet, those in the inbox included."""
        return max(0, len(self._tenant_of) - self._stats.num_running)

    @property
    def _tokens_queued(self) -> int:
        """Their tokens."""
        in_inbox = self._tokens_accepted - self._stats.tokens_received
        return self._stats.num_waiting_tokens + in_inbox

    def _may_overflow(self, tenant: str, num_requests: int, queued: int, most: int) -> bool:
        """Whether the tenant may go beyond a full queue, because others fill it."""
        if self._config.scheduling_policy != "fair" or queued > MOST_OVERFLOW * most:
            return False
        room = self._config.max_num_queued_requests + self._config.max_num_seqs
        return self._num_present.get(tenant, 0) + num_requests <= room * self._share(tenant) and (
            len(self._num_present) > (tenant in self._num_present)
        )

    def _share(self, tenant: str) -> float:
        weight = self._weight(tenant)
        others = self._total_weight - (weight if tenant in self._num_present else 0.0)
        return weight / (others + weight)

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


def _retry_s(excess: int, rate: float) -> float:
    """Return when so much will have drained."""
    return min(max(excess / rate if rate > 0 else MIN_RETRY_S, MIN_RETRY_S), MAX_RETRY_S)
