"""How requests end, and the token that is in flight when they do."""

import gc

import pytest

from jaxengine.outputs import FinishReason, RequestTiming
from scheduler_loop import SchedulerLoop, shares


def end_of(loop: SchedulerLoop, *tokens: int):
    """Step with these tokens; return the outputs of all steps, which must end the one request."""
    outputs = []
    for token_id in tokens:
        assert loop.scheduler.has_requests, "the request ended too early"
        outputs += loop.update(loop.schedule(), {"a": token_id})
    assert not loop.scheduler.has_requests
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert [output.finished for output in outputs] == [False] * (len(tokens) - 1) + [True]
    assert tuple(t for output in outputs for t in output.new_token_ids) == tokens
    return outputs[-1]


def test_max_tokens_ends_a_request():
    loop = SchedulerLoop()
    loop.add("a", 3, max_tokens=2)
    last = end_of(loop, 7, 8)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.LENGTH, None)


def test_eos_ends_a_request():
    loop = SchedulerLoop(eos=(90, 91))
    loop.add("a", 3)
    last = end_of(loop, 7, 91)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 91)


def test_a_stop_id_ends_a_request():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 3, stop_token_ids=(50, 51))
    last = end_of(loop, 7, 51)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 51)


def test_a_stop_id_of_one_request_does_not_end_another():
    loop = SchedulerLoop()
    loop.add("a", 3, stop_token_ids=(50,))
    loop.add("b", 3)
    loop.step({"a": 50, "b": 50})
    assert loop.step() == {"b": 1}


def test_ignore_eos_ignores_eos_but_not_stop_ids():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 3, ignore_eos=True, stop_token_ids=(50,))
    last = end_of(loop, 90, 90, 50)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 50)


def test_an_eos_that_is_a_stop_id_too_ends_in_spite_of_ignore_eos():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 3, ignore_eos=True, stop_token_ids=(90,))
    assert end_of(loop, 90).finish_reason is FinishReason.STOP


def test_before_min_tokens_nothing_stops_a_request():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 3, min_tokens=3, stop_token_ids=(50,))
    last = end_of(loop, 90, 50, 90)
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, 90)


def test_a_stop_id_that_is_also_the_last_token_allowed_counts_as_a_stop():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 3, max_tokens=2)
    assert end_of(loop, 7, 90).finish_reason is FinishReason.STOP


def test_a_full_context_ends_a_request():
    loop = SchedulerLoop(max_model_len=6)
    loop.add("a", 3, max_tokens=40)
    assert end_of(loop, 7, 7, 7).finish_reason is FinishReason.LENGTH


def test_a_prompt_one_short_of_the_context_gets_one_token():
    loop = SchedulerLoop(max_model_len=6)
    loop.add("a", 5, max_tokens=40)
    assert end_of(loop, 7).finish_reason is FinishReason.LENGTH


def test_every_output_tells_the_time_in_the_queue_and_the_last_one_all_times():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("b", 3, max_tokens=1)
    loop.add("a", 20, max_tokens=2)  # arrives at 0
    loop.step()  # at 1 and 2, for b
    assert loop.update(loop.schedule()) == []  # scheduled first at 3, done at 4
    [first] = loop.update(loop.schedule())  # at 5 and 6
    [last] = loop.update(loop.schedule())  # at 7 and 8
    assert (first.queue_s, first.new_token_times_s, first.timing) == (3.0, (6.0,), None)
    assert (last.queue_s, last.new_token_times_s) == (3.0, (8.0,))
    assert last.timing == RequestTiming(
        queue_s=3.0,
        prefill_s=3.0,
        decode_s=2.0,
        ttft_s=6.0,
        e2e_s=8.0,
        num_cached_tokens=0,
        num_preemptions=0,
    )


def test_nothing_is_kept_of_requests_that_have_ended():
    loop = SchedulerLoop()

    def serve(count: int) -> None:
        for index in range(count):
            loop.add(f"r{index}", [index % 7] * 20, max_tokens=1)
            loop.step()
            loop.step()
            loop.add(f"s{index}", [index % 7] * 20)
            loop.step()
            loop.abort(f"s{index}")

    serve(50)
    gc.collect()
    num_objects = len(gc.get_objects())
    serve(200)
    gc.collect()
    assert not loop.scheduler.has_requests
    assert len(gc.get_objects()) < num_objects + 100


# Aborts.


