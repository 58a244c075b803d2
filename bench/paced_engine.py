"""The engine's own step loop over a device that does nothing but take its time."""

import time
from collections.abc import Iterable, Mapping, Sequence

from jaxengine.async_engine import AsyncEngine
from jaxengine.config import EngineConfig
from jaxengine.engine_core import EngineCore
from jaxengine.outputs import ItemLogprobs
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.token_engine import EngineLimits

__all__ = ["paced_engine"]

BLOCK_SIZE = 16
FIRST_WORD = 256  # before are the bytes


def paced_engine(
    *, num_streams: int, prompt_len: int, output_len: int, vocab_size: int, step_s: float
) -> AsyncEngine:
    """Return an engine, not started, that gives each of so many streams a token per step.

    Args:
        num_streams: that run at the same time.
        prompt_len: most tokens of a prompt.
        output_len: most tokens of an answer.
        vocab_size: tokens are above 255 and below it.
        step_s: time of a step on the device.
    """
    config = EngineConfig(
        max_model_len=prompt_len + output_len + 1,
        max_num_batched_tokens=num_streams * (prompt_len + 1),
        max_num_seqs=num_streams,
        max_num_queued_requests=num_streams,
        block_size=BLOCK_SIZE,
        num_blocks=1 + num_streams * (2 + (prompt_len + output_len) // BLOCK_SIZE),
        watermark=0.0,
        enable_prefix_caching=False,
    )
    limits = EngineLimits(
        max_model_len=config.max_model_len,
        vocab_size=vocab_size,
        max_num_seqs=num_streams,
        max_num_queued_requests=num_streams,
        eos_token_ids=(),
    )
    runner = _PacedRunner(vocab_size, step_s)
    return AsyncEngine(EngineCore(config, runner, eos_token_ids=()), limits)


class _PacedRunner:
    """A ModelRunner whose steps end one after the other, each after its time."""

    def __init__(self, vocab_size: int, step_s: float) -> None:
        self.compiles_after_ready = 0
        self._num_words = vocab_size - FIRST_WORD
        self._step_s = step_s
        self._num_steps = 0
        self._end_s = 0.0

    def execute(self, outputs: Iterable[SchedulerOutput]) -> Sequence["_PacedStep"]:
        return [self._execute(output) for output in outputs]

    @property
    def can_overtake(self) -> bool:
        return False

    def overtake(
        self, running: Sequence[object], output: SchedulerOutput
    ) -> tuple["_PacedStep", Sequence["_PacedStep"]]:
        raise NotImplementedError

    def reset(self) -> None:
        pass

    def _execute(self, output: SchedulerOutput) -> "_PacedStep":
        self._num_steps += 1
        self._end_s = max(self._end_s, time.monotonic()) + self._step_s
        token_ids = [
            FIRST_WORD + (self._num_steps + 7 * row) % self._num_words
            for row in range(len(output.scheduled))
        ]
        return _PacedStep(token_ids, output.num_tokens, self._end_s)


class _PacedStep:
    """A StepHandle."""

    def __init__(self, token_ids: Sequence[int], num_slots: int, end_s: float) -> None:
        self.num_slots = num_slots
        self._token_ids = token_ids
        self._end_s = end_s

    def is_done(self) -> bool:
        return time.monotonic() >= self._end_s

    def result(self) -> Sequence[int]:
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        return self._token_ids

    def logprobs(self) -> Mapping[int, ItemLogprobs]:
        return {}
