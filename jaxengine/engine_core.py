"""The body of the step loop: schedule, launch, take in.

Single-threaded, without asyncio, and without JAX: the device hides behind `ModelRunner`.

Without overlap a step is launched and taken in at once: the readable truth. With overlap, the
next step is launched before the one before is taken in, so that the host works while the device
does. Both give the same tokens.
"""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import chain

from jaxengine.config import EngineConfig
from jaxengine.decode_ahead import schedule_ahead
from jaxengine.device_interface import ModelRunner, StepHandle
from jaxengine.errors import EngineDeadError
from jaxengine.in_flight import InFlight, StepInFlight
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.launch_timer import LaunchTimer
from jaxengine.outputs import RequestOutput
from jaxengine.request import Request
from jaxengine.scheduler import Scheduler
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.stats import EngineStats
from jaxengine.step_log import StepRecord
from jaxengine.step_meter import LaunchedStep, StepMeter
from jaxengine.step_time import StepTimeModel

__all__ = ["EngineCore"]

logger = logging.getLogger(__name__)

# Steps that may fail one after the other before the engine gives up.
MAX_FAILURES_IN_A_ROW = 3

STEP_FAILED = "the engine failed while computing this request"


class EngineCore:
    """Scheduler and model runner, stepped by their owner.

    Every request added gets exactly one last output, also when steps fail.

    Args:
        step_times: predicts step times, and is taught by those that are measured.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        eos_token_ids: tuple[int, ...],
        step_times: StepTimeModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._runner = runner
        self._step_times = step_times
        self._clock = clock
        self._kv = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_pending_tokens=2 * config.decode_steps - 1,
        )
        self._scheduler = Scheduler(
            config,
            self._kv,
            eos_token_ids=eos_token_ids,
            step_times=step_times,
            can_overtake=runner.can_overtake and config.overlap,
        )
        self._in_flight = InFlight()
        self._failures_in_a_row = 0
        self._idle_since_s: float | None = None  # with nothing in flight, though there is work
        self._num_step_failures = 0
        self._meter = StepMeter()
        self._launch_timer = LaunchTimer()
        self._records: list[StepRecord] = []
        self._waiting_for = ""
        self._has_overtakers = False  # somebody has come who should not wait for the step in flight
        self._num_overtaken = 0

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def has_work(self) -> bool:
        """Whether stepping makes progress."""
        return self._scheduler.has_requests or bool(self._in_flight)

    @property
    def steps_in_flight(self) -> tuple[SchedulerOutput, ...]:
        """The steps not taken in yet, oldest first. Any thread may ask: one of them may hang."""
        return self._in_flight.outputs

    def seconds_until_work(self) -> float | None:
        """Return how long stepping should wait; None: until something is added.

        It has nothing to do, or a step is in flight and it is too early to decide on the next one.
        Who is added meanwhile joins that.
        """
        now_s = self._clock()
        if self._has_overtakers:
            return 0.0
        in_flight = self._in_flight
        if in_flight and (self._is_next_launched or in_flight[0].began_s is not None):
            # One that was overtaken has less left, or more, than was foreseen.
            if not in_flight.is_worth_looking():
                return 0.0
            look_s = in_flight.seconds_to_look(now_s)
            begins_s = None if self._is_next_launched else self._begins_at_s()
            return look_s if begins_s is None else min(look_s, max(0.0, begins_s - now_s))
        if in_flight:
            begins_s = self._begins_at_s()
            return 0.0 if begins_s is None else max(0.0, begins_s - now_s)
        event_s = self._scheduler.next_event_s(now_s)
        return None if event_s is None else max(0.0, event_s - now_s)

    def take_records(self) -> list[StepRecord]:
        """Return the records of the steps that ended since the last call."""
        records, self._records = self._records, []
        return records

    def add(self, request: Request) -> None:
        if not self.has_work:
            self._idle_since_s = None
        self._scheduler.add(request)
        self._has_overtakers |= (
            self._runner.can_overtake
            and bool(self._in_flight)
            and self._in_flight[0].may_be_overtaken()
            # Whoever is due a token within a time is delayed once.
            and (self._config.target_itl_s is None or self._in_flight[0].began_s is None)
            and self._scheduler.may_overtake(request, self.steps_in_flight)
        )

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Let these weights hold from now on; see TokenEngine.set_tenant_weights."""
        self._scheduler.roster.tenants.set_weights(weights)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request early; its blocks are free at once. Returns its last output, if any."""
        output = self._scheduler.abort(request_id, self._clock())
        return [] if output is None else [output]

    def abort_all(self) -> list[RequestOutput]:
        """End every request early."""
        return self._scheduler.abort_all(self._clock())

    def step(self) -> list[RequestOutput]:
        """Launch the next step, take in what is due, and return what is new.

        With overlap, one step stays in flight. The device runs steps in order, so a step may use
        all that the one before writes, and what the host does not know yet it does not need: the
        device remembers the last token of every row. A request that turns out to have ended has
        one surplus token in flight, which is dropped.

        Who is owed service and comes while steps are in flight runs before the rest of them, where
        the device can do that. So nobody waits here for a step that has long to go. And streams run
        before the rest of a long piece of a prompt, again and again.

        Raises:
            EngineDeadError: too many steps failed in a row.
        """
        now_s = self._clock()
        outputs = self._scheduler.expire(now_s)
        try:
            num_stay = self._let_overtake(now_s, outputs)
            if num_stay is None:
                num_stay = self._go_on(now_s)
            self._take_in_all_but(num_stay, outputs)
        except Exception as error:
            outputs += self._recover(error)
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, rows and blocks are all accounted for."""
        self._scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters and gauges."""
        scheduler, kv, meter = self._scheduler, self._kv, self._meter
        roster = scheduler.roster
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preempted=roster.num_preempted,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            waiting_for=self._waiting_for if scheduler.num_waiting else "",
            num_received=roster.num_received,
            tokens_received=roster.tokens_received,
            num_admitted=roster.num_admitted,
            tokens_admitted=roster.tokens_admitted,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            block_size=self._config.block_size,
            prefix_queries=kv.prefix_queries,
            prefix_hits=kv.prefix_hits,
            prompt_tokens=roster.tokens_admitted,
            generation_tokens=scheduler.generation_tokens,
            draft_tokens=scheduler.speculation.num_drafted,
            accepted_draft_tokens=scheduler.speculation.num_accepted,
            num_preemptions=roster.num_preemptions,
            num_steps=meter.num_steps,
            num_steps_overtaken=self._num_overtaken,
            step_times=tuple(meter.step_times),
            step_time_sum_s=meter.step_time_sum_s,
            num_predicted_steps=meter.num_predicted_steps,
            step_prediction_error_s=meter.step_prediction_error_s,
            step_busy_s=self._in_flight.busy_s,
            device_idle_s=meter.device_idle_s,
            iteration_tokens=tuple(meter.iteration_tokens),
            iteration_tokens_sum=meter.iteration_tokens_sum,
            padded_tokens=meter.padded_tokens,
            wasted_prompt_slots=meter.wasted_prompt_slots,
            wasted_row_slots=meter.wasted_row_slots,
            compiles_after_ready=self._runner.compiles_after_ready,
            num_step_failures=self._num_step_failures,
        )

    def _launch(self, now_s: float) -> int:
        """Schedule a step, or several, and start them on the device; return how many."""
        first = len(self._in_flight)
        running = self._in_flight[-1].handle if first else None
        done_s = self._predict_done_s() if first else None
        ahead = schedule_ahead(
            self._scheduler,
            now_s,
            in_flight=self._in_flight.outputs,
            most=self._config.decode_steps,
        )
        output = next(ahead)
        self._waiting_for = output.waiting_for
        if output.is_empty:
            return 0
        if not first:
            self._in_flight.busy_since_s = now_s
        handles = self._runner.execute(map(self._note, chain([output], ahead)))
        was_late = running is not None and running.is_done()
        if running is not None:
            self._launch_timer.note(was_late=was_late)
        launched_s = self._clock()
        if was_late:
            self._idle_since_s = done_s
        if self._idle_since_s is not None:
            self._meter.device_idle_s += max(0.0, launched_s - self._idle_since_s)
            self._idle_since_s = None
        for index, handle in enumerate(handles):
            step = self._in_flight[first + index]
            step.handle = handle
            step.launched = self._launched(step.output, handle, now_s, launched_s)
            step.left_s = step.launched.predicted_s
            if len(handles) == self._config.decode_steps:
                step.num_together = len(handles) - index
        return len(handles)

    def _begins_at_s(self) -> float | None:
        """Return when to decide on the step after those in flight; None if that is not known."""
        predicted_s, pauses_at_s = self._in_flight.left_s(), self._in_flight.pauses_at_s()
        if predicted_s is None or pauses_at_s is not None:
            return pauses_at_s
        return self._launch_timer.begins_at_s(self._in_flight.busy_since_s, predicted_s)

    @property
    def _is_next_launched(self) -> bool:
        """Whether the next step is launched, and the one before it has not been waited for."""
        return self._runner.can_overtake and len(self._in_flight) > 1

    def _go_on(self, now_s: float) -> int:
        """Launch the next step, unless it is, and return how many should stay in flight."""
        num_launched = 1 if self._is_next_launched else self._launch(now_s)
        if self._is_next_launched and self._in_flight.is_worth_looking():
            return len(self._in_flight)
        return num_launched if self._config.overlap else 0

    def _let_overtake(self, now_s: float, outputs: list[RequestOutput]) -> int | None:
        """Have those run who should not wait for the steps in flight, if there are some.

        Their step is taken in at once, so that its tokens are known before another is scheduled.

        Args:
            now_s: when.
            outputs: what is new is added to it.

        Returns:
            How many steps should stay in flight; None if nobody overtakes them.
        """
        in_flight, pauses_at_s = self._in_flight, self._in_flight.pauses_at_s()
        if not self._has_overtakers and (pauses_at_s is None or now_s < pauses_at_s):
            return None
        self._has_overtakers = False
        while in_flight and in_flight[0].is_done():
            self._take_in_all_but(len(in_flight) - 1, outputs)
        if not in_flight:
            return None
        output = self._scheduler.schedule_before(in_flight.outputs, now_s)
        if output.is_empty:
            return None
        running = list(in_flight)
        step = in_flight.put_first(output)
        handles = [overtaken.handle for overtaken in running if overtaken.handle is not None]
        step.handle, rests = self._runner.overtake(handles, output)
        for overtaken, rest in zip(running, rests, strict=True):
            overtaken.handle = rest
        step.launched = self._launched(output, step.handle, now_s, self._clock())
        step.left_s = step.launched.predicted_s
        first = running[0]
        if first.left_s is not None:
            first.left_s = max(0.0, first.left_s - (now_s - in_flight.busy_since_s))
        if first.began_s is None and first.launched is not None:
            first.began_s = self._meter.device_start_s(first.launched)
        self._num_overtaken += 1
        return len(running)

    def _take_in_all_but(self, num_steps: int, outputs: list[RequestOutput]) -> None:
        """Wait for the first steps in flight, until only so many are left; add what is new."""
        while len(self._in_flight) > num_steps:
            outputs += self._take_in(self._in_flight[0])
            self._in_flight.drop_first()

    def _predict_done_s(self) -> float | None:
        """Return when the steps in flight should be done: nobody looks when they are."""
        predicted_s, oldest = self._in_flight.left_s(), self._in_flight[0].launched
        if predicted_s is None or oldest is None:
            return None
        return self._meter.device_start_s(oldest) + predicted_s

    def _note(self, output: SchedulerOutput) -> SchedulerOutput:
        """Count a step as in flight before it is launched, so that a failing one is charged."""
        self._in_flight.append(output)
        return output

    def _launched(
        self, output: SchedulerOutput, handle: StepHandle, scheduled_s: float, launched_s: float
    ) -> LaunchedStep:
        num_free, num_cached = self._kv.num_free_blocks, self._kv.num_cached_blocks
        return LaunchedStep(
            output=output,
            scheduled_s=scheduled_s,
            launched_s=launched_s,
            predicted_s=None if self._step_times is None else self._step_times.predict(output.work),
            num_slots=handle.num_slots,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_used_blocks=self._kv.num_blocks - num_free,
            num_cached_blocks=num_cached,
            num_free_blocks=num_free - num_cached,
        )

    def _take_in(self, step: StepInFlight) -> list[RequestOutput]:
        """Wait for the tokens of a step and hand them to their requests."""
        assert step.handle is not None, "a step that failed to launch was not recovered from"
        assert step.launched is not None
        sampled = step.handle.result()
        now_s = self._clock()
        self._in_flight.count_busy(now_s)
        self._failures_in_a_row = 0
        # Steps that ran together end together: each is given its share of the time.
        start_s = self._meter.device_start_s(step.launched)
        end_s = start_s + (now_s - start_s) / step.num_together
        for index, found in step.handle.logprobs().items():
            step.output.scheduled[index].request.note_logprobs(found)
        speculation = self._scheduler.speculation
        num_accepted_before = speculation.num_accepted
        outputs = self._scheduler.update(step.output, sampled, now_s)
        num_accepted = speculation.num_accepted - num_accepted_before
        record = self._meter.finish(
            step.launched,
            end_s,
            num_accepted=num_accepted,
            began_s=step.began_s,
            overtaken_s=step.overtaken_s,
        )
        self._records.append(record)
        if len(self._in_flight) > 1 and self._in_flight[1].began_s is not None:
            self._in_flight[1].overtaken_s += record.duration_s
        if self._step_times is not None:
            self._step_times.observe(step.output.work, record.duration_s)
        if len(self._in_flight) == 1 and self._scheduler.has_requests:
            self._idle_since_s = now_s
        return outputs

    def _recover(self, error: Exception) -> list[RequestOutput]:
        """Fail the requests of the steps in flight; all others start over on an empty cache."""
        logger.error("a step failed", exc_info=error)
        now_s = self._clock()
        if self._in_flight:
            self._in_flight.count_busy(now_s)
        self._num_step_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineDeadError(
                f"{self._failures_in_a_row} steps failed in a row, the last with "
                f"{type(error).__name__}"
            ) from error
        affected = {
            item.request.request_id: item.request
            for step in self._in_flight
            for item in step.output.scheduled
        }
        self._in_flight.clear()
        self._idle_since_s = None
        outputs = self._scheduler.fail(list(affected.values()), STEP_FAILED, now_s)
        self._runner.reset()
        return outputs
