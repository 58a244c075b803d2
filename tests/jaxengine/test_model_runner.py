from dataclasses import replace
from itertools import chain

import jax
import numpy as np
import pytest

from attention_kernels import can_project, ready_library
from compile_cache import without_compile_cache
from engine_builder import (
    ENGINE_CONFIG,
    packed_decoder,
    random_decoder,
    warm_random_runner,
    warm_runner,
)
from jaxengine.model_runner import JaxModelRunner
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest
from steps import step_of

GREEDY = SamplingParams(max_tokens=99, temperature=0)
PROMPT = tuple(range(40, 60))


@pytest.fixture
def warm():
    return warm_random_runner("float32")


def item(token_ids, first, count, *, row=0, blocks=(1, 2, 3), pending=False):
    request = Request("r", tuple(token_ids), GREEDY, seed=0, arrival_time_s=0.0)
    samples = first + count == len(token_ids) + pending
    return ScheduledRequest(request, first, count, row, blocks, samples, pending)


def execute(warm, *items):
    return launch(warm, step_of(*items))


def launch(warm, output):
    (step,) = warm.runner.execute([output])
    return step


def next_token(warm, *items):
    return execute(warm, *items).result()[0]


def test_tokens_come_back_in_the_order_of_the_scheduler(warm):
    first, second = item(PROMPT, 0, 20, row=0), item((7, 8, 9), 0, 3, row=1, blocks=(5, 6))
    tokens = [next_token(warm, first), next_token(warm, second)]
    assert len(set(tokens)) == 2
    decode = item((7, 8, 9), 2, 1, row=1, blocks=(5, 6))
    assert execute(warm, first, second).result() == tokens
    # The decode is packed first, whatever the order.
    assert execute(warm, first, decode).result() == tokens
    assert execute(warm, decode, first).result() == tokens[::-1]


def test_a_pending_token_is_the_one_that_the_row_sampled_last(warm):
    token = next_token(warm, item(PROMPT, 0, 20, row=3))
    known = next_token(warm, item((*PROMPT, token), 20, 1, row=4))
    # Another row samples something else meanwhile, and a chunk samples nothing at all.
    next_token(warm, item(PROMPT, 0, 20, row=3), item((1, 2, 3, 4), 0, 3, row=5, blocks=(8,)))
    assert next_token(warm, item(PROMPT, 20, 1, row=3, pending=True)) == known


def test_a_chunk_that_samples_nothing_leaves_the_memory_of_its_row(warm):
    token = next_token(warm, item(PROMPT, 0, 20, row=3))
    expected = next_token(warm, item((*PROMPT, token), 20, 1, row=2))
    execute(warm, item((1, 2, 3, 4), 0, 3, row=3, blocks=(8,))).result()
    assert next_token(warm, item(PROMPT, 20, 1, row=3, pending=True)) == expected


def test_a_step_says_how_many_slots_the_device_computes(warm):
    assert execute(warm, item(PROMPT, 0, 20)).num_slots == 64
    assert execute(warm, item((5,), 0, 1)).num_slots == 16
    assert not warm.runner.skips_padding


def test_packed_layers_say_that_they_leave_padding_out():
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    config = replace(ENGINE_CONFIG, dtype="bfloat16", attention_kernel="native")
    assert JaxModelRunner(*packed_decoder(), config).skips_padding


def test_a_step_of_nothing_but_fillers_can_be_run_and_changes_no_row(warm):
    token = next_token(warm, item(PROMPT, 0, 20, row=3))
    expected = next_token(warm, item((*PROMPT, token), 20, 1, row=4))
    # Padding behind the prompt, in its blocks, which the next token overwrites.
    filler = item(PROMPT, 20, 9, row=-1)._replace(samples=False, is_filler=True)
    step = launch(warm, step_of(padding=(filler,)))
    assert (step.num_slots, step.result()) == (16, [])
    assert next_token(warm, item(PROMPT, 20, 1, row=3, pending=True)) == expected


