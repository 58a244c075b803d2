from itertools import pairwise

import pytest

from headrace_client.retry import FIRST_DELAY_S, LONGEST_DELAY_S, backoff_s


def test_the_wait_doubles_up_to_a_bound_and_is_random_below_it():
    longest = [backoff_s(attempt, uniform=lambda: 1.0) for attempt in range(1, 20)]
    assert longest[0] == FIRST_DELAY_S
    assert all(later in (2 * earlier, LONGEST_DELAY_S) for earlier, later in pairwise(longest))
    assert longest[-1] == LONGEST_DELAY_S
    assert backoff_s(5, uniform=lambda: 0.0) == 0.0


@pytest.mark.parametrize("retry_after_s", [0.0, 1.5, 60.0])
def test_it_is_never_shorter_than_the_server_asked_for(retry_after_s):
    for attempt in range(1, 10):
        waits = [backoff_s(attempt, retry_after_s, uniform=lambda u=u: u) for u in (0.0, 0.99)]
        assert waits[0] == retry_after_s
        assert waits[1] > retry_after_s  # spread out
