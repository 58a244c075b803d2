"""What the gateway needs from an engine, and all that it sees of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxengine.output_stream import OutputStream
from jaxengine.sampling_params import SamplingParams
from jaxengine.stats import EngineStats
from jaxengine.step_log import StepLog

__all__ = ["EngineLimits", "TokenEngine", "TokenRequest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Bounds that a request must keep, fixed once the engine is ready.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: token ids are in [0, vocab_size).
        max_num_seqs: requests that can run at the same time.
        max_num_queued_requests: requests that may wait; beyond, `submit` raises QueueFullError.
        eos_token_ids: ids that end a request unless it asks to ignore them.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_queued_requests: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRequest:
    """What the gateway asks of the engine.

    Attributes:
        cache_salt: only requests of the same tenant with the same salt share cached prefixes.
        tenant: on whose behalf; tenants share the engine fairly.
        priority: lower goes first.
        queue_timeout_s: the request ends if it has not started after so long; None takes the
            engine's default.
        deadline_s: the request ends after so long, with what it has; None sets no bound.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0
    queue_timeout_s: float | None = None
    deadline_s: float | None = None


class TokenEngine(Protocol):
    """Token ids in, token ids out. Implemented in-process by AsyncEngine, and by fakes in tests.

    All methods are called on the event loop. None of them blocks.
    """

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: started, not draining, not stalled, not dead."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether there is work and no step has ended for longer than any should take."""
        ...

    @property
    def failure(self) -> str | None:
        """One line saying why the engine is dead, or None while it lives."""
        ...

    @property
    def steps(self) -> StepLog:
        """The newest steps."""
        ...

    def check_capacity(self, num_requests: int, *, tenant: str = "") -> None:
        """Raise if so many requests of a tenant could not be taken now, whatever they are.

        For whoever wants to refuse before it has worked on a request; `submit` checks again.

        Raises:
            QueueFullError: too many requests wait.
        """
        ...

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Let these shares, all above 0, hold from now on, and 1 for all other tenants."""
        ...

    def submit(self, requests: Sequence[TokenRequest]) -> list[OutputStream]:
        """Queue all of these requests, or none, and return the outputs of each.

        Raises:
            InvalidRequestError: empty or too long prompt, an id outside the vocabulary,
                or a request that could never fit into the KV cache.
            QueueFullError: too much waits, or it would not start before its queue timeout.
            EngineStoppingError: the engine drains or has stopped.
            EngineStalledError: no step ends.
            EngineDeadError: the engine failed for good.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Accept nothing more, let requests finish for so long, abort the rest, end the loop."""
        ...
