from jaxengine.outputs import ItemLogprobs, RequestTiming, TokenLogprobs
from jaxengine.request import Request, RequestStatus
from jaxengine.sampling_params import SamplingParams


def make_request() -> Request:
    return Request("r", (1, 2, 3), SamplingParams(max_tokens=5), seed=9, arrival_time_s=10.0)


def test_a_new_request_waits_with_nothing_computed():
    request = make_request()
    assert request.status is RequestStatus.WAITING
    assert not request.is_finished
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.row) == (0, None)


def test_a_pending_token_counts_as_a_token():
    request = make_request()
    request.num_pending_tokens = 1
    assert (request.num_tokens, request.num_output_tokens) == (4, 1)
    request.token_ids.append(7)
    assert (request.num_tokens, request.num_output_tokens) == (5, 2)
    assert request.num_prompt_tokens == 3


def test_a_request_shows_its_progress_and_not_its_tokens():
    request = make_request()
    request.num_computed_tokens = 2
    assert repr(request) == "Request(r, WAITING, 2/3 computed)"


def test_all_time_of_a_request_that_never_ran_was_spent_waiting():
    assert make_request().timing(12.5) == RequestTiming(
        queue_s=2.5,
        prefill_s=0.0,
        decode_s=0.0,
        ttft_s=None,
        e2e_s=2.5,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def test_time_before_the_first_token_of_a_request_without_one_is_not_called_prefill():
    request = make_request()
    request.first_scheduled_time_s = 11.0
    timing = request.timing(15.0)
    assert (timing.queue_s, timing.prefill_s, timing.ttft_s, timing.e2e_s) == (1.0, 0.0, None, 5.0)


def test_the_times_of_a_finished_request_add_up():
    request = make_request()
    request.first_scheduled_time_s = 11.0
    request.first_token_time_s = 13.0
    request.last_token_time_s = 17.0
    request.num_cached_tokens = 2
    request.num_preemptions = 1
    assert request.timing(17.0) == RequestTiming(
        queue_s=1.0,
        prefill_s=2.0,
        decode_s=4.0,
        ttft_s=3.0,
        e2e_s=7.0,
        num_cached_tokens=2,
        num_preemptions=1,
    )


def logprobs_of(*values):
    return tuple(TokenLogprobs(value, ()) for value in values)


def test_log_probabilities_are_told_once_and_those_of_the_prompt_together():
    params = SamplingParams(max_tokens=5, logprobs=0, prompt_logprobs=0)
    request = Request("r", (1, 2, 3), params, seed=9, arrival_time_s=10.0)
    request.set_limits(eos_token_ids=(), max_model_len=20)
    assert request.lacks_prompt_logprobs
    first, second, third = logprobs_of(-1.0, -2.0, -3.0)
    request.note_logprobs(ItemLogprobs(None, 1, (first,)))
    assert request.lacks_prompt_logprobs
    # A preemption: the beginning comes again.
    request.note_logprobs(ItemLogprobs(third, 1, (first, second)))
    assert not request.lacks_prompt_logprobs
    assert request.append(7, 11.0) is None
    told = request.output(11.0, (7,))
    assert (told.new_logprobs, told.prompt_logprobs) == ((third,), (None, first, second))
    request.note_logprobs(ItemLogprobs(first, 0, ()))
    assert request.append(8, 12.0) is None
    told = request.output(12.0, (8,))
    assert (told.new_logprobs, told.prompt_logprobs) == ((first,), None)


def test_a_prompt_of_one_token_has_nothing_to_compute_for_its_log_probabilities():
    params = SamplingParams(max_tokens=5, prompt_logprobs=0)
    request = Request("r", (1,), params, seed=9, arrival_time_s=10.0)
    assert not request.lacks_prompt_logprobs
    assert request.append(7, 11.0) is None
    assert request.output(11.0, (7,)).prompt_logprobs == (None,)


def test_requests_without_rules_carry_none():
    request = make_request()
    request.set_limits(eos_token_ids=(), max_model_len=20)
    assert request.rules is None
