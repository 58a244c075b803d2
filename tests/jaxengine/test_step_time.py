import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.buckets import Bucket, smallest_bucket
from jaxengine.step_time import StepTimeModel, StepWork

BUCKETS = [
    *(Bucket(size, size, True) for size in (8, 16, 32, 64)),
    *(Bucket(size, min(size, 64), False) for size in (32, 64, 128, 256, 512)),
]
# 20 ms and 0.3 ms a token.
TIMES_S = {bucket: 0.02 + 0.0003 * bucket.num_tokens for bucket in BUCKETS}


# Of a device that leaves out padding. It takes less for up to 16 tokens, and more beyond 256.
SIZES = [Bucket(size, min(size, 64), False) for size in (16, 32, 64, 128, 256, 512)]
SIZE_TIMES_S = {
    size: 0.02 + 0.0003 * size.num_tokens + 0.0002 * max(0, size.num_tokens - 256) for size in SIZES
}
SINGLE_TOKEN_S = 0.022


def new_model():
    return StepTimeModel(BUCKETS, TIMES_S)


def new_token_model():
    return StepTimeModel(SIZES, SIZE_TIMES_S, skips_padding=True)


models = pytest.mark.parametrize("skips_padding", [False, True])


def decodes(count, context, *, num_sampled=0):
    return StepWork(count, count, True, count * context, 0, num_sampled, 0)


def with_chunk(work, first_position, num_tokens):
    """The step with a chunk of a prompt besides; token i attends to i + 1 positions."""
    pairs = sum(range(first_position + 1, first_position + num_tokens + 1))
    return work._replace(
        num_tokens=work.num_tokens + num_tokens,
        num_seqs=work.num_seqs + 1,
        decode_only=False,
        prefill_context=work.prefill_context + pairs,
        chunk_context=work.chunk_context + first_position + num_tokens,
    )


def random_work(rng):
    num_decodes = rng.randint(1, 60)
    num_sampled = rng.choice((0, num_decodes))
    context = sum(rng.randint(20, 1500) for _ in range(num_decodes))
    work = StepWork(num_decodes, num_decodes, True, context, 0, num_sampled, 0)
    if rng.random() < 0.4:
        work = with_chunk(work, rng.randint(0, 1500), rng.randint(2, 400))
    return work


def bucket_of(work):
    return smallest_bucket(
        BUCKETS, num_tokens=work.num_tokens, num_seqs=work.num_seqs, decode_only=work.decode_only
    )


def true_time_s(work, slopes, *, skips_padding=False, slowdown=1.0):
    position, prefill, sampling = slopes
    if skips_padding:
        num_tokens = work.num_tokens
        points = [(1, SINGLE_TOKEN_S), *((s.num_tokens, time) for s, time in SIZE_TIMES_S.items())]
        base_s = float(np.interp(num_tokens, *zip(*points, strict=True)))
        drawn = work.num_sampled
    else:
        bucket = bucket_of(work)
        base_s = TIMES_S[bucket]
        drawn = bucket.num_seqs if work.num_sampled else 0
    return slowdown * (
        base_s
        + position * (work.decode_context + work.chunk_context)
        + prefill * work.prefill_context
        + sampling * drawn
    )


works = st.randoms(use_true_random=False).map(random_work)
slopes = st.tuples(st.floats(0, 1e-5), st.floats(0, 2e-6), st.floats(0, 5e-3))
durations_s = st.one_of(st.floats(0, 1), st.floats(0, 1e4))
observations = st.lists(st.tuples(works, durations_s), max_size=30)


def taught(observed, *, skips_padding=False):
    model = new_token_model() if skips_padding else new_model()
    for work, duration_s in observed:
        model.observe(work, duration_s)
    return model


@given(works)
def test_at_first_a_step_takes_what_its_bucket_took_without_sequences(work):
    assert new_model().predict(work) == TIMES_S[bucket_of(work)]


@pytest.mark.parametrize(
    ("num_tokens", "expected_ms"),
    # Sizes of 16, 32, 64, 256 and 512 tokens take 24.8, 29.6, 39.2, 96.8 and 224.8 ms.
    [
        *((1, 24.8), (8, 24.8), (16, 24.8), (20, 26.0), (24, 27.2), (32, 29.6)),
        *((40, 32.0), (60, 38.0), (320, 128.8), (511, 224.3)),
    ],
)
def test_without_padding_a_step_takes_what_lies_between_two_sizes(num_tokens, expected_ms):
    work = with_chunk(decodes(0, 0), 0, num_tokens)
    assert new_token_model().predict(work) == pytest.approx(expected_ms / 1000)


