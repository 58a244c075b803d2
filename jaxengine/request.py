"""One request inside the engine: its tokens, how far they are computed, and its history."""

from collections.abc import Collection
from enum import Enum, auto

from jaxengine.outputs import (
    FinishReason,
    ItemLogprobs,
    RequestOutput,
    RequestTiming,
    TokenLogprobs,
)
from jaxengine.prompt_lookup import PromptLookup
from jaxengine.sampling_params import SamplingParams
from jaxengine.tenants import Tenant
from jaxengine.token_rules import TokenRules

__all__ = ["Request", "RequestStatus"]


class RequestStatus(Enum):
    """Where a request is in its life. Why it ended is its `finish_reason`."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # ran, and waits again; with its blocks where only its row was wanted
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
            scheduled, 2 between scheduling a step and taking in the tokens of the one before;
            with `decode_steps` so many times more.
        num_draft_tokens: guessed tokens that a step in flight computes along; they are none of its
            tokens before they are accepted.
        lookup: where its guesses come from; None as long as nobody has guessed.
        block_hashes: names of the contents of its first full blocks, as far as they were needed.
        row: place in the device state while running.
        block_ids, num_slots: its blocks in order, and the tokens that they can hold; kept by the
            KVCacheManager.
        end_token_ids: tokens that end it, by `set_limits`.
        max_num_tokens: how long it can get, prompt and output, by `set_limits`.
        rank: place in the order of requests, lower first; fixed once the scheduler has it.
        samples_at_random: whether its tokens are drawn, not just the most likely ones.
        needs_last_token: as in SamplingParams.
        account: what its tenant's service is charged to; given by the scheduler.
        num_waiting_tokens: tokens that it has to compute while it waits, kept by the WaitingQueue.
        num_charged_tokens: beginning of the sequence that has been charged, or came for free.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission.
        rules: what its next tokens depend on besides the model, by `set_limits`; None without.
        lacks_prompt_logprobs: it wants log-probabilities of prompt tokens that are not known yet,
            so that no part of its prompt may come from the prefix cache.
    """

    # Steps touch thousands of requests: slots are faster than a dict, and smaller.
    __slots__ = (
        "__weakref__",
        "_new_logprobs",
        "_num_prompt_logprobs",
        "_prompt_logprobs",
        "_wants_logprobs",
        "account",
        "arrival_time_s",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "deadline_s",
        "end_token_ids",
        "finish_reason",
        "first_scheduled_time_s",
        "first_token_time_s",
        "lacks_prompt_logprobs",
        "last_token_time_s",
        "lookup",
        "max_num_tokens",
        "needs_last_token",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_draft_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_waiting_tokens",
        "params",
        "priority",
        "queue_timeout_s",
        "rank",
        "request_id",
        "row",
        "rules",
        "samples_at_random",
        "seed",
        "status",
        "tenant",
        "token_ids",
    )

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
        self.num_draft_tokens = 0
        self.lookup: PromptLookup | None = None
        self.block_hashes: list[bytes] = []
        self.row: int | None = None
        self.num_slots = 0
        self.rank = (0.0, 0)
        self.end_token_ids: frozenset[int] = frozenset()
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens
        self.block_ids: list[int] = []
        self.samples_at_random = not params.is_greedy
        self.needs_last_token = params.needs_last_token
        self.account = Tenant(tenant, 1.0)
        self.num_charged_tokens = 0
        self.num_waiting_tokens = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_time_s: float | None = None
        self.first_token_time_s: float | None = None
        self.last_token_time_s: float | None = None
        self.rules: TokenRules | None = None
        self.lacks_prompt_logprobs = (
            params.prompt_logprobs is not None and self.num_prompt_tokens > 1
        )
        self._wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._new_logprobs: tuple[TokenLogprobs, ...] = ()
        self._num_prompt_logprobs = 1  # known, counting the first token, which has none
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None] * self.num_prompt_tokens
        )

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

    @property
    def wants_only_tokens(self) -> bool:
        """Whether nothing decides on its tokens but the model, and nothing is told about them."""
        return self.rules is None and not self._wants_logprobs

    def set_limits(self, *, eos_token_ids: Collection[int], max_model_len: int) -> None:
        """Decide what ends the request besides its own wishes. Called once, before it is queued."""
        params = self.params
        eos = () if params.ignore_eos else eos_token_ids
        self.end_token_ids = frozenset((*params.stop_token_ids, *eos))
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        if params.masks or params.penalizes or params.logit_bias:
            self.rules = TokenRules(
                params,
                self.token_ids,
                eos_token_ids=eos_token_ids,
                end_token_ids=self.end_token_ids,
            )

    def begin(self, now_s: float, num_cached_tokens: int) -> None:
        """Note the first admission, with so many tokens from the prefix cache."""
        self.first_scheduled_time_s = now_s
        self.num_cached_tokens = num_cached_tokens
        self.num_charged_tokens = num_cached_tokens

    def note_logprobs(self, logprobs: ItemLogprobs) -> None:
        """Take in what a step says about its tokens; call it before `append`."""
        self._new_logprobs = () if logprobs.sampled is None else (logprobs.sampled,)
        known = self._prompt_logprobs
        if logprobs.prompt and known is not None:
            # After a preemption some come again, the same as before.
            end = logprobs.first_position + len(logprobs.prompt)
            known[logprobs.first_position : end] = logprobs.prompt
            self._num_prompt_logprobs = max(self._num_prompt_logprobs, end)
            self.lacks_prompt_logprobs = self._num_prompt_logprobs < self.num_prompt_tokens

    def append(self, token_id: int, now_s: float) -> FinishReason | None:
        """Take in the oldest pending token, which reached the host now.

        Returns:
            Why the request ends with it, or None if it goes on. At a dead end it is no token of
            the answer.
        """
        self.num_pending_tokens -= 1
        rules = self.rules
        if rules is not None:
            if not rules.allows(token_id):
                self._new_logprobs = ()
                return FinishReason.DEAD_END
            rules.append(token_id)
        token_ids = self.token_ids
        token_ids.append(token_id)
        if self.first_token_time_s is None:
            self.first_token_time_s = now_s
        self.last_token_time_s = now_s
        # Only what is known counts: the next token may be in flight already.
        num_tokens = len(token_ids)
        if (
            token_id in self.end_token_ids
            and num_tokens - self.num_prompt_tokens >= self.params.min_tokens
        ):
            return FinishReason.STOP
        if rules is not None and rules.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.max_num_tokens else None

    def finish(self, reason: FinishReason) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason

    def output(
        self, now_s: float, new_token_ids: tuple[int, ...], *, error: str | None = None
    ) -> RequestOutput:
        """Return what is new; the last output, with the timing, once the request is finished."""
        reason = self.finish_reason
        scheduled_s = self.first_scheduled_time_s
        queue_s = (now_s if scheduled_s is None else scheduled_s) - self.arrival_time_s
        times_s = (now_s,) * len(new_token_ids)
        if reason is None:
            output = RequestOutput(
                self.request_id,
                new_token_ids,
                times_s,
                self.num_cached_tokens,
                queue_s,
                self.num_preemptions,
            )
            return self._with_logprobs(output) if self._wants_logprobs else output
        output = RequestOutput(
            self.request_id,
            new_token_ids,
            times_s,
            self.num_cached_tokens,
            queue_s,
            self.num_preemptions,
            finish_reason=reason,
            stop_token_id=(
                new_token_ids[-1]
                if reason is FinishReason.STOP and new_token_ids[-1] in self.end_token_ids
                else None
            ),
            error=error,
            timing=self.timing(now_s),
        )
        return self._with_logprobs(output) if self._wants_logprobs else output

    def _with_logprobs(self, output: RequestOutput) -> RequestOutput:
        """Add what has not been told yet: those of the prompt all together."""
        output = output._replace(new_logprobs=self._new_logprobs)
        self._new_logprobs = ()
        if self._prompt_logprobs is not None and not self.lacks_prompt_logprobs:
            output = output._replace(prompt_logprobs=tuple(self._prompt_logprobs))
            self._prompt_logprobs = None
        return output

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
