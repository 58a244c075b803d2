"""Static and dynamic batching, the baselines that continuous batching is measured against.

A batch is formed from waiting requests and starts together, as a rectangle: every row has room for
the longest prompt and the longest answer. Prompts are padded to the longest, and computed before
the first token is decoded; then all rows are computed until the last request ends:

    | prompt                 | answer                         |
    | prompt | padding       | answer   | ended               |
    |<---- longest prompt -->|<------- longest answer ------->|

Nobody joins meanwhile, and no row gives its blocks back. Padding and ended rows are computed like
any token, attention and all, and counted as wasted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request
from jaxengine.step_draft import StepDraft

__all__ = ["ClosedBatch"]

# A static batch waits until it is full. Once nobody new has come for so long, what is there
# starts, so that the last requests of a run are served as well.
STATIC_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Row:
    """A request of the batch, which may have ended.

    Attributes:
        num_prompt_tokens: tokens that it had when the batch started.
        filled: end of its slots that fillers have taken; 0 if there are none.
    """

    request: Request
    num_prompt_tokens: int
    filled: int = 0

    @property
    def next_filler(self) -> int:
        """Position of its first slot that nothing has been computed for."""
        return max(self.filled, self.request.num_computed_tokens)


class ClosedBatch:
    """The batch that runs, and when the next one starts.

    A row is filled behind its own tokens, in its own blocks: with padding of its prompt, which its
    answer then overwrites, and, once it has ended, with one token a step.

    Owns: the blocks of its rows, until it is disbanded.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self._config = config
        self._kv = kv
        self._last_arrival_s = 0.0
        self._rows: list[_Row] = []
        self._longest_prompt = 0
        self._longest_answer = 0

    @property
    def is_prefilling(self) -> bool:
        """Whether prompts, or their padding, are still to be computed."""
        return any(row.next_filler < self._longest_prompt for row in self._rows)

    @property
    def prompts(self) -> list[Request]:
        """The requests whose own prompts are still to be computed."""
        return [
            row.request
            for row in self._rows
            if not row.request.is_finished
            and row.request.num_computed_tokens < row.num_prompt_tokens
        ]

    def note_arrival(self, arrival_time_s: float) -> None:
        """Take note of a request that begins to wait."""
        self._last_arrival_s = arrival_time_s

    def opens_at_s(self, waiting: Iterable[Request]) -> float:
        """Return when requests that wait, one at least, may start, given that nothing runs.

        As soon as they fill a batch they need not wait for others.
        """
        arrivals_s = [request.arrival_time_s for request in waiting]
        if len(arrivals_s) >= self._config.max_num_seqs:
            return 0.0
        if self._config.batching == "static":
            return self._last_arrival_s + STATIC_PATIENCE_S
        return min(arrivals_s) + self._config.batch_window_s

    def has_room(self, request: Request) -> bool:
        """Whether a request fits in, with every row as long as the longest may get."""
        num_rows = len(self._rows) + 1
        num_slots = sum(self._longest_with(request))
        return (
            num_rows <= self._config.max_num_seqs
            and num_slots <= self._config.max_model_len
            and num_rows * self._kv.blocks_for(num_slots) <= self._kv.num_blocks
        )

    def add(self, request: Request) -> int:
        """Take in a request that fits; return how many tokens of it are cached."""
        self._longest_prompt, self._longest_answer = self._longest_with(request)
        self._rows.append(_Row(request, request.num_tokens))
        return self._kv.match_prefix(request)

    def reserve(self) -> None:
        """Give all rows their blocks, once everybody is in."""
        for row in self._rows:
            reserved = self._kv.reserve(row.request, self._num_slots)
            assert reserved, "nothing else holds blocks, and the batch fits"

    def disband(self) -> None:
        """Take the blocks of all rows back."""
        for row in self._rows:
            self._kv.free(row.request)
        self._rows = []
        self._longest_prompt = self._longest_answer = 0

    def pad_prompts(self, draft: StepDraft) -> None:
        """Fill up the rows whose own prompts are computed, as far as the step's budgets go."""
        for row in self._rows:
            first = row.next_filler
            own = 0 if row.request.is_finished else row.num_prompt_tokens
            most = min(self._longest_prompt - first, draft.budget)
            if first >= own and most > 0 and draft.num_seqs < self._config.max_num_seqs:
                draft.pad(row.request, first, most)
                row.filled = first + most

    def fill_ended_rows(self, draft: StepDraft) -> None:
        """Give each row that has ended a slot beside those that decode, if there are any.

        So has one whose last token is in flight, and known to be the last.
        """
        decoding = {item.request for item in draft.scheduled}
        for row in self._rows if decoding else ():
            request, position = row.request, row.next_filler
            ends = request.is_finished or request.num_tokens >= request.max_num_tokens
            has_room = position < self._num_slots and draft.budget > 0
            if ends and has_room and request not in decoding:
                draft.fill_ended_row(request, position)
                row.filled = position + 1

    @property
    def _num_slots(self) -> int:
        """How long each row may get, in tokens."""
        return self._longest_prompt + self._longest_answer

    def _longest_with(self, request: Request) -> tuple[int, int]:
        num_tokens = request.num_tokens
        return (
            max(self._longest_prompt, num_tokens),
            max(self._longest_answer, request.max_num_tokens - num_tokens),
        )