def test_without_padding_times_of_the_warm_up_are_never_taken_to_fall():
    times_s = {**SIZE_TIMES_S, SIZES[2]: 0.100, SIZES[4]: 0.090}  # 64 and 256 tokens
    model = StepTimeModel(SIZES, times_s, skips_padding=True)
    assert model.predict(decodes(64, 0)) == model.predict(with_chunk(decodes(0, 0), 0, 200)) == 0.1


@given(works)
def test_without_padding_it_makes_no_difference_that_all_tokens_are_decodes(work):
    model = StepTimeModel(BUCKETS, TIMES_S, skips_padding=True)
    assert model.predict(work) == pytest.approx(0.02 + 0.0003 * max(work.num_tokens, 32))


def test_without_padding_a_single_token_need_not_take_what_sixteen_do():
    model = new_token_model()
    for _ in range(60):
        model.observe(decodes(1, 0), 0.010)
        model.observe(decodes(16, 0), 0.024)
    assert model.predict(decodes(1, 0)) == pytest.approx(0.010, rel=0.02)
    assert model.predict(decodes(6, 0)) == pytest.approx(0.010 + 0.014 / 3, rel=0.02)
    assert model.predict(decodes(16, 0)) == pytest.approx(0.024, rel=0.02)


def test_a_step_that_no_bucket_holds_is_refused():
    work = with_chunk(decodes(3, 10), 0, 510)
    for use in (
        new_model().predict,
        lambda work: new_model().observe(work, 1.0),
        new_token_model().predict,
    ):
        with pytest.raises(ValueError, match="no bucket holds 513 tokens of 4 sequences"):
            use(work)


def test_a_bucket_that_takes_no_time_is_refused():
    with pytest.raises(ValueError, match="must be positive"):
        StepTimeModel(BUCKETS, {**TIMES_S, BUCKETS[0]: 0.0})


def test_observing_returns_the_error_of_the_prediction_before():
    model = new_model()
    work = decodes(8, 100)
    predicted_s = model.predict(work)
    assert model.observe(work, 0.1) == pytest.approx(0.1 - predicted_s)
    assert predicted_s < model.predict(work) < 0.1


@models
@settings(max_examples=5, derandomize=True)
@given(slopes, st.floats(0.7, 1.5), st.integers(0, 2**32))
def test_it_finds_the_truth_behind_noise_and_disturbed_steps(skips_padding, slopes, slowdown, seed):
    rng = random.Random(seed)
    model = taught([], skips_padding=skips_padding)
    errors = []
    for _ in range(700):
        work = random_work(rng)
        true_s = true_time_s(work, slopes, skips_padding=skips_padding, slowdown=slowdown)
        errors.append(abs(model.predict(work) / true_s - 1))
        model.observe(work, true_s * (3 if rng.random() < 0.03 else rng.gauss(1, 0.03)))
    # Less than the noise of a single step, the disturbed ones aside.
    assert statistics.median(errors[300:]) < 0.03
    assert statistics.quantiles(errors[300:], n=10)[-1] < 0.1


def test_it_is_near_the_truth_after_few_steps():
    rng = random.Random(1)
    slopes = (2e-6, 4e-7, 1e-3)
    model = new_model()
    for _ in range(60):
        work = random_work(rng)
        model.observe(work, true_time_s(work, slopes))
    assert model.slopes_s == pytest.approx(slopes, rel=0.05)


def test_a_slower_machine_is_noticed_also_where_no_step_was_seen():
    model = new_model()
    work, unseen = decodes(16, 1), with_chunk(decodes(16, 1), 0, 100)
    before_s = model.predict(unseen)
    for _ in range(40):
        model.observe(work, 2 * TIMES_S[bucket_of(work)])
    assert model.predict(work) == pytest.approx(2 * TIMES_S[bucket_of(work)], rel=0.02)
    assert 1.75 * before_s < model.predict(unseen) < 2.1 * before_s


