import pytest

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.generation import GenerationRequest, PreparedGeneration
from gateway.openai.protocol import SamplingBody, StreamOptions
from gateway.openai.sampling import (
    check_model,
    generation_requests,
    num_choices,
    with_choice_seeds,
)
from jaxengine.sampling_params import SamplingParams

CONFIG = GatewayConfig(served_model_names=("a", "b"), max_n=4, max_choices=8)


def test_no_model_means_the_first_name():
    assert [check_model(name, CONFIG) for name in (None, "a", "b")] == ["a", "a", "b"]
    with pytest.raises(ModelNotFound):
        check_model("", CONFIG)


@pytest.mark.parametrize(("n", "num_prompts"), [(None, 8), (4, 2), (1, 1)])
def test_choices_up_to_the_limits_pass(n, num_prompts):
    assert num_choices(SamplingBody(n=n), num_prompts, CONFIG) == (n or 1)


@pytest.mark.parametrize(
    ("n", "num_prompts", "param"), [(0, 1, "n"), (5, 1, "n"), (4, 3, "n"), (None, 9, "prompt")]
)
def test_choices_beyond_the_limits_are_refused(n, num_prompts, param):
    with pytest.raises(InvalidRequest) as caught:
        num_choices(SamplingBody(n=n), num_prompts, CONFIG)
    assert caught.value.param == param


def test_nulls_take_the_defaults_of_a_generation_request():
    [request] = generation_requests(SamplingBody(), ["x"], max_tokens=None)
    assert request == GenerationRequest(prompt="x")


def test_fields_are_taken_over():
    body = SamplingBody(temperature=0, top_k=-1, top_p=0.5, stop="x", seed=0, ignore_eos=True)
    [request] = generation_requests(body, ["x"], max_tokens=3)
    assert (request.temperature, request.top_k, request.top_p) == (0, 0, 0.5)
    assert (request.stop, request.seed, request.max_tokens) == (("x",), 0, 3)
    assert request.ignore_eos


def test_stream_options_need_a_stream():
    with pytest.raises(InvalidRequest, match="stream"):
        generation_requests(SamplingBody(stream_options=StreamOptions()), ["x"], max_tokens=1)


def prepared(seed):
    return PreparedGeneration(
        request=GenerationRequest(prompt="x"),
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=1, seed=seed),
    )


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (7, [7, 8, 9]),
        (None, [None, None, None]),
        (-1, [-1, 0, 1]),
        (2**64 - 1, [2**64 - 1, 0, 1]),
    ],
)
def test_choices_count_the_seed_up_within_64_bits(seed, seeds):
    assert [choice.params.seed for choice in with_choice_seeds(prepared(seed), 3)] == seeds
