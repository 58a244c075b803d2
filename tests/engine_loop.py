"""An engine core over the fake device, and all that its requests were answered."""

from collections.abc import Callable, Sequence

import pytest

from fake_runner import FakeModelRunner, NextToken, weighted_sum, whole_answer
from jaxengine.config import EngineConfig
from jaxengine.engine_core import EngineCore
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request, RequestStatus
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.stats import EngineStats
from jaxengine.step_time import StepTimeModel

__all__ = ["EngineLoop", "small_config"]


def small_config(**changes) -> EngineConfig:
    """16 blocks of 8 tokens, 4 requests, 16 tokens a step, unless changed."""
    defaults = {
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "block_size": 8,
        "num_blocks": 17,
        "watermark": 0.0,
    }
    return EngineConfig(**(defaults | changes))


class Clock:
    """Each look at it takes a second; the first says 1.

    Attributes:
        now_s: what the last look said.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


class WatchedRunner(FakeModelRunner):
    """A device that shows each step to somebody before it runs it.

    Attributes:
        watch: called with the step, and those that it overtakes.
    """

    watch: Callable[[SchedulerOutput, Sequence[SchedulerOutput]], None]
    _overtaken: Sequence[SchedulerOutput] = ()

    def execute_one(self, output: SchedulerOutput):
        self.watch(output, self._overtaken)
        return super().execute_one(output)

    def overtake(self, running, output: SchedulerOutput):
        self._overtaken = [step.output for step in running]
        try:
            return super().overtake(running, output)
        finally:
            self._overtaken = ()


class EngineLoop:
    """Steps a core, checks it after each step, and keeps what comes out.

    Attributes:
        answers: the tokens of each request so far.
        ends: the last output of each request that has ended.
        requests: all requests ever added.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 100,
        eos: Sequence[int] = (),
        num_padded_tokens: int = 0,
        step_times: StepTimeModel | None = None,
        next_token: NextToken | None = None,
    ) -> None:
        self.config = config
        self._next_token = next_token or weighted_sum(vocab_size)
        self.runner = WatchedRunner(
            config,
            next_token=self._next_token,
            eos_token_ids=eos,
            num_padded_tokens=num_padded_tokens,
        )
        self.runner.watch = self._check_step
        self.clock = Clock()
        self.core = EngineCore(
            config,
            self.runner,
            eos_token_ids=tuple(eos),
            step_times=step_times,
            clock=self.clock,
        )
        self.answers: dict[str, tuple[int, ...]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self._eos = tuple(eos)
        self.requests: dict[str, Request] = {}
        self._batch: set[str] = set()  # who started together, without continuous batching
        self._batch_blocks = 0

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()

    @property
    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.status is RequestStatus.RUNNING]

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self.requests if name not in self.ends]

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
        **params,
    ) -> Request:
        request = Request(
            name,
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            arrival_time_s=self.clock.now_s,
            cache_salt=salt,
            tenant=tenant,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
            deadline_s=deadline_s,
        )
        self.requests[name] = request
        self.answers[name] = ()
        self.core.add(request)
        return request

    def step(self) -> list[RequestOutput]:
        eldest = min(self.running, key=lambda request: request.rank, default=None)
        num_failures = self.stats.num_step_failures
        begins_s = self.clock.now_s + 1
        outputs = self.core.step()
        self._take(outputs)
        for request in self.requests.values():
            if request.request_id in self.unfinished:
                times_s = [request.deadline_s]
                if request.first_scheduled_time_s is None:
                    times_s.append(request.queue_timeout_s)
                for time_s in times_s:
                    assert time_s is None or request.arrival_time_s + time_s > begins_s, request
        if eldest is not None and self.stats.num_step_failures == num_failures:
            # Somebody always gets on: the eldest that runs, or one that is elder still.
            assert (
                eldest.status is not RequestStatus.PREEMPTED
                or min(request.rank for request in self.running) < eldest.rank
            )
        return outputs

    def abort(self, name: str) -> None:
        self._take(self.core.abort(name))

    def run(self) -> None:
        """Step until nothing is left to do, within the steps that this can take at most.

        The request admitted first always gets a token or more in a step, so each request takes at
        most as many steps as it has tokens, and some until its last token has arrived.
        """
        most = 3 + sum(
            request.num_prompt_tokens + request.params.max_tokens + 3
            for name, request in self.requests.items()
            if name not in self.ends
        )
        for _ in range(most * (self.runner.num_vain_looks + 1)):  # some only look
            if not self.core.has_work:
                break
            before = self._progress()
            if self.step() or self._progress() != before:
                continue
            # Nothing happened, so there is a time to wait for, and something happens then; or later
            # if it was to look whether a step is done.
            for _ in range(self.runner.num_vain_looks + 1):
                if not self.core.has_work:
                    break
                wait_s = self.core.seconds_until_work()
                assert wait_s is not None
                self.clock.now_s += wait_s
                if self.step() or self._progress() != before:
                    break
            else:
                pytest.fail("waited for nothing")
        assert not self.core.has_work, f"still busy after {most} steps: {self.unfinished}"
        assert self.unfinished == []

    def _progress(self) -> tuple[int, int]:
        """Steps launched and taken in."""
        return len(self.runner.steps), self.runner.num_results

    def expected(self, name: str) -> tuple[tuple[int, ...], FinishReason]:
        """What a request must be answered if nothing cuts it short."""
        request = self.requests[name]
        return whole_answer(
            request.token_ids[: request.num_prompt_tokens],
            request.params,
            self._next_token,
            eos_token_ids=self._eos,
            max_model_len=self.config.max_model_len,
        )

    def check_answers(self) -> None:
        """Compare each answer with the reference; what was cut short is a beginning of it."""
        for name, end in self.ends.items():
            tokens, reason = self.expected(name)
            if end.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.answers[name] == tokens[: len(self.answers[name])], name
            else:
                assert (self.answers[name], end.finish_reason) == (tokens, reason), name

    def check_idle(self) -> None:
        """Nothing is left of any request but prefixes in the cache."""
        stats = self.stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        self.core.check_integrity()

    def _check_step(
        self, output: SchedulerOutput, overtaken: Sequence[SchedulerOutput] = ()
    ) -> None:
        """Check the laws that a step must keep, just after it was scheduled."""
        config, stats = self.config, self.stats
        limit = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        num_slots = output.num_tokens + output.wasted_slots
        assert num_slots <= limit
        live = [request for request in self.requests.values() if not request.is_finished]
        waiting = [request for request in live if request.status is not RequestStatus.RUNNING]
        assert (stats.num_running, stats.num_waiting) == (len(live) - len(waiting), len(waiting))
        assert stats.num_preempted == sum(
            request.status is RequestStatus.PREEMPTED for request in waiting
        )
        if config.long_prefill_token_threshold and len(live) > 1:
            most = max((item.num_new_tokens for item in output.scheduled), default=0)
            assert most <= config.long_prefill_token_threshold
        is_closed = config.batching != "continuous"
        if is_closed:
            assert output.num_preempted == 0
        else:
            assert output.wasted_slots == 0
        if overtaken:
            self._check_overtaking(output, overtaken)
            return
        # Work is conserved: who runs gets tokens while there are any, and who waits is right to.
        is_timed = config.target_itl_s is not None
        scheduled = {item.request for item in output.scheduled}
        for request in live:
            if not (request.status is not RequestStatus.RUNNING or is_closed or is_timed):
                awaits_its_end = (
                    request.num_pending_tokens and request.num_tokens >= request.max_num_tokens
                )
                awaits_its_token = config.num_speculative_tokens and request.num_pending_tokens
                assert (
                    request in scheduled or awaits_its_end or awaits_its_token or num_slots == limit
                ), request
        match output.waiting_for:
            case "":
                assert not waiting
            case "seqs":
                assert stats.num_running == config.max_num_seqs
            case "tokens":
                assert num_slots == limit or is_timed
            case "kv_cache":
                assert output.num_preempted or any(
                    self._blocks(request) + config.watermark_blocks > stats.num_free_blocks
                    for request in waiting
                )
            case "preemption":
                assert any(request.num_pending_tokens for request in waiting)
            case reason:
                assert (reason, is_closed) == ("batch", True)
        assert bool(waiting) == bool(output.waiting_for)

    def _check_overtaking(
        self, output: SchedulerOutput, overtaken: Sequence[SchedulerOutput]
    ) -> None:
        """Whole prompts of tenants below their share run before others, and streams before prompts.

        They are none of those that are overtaken.
        """
        assert self.config.batching == "continuous"
        is_long_piece = overtaken[0].pause_after_s is not None
        running = {item.request for step in overtaken for item in step.scheduled}
        for item in output.scheduled:
            request = item.request
            assert item.samples
            assert request not in running
            if is_long_piece and item.first_position >= request.num_prompt_tokens:
                assert item.num_new_tokens == 1
                continue
            assert self.config.scheduling_policy == "fair"
            assert item.first_position + item.num_new_tokens == request.num_prompt_tokens
            tenants = {r.tenant for r in (*running, *self.running)}
            assert tenants - {request.tenant}, "it overtakes its own"

    def _check_batch(self) -> None:
        """A batch keeps all of its blocks until it is done, and nobody joins it."""
        stats = self.stats
        names = {request.request_id for request in self.running}
        num_held = stats.num_blocks - stats.num_free_blocks
        if names & self._batch:
            assert names < self._batch or names == self._batch, "somebody joined"
            assert num_held == self._batch_blocks, "blocks were taken or given back on the way"
        else:
            assert bool(num_held) == bool(names), "a batch that is done holds blocks"
            self._batch, self._batch_blocks = names, num_held

    def _blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self.config.block_size)

    def _take(self, outputs: list[RequestOutput]) -> None:
        assert self.runner.faults == [], self.runner.faults
        self.core.check_integrity()
        assert self.stats.num_running <= self.config.max_num_seqs
        if self.config.batching != "continuous":
            self._check_batch()
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, f"{name} goes on after its end"
            assert output.new_token_ids or output.finished, f"an output of {name} says nothing"
            assert len(output.new_token_times_s) == len(output.new_token_ids)
            assert (output.timing is not None) is output.finished
            self.answers[name] += output.new_token_ids
            if output.finished:
                self.ends[name] = output
