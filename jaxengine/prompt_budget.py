"""How many tokens of a prompt a step takes."""

from typing import NamedTuple

from jaxengine.config import EngineConfig
from jaxengine.scheduler_output import SchedulerOutput
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepTimeModel, StepWork

__all__ = ["LongPiece", "PromptBudget"]

# A prompt is computed in long pieces beside streams if more than so many tokens lie before it for
# each that a step of the streams has time for.
MOST_BEFORE = 32

# So many steps of the streams overtake a long piece.
PAUSES = 12

NOTHING = StepWork(
    num_tokens=0,
    num_seqs=0,
    decode_only=True,
    decode_context=0,
    prefill_context=0,
    num_sampled=0,
    chunk_context=0,
)


class LongPiece(NamedTuple):
    """A piece of a prompt that is paused for steps of the streams.

    Attributes:
        num_tokens: of the piece.
        pause_after_s: how long it runs between two of these.
    """

    num_tokens: int
    pause_after_s: float


class PromptBudget:
    """Cuts prompts to the budgets of a step: tokens, and the time that running streams can spare.

    Args:
        step_times: predicts steps, for `target_itl_s`; without it there is no limit of time.
    """

    def __init__(self, config: EngineConfig, step_times: StepTimeModel | None) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._target_itl_s = config.target_itl_s
        self._least = config.least_chunk
        self._limit = config.scheduled_tokens_limit
        self._step_times = step_times

    def most_tokens(
        self, draft: StepDraft, *, first_position: int, at_most: int, is_alone: bool
    ) -> int:
        """Return how many tokens from a position on the step should take.

        Args:
            draft: the step so far.
            first_position: of the tokens in their prompt.
            at_most: tokens that are left of it.
            is_alone: there is no other request, so a long prompt delays nobody.
        """
        at_most = min(at_most, draft.budget)
        if self._threshold and not is_alone:
            at_most = min(at_most, self._threshold)
        if self._target_itl_s is None or self._step_times is None or not draft.num_decodes:
            return at_most
        fitting = self._step_times.most_prefill_tokens(
            self._target_itl_s, draft.work, first_position=first_position, at_most=at_most
        )
        # Prompts move on even if the decodes alone take all the time there is.
        least = 0 if draft.has_prompts else min(self._least, at_most)
        return max(fitting, least)

    def long_piece(
        self, streams: StepDraft, *, first_position: int, num_left: int
    ) -> LongPiece | None:
        """Return a piece that is to be computed alone, if it is better than one beside streams.

        Each piece reads all that lies before it, so long ones are computed in less time. Streams
        keep their pace all the same if steps of theirs run before its rest.

        Args:
            streams: a step of those that decode.
            first_position: of the prompt's next token.
            num_left: tokens of the prompt.
        """
        if self._target_itl_s is None or self._step_times is None or self._threshold:
            return None
        if not streams.num_decodes:
            return None
        left_s = self._target_itl_s - self._step_times.predict(streams.work)
        num_fitting = self.most_tokens(
            streams, first_position=first_position, at_most=num_left, is_alone=False
        )
        if num_fitting >= num_left or first_position <= MOST_BEFORE * num_fitting or left_s <= 0:
            return None
        num_tokens = self._step_times.most_prefill_tokens(
            PAUSES * left_s,
            NOTHING,
            first_position=first_position,
            at_most=min(num_left, self._limit),
        )
        return LongPiece(num_tokens, left_s) if num_tokens > num_fitting else None

    def allows_before(self, running: SchedulerOutput, draft: StepDraft, num_tokens: int) -> bool:
        """Whether a prompt may have a step of its own before the rest of one that runs.

        It must fit in the step as a whole, and the requests of the other wait no longer than
        `target_itl_s` for their tokens.

        Args:
            running: the step that runs.
            draft: what runs before it so far.
            num_tokens: of the prompt.
        """
        if num_tokens > draft.budget or 0 < self._threshold < num_tokens:
            return False
        if self._target_itl_s is None or self._step_times is None:
            return True
        if running.pause_after_s is not None:  # streams wait for what runs before it, as ever
            return num_tokens <= self.most_tokens(
                draft, first_position=0, at_most=num_tokens, is_alone=False
            )
        left_s = self._target_itl_s - self._step_times.predict(running.work)
        return num_tokens <= self._step_times.most_prefill_tokens(
            left_s, draft.work, first_position=0, at_most=num_tokens
        )