@models
def test_a_machine_that_is_slow_now_and_then_is_followed(skips_padding):
    rng = random.Random(4)
    slopes = (2e-6, 4e-7, 1e-3)
    model = taught([], skips_padding=skips_padding)
    late_errors = []
    for step in range(800):
        slowdown = 1.5 if step // 50 % 2 else 1.0
        work = random_work(rng)
        true_s = true_time_s(work, slopes, skips_padding=skips_padding, slowdown=slowdown)
        if step >= 400 and step % 50 >= 35:  # a pace that moves by 2 % a step is there after 25
            late_errors.append(abs(model.predict(work) / true_s - 1))
        model.observe(work, true_s * rng.gauss(1, 0.03))
    assert statistics.median(late_errors) < 0.03
    assert statistics.quantiles(late_errors, n=10)[-1] < 0.1


def test_constant_traffic_leaves_what_it_does_not_show_as_it_was():
    rng = random.Random(2)
    slopes = (2e-6, 4e-7, 1e-3)
    model = new_model()
    for _ in range(300):
        work = random_work(rng)
        model.observe(work, true_time_s(work, slopes))
    steady = decodes(32, 500)
    for _ in range(5000):
        model.observe(steady, true_time_s(steady, slopes) * rng.gauss(1, 0.02))
    steady_s = true_time_s(steady, slopes)
    model.observe(steady, 10 * steady_s)
    assert model.predict(steady) == pytest.approx(steady_s, rel=0.05)
    for work in (decodes(64, 500), decodes(8, 2000), with_chunk(decodes(20, 200), 1000, 200)):
        assert model.predict(work) == pytest.approx(true_time_s(work, slopes), rel=0.1)


@given(observations, works, st.booleans())
def test_no_time_and_no_slope_is_ever_negative(observed, work, skips_padding):
    model = taught(observed, skips_padding=skips_padding)
    assert model.predict(work) > 0
    assert min(model.slopes_s) >= 0
    assert min(model.base_times_s.values()) > 0
    assert model.spread > 0


@given(observations, works, *[st.integers(0, 10**6)] * 3, st.booleans())
def test_more_context_never_takes_less_time(
    observed, work, decode_context, prefill_context, chunk_context, skips_padding
):
    model = taught(observed, skips_padding=skips_padding)
    more = work._replace(
        decode_context=work.decode_context + decode_context,
        prefill_context=work.prefill_context + prefill_context,
        chunk_context=work.chunk_context + chunk_context,
    )
    assert model.predict(more) >= model.predict(work)


@given(observations, st.integers(1, 511), st.integers(1, 511))
def test_without_padding_more_tokens_never_take_less_time(observed, num_tokens, more_tokens):
    model = taught(observed, skips_padding=True)
    fewer = with_chunk(decodes(0, 0), 0, num_tokens)
    more = fewer._replace(num_tokens=min(num_tokens + more_tokens, 512))
    assert model.predict(more) >= model.predict(fewer) * (1 - 1e-9)


def test_drawing_one_row_at_random_costs_what_drawing_all_does():
    model = new_model()
    for _ in range(50):
        model.observe(decodes(16, 100), 0.03)
        model.observe(decodes(16, 100, num_sampled=16), 0.05)
    one = model.predict(decodes(16, 100, num_sampled=1))
    assert one == model.predict(decodes(16, 100, num_sampled=16))
    assert one == pytest.approx(0.05, rel=0.1)


def test_without_padding_a_drawn_row_costs_what_it_costs():
    model = new_token_model()
    for _ in range(50):
        model.observe(decodes(16, 100), 0.03)
        model.observe(decodes(16, 100, num_sampled=16), 0.05)
    assert model.predict(decodes(16, 100, num_sampled=4)) == pytest.approx(0.035, rel=0.05)


