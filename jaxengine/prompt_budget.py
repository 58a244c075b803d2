"""How many tokens of a prompt a step takes."""

from jaxengine.config import EngineConfig
from jaxengine.step_draft import StepDraft
from jaxengine.step_time import StepTimeModel, StepWork

__all__ = ["PromptBudget"]


class PromptBudget:
    """Cuts prompts to the budgets of a step: tokens, and the time that running streams can spare.

    Args:
        step_times: predicts steps, for `target_itl_s`; without it there is no limit of time.
    """

    def __init__(self, config: EngineConfig, step_times: StepTimeModel | None) -> None:
        self._threshold = config.long_prefill_token_threshold
        self._target_itl_s = config.target_itl_s
        self._least = config.least_chunk
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

    def allows_before(self, running: StepWork, draft: StepDraft, num_tokens: int) -> bool:
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
        left_s = self._target_itl_s - self._step_times.predict(running)
        return num_tokens <= self._step_times.most_prefill_tokens(
            left_s, draft.work, first_position=0, at_most=num_tokens
        )
