"""How long to wait before the next attempt."""

import random
from collections.abc import Callable

__all__ = ["backoff_s"]

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0


def backoff_s(
    attempt: int,
    retry_after_s: float | None = None,
    *,
    uniform: Callable[[], float] = random.random,
) -> float:
    """Return the wait before attempt number `attempt`, counted from 1.

    Twice as long each time, and random, so that clients that lost the same server do not come
    back all at once. Never sooner than the server asked for, and then spread over a second half.

    Args:
        attempt: 1 is the first attempt after the one that failed.
        retry_after_s: what the server said, if it did.
        uniform: random numbers in [0, 1).
    """
    longest_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** (attempt - 1))
    if retry_after_s is None:
        return longest_s * uniform()
    return retry_after_s + max(longest_s, retry_after_s / 2) * uniform()
