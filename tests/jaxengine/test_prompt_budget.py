from jaxengine.config import EngineConfig
from jaxengine.prompt_budget import PromptBudget
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.step_draft import StepDraft


class OneMillisecondPerToken:
    """A cost model that is easy to compute by hand."""

    def most_prefill_tokens(self, limit_s, work, *, first_position, at_most):
        assert first_position == 7
        return min(at_most, int(limit_s * 1000) - work.num_tokens)


def decoding(name):
    request = Request(name, (1, 2), SamplingParams(max_tokens=9), seed=0, arrival_time_s=0.0)
    request.row, request.block_ids, request.num_computed_tokens = 0, [1], 1
    return request


def draft_with(num_decodes, *, budget=100):
    draft = StepDraft(budget)
    for index in range(num_decodes):
        draft.take_token(decoding(f"r{index}"))
    return draft


def most(budget, draft, at_most, *, is_alone=False):
    return budget.most_tokens(draft, first_position=7, at_most=at_most, is_alone=is_alone)


def test_without_other_bounds_a_prompt_takes_the_tokens_that_are_left():
    budget = PromptBudget(EngineConfig(), None)
    assert most(budget, draft_with(3), 200) == 97
    assert most(budget, draft_with(3), 20) == 20


def test_a_long_prompt_is_bounded_unless_it_is_alone():
    budget = PromptBudget(EngineConfig(long_prefill_token_threshold=30), None)
    assert most(budget, draft_with(0), 200) == 30
    assert most(budget, draft_with(0), 20) == 20
    assert most(budget, draft_with(0), 200, is_alone=True) == 100


def test_the_time_is_bounded_only_where_streams_run():
    budget = PromptBudget(EngineConfig(target_itl_s=0.05), OneMillisecondPerToken())
    assert most(budget, draft_with(10), 200) == 40
    assert most(budget, draft_with(10), 25) == 25
    assert most(budget, draft_with(0), 200) == 100


def test_the_native_kernel_moves_a_prompt_on_by_less_than_a_block():
    config = EngineConfig(target_itl_s=0.01, attention_kernel="native")
    budget = PromptBudget(config, OneMillisecondPerToken())
    assert most(budget, draft_with(20), 200) == 4
    assert most(budget, draft_with(5), 200) == 5


def test_the_first_prompt_of_a_step_gets_a_block_even_if_no_time_is_left():
    config = EngineConfig(target_itl_s=0.01, block_size=16)
    budget = PromptBudget(config, OneMillisecondPerToken())
    draft = draft_with(20)
    assert most(budget, draft, 200) == 16
    assert most(budget, draft, 5) == 5
    prompt = Request("p", range(50), SamplingParams(max_tokens=9), seed=0, arrival_time_s=0.0)
    prompt.row, prompt.block_ids = 1, [2, 3, 4, 5]
    draft.take(prompt, 16)
    assert most(budget, draft, 200) <= 0