def check_aborted(loop: SchedulerLoop, name: str) -> None:
    output = loop.abort(name)
    assert output is not None
    assert (output.request_id, output.finish_reason) == (name, FinishReason.ABORT)
    assert output.new_token_ids == ()
    assert output.timing is not None
    assert loop.abort(name) is None
    assert not loop.scheduler.has_requests
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert loop.step() == {}


def test_abort_while_waiting():
    loop = SchedulerLoop()
    loop.add("a", 40)
    loop.now_s = 5.0
    check_aborted(loop, "a")


def test_abort_in_the_middle_of_the_prompt():
    loop = SchedulerLoop()
    loop.add("a", 40)
    loop.step()
    check_aborted(loop, "a")


def test_abort_while_decoding():
    loop = SchedulerLoop()
    loop.add("a", 4)
    loop.step()
    loop.step()
    check_aborted(loop, "a")


def test_abort_with_a_token_in_flight_drops_that_token():
    loop = SchedulerLoop()
    loop.add("a", 4)
    in_flight = loop.schedule()
    check_aborted(loop, "a")
    assert loop.update(in_flight) == []
    assert loop.scheduler.generation_tokens == 0


def test_abort_in_the_step_that_would_have_been_the_last():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 4)
    in_flight = loop.schedule()
    check_aborted(loop, "a")
    assert loop.update(in_flight, {"a": 90}) == []


def test_abort_after_the_end_and_abort_of_an_unknown_request_do_nothing():
    loop = SchedulerLoop()
    loop.add("a", 4, max_tokens=1)
    loop.step()
    assert loop.abort("a") is None
    assert loop.abort("never") is None


def test_abort_of_one_leaves_the_others_alone():
    loop = SchedulerLoop()
    for name in "abc":
        loop.add(name, 4)
    loop.step()
    loop.abort("b")
    assert loop.step() == {"a": 1, "c": 1}


def test_abort_all_ends_whoever_waits_or_runs():
    loop = SchedulerLoop(max_num_seqs=1)
    loop.add("a", 4)
    loop.add("b", 4)
    loop.step()
    outputs = loop.scheduler.abort_all(9.0)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [
        ("a", FinishReason.ABORT),
        ("b", FinishReason.ABORT),
    ]
    assert loop.scheduler.abort_all(9.0) == []
    loop.scheduler.check_integrity()
    assert not loop.scheduler.has_requests


# A step is scheduled before the tokens of the one before are known.


def test_the_next_token_is_scheduled_before_the_last_one_is_known():
    loop = SchedulerLoop()
    loop.add("a", range(4))
    first, second = loop.schedule(), loop.schedule()
    [item] = second.scheduled
    assert (item.first_position, item.num_new_tokens) == (4, 1)
    assert list(item.token_ids) == []
    assert item.last_is_pending
    assert item.samples
    assert [output.new_token_ids for output in loop.update(first, {"a": 30})] == [(30,)]
    third = loop.schedule()
    assert third.scheduled[0].first_position == 5
    assert [output.new_token_ids for output in loop.update(second, {"a": 31})] == [(31,)]
    assert [output.new_token_ids for output in loop.update(third, {"a": 32})] == [(32,)]


def test_the_surplus_token_after_the_end_is_dropped():
    loop = SchedulerLoop(eos=(90,))
    request = loop.add("a", 4)
    first, second = loop.schedule(), loop.schedule()
    [last] = loop.update(first, {"a": 90})
    assert last.finish_reason is FinishReason.STOP
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert loop.update(second, {"a": 31}) == []
    assert request.token_ids[4:] == [90]
    assert loop.scheduler.generation_tokens == 1


@pytest.mark.parametrize("limit", [{"max_tokens": 2}, {"max_model_len": 6}])
def test_no_token_is_computed_beyond_a_length_known_beforehand(limit):
    loop = SchedulerLoop(max_model_len=limit.get("max_model_len", 64))
    loop.add("a", 4, max_tokens=limit.get("max_tokens", 40))
    first, second = loop.schedule(), loop.schedule()
    assert shares(loop.schedule()) == {}
    loop.update(first)
    assert shares(loop.schedule()) == {}
    [last] = loop.update(second)
    assert last.finish_reason is FinishReason.LENGTH


def test_what_is_pending_does_not_count_as_generated():
    loop = SchedulerLoop(eos=(90,))
    loop.add("a", 4, min_tokens=2)
    first, _second = loop.schedule(), loop.schedule()
    # The first of two tokens; that the second is in flight must not let EOS end it.
    assert [output.finished for output in loop.update(first, {"a": 90})] == [False]
