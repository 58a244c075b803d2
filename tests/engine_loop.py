"""An engine core over the fake device, and all that its requests were answered."""

from collections.abc import Sequence

from fake_runner import FakeModelRunner, weighted_sum, whole_answer
from jaxengine.config import EngineConfig
from jaxengine.engine_core import EngineCore
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
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


class EngineLoop:
    """Steps a core, checks it after each step, and keeps what comes out.

    Attributes:
        answers: the tokens of each request so far.
        ends: the last output of each request that has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 100,
        eos: Sequence[int] = (),
        num_padded_tokens: int = 0,
        step_times: StepTimeModel | None = None,
    ) -> None:
        self.config = config
        self.runner = FakeModelRunner(
            config,
            vocab_size=vocab_size,
            eos_token_ids=eos,
            num_padded_tokens=num_padded_tokens,
        )
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
        self._vocab_size = vocab_size
        self._eos = tuple(eos)
        self._requests: dict[str, Request] = {}

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()

    @property
    def unfinished(self) -> list[str]:
        return [name for name in self._requests if name not in self.ends]

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
        self._requests[name] = request
        self.answers[name] = ()
        self.core.add(request)
        return request

    def step(self) -> list[RequestOutput]:
        outputs = self.core.step()
        self._take(outputs)
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
            for name, request in self._requests.items()
            if name not in self.ends
        )
        for _ in range(most):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"still busy after {most} steps: {self.unfinished}"
        assert self.unfinished == []

    def expected(self, name: str) -> tuple[tuple[int, ...], FinishReason]:
        """What a request must be answered if nothing cuts it short."""
        request = self._requests[name]
        return whole_answer(
            request.token_ids[: request.num_prompt_tokens],
            request.params,
            weighted_sum(self._vocab_size),
            eos_token_ids=self._eos,
            max_model_len=self.config.max_model_len,
        )

    def check_answers(self) -> None:
        """Compare each answer with the reference; what was cut short is a beginning of it."""
        for name, end in self.ends.items():
            tokens, reason = self.expected(name)
            if end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert self.answers[name] == tokens[: len(self.answers[name])], name
            else:
                assert (self.answers[name], end.finish_reason) == (tokens, reason), name

    def check_idle(self) -> None:
        """Nothing is left of any request but prefixes in the cache."""
        stats = self.stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        self.core.check_integrity()

    def _take(self, outputs: list[RequestOutput]) -> None:
        assert self.runner.faults == []
        self.core.check_integrity()
        assert self.stats.num_running <= self.config.max_num_seqs
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, f"{name} goes on after its end"
            assert output.new_token_ids or output.finished, f"an output of {name} says nothing"
            assert len(output.new_token_times_s) == len(output.new_token_ids)
            assert (output.timing is not None) is output.finished
            self.answers[name] += output.new_token_ids
            if output.finished:
                self.ends[name] = output
