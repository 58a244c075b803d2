import dataclasses

import pytest

from gateway.accounts import Account
from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.generation import (
    GenerationRequest,
    PreparedGeneration,
    TextFinish,
    Timing,
    Usage,
)
from gateway.openai.protocol import SamplingBody, StreamOptions
from gateway.openai.sampling import (
    check_model,
    generation_requests,
    num_choices,
    wire_finish,
    wire_stop_reason,
    with_choice_seeds,
)
from jaxengine.sampling_params import SamplingParams

CALLER = Caller(account=Account("anonymous"))
KEY = Caller(account=CALLER.account, tenant="key")
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
    [request] = generation_requests(SamplingBody(), ["x"], max_tokens=None, caller=CALLER)
    assert request == GenerationRequest(prompt="x", account=CALLER.account)


def test_fields_are_taken_over():
    body = SamplingBody(temperature=0, top_k=-1, top_p=0.5, stop="x", seed=0, ignore_eos=True)
    [request] = generation_requests(body, ["x"], max_tokens=3, caller=CALLER)
    assert (request.temperature, request.top_k, request.top_p) == (0, 0, 0.5)
    assert (request.stop, request.seed, request.max_tokens) == (("x",), 0, 3)
    assert request.ignore_eos


def test_stream_options_need_a_stream():
    with pytest.raises(InvalidRequest, match="stream"):
        generation_requests(
            SamplingBody(stream_options=StreamOptions()), ["x"], max_tokens=1, caller=CALLER
        )


def test_scheduling_fields_are_taken_over():
    body = SamplingBody(priority=-3, queue_timeout=1.5, deadline=60.0, cache_salt="salt")
    for request in generation_requests(body, ["x", "y"], max_tokens=1, caller=KEY):
        assert (request.priority, request.queue_timeout_s, request.deadline_s) == (-3, 1.5, 60)
        assert (request.tenant, request.cache_salt) == ("key", "salt")


def test_a_named_tenant_wins_over_the_digest_of_a_key_that_nobody_checked():
    [request] = generation_requests(SamplingBody(tenant="a"), ["x"], max_tokens=1, caller=KEY)
    assert request.tenant == "a"


def test_an_end_by_deadline_is_a_length_with_its_own_stop_reason():
    ends = [finish("length"), finish("deadline"), finish("stop", stop_reason="END")]
    assert [wire_finish(end) for end in ends] == ["length", "length", "stop"]
    assert [wire_stop_reason(end) for end in ends] == [None, "deadline", "END"]


def finish(reason, stop_reason=None):
    times = dict.fromkeys(field.name for field in dataclasses.fields(Timing))
    return TextFinish(
        reason=reason,
        stop_reason=stop_reason,
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
        timing=Timing(**times),
    )


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