def test_a_reset_forgets_the_cache_and_the_tokens(warm):
    token = next_token(warm, item(PROMPT, 0, 20, row=1))
    second = next_token(warm, item((*PROMPT, token), 20, 1, row=1))
    warm.runner.reset()
    # Token 0, not what row 1 remembered, on a context of zeros.
    forgotten = next_token(warm, item(PROMPT, 20, 1, row=1, pending=True))
    assert forgotten == next_token(warm, item((*PROMPT, 0), 20, 1, row=2))
    next_token(warm, item(PROMPT, 0, 20, row=1))
    assert next_token(warm, item((*PROMPT, token), 20, 1, row=1)) == second


def test_the_arrays_that_steps_without_rules_share_are_counted_as_memory(warm):
    rows = {bucket.num_seqs for bucket in warm.runner.buckets}
    # A bit for each of 300 tokens in words of 32, 300 biases of two numbers, 256 positions.
    arrays = sum(rows) * 4 * (10 + 2 * 300 + 256)
    programs = (*warm.runner._forward.values(), *warm.runner._choose.values())
    largest = max(program.memory_analysis().temp_size_in_bytes for program in programs)
    assert warm.runner.workspace_bytes == largest + arrays


def test_warming_up_times_every_bucket(warm):
    times_s = warm.runner.bucket_times_s
    assert list(times_s) == warm.runner.buckets
    assert min(times_s.values()) > 0


def test_a_second_start_compiles_nothing_and_answers_the_same(tmp_path, monkeypatch):
    decoder, model = random_decoder("float32")
    config = replace(ENGINE_CONFIG, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,))
    step = step_of(item(PROMPT, 0, 20))
    with without_compile_cache():
        first = JaxModelRunner(decoder, model, config, programs_dir=tmp_path)
        first.warm_up()
        expected = first.execute([step])[0].result()
        first.close()
        monkeypatch.setattr(JaxModelRunner, "lower", None)
        monkeypatch.setattr(JaxModelRunner, "lower_choice", None)
        second = JaxModelRunner(decoder, model, config, programs_dir=tmp_path)
        second.warm_up()
        assert second.execute([step])[0].result() == expected
        second.close()


def test_times_of_an_earlier_start_are_taken_at_todays_pace(tmp_path, monkeypatch):
    decoder, model = random_decoder("float32")
    config = replace(ENGINE_CONFIG, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,))
    timed = []
    monkeypatch.setattr(JaxModelRunner, "_program", lambda self, fact, lower, layout: None)

    def times_s(slowness):
        def time_one(self, layout, **repeats):
            timed.append(layout.bucket)
            return layout.bucket.num_tokens * slowness

        timed.clear()
        monkeypatch.setattr(JaxModelRunner, "_time", time_one)
        runner = JaxModelRunner(decoder, model, config, programs_dir=tmp_path)
        runner.warm_up()
        runner.close()
        assert list(runner.bucket_times_s) == runner.buckets
        return list(runner.bucket_times_s.values())

    with without_compile_cache():
        assert times_s(1.0) == [8.0, 64.0]
        assert len(timed) == 2
        assert times_s(1.25) == [10.0, 80.0]
        assert len(timed) == 1
        # Another machine, to all appearances: measured anew, and that is what is kept.
        assert times_s(4.0) == [32.0, 256.0]
        assert times_s(4.0) == [32.0, 256.0]
        assert len(timed) == 1


def test_warming_up_reports_every_program_and_leaves_nothing_to_compile():
    decoder, model = random_decoder("float32")
    config = replace(ENGINE_CONFIG, max_num_seqs=8, max_num_batched_tokens=64, token_buckets=(64,))
    seen = []
    warm = warm_runner(
        decoder, model, config, progress=lambda done, total: seen.append((done, total))
    )
    try:
        # Two buckets, and the choice of tokens for their eight sequences.
        assert seen == [(1, 3), (2, 3), (3, 3)]
        assert warm.runner.buckets == [(8, 8, True), (64, 8, False)]
        assert warm.runner.compiles_after_ready == 0
        for count in (1, 2, 8, 33, 64):
            execute(warm, item(range(count), 0, count, blocks=(1, 2, 3, 4))).result()
        assert warm.runner.compiles_after_ready == 0
        jax.jit(lambda x: x * 7)(np.arange(3))
        assert warm.runner.compiles_after_ready >= 1
    finally:
        warm.runner.close()


