import statistics

import pytest

from bench.lengths import (
    LengthConfig,
    continuous_steps,
    draw_lengths,
    find_potential,
    static_steps,
)


def test_lengths_repeat_with_their_seed():
    config = LengthConfig(kind="exponential", mean=20, cap=100)
    assert draw_lengths(config, 50, seed=1) == draw_lengths(config, 50, seed=1)
    assert draw_lengths(config, 50, seed=1) != draw_lengths(config, 50, seed=2)


def test_uniform_lengths_have_their_mean_and_range():
    drawn = draw_lengths(LengthConfig(kind="uniform", mean=10, cap=1000), 20_000, seed=1)
    assert (min(drawn), max(drawn)) == (1, 19)
    assert statistics.fmean(drawn) == pytest.approx(10, rel=0.02)


def test_exponential_lengths_have_their_mean_and_as_large_a_spread():
    # Rounded up, an exponential of mean 50 is geometric: mean 1 / (1 - exp(-1/50)) = 50.5.
    drawn = draw_lengths(LengthConfig(kind="exponential", mean=50, cap=10_000), 40_000, seed=1)
    assert statistics.fmean(drawn) == pytest.approx(50.5, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(50, rel=0.03)


def test_no_output_is_longer_than_the_cap():
    drawn = draw_lengths(LengthConfig(kind="exponential", mean=50, cap=60), 1000, seed=1)
    assert max(drawn) == 60
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "normal", "mean": 5, "cap": 9}, "must be one of uniform, exponential"),
        ({"kind": "uniform", "mean": 0, "cap": 9}, "must be at least 1"),
        ({"kind": "uniform", "mean": 10, "cap": 9}, "at most self.cap=9"),
    ],
)
def test_lengths_that_cannot_be_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LengthConfig(**fields)


def test_a_static_batch_lasts_as_long_as_its_longest_output():
    assert static_steps([1, 4, 2, 2], batch_size=2) == 4 + 2


def test_a_free_row_takes_the_next_output():
    # Rows of 4 and 1; the second row then takes 2 (to 3) and 3 (to 6).
    assert continuous_steps([4, 1, 2, 3], num_rows=2) == 6
    assert continuous_steps([5], num_rows=3) == 5


def test_the_ideal_gain_is_the_longest_over_the_mean():
    # Batches (8, 2) and (4, 2): longest 8 and 4, 6 on average; the mean output is 4.
    # Rows: 8 | 2, then 4 (to 6), then 2 (to 8): 8 steps against 12.
    potential = find_potential([8, 2, 4, 2], batch_size=2)
    assert potential.ideal_ratio == 6 / 4
    assert potential.finite_ratio == 12 / 8


def test_equal_outputs_have_nothing_to_gain():
    potential = find_potential([7] * 8, batch_size=4)
    assert (potential.ideal_ratio, potential.finite_ratio) == (1, 1)


def test_the_ideal_gain_of_exponential_lengths_is_a_harmonic_number():
    # The longest of 32 exponential lengths is 1 + 1/2 + ... + 1/32 = 4.06 means on average.
    lengths = draw_lengths(LengthConfig(kind="exponential", mean=200, cap=10**6), 32 * 500, seed=3)
    assert find_potential(lengths, batch_size=32).ideal_ratio == pytest.approx(4.06, rel=0.03)


def test_batches_that_do_not_fill_are_refused():
    with pytest.raises(ValueError, match="3 requests do not fill batches of 2"):
        find_potential([1, 2, 3], batch_size=2)
    with pytest.raises(ValueError, match="0 requests"):
        find_potential([], batch_size=2)
