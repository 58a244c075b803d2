"""What the gateway needs from an engine, and all that it sees of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxengine.output_stream import OutputStream
from jaxengine.sampling_params import SamplingParams
from jaxengine.stats import EngineStats

__all__ = ["EngineLimits", "TokenEngine"]


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


class TokenEngine(Protocol):
    """Token ids in, token ids out. Implemented in-process by AsyncEngine, and by fakes in tests.

    All methods are called on the event loop. None of them blocks.
    """

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: started, not draining, not dead."""
        ...

    @property
    def failure(self) -> str | None:
        """One line saying why the engine is dead, or None while it lives."""
        ...

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> OutputStream:
        """Queue a request and return its outputs.

        Raises:
            InvalidRequestError: empty or too long prompt, an id outside the vocabulary,
                or a request that could never fit into the KV cache.
            QueueFullError: too many requests wait.
            EngineStoppingError: the engine drains or has stopped.
            EngineDeadError: the engine failed for good.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Accept nothing more, let requests finish for so long, abort the rest, end the loop."""
        ...
