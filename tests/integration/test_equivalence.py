"""The tokens of a request do not depend on how the engine came to compute them.

Alone, together, in chunks of any size, with prefix hits, after a preemption, in the overlapped and
in the plain loop: the same ids. Greedy and with fixed seeds, in f32 and in bf16,
whatever the KV cache stores.
"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from engine_builder import (
    WarmRunner,
    warm_default_runner,
    warm_random_runner,
    warm_tiny_runner,
)
from jaxengine.sampling_params import SamplingParams

# How the engine may come to compute the same requests; fields of EngineConfig.
WAYS = {
    "together": {"overlap": False},
    "overlapped": {},
    "chunks of 16": {"max_num_scheduled_tokens": 16},
    "chunks of 64": {"max_num_scheduled_tokens": 64},
    "chunks of 16 in the plain loop": {"max_num_scheduled_tokens": 16, "overlap": False},
    "without prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 32, "max_num_scheduled_tokens": 64},
    "preempted in the plain loop": {"num_blocks": 32, "overlap": False},
    "preempted without prefix cache": {"num_blocks": 32, "enable_prefix_caching": False},
}

THREES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}

# Each number of query heads per kv head (2, 4, 3 and 1), each dtype of the KV cache and of the
# weights once or more, not each with each: the engine knows no dtype, and what computes with one
# has its bits compared in test_decoder and in test_ragged_paged_attention_bits.
RUNNERS = {
    "llama-float32": lambda: warm_tiny_runner("llama", "float32"),
    "mistral-window-bfloat16": lambda: warm_tiny_runner("mistral_window", "bfloat16"),
    "ones-float32-fp8_e5m2": lambda: warm_random_runner(
        "float32", "fp8_e5m2", num_key_value_heads=4
    ),
    "threes-bfloat16-float16": lambda: warm_random_runner("bfloat16", "float16", **THREES),
    "threes-bfloat16-fp8_e4m3": lambda: warm_random_runner("bfloat16", "fp8_e4m3", **THREES),
    "threes-bfloat16-quantized-int8": lambda: warm_random_runner(
        "bfloat16", "int8", quantization="int8", vocab_size=320, intermediate_size=128, **THREES
    ),
    # All others run on the kernel that a server here would take.
    "llama-float32-reference": lambda: warm_tiny_runner("llama", "float32", kernel="reference"),
    "threes-bfloat16-reference": lambda: warm_random_runner(
        "bfloat16", kernel="reference", **THREES
    ),
}


def eight_prompts(
    vocab_size: int, lengths: tuple[int, ...] = (1, 7, 16, 33, 65, 100, 128)
) -> list[tuple[int, ...]]:
    """Different lengths around the edges of blocks, tiles and buckets; two share a beginning."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, vocab_size, length).tolist()) for length in lengths]
    return [*prompts, (*prompts[-1][:32], *prompts[1])]


def sampling_mix(max_tokens: int) -> list[SamplingParams]:
    """Greedy and seeded requests in turn; EOS does not end them, so that all are long."""
    seeded = {"temperature": 0.8, "ignore_eos": True, "max_tokens": max_tokens}
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [
        greedy,
        SamplingParams(top_p=0.95, seed=1, **seeded),
        SamplingParams(top_k=40, seed=2**64 - 1, **seeded),
        SamplingParams(top_p=0.95, top_k=40, seed=3, **seeded),
    ] * 2


