"""Host time of one scheduling step, by how many requests run and how many wait."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from jaxengine.config import EngineConfig, SchedulingPolicy
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler import Scheduler

__all__ = ["StepCost", "measure_step_cost"]

PROMPT_LEN = 32
BLOCK_SIZE = 16
NUM_TENANTS = 10
WARMUP_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Milliseconds of a step in which `num_running` requests get a token each.

    Attributes:
        schedule_ms, update_ms: medians of the two halves.
        step_ms, step_p99_ms, step_max_ms: of both together.
        add_us: microseconds to queue a request, on average.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    schedule_ms: float
    update_ms: float
    step_ms: float
    step_p99_ms: float
    step_max_ms: float
    add_us: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_step_cost(
    *,
    num_running: int,
    num_waiting: int,
    num_steps: int = 200,
    policy: SchedulingPolicy = "fair",
    clock: Callable[[], float] = time.perf_counter,
) -> StepCost:
    """Run the scheduler without a device and take the time.

    Requests of ten tenants decode; the others wait, for there is no row for them. The garbage
    collector is off, as in a server that freezes what lives long.
    """
    scheduler = make_scheduler(num_running, num_steps, policy)
    for number in range(num_running):
        scheduler.add(make_request(number, now_s=0.0))
    now_s = 1.0
    while has_prompts(scheduler, now_s):
        now_s += 1.0
    assert scheduler.num_running == num_running, "not all requests run"
    start_s = clock()
    for number in range(num_waiting):
        scheduler.add(make_request(num_running + number, now_s=now_s))
    add_s = clock() - start_s
    schedule_s, update_s = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARMUP_STEPS + num_steps):
            now_s += 0.01
            start_s = clock()
            output = scheduler.schedule(now_s)
            scheduled_s = clock()
            sampled = [0] * len(output.scheduled)
            updating_s = clock()
            scheduler.update(output, sampled, now_s)
            end_s = clock()
            schedule_s.append(scheduled_s - start_s)
            update_s.append(end_s - updating_s)
    finally:
        gc.enable()
    del schedule_s[:WARMUP_STEPS], update_s[:WARMUP_STEPS]
    step_s = sorted(map(sum, zip(schedule_s, update_s, strict=True)))
    return StepCost(
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=num_steps,
        schedule_ms=1e3 * median(schedule_s),
        update_ms=1e3 * median(update_s),
        step_ms=1e3 * median(step_s),
        step_p99_ms=1e3 * step_s[int(0.99 * (len(step_s) - 1))],
        step_max_ms=1e3 * step_s[-1],
        add_us=1e6 * add_s / num_waiting if num_waiting else 0.0,
    )


def make_scheduler(num_running: int, num_steps: int, policy: SchedulingPolicy) -> Scheduler:
    """One in which so many requests can decode for so many steps."""
    max_model_len = PROMPT_LEN + 2 * (WARMUP_STEPS + num_steps) + num_running
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max(num_running, PROMPT_LEN) + 1024,
        max_num_seqs=num_running,
        block_size=BLOCK_SIZE,
        num_blocks=1 + num_running * blocks_per_seq,
        watermark=0.0,
        scheduling_policy=policy,
    )
    kv = KVCacheManager(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Scheduler(config, kv, eos_token_ids=())


def make_request(number: int, *, now_s: float) -> Request:
    return Request(
        str(number),
        (number,) * PROMPT_LEN,
        SamplingParams(max_tokens=1_000_000, ignore_eos=True),
        seed=0,
        arrival_time_s=now_s,
        tenant=f"tenant-{number % NUM_TENANTS}",
    )


def has_prompts(scheduler: Scheduler, now_s: float) -> bool:
    """Make a step; return whether any request got more than one token."""
    output = scheduler.schedule(now_s)
    scheduler.update(output, [0] * len(output.scheduled), now_s)
    return any(item.num_new_tokens > 1 for item in output.scheduled)
