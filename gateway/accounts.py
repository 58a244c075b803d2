"""What the holder of a key may use, and has used: quotas, and the tokens and seconds so far.

An account has one quota of requests and one of tokens, both buckets that hold a minute's worth and
refill all the time. Output is only known when it is there, so it may overdraw the tokens; the next
request then waits until they are paid back.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import InvalidRequest, Overloaded, Unauthorized
from gateway.timing import Timing

__all__ = ["Account", "Quota", "UsageSoFar"]

SECONDS_PER_MINUTE = 60.0
# Nobody knows when a running request ends; this is when it makes sense to look again.
BUSY_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What a key may use. None sets no bound.

    Attributes:
        requests_per_minute: requests that may begin; each choice of each prompt is one.
        tokens_per_minute: tokens of prompts, cached or not, and of answers.
        max_concurrent_requests: requests that may wait or run at a time, counted likewise.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(kw_only=True, slots=True)
class UsageSoFar:
    """What was used since the server started.

    Attributes:
        num_requests: requests that the engine took.
        num_refused: requests that it, or the quota, did not take.
        prompt_tokens: tokens of prompts, those from the cache included.
        cached_tokens: of these, the ones whose K and V were in the prefix cache.
        completion_tokens: tokens of answers.
        busy_s: from the first scheduled step of each request to its last token, added up.
    """

    num_requests: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    busy_s: float = 0.0


class Account:
    """One key's account. Use it on the event loop only.

    Attributes:
        name: of the key.
        usage: what was used so far.
        num_running: requests that wait or run.
        is_closed: whether the key was revoked.
    """

    def __init__(
        self,
        name: str,
        quota: Quota = Quota(),
        *,
        usage: UsageSoFar | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.usage = usage or UsageSoFar()
        self.num_running = 0
        self.is_closed = False
        self._clock = clock
        self._quota = quota
        self._requests = _Bucket(quota.requests_per_minute, clock)
        self._tokens = _Bucket(quota.tokens_per_minute, clock)

    @property
    def quota(self) -> Quota:
        return self._quota

    @quota.setter
    def quota(self, quota: Quota) -> None:
        """Set other bounds. What was used of the old ones is forgotten where they differ."""
        if quota.requests_per_minute != self._quota.requests_per_minute:
            self._requests = _Bucket(quota.requests_per_minute, self._clock)
        if quota.tokens_per_minute != self._quota.tokens_per_minute:
            self._tokens = _Bucket(quota.tokens_per_minute, self._clock)
        self._quota = quota

    def close(self) -> None:
        """Take no more requests: the key was revoked. What runs may finish."""
        self.is_closed = True

    def check(self, num_requests: int, *, prompt_tokens: int = 1) -> None:
        """Raise if so many requests could not begin now.

        Raises:
            gateway.errors.GatewayError: Overloaded (429) with a code and a time to wait,
                InvalidRequest if they never could, Unauthorized if the key is no more.
        """
        if self.is_closed:
            raise Unauthorized("this API key was revoked")
        most, per_minute = self._quota.max_concurrent_requests, self._quota.requests_per_minute
        _refuse_what_never_fits(num_requests, most, "at a time")
        _refuse_what_never_fits(num_requests, per_minute, "a minute")
        if most is not None and self.num_running + num_requests > most:
            raise Overloaded(
                f"this key may have {most} requests at a time",
                retry_after_s=BUSY_RETRY_AFTER_S,
                code="concurrent_requests",
            )
        if wait_s := self._requests.wait_s(num_requests):
            raise Overloaded(
                f"this key may make {per_minute} requests a minute",
                retry_after_s=wait_s,
                code="requests_per_minute",
            )
        if wait_s := self._tokens.wait_s(prompt_tokens):
            raise Overloaded(
                f"this key may use {self._quota.tokens_per_minute} tokens a minute",
                retry_after_s=wait_s,
                code="tokens_per_minute",
            )

    def rate_headers(self) -> dict[str, str]:
        """Return headers that tell what is left of both rates, as OpenAI's clients know them."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.per_minute is not None:
                headers |= {
                    f"x-ratelimit-limit-{name}": str(bucket.per_minute),
                    f"x-ratelimit-remaining-{name}": str(max(0, math.floor(bucket.level))),
                    f"x-ratelimit-reset-{name}": _duration(bucket.wait_s(bucket.per_minute)),
                }
        return headers

    def begin(self, num_requests: int, *, prompt_tokens: int) -> None:
        """Count requests that begin, whose prompts have so many tokens together.

        Each ends by `end` or `end_unbegun`, or all of them by `take_back`.

        Raises:
            gateway.errors.GatewayError: as `check`; nothing was counted.
        """
        self.check(num_requests, prompt_tokens=prompt_tokens)
        self._requests.take(num_requests)
        self._tokens.take(prompt_tokens)
        self.num_running += num_requests
        self.usage.num_requests += num_requests

    def take_back(self, num_requests: int, *, prompt_tokens: int) -> None:
        """Undo `begin`: the engine did not take them."""
        self._requests.take(-num_requests)
        self._tokens.take(-prompt_tokens)
        self.num_running -= num_requests
        self.usage.num_requests -= num_requests

    def end_unbegun(self, *, prompt_tokens: int) -> None:
        """Count the end of one request that only ever waited: its quota is given back."""
        self._requests.take(-1)
        self._tokens.take(-prompt_tokens)
        self.num_running -= 1

    def count_refusal(self) -> None:
        self.usage.num_refused += 1

    def add_output(self, num_tokens: int) -> None:
        """Count tokens of an answer as they come."""
        self.usage.completion_tokens += num_tokens
        if self._tokens.per_minute is not None:  # asked here, for it is done with every token
            self._tokens.take(num_tokens)

    def end(self, *, prompt_tokens: int, cached_tokens: int, timing: Timing) -> None:
        """Count the end of one request."""
        self.num_running -= 1
        self.usage.prompt_tokens += prompt_tokens
        self.usage.cached_tokens += cached_tokens
        self.usage.busy_s += timing.prefill_s + timing.decode_s


class _Bucket:
    """A minute's worth that refills evenly; None never runs out."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._at_s = clock()

    @property
    def level(self) -> float:
        """What can be taken now; negative after an overdraft."""
        self._refill()
        return self._level

    def wait_s(self, amount: int) -> float:
        """Return when so much can be taken: 0 for now. What never fits waits until it is full."""
        if self.per_minute is None:
            return 0.0
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * SECONDS_PER_MINUTE / self.per_minute)

    def take(self, amount: int) -> None:
        """Take so much, even more than there is."""
        if self.per_minute is not None:
            self._refill()
            self._level -= amount

    def _refill(self) -> None:
        per_minute = self.per_minute or 0
        now_s = self._clock()
        self._level += (now_s - self._at_s) * per_minute / SECONDS_PER_MINUTE
        self._level = min(self._level, float(per_minute))
        self._at_s = now_s


def _duration(seconds: float) -> str:
    """Return a time as OpenAI's headers spell it: 250ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, seconds = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _refuse_what_never_fits(num_requests: int, most: int | None, when: str) -> None:
    if most is not None and num_requests > most:
        raise InvalidRequest(
            f"these are {num_requests} requests at once, and this key may have {most} {when}",
            param="n",
        )
