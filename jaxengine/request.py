"""One request inside the engine: its tokens, how far they are computed, and its history."""

from enum import Enum, auto

from jaxengine.outputs import FinishReason, RequestTiming
from jaxengine.sampling_params import SamplingParams

__all__ = ["Request", "RequestStatus"]


class RequestStatus(Enum):
    """Where a request is in its life. Why it ended is its `finish_reason`."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waits again; its tokens must be computed anew
    FINISHED = auto()


class Request:
    """The mutable state of one request. Only the engine thread touches it.

    There is no prefill or decode phase. `num_computed_tokens` chases `num_tokens`:

        |<------------------ num_tokens ------------------->|
        |  prompt  |  sampled tokens, known on the host  | pending |
        |<--- num_computed_tokens --->|<- to be computed ->|

    A pending token was sampled on the device and has not reached the host yet; it can be
    computed all the same, because the device remembers the last token of every row.

    Attributes:
        cache_salt, tenant, priority, queue_timeout_s, deadline_s: as in TokenRequest.
        token_ids: prompt and sampled tokens known on the host.
        num_computed_tokens: tokens whose K and V are in the cache, or will be after the steps
            already launched.
        num_pending_tokens: sampled tokens not known on the host. At most 1 when a step is
            scheduled, 2 between scheduling a step and taking in the tokens of the one before.
        block_hashes: names of the contents of its first full blocks, as far as they were needed.
        row: place in the device state while running.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        seed: int,
        arrival_time_s: float,
        cache_salt: str | None = None,
        tenant: str = "",
        priority: int = 0,
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.priority = priority
        self.queue_timeout_s = queue_timeout_s
        self.deadline_s = deadline_s
        self.arrival_time_s = arrival_time_s
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.block_hashes: list[bytes] = []
        self.row: int | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time_s: float | None = None
        self.first_token_time_s: float | None = None
        self.last_token_time_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and sampled tokens, the pending one included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, the pending one included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def queue_s(self, now_s: float) -> float:
        """Return the time from arrival to the first step that scheduled it, or until `now_s`."""
        scheduled = self.first_scheduled_time_s
        return (now_s if scheduled is None else scheduled) - self.arrival_time_s

    def timing(self, now_s: float) -> RequestTiming:
        """Return where the time went until `now_s`."""
        scheduled = self.first_scheduled_time_s
        first, last = self.first_token_time_s, self.last_token_time_s
        return RequestTiming(
            queue_s=self.queue_s(now_s),
            prefill_s=0.0 if scheduled is None or first is None else first - scheduled,
            decode_s=0.0 if first is None or last is None else last - first,
            ttft_s=None if first is None else first - self.arrival_time_s,
            e2e_s=now_s - self.arrival_time_s,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
        )