def run_alone(
    warm: WarmRunner, prompts: list[tuple[int, ...]], params: list[SamplingParams]
) -> list[tuple[int, ...]]:
    """The plainest way: one request at a time, whole prompts, no cache, no overlap."""
    plain = warm.session(enable_prefix_caching=False, overlap=False, decode_steps=1)
    return [plain.run([prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("name", RUNNERS)
def test_every_way_to_compute_gives_the_same_tokens(name):
    warm = RUNNERS[name]()
    prompts, params = eight_prompts(warm.model.vocab_size), sampling_mix(24)
    compiles_before = warm.runner.compiles_after_ready
    alone = run_alone(warm, prompts, params)
    assert [len(tokens) for tokens in alone] == [24] * 8
    for way, changes in WAYS.items():
        session = warm.session(**changes)
        assert session.run(prompts, params) == alone, way
        # Once more: now the prefixes are cached, unless that is off.
        hits_before = session.stats.prefix_hits
        assert session.run(prompts[::-1], params[::-1]) == alone[::-1], f"{way}, again"
        stats = session.stats
        assert (stats.prefix_hits > hits_before) == changes.get("enable_prefix_caching", True), way
        assert (stats.num_preemptions > 0) == ("preempted" in way), way
    assert warm.runner.compiles_after_ready == compiles_before


@pytest.mark.parametrize("name", ["llama-float32", "mistral-window-bfloat16"])
@pytest.mark.parametrize("overlap", [False, True])
def test_closed_batches_give_the_same_tokens(name, overlap):
    """Of prompts that are padded, beside rows that have ended and go on."""
    warm = RUNNERS[name]()
    prompts = eight_prompts(warm.model.vocab_size)
    params = [
        replace(param, max_tokens=max_tokens)
        for param, max_tokens in zip(sampling_mix(24), (1, 24, 3, 12, 30, 2, 9, 17), strict=True)
    ]
    alone = run_alone(warm, prompts, params)
    session = warm.session(
        batching="dynamic", batch_window_s=1e-9, max_num_seqs=4, num_blocks=64, overlap=overlap
    )
    assert session.run(prompts, params) == alone
    stats = session.stats
    # Two batches, of prompts up to 33 and up to 128. A row ends a token before its answer does.
    assert stats.wasted_prompt_slots == (32 + 26 + 17) + (128 - 65 + 28 + 89)
    assert stats.wasted_row_slots == (23 + 21 + 12) + (28 + 21 + 13)
    assert stats.iteration_tokens_sum == sum(map(len, prompts)) + sum(map(len, alone)) - 8


# The one has programs for decode-only steps, the other takes them as any step.
@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_several_decode_steps_at_once_give_the_same_tokens(kernel, monkeypatch):
    warm = warm_tiny_runner("llama", kernel=kernel, decode_steps=4)
    prompts, params = eight_prompts(warm.model.vocab_size), sampling_mix(24)
    # Some end on the way: after their last token, or by a token that others need not stop at.
    alone = run_alone(warm, prompts, params)
    params[2] = replace(params[2], max_tokens=9)
    params[5] = replace(params[5], stop_token_ids=(alone[5][13],))
    alone = run_alone(warm, prompts, params)
    assert len(alone[2]) == 9
    assert len(alone[5]) <= 14
    launches = []
    execute = warm.runner.execute

    def watched(outputs):
        steps = execute(outputs)
        launches.append(len(steps))
        return steps

    monkeypatch.setattr(warm.runner, "execute", watched)
    for way in ("together", "overlapped", "chunks of 16", "without prefix cache", "preempted"):
        changes = WAYS[way] | ({"num_blocks": 26} if way == "preempted" else {})
        session = warm.session(**changes)
        launches.clear()
        assert session.run(prompts, params) == alone, way
        assert launches.count(4) >= 2, way
        assert session.run(prompts[::-1], params[::-1]) == alone[::-1], f"{way}, again"
        assert (session.stats.num_preemptions > 0) == (way == "preempted"), way
    assert warm.runner.compiles_after_ready == 0


class Prophet:
    """Guesses what will come, but for one place in six; stands in for a request's PromptLookup."""

    answers: ClassVar[dict[tuple[int, ...], tuple[int, ...]]]
    chance = 0.9
    has_guess = True

    def __init__(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._future = self.answers[tuple(token_ids[:num_prompt_tokens])]
        self._num_prompt_tokens = num_prompt_tokens

    def catch_up(self) -> None:
        pass

    def guess(self, most: int) -> list[int]:
        first = len(self._token_ids) - self._num_prompt_tokens
        places = range(first, min(first + most, len(self._future)))
        return [self._future[place] ^ (place % 6 == 5) for place in places]


@pytest.mark.parametrize(
    "name", ["llama-float32", "llama-float32-reference", "threes-bfloat16-quantized-int8"]
)
def test_guessed_tokens_change_nothing(name, monkeypatch):
    warm = RUNNERS[name]()
    prompts, params = eight_prompts(warm.model.vocab_size), sampling_mix(24)
    compiles_before = warm.runner.compiles_after_ready
    alone = run_alone(warm, prompts, params)
    # Without prophecies these would hardly ever come true.
    Prophet.answers = dict(zip(prompts, alone, strict=True))
    monkeypatch.setattr("jaxengine.speculation.PromptLookup", Prophet)
    for way in ("together", "overlapped", "chunks of 16", "without prefix cache", "preempted"):
        session = warm.session(num_speculative_tokens=6, **WAYS[way])
        assert session.run(prompts, params) == alone, way
        stats = session.stats
        assert 50 < stats.accepted_draft_tokens < stats.draft_tokens, way
        assert (stats.num_preemptions > 0) == (way == "preempted"), way
    # One at a time, a step has up to seven tokens of the same request.
    session = warm.session(num_speculative_tokens=6)
    for index in (1, 3, 6):
        assert session.run([prompts[index]], [params[index]]) == [alone[index]]
    assert session.stats.num_steps < 3 * 12
    assert warm.runner.compiles_after_ready == compiles_before


@pytest.mark.parametrize("name", RUNNERS)
def test_strangers_change_nothing(name):
    """Sixteen rows in use, requests that come and go, and others' parameters."""
    warm = RUNNERS[name]()
    prompts, params = eight_prompts(warm.model.vocab_size), sampling_mix(12)
    rng = np.random.default_rng(6)
    strangers = [
        tuple(rng.integers(0, warm.model.vocab_size, 5 + 9 * i).tolist()) for i in range(8)
    ]
    others = [
        SamplingParams(max_tokens=1 + 3 * i, temperature=i / 4, min_p=0.02 * i, seed=i)
        for i in range(8)
    ]
    alone = run_alone(warm, prompts, params)
    crowded = warm.session().run([*strangers, *prompts], [*others, *params])
    assert crowded[8:] == alone


def test_nothing_compiles_whatever_is_asked():
    """A mixed workload over all buckets and all features of sampling."""
    warm = RUNNERS["llama-float32"]()
    before = warm.runner.compiles_after_ready
    rng = np.random.default_rng(7)
    session = warm.session(num_blocks=24)
    for count in (1, 3, 16, 20):
        prompts = [tuple(rng.integers(0, 250, rng.integers(1, 120)).tolist()) for _ in range(count)]
        params = [
            SamplingParams(
                max_tokens=int(rng.integers(1, 50)),
                min_tokens=int(rng.integers(0, 2)),
                temperature=float(rng.choice([0, 0.5, 1.5])),
                top_k=int(rng.choice([0, 5, 270, 10_000])),
                top_p=float(rng.choice([1, 0.5, 0.999])),
                min_p=float(rng.choice([0, 0.1])),
                stop_token_ids=tuple(rng.integers(0, 250, rng.integers(3)).tolist()),
                ignore_eos=bool(rng.integers(2)),
                seed=int(rng.integers(2**63)),
            )
            for _ in range(count)
        ]
        session.run(prompts, params)
    assert session.stats.num_preemptions > 0
    assert session.stats.compiles_after_ready == before


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_gives_the_same_tokens_in_every_way(dtype):
    warm = warm_default_runner(dtype)
    # Short, because 30 layers take their time; most need another block soon.
    prompts = eight_prompts(warm.model.vocab_size, (1, 15, 16, 31, 32, 47, 48))
    params = sampling_mix(6)
    alone = run_alone(warm, prompts, params)
    ways = {
        "overlapped": {},
        "chunks of 16 in the plain loop": {"max_num_scheduled_tokens": 16, "overlap": False},
        "preempted": {"num_blocks": 11},
    }
    for way, changes in ways.items():
        session = warm.session(**changes)
        assert session.run(prompts, params) == alone, way
        assert (session.stats.num_preemptions > 0) == (way == "preempted")
