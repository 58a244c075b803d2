import math
import random

import pytest

from bench.paired import by_turns, estimate


def test_sides_take_turns_in_going_first():
    assert list(by_turns("a", "b", 3)) == [("a", "b"), ("b", "a"), ("a", "b")]


@pytest.mark.parametrize(
    # Tables of the sign test: which of the sorted values bound the median at 95 %.
    ("count", "rank"),
    [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18)],
)
def test_the_interval_is_that_of_the_sign_test(count, rank):
    values = [float(number) for number in range(1, count + 1)]
    random.Random(count).shuffle(values)
    found = estimate(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert (found.median, found.num_pairs) == ((count + 1) / 2, count)


def test_too_few_pairs_bound_nothing():
    found = estimate([0.1, 0.2, 0.3, 0.4, 0.5])
    assert (found.median, found.low, found.high) == (0.3, -math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_a_few_wild_pairs_change_little():
    calm = [0.001 * number for number in range(-10, 11)]
    wild = [*calm[:-3], 5.0, 7.0, 9.0]
    assert estimate(wild) == estimate(calm)


def test_a_difference_of_a_hundredth_is_found_in_noise_of_three():
    source = random.Random(1)
    found = estimate([0.01 + source.gauss(0, 0.03) for _ in range(400)])
    assert 0 < found.low < 0.01 < found.high < 0.02
