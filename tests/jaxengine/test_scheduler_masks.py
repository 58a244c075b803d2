"""Requests whose next token depends on the last one, on the host, among requests that do not."""

from jaxengine.outputs import FinishReason
from scheduler_loop import SchedulerLoop, shares

WORD = ((1, 2),)  # of two tokens, so the second is forbidden after the first


def test_who_needs_its_last_token_joins_every_second_step_and_nobody_waits_for_it():
    """Step k + 1 is scheduled before the tokens of step k are known, as with overlap."""
    loop = SchedulerLoop()
    loop.add("a", 3)
    loop.add("b", 3, bad_words=WORD)
    in_flight, seen = loop.schedule(), []
    for _ in range(6):
        output = loop.schedule()
        loop.update(in_flight, {"b": 9})
        in_flight = output
        seen.append(shares(output))
    assert seen == [{"a": 1}, {"a": 1, "b": 1}] * 3


def test_alone_it_is_scheduled_once_its_token_is_known():
    loop = SchedulerLoop()
    loop.add("b", 3, bad_words=WORD)
    output = loop.schedule()
    assert loop.schedule().is_empty
    loop.update(output)
    assert shares(loop.schedule()) == {"b": 1}


def test_bad_words_of_one_token_wait_for_nothing():
    loop = SchedulerLoop()
    loop.add("b", 3, bad_words=((1,),), allowed_token_ids=(1, 2))
    loop.schedule()
    assert shares(loop.schedule()) == {"b": 1}


def test_a_dead_end_gives_no_token_and_everything_back():
    loop = SchedulerLoop()
    request = loop.add("b", 3, allowed_token_ids=(4, 5))
    for token_id in (4, 5, 6):
        output = loop.schedule()
        assert request.rules is not None
        request.rules.mask(2, num_before=request.num_output_tokens - 1)
        [told] = loop.update(output, {"b": token_id})
    assert told.finish_reason is FinishReason.DEAD_END
    assert told.new_token_ids == ()
    assert request.token_ids[3:] == [4, 5]
    assert loop.scheduler.generation_tokens == 2