@pytest.fixture
def pausing():
    """A runner with packed layers, and a function that pauses the next step that it launches."""
    if not can_project():
        pytest.skip("no compiler here, or no instructions for bfloat16")
    config = replace(ENGINE_CONFIG, dtype="bfloat16", attention_kernel="native")
    warm = warm_runner(*packed_decoder(), config)
    library = ready_library("native")

    def pause_next():
        serial = next(library.serials)
        warm.runner._library = library._replace(serials=chain([serial], library.serials))
        library.pause(serial, 0)

    assert warm.runner.can_overtake
    return warm, pause_next


def two_requests():
    """A decode whose token only the device knows, beside a prompt; and a newcomer's prompt."""
    decode = item(PROMPT, 20, 1, row=1, blocks=(1, 2), pending=True)
    prompt = item(tuple(range(70, 110)), 0, 40, row=2, blocks=(5, 6, 7))
    # It takes over the row of the decode, which has given it up.
    newcomer = item(tuple(range(120, 139)), 0, 19, row=1, blocks=(8, 9))
    return step_of(decode, prompt), step_of(newcomer)


def test_a_paused_step_goes_on_behind_the_one_that_overtook_it(pausing):
    warm, pause_next = pausing
    step, newcomer = two_requests()
    next_token(warm, item(PROMPT, 0, 20, row=1, blocks=(1, 2)))
    expected = launch(warm, step).result()
    expected_newcomer = launch(warm, newcomer).result()
    next_token(warm, item(PROMPT, 0, 20, row=1, blocks=(1, 2)))
    pause_next()
    paused = launch(warm, step)
    first, (rest,) = warm.runner.overtake([paused], newcomer)
    assert int(paused.begun.partway.layer) == 0  # of three
    assert first.result() == expected_newcomer
    # The decode's token was known to the row alone, where now is the newcomer's.
    assert rest.result() == expected


def test_a_paused_step_chooses_and_remembers_nothing(pausing):
    warm, pause_next = pausing
    token = next_token(warm, item(PROMPT, 0, 20, row=3))
    expected = next_token(warm, item((*PROMPT, token), 20, 1, row=4))
    pause_next()
    launch(warm, step_of(item((1, 2, 3, 4), 0, 4, row=3, blocks=(8,)))).result()
    assert next_token(warm, item(PROMPT, 20, 1, row=3, pending=True)) == expected


@pytest.mark.parametrize("num_running", [1, 2])
def test_steps_that_are_overtaken_at_any_moment_give_the_same_tokens(pausing, num_running):
    warm, _ = pausing
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 300, 60).tolist()) for _ in range(3)]
    tables = [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]

    def steps():
        """A prompt and its first token, known to the device alone; and the newcomer."""
        first = item(prompts[0], 0, 60, row=0, blocks=tables[0])
        decode = item(prompts[0], 60, 1, row=0, blocks=tables[0], pending=True)
        newcomer = item(prompts[2], 0, 60, row=2, blocks=tables[2])
        return [step_of(first), step_of(decode)][:num_running], step_of(newcomer)

    running, newcomer = steps()
    expected = [launch(warm, step).result() for step in (*running, newcomer)]
    reached = set()
    for _ in range(60):
        running, newcomer = steps()
        launched = [launch(warm, step) for step in running]
        first, rests = warm.runner.overtake(launched, newcomer)
        found = [*(rest.result() for rest in rests), first.result()]
        assert found == expected, f"paused at {launched[0].begun}"
        reached.add(int(launched[0].begun.partway.layer))
    assert reached <= {0, 1, 2, 3}


def test_what_cannot_pause_cannot_be_overtaken(warm):
    assert not warm.runner.can_overtake
    if can_project():
        config = replace(ENGINE_CONFIG, dtype="bfloat16", attention_kernel="native")
        library = ready_library("native")
        several = replace(config, decode_steps=2)
        assert not JaxModelRunner(*packed_decoder(), several, library=library).can_overtake
        gemma = packed_decoder(model_type="gemma2")
        assert not JaxModelRunner(*gemma, config, library=library).can_overtake
        assert JaxModelRunner(*packed_decoder(), config, library=library).can_overtake
