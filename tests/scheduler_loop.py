"""A scheduler without a device: the test says which tokens come back, and when."""

from collections.abc import Mapping, Sequence

from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.outputs import RequestOutput
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler import Scheduler
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_time import StepTimeModel

__all__ = ["SchedulerLoop", "shares"]

DEFAULTS = {
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "block_size": 8,
    "num_blocks": 17,
    "watermark": 0.0,
}


def shares(output: SchedulerOutput) -> dict[str, int]:
    """How many tokens each request was given in a step."""
    return {item.request.request_id: item.num_new_tokens for item in output.scheduled}


class SchedulerLoop:
    """Small numbers by default: 16 blocks of 8 tokens, 4 requests, 16 tokens a step.

    Each `schedule` and each `update` takes a second of a clock that starts at 0. Integrity is
    checked after each.
    """

    def __init__(
        self, *, eos: Sequence[int] = (), step_times: StepTimeModel | None = None, **changes
    ) -> None:
        self.config = EngineConfig(**(DEFAULTS | changes))
        self.kv = KVCacheManager(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(self.config, self.kv, eos_token_ids=eos, step_times=step_times)
        self.now_s = 0.0

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        *,
        max_tokens: int = 40,
        salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
        **params,
    ) -> Request:
        """Queue a request. A number stands for a prompt of that length that shares no prefix."""
        ids = [ord(name[0])] * prompt if isinstance(prompt, int) else prompt
        request = Request(
            name,
            tuple(ids),
            SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            arrival_time_s=self.now_s,
            cache_salt=salt,
            tenant=tenant,
            priority=priority,
            queue_timeout_s=queue_timeout_s,
            deadline_s=deadline_s,
        )
        self.scheduler.add(request)
        self.scheduler.check_integrity()
        return request

    def schedule(self) -> SchedulerOutput:
        self.now_s += 1
        output = self.scheduler.schedule(self.now_s)
        self.scheduler.check_integrity()
        return output

    def update(
        self, output: SchedulerOutput, tokens: Mapping[str, int] | None = None
    ) -> list[RequestOutput]:
        """Let a step finish. Requests that `tokens` does not name get token 7."""
        self.now_s += 1
        sampled = [(tokens or {}).get(item.request.request_id, 7) for item in output.scheduled]
        outputs = self.scheduler.update(output, sampled, self.now_s)
        self.scheduler.check_integrity()
        return outputs

    def step(self, tokens: Mapping[str, int] | None = None) -> dict[str, int]:
        """Schedule and update at once; return the shares."""
        output = self.schedule()
        self.update(output, tokens)
        return shares(output)

    def expire(self, now_s: float) -> list[RequestOutput]:
        """Let it be so late."""
        self.now_s = now_s
        outputs = self.scheduler.expire(now_s)
        self.scheduler.check_integrity()
        return outputs

    def abort(self, name: str) -> RequestOutput | None:
        output = self.scheduler.abort(name, self.now_s)
        self.scheduler.check_integrity()
        return output
