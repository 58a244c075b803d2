"""What the host makes of a step's results."""

import jax.numpy as jnp
import numpy as np

from jaxengine.batch import BatchBuilder
from jaxengine.buckets import Bucket
from jaxengine.jax_steps import JaxStep, JaxStepOfMany, Launch, StepResults
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from steps import step_of

BUILDER = BatchBuilder(
    [Bucket(16, 4, False)], block_size=8, max_blocks_per_seq=2, spare_row=4, eos_token_ids=()
)


def item(name, count, *, row):
    request = Request(
        name, tuple(range(count)), SamplingParams(max_tokens=4), seed=0, arrival_time_s=0.0
    )
    return ScheduledRequest(request, 0, count, row, (row + 1,), True, False)


def test_tokens_come_back_in_the_order_of_the_scheduler_whatever_that_of_the_batch():
    output = step_of(item("prompt", 5, row=0), item("decode", 1, row=1))
    step = BUILDER.build(output, serial=7)
    assert step.sequences == [1, 0]  # a single token is packed first
    sampled = jnp.array([30, 40, 0, 0])
    results = StepResults(sampled, jnp.zeros((4, 0), jnp.int32), jnp.zeros((16, 0), jnp.int32))
    found = JaxStep(results, Launch(step, step.packed, None, output.scheduled))
    assert (found.result(), found.num_slots, found.logprobs()) == ([40, 30], 16, {})
    assert found.is_done()
    assert found.launch.step.serial == 7


def test_of_many_steps_each_has_its_own_tokens():
    output = step_of(item("a", 1, row=0), item("b", 1, row=1))
    step = BUILDER.build(output)
    sampled = jnp.array(np.arange(8).reshape(2, 4))
    steps = [JaxStepOfMany(sampled, index, step) for index in range(2)]
    assert [s.result() for s in steps] == [[0, 1], [4, 5]]
