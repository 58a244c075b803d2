import pytest

from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from steps import step_of


def share(first: int, count: int, *, pending: bool = False) -> ScheduledRequest:
    """A share of a request with the tokens 10, 11, ..., 19."""
    request = Request(
        "a", tuple(range(10, 20)), SamplingParams(max_tokens=9), seed=0, arrival_time_s=0.0
    )
    return ScheduledRequest(
        request,
        first_position=first,
        num_new_tokens=count,
        row=0,
        block_ids=[1, 2],
        samples=True,
        last_is_pending=pending,
    )


@pytest.mark.parametrize(
    ("first", "count", "pending", "ids"),
    [
        (0, 10, False, [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]),
        (2, 3, False, [12, 13, 14]),
        (9, 1, False, [19]),
        (10, 1, True, []),
        (8, 3, True, [18, 19]),
    ],
)
def test_the_token_ids_are_those_that_the_host_knows(first, count, pending, ids):
    assert list(share(first, count, pending=pending).token_ids) == ids


def test_a_step_is_empty_if_the_device_has_nothing_to_compute_not_even_waste():
    assert step_of().is_empty
    assert not step_of(share(0, 4)).is_empty
    assert not step_of(padding=(share(4, 3),)).is_empty
    assert not step_of(ended_rows=(share(4, 1),)).is_empty


def test_waste_adds_up_and_is_computed_behind_all_else():
    items = [share(0, 4), share(4, 3), share(8, 1), share(9, 1)]
    step = step_of(items[0], padding=(items[1],), ended_rows=tuple(items[2:]))
    assert (step.padding_slots, step.wasted_slots) == (3, 5)
    assert step.items == tuple(items)


def test_a_filler_has_tokens_that_are_none_of_the_requests():
    filler = share(8, 3)._replace(is_filler=True, samples=False)
    assert list(filler.token_ids) == [0, 0, 0]


def test_a_step_writes_the_blocks_that_its_tokens_lie_in():
    # Blocks 1 and 2 hold eight tokens each.
    assert step_of(share(0, 8)).written_blocks(8) == {1}
    assert step_of(share(7, 2)).written_blocks(8) == {1, 2}
    assert step_of(share(8, 2)).written_blocks(8) == {2}
    padding = (share(8, 1)._replace(is_filler=True),)
    assert step_of(share(0, 1), padding=padding).written_blocks(8) == {1, 2}
