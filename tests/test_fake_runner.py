"""The fake device must notice what it is there to notice."""

import pytest

from fake_runner import NOTHING_SAMPLED, FakeModelRunner, weighted_sum, whole_answer
from jaxengine.config import EngineConfig
from jaxengine.outputs import FinishReason
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from steps import step_of

CONFIG = EngineConfig(
    max_model_len=32, max_num_batched_tokens=16, max_num_seqs=4, block_size=8, num_blocks=8
)


def make_request(*prompt: int, min_tokens: int = 0, stop: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(max_tokens=8, min_tokens=min_tokens, stop_token_ids=stop)
    return Request("r", prompt, params, seed=0, arrival_time_s=0.0)


def whole_prompt(request: Request, *, row: int = 0, blocks=(1,)) -> ScheduledRequest:
    return ScheduledRequest(
        request=request,
        first_position=0,
        num_new_tokens=len(request.token_ids),
        row=row,
        block_ids=blocks,
        samples=True,
        last_is_pending=False,
    )


def pending_token(request: Request, position: int, *, row: int = 0, blocks=(1,)):
    return ScheduledRequest(
        request=request,
        first_position=position,
        num_new_tokens=1,
        row=row,
        block_ids=blocks,
        samples=True,
        last_is_pending=True,
    )


def test_tokens_are_what_the_docstring_computes_by_hand():
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    assert runner.execute_one(step_of(whole_prompt(request))).result() == [14]
    assert runner.execute_one(step_of(pending_token(request, 3))).result() == [70]
    assert runner.execute_one(step_of(pending_token(request, 4))).result() == [20]
    assert whole_answer(
        (1, 2, 3),
        SamplingParams(max_tokens=3),
        weighted_sum(100),
        eos_token_ids=(),
        max_model_len=32,
    ) == ((14, 70, 20), FinishReason.LENGTH)


def test_a_masked_token_is_replaced_by_the_next_larger_one():
    runner = FakeModelRunner(CONFIG, eos_token_ids=(15,))
    request = make_request(1, 2, 3, min_tokens=1, stop=(14,))
    assert runner.execute_one(step_of(whole_prompt(request))).result() == [16]


def test_the_reference_stops_where_the_context_is_full():
    params = SamplingParams(max_tokens=8)
    answer = whole_answer((1, 2, 3), params, weighted_sum(100), eos_token_ids=(), max_model_len=5)
    assert answer == ((14, 70), FinishReason.LENGTH)


def test_the_reference_includes_the_token_that_ends_it():
    params = SamplingParams(max_tokens=8)
    answer = whole_answer(
        (1, 2, 3), params, weighted_sum(100), eos_token_ids=(70,), max_model_len=32
    )
    assert answer == ((14, 70), FinishReason.STOP)


def test_a_chunk_that_does_not_reach_the_end_samples_nothing():
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    chunk = whole_prompt(request)._replace(num_new_tokens=2, samples=False)
    assert runner.execute_one(step_of(chunk)).result() == [NOTHING_SAMPLED]


def test_a_block_shared_within_one_step_can_be_read():
    runner = FakeModelRunner(CONFIG)
    first, second = make_request(*range(8)), make_request(*range(9))
    tail = whole_prompt(second)._replace(first_position=8, num_new_tokens=1, row=1)
    tail = tail._replace(block_ids=(1, 2))
    # 1 * 0 + 2 * 1 + ... + 8 * 7 = 168, and 9 * 8 more.
    assert runner.execute_one(step_of(whole_prompt(first), tail)).result() == [68, 40]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"block_ids": (2,)}, "nobody wrote"),
        ({"first_position": 5}, "nobody wrote"),
        ({"first_position": 2}, "attends to"),
        ({"row": 1}, "has no last token"),
        ({"last_is_pending": False}, "tokens are missing"),
        ({"block_ids": (0,)}, "no such block"),
        ({"block_ids": ()}, "has no block"),
        ({"block_ids": (1, 1)}, "twice in a table"),
        ({"num_new_tokens": 2}, "tokens are missing"),
    ],
)
def test_it_notices(change, complaint):
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    runner.execute_one(step_of(whole_prompt(request)))
    with pytest.raises(AssertionError, match=complaint):
        runner.execute_one(step_of(pending_token(request, 3)._replace(**change)))
    assert len(runner.faults) == 1


def test_it_notices_a_block_that_another_sequence_has_overwritten():
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    runner.execute_one(step_of(whole_prompt(request)))
    runner.execute_one(step_of(whole_prompt(make_request(4, 5), row=1)))
    with pytest.raises(AssertionError, match="another sequence's"):
        runner.execute_one(step_of(pending_token(request, 3)))


def test_it_notices_that_the_device_was_not_reset_after_a_failure():
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    runner.fail_launch(0)
    with pytest.raises(RuntimeError):
        runner.execute_one(step_of(whole_prompt(request)))
    with pytest.raises(AssertionError, match="has failed"):
        runner.execute_one(step_of(whole_prompt(request)))


def test_it_notices_that_old_blocks_are_used_after_a_reset():
    runner, request = FakeModelRunner(CONFIG), make_request(1, 2, 3)
    runner.execute_one(step_of(whole_prompt(request)))
    runner.reset()
    with pytest.raises(AssertionError, match="has no last token"):
        runner.execute_one(step_of(pending_token(request, 3)))


def test_it_notices_too_many_tokens():
    runner = FakeModelRunner(CONFIG)
    items = [whole_prompt(make_request(*range(8)), row=row, blocks=(row + 1,)) for row in range(3)]
    with pytest.raises(AssertionError, match="24 tokens in a step"):
        runner.execute_one(step_of(*items))