@models
@given(
    st.one_of(observations, st.just([])),
    st.integers(1, 70).map(lambda count: decodes(count, 300)),
    st.lists(st.tuples(st.integers(0, 500), st.integers(2, 120)), max_size=2),
    st.floats(0, 0.5),
    st.integers(0, 2000),
    st.integers(0, 600),
)
def test_a_chunk_is_as_long_as_fits_or_fills_the_bucket_where_prompts_are_fastest(
    skips_padding, observed, work, chunks, limit_s, first_position, at_most
):
    if work.num_seqs + len(chunks) > 64:
        work = decodes(20, 300)
    for chunk in chunks:
        work = with_chunk(work, *chunk)
    model = taught(observed, skips_padding=skips_padding)
    found = model.most_prefill_tokens(limit_s, work, first_position=first_position, at_most=at_most)
    assert 0 <= found <= at_most

    # Every length, one by one.
    room = min(at_most, 512 - work.num_tokens) if work.num_seqs < 64 else 0
    times_s = {
        length: model.predict(with_chunk(work, first_position, length))
        for length in range(1, room + 1)
    }
    if found:
        assert times_s[found] <= limit_s * (1 + 1e-9)
    if at_most in times_s and times_s[at_most] <= limit_s * (1 - 1e-9):
        assert found == at_most
        return

    def speed(length):
        """Prompt tokens by the time that the step takes without their attention."""
        longer = work if length == 0 else with_chunk(work, first_position, length)
        rest_s = model.predict(longer._replace(prefill_context=0, chunk_context=0))
        return (longer.num_tokens - work.num_seqs) / rest_s

    fitting = [length for length, time_s in times_s.items() if time_s <= limit_s * (1 - 1e-9)]
    assert speed(found) >= max(map(speed, fitting), default=0) * (1 - 1e-9)


# Without slopes.
@pytest.mark.parametrize(
    ("limit_ms", "num_decodes", "at_most", "expected"),
    [
        # Buckets of 32, 64, 128, 256 tokens take 29.6, 39.2, 58.4, 96.8 ms.
        (60, 16, 500, 128 - 16),
        (60, 16, 70, 70),
        (60, 16, 112, 112),
        (58, 16, 500, 64 - 16),  # the bucket of 128 does not fit
        (20, 16, 500, 0),
        (600, 16, 496, 496),
        (60, 64, 500, 0),  # no row is left
    ],
)
def test_a_chunk_fills_the_largest_bucket_that_fits(limit_ms, num_decodes, at_most, expected):
    found = new_model().most_prefill_tokens(
        limit_ms / 1000, decodes(num_decodes, 50), first_position=0, at_most=at_most
    )
    assert found == expected


# Without slopes: 20 ms, 0.3 for each token up to 256, 0.5 for each further one.
@pytest.mark.parametrize(
    ("limit_ms", "num_decodes", "at_most", "expected"),
    [
        (60, 16, 500, 117),  # 133 tokens take 59.9 ms
        (60, 16, 100, 100),
        (38, 16, 500, 44),  # 60 tokens take 38 ms
        (30, 40, 500, 0),
        (25, 16, 500, 0),  # one takes 25.1
        (101.1, 16, 248, 248),  # eight of 0.5 ms beyond 256
        # 248 tokens in 100.8 ms are no faster than 240 in 96.8, and the streams have to wait.
        (101.1, 16, 496, 240),
        (600, 16, 496, 496),
        (60, 64, 500, 0),  # no row is left
    ],
)
def test_without_padding_a_chunk_is_as_long_as_the_time_that_is_left(
    limit_ms, num_decodes, at_most, expected
):
    found = new_token_model().most_prefill_tokens(
        limit_ms / 1000 + 1e-9, decodes(num_decodes, 50), first_position=0, at_most=at_most
    )
    assert found == expected


def test_a_chunk_never_stops_just_past_the_edge_of_a_bucket():
    model = new_model()
    slopes = (0.0, 2e-6, 0.0)
    rng = random.Random(3)
    for _ in range(400):
        work = random_work(rng)._replace(num_sampled=0)
        model.observe(work, true_time_s(work, slopes))
    # 112 tokens from position 1000 on fill the bucket of 128. They attend to 118,328 positions:
    # 58.4 + 236.7 ms. The bucket of 256 takes 96.8 ms; in the rest of 365 and of 540 ms another
    # 125 and 201 tokens attend. 125 / 96.8 is less than 112 / 58.4, and 201 / 96.8 is more.
    chunks = {
        limit_ms: model.most_prefill_tokens(
            limit_ms / 1000,
            decodes(16, 1),
            first_position=1000,
            at_most=400,
        )
        for limit_ms in (300, 365, 540)
    }
    assert chunks[300] == 112
    assert chunks[365] == 112
    assert chunks[540] == pytest.approx(201, abs=3)
