import itertools
import statistics

import pytest

from bench.workload import WorkloadConfig, arrival_times, make_prompt


def test_a_prompt_depends_on_seed_and_number_only():
    config = WorkloadConfig(input_len=32, seed=5)
    assert make_prompt(config, 3) == make_prompt(config, 3)
    assert make_prompt(config, 3) != make_prompt(config, 4)
    assert make_prompt(config, 3) != make_prompt(WorkloadConfig(input_len=32, seed=6), 3)


def test_no_two_prompts_begin_alike_so_no_prefix_cache_can_help():
    config = WorkloadConfig(input_len=16)
    beginnings = {tuple(make_prompt(config, index)[:8]) for index in range(500)}
    assert len(beginnings) == 500


def test_token_ids_are_ordinary_ones():
    config = WorkloadConfig(input_len=400, min_token_id=50, vocab_size=60)
    prompt = make_prompt(config, 0)
    assert len(prompt) == 400
    assert set(prompt) == set(range(50, 60))


def test_a_shared_prefix_is_shared_exactly():
    config = WorkloadConfig(input_len=20, shared_prefix_len=12)
    first, second = make_prompt(config, 0), make_prompt(config, 1)
    assert first[:12] == second[:12]
    assert first[12] != second[12]


def test_text_has_so_many_words():
    prompt = make_prompt(WorkloadConfig(kind="text", input_len=9, shared_prefix_len=4), 0)
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 9
    other = make_prompt(WorkloadConfig(kind="text", input_len=9, shared_prefix_len=4), 1)
    assert prompt.split()[:4] == other.split()[:4]
    assert prompt != other


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "image"}, r"self\.kind='image' must be"),
        ({"input_len": 0}, r"self\.input_len=0 .* must be positive"),
        ({"output_len": 0}, "must be positive"),
        ({"input_len": 4, "shared_prefix_len": 4}, "room for at least one own token"),
        ({"min_token_id": 9, "vocab_size": 9}, r"min_token_id=9 must be below"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        WorkloadConfig(**fields)


def gaps(rate: float, burstiness: float, count: int = 20_000) -> list[float]:
    times = list(itertools.islice(arrival_times(rate, burstiness, seed=1), count))
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(burstiness: float):
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    observed = gaps(rate=8.0, burstiness=burstiness)
    mean = statistics.fmean(observed)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert statistics.pstdev(observed) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_start_at_once_and_repeat_with_their_seed():
    first = list(itertools.islice(arrival_times(2.0, 1.0, seed=3), 10))
    assert first[0] == 0.0
    assert first == list(itertools.islice(arrival_times(2.0, 1.0, seed=3), 10))
    assert first != list(itertools.islice(arrival_times(2.0, 1.0, seed=4), 10))


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="rate=0"):
        next(arrival_times(0, 1.0, seed=0))
