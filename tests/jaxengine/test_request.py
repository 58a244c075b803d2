from jaxengine.outputs import RequestTiming
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
