"""One engine of the fleet: the real scheduler and KV cache, a clock that jumps, no device.

Time moves from the end of one step to the end of the next, as in `EngineCore`: with overlap, a step
is scheduled when the one before it begins on the device, so whoever arrives meanwhile joins the
step after. Scheduling itself takes no time here; its cost belongs to the device model's overhead.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from bench.simulation.device import DeviceModel, StepLoad
from bench.simulation.record import ReplicaRecord
from jaxengine.buckets import buckets_for, smallest_bucket
from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler import Scheduler
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_time import StepTimeModel

__all__ = ["Arrival", "Replica"]


class Arrival(NamedTuple):
    """A request as it reaches a replica: its number in the trace, and the columns of Trace."""

    number: int
    arrival_s: float
    prompt_len: int
    output_len: int
    prefix_len: int
    group: int
    session: int
    tenant: int
    priority: int


class StepInFlight(NamedTuple):
    """A step that the device works on, or will when the one before is done."""

    output: SchedulerOutput
    end_s: float
    duration_s: float


class Replica:
    """An engine that is driven from event to event.

    Attributes:
        next_event_s: when it has to be woken; infinite while it has nothing to do.
        record: what happened so far.

    Args:
        on_end: called with a request's number and the time, whenever one has ended. It may call
            `add`.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: DeviceModel,
        *,
        on_end: Callable[[int, float], None] | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._on_end = on_end
        self._kv = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._buckets = buckets_for(config)
        self._step_times = None if config.target_itl_s is None else self._warm_up()
        self._scheduler = Scheduler(config, self._kv, eos_token_ids=(), step_times=self._step_times)
        self._slots: dict[tuple[int, bool], int] = {}
        self._depth = 2 if config.overlap else 1
        self._in_flight: deque[StepInFlight] = deque()
        self._device_free_s = 0.0
        self.next_event_s = math.inf
        self.record = ReplicaRecord()

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_requests

    def add(self, arrival: Arrival, now_s: float) -> None:
        """Hand over a request. Everything due before `now_s` must have happened."""
        request = Request(
            str(arrival.number),
            prompt_ids(arrival),
            sampling_params(arrival.output_len),
            seed=0,
            arrival_time_s=now_s,
            tenant=f"tenant-{arrival.tenant}",
            priority=arrival.priority,
            queue_timeout_s=self._config.queue_timeout_s,
        )
        self._scheduler.add(request)
        if not self._in_flight:
            self.next_event_s = min(self.next_event_s, now_s)

    def run_until(self, end_s: float) -> None:
        """Live through everything that is due before `end_s`."""
        while self.next_event_s < end_s:
            self.wake()

    def wake(self) -> None:
        """Live through what is due at `next_event_s`, and find out when the next thing is."""
        now_s = self.next_event_s
        if self._in_flight and self._in_flight[0].end_s <= now_s:
            self._take_in(self._in_flight.popleft())
        if self._config.queue_timeout_s is not None:
            self._note_ends(self._scheduler.expire(now_s), now_s)
        while len(self._in_flight) < self._depth and self._launch(now_s):
            pass
        if self._in_flight:
            self.next_event_s = self._in_flight[0].end_s
            return
        event_s = self._scheduler.next_event_s(now_s)
        if event_s is not None and event_s <= now_s:
            raise RuntimeError(f"the scheduler has requests at {now_s} s, but schedules none")
        self.next_event_s = math.inf if event_s is None else event_s

    def _warm_up(self) -> StepTimeModel:
        """Measure every bucket without sequences, as the engine does at its start."""
        times_s = {
            bucket: self._device.step_s(StepLoad(bucket.num_tokens, bucket.decode_only, 0, 0, 0))
            for bucket in self._buckets
        }
        return StepTimeModel(self._buckets, times_s)

    def _launch(self, now_s: float) -> bool:
        """Schedule a step and give it to the device. Returns False if there was nothing to do."""
        output = self._scheduler.schedule(now_s)
        if output.is_empty:
            return False
        work = output.work
        num_slots = self._num_slots(work.num_tokens, work.decode_only)
        duration_s = self._device.step_s(
            StepLoad(
                num_slots,
                work.decode_only,
                work.num_seqs,
                work.decode_context,
                work.prefill_context,
            )
        )
        self._device_free_s = max(now_s, self._device_free_s) + duration_s
        self._in_flight.append(StepInFlight(output, self._device_free_s, duration_s))
        self.record.count_step(
            duration_s=duration_s,
            num_seqs=work.num_seqs,
            num_tokens=output.num_tokens,
            num_slots=num_slots,
            kv_use=1 - self._kv.num_free_blocks / self._kv.num_blocks,
            num_preempted=output.num_preempted,
        )
        return True

    def _take_in(self, step: StepInFlight) -> None:
        """Give the tokens of a finished step to their requests."""
        scheduled = step.output.scheduled
        self.record.end_s = step.end_s
        if self._step_times is not None:
            self._step_times.observe(step.output.work, step.duration_s)
        last_times = Counter([item.request.last_token_time_s for item in scheduled if item.samples])
        for last_s, count in last_times.items():
            if last_s is not None:
                self.record.gaps.add(step.end_s - last_s, count)
        # A conversation's tokens are all the same number, so that its next turn begins with them.
        sampled = [item.request.token_ids[-1] for item in scheduled]
        self._note_ends(self._scheduler.update(step.output, sampled, step.end_s), step.end_s)

    def _note_ends(self, outputs: Sequence[RequestOutput], now_s: float) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            number = int(output.request_id)
            if output.finish_reason is FinishReason.LENGTH:
                self._note_completion(number, output)
            else:
                self.record.timed_out.append(number)
            if self._on_end is not None:
                self._on_end(number, now_s)

    def _note_completion(self, number: int, output: RequestOutput) -> None:
        timing, record = output.timing, self.record
        assert timing is not None, "the last output has no timing"
        assert timing.ttft_s is not None, "a complete request has no first token"
        record.index.append(number)
        record.queue_s.append(timing.queue_s)
        record.ttft_s.append(timing.ttft_s)
        record.decode_s.append(timing.decode_s)
        record.e2e_s.append(timing.e2e_s)
        record.cached_tokens.append(timing.num_cached_tokens)
        record.preemptions.append(timing.num_preemptions)

    def _num_slots(self, num_tokens: int, decode_only: bool) -> int:
        """The bucket of a step, as the model runner chooses it, if the device computes it all."""
        if self._config.attention_kernel == "native":
            return num_tokens
        key = (num_tokens, decode_only)
        num_slots = self._slots.get(key)
        if num_slots is None:
            bucket = smallest_bucket(
                self._buckets,
                num_tokens=num_tokens,
                num_seqs=min(num_tokens, self._config.max_num_seqs),
                decode_only=decode_only and num_tokens <= self._config.max_num_seqs,
            )
            num_slots = self._slots[key] = bucket.num_tokens
        return num_slots


def prompt_ids(arrival: Arrival) -> tuple[int, ...]:
    """A prompt that shares exactly what its group and its conversation share.

    All tokens of a group are one number, and all of a conversation another: the names of cached
    blocks depend on all that comes before them, so blocks are told apart all the same.
    """
    own_len = arrival.prompt_len - arrival.prefix_len
    return (2 * arrival.group,) * arrival.prefix_len + (2 * arrival.session + 1,) * own_len


@lru_cache(maxsize=65536)
def sampling_params(output_len: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
