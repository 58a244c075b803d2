import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_loop import EngineLoop, small_config
from known_times import KnownTimes


class Launches:
    """Counts the steps of each launch of a loop's device."""

    def __init__(self, loop: EngineLoop) -> None:
        self.counts: list[int] = []
        execute = loop.runner.execute

        def watched(outputs):
            steps = execute(outputs)
            self.counts.append(len(steps))
            return steps

        loop.runner.execute = watched


def run(*requests, decode_steps=4, steps=None, **config):
    """Run requests to their ends; return the loop, and how many steps each launch had."""
    loop = EngineLoop(small_config(decode_steps=decode_steps, **config))
    launches = Launches(loop)
    for index, request in enumerate(requests):
        loop.add(f"r{index}", **request)
    loop.run()
    loop.check_answers()
    loop.check_idle()
    return loop, launches.counts


def test_decodes_are_launched_several_at_a_time():
    # The prompt gives the first of 9 tokens; two times four decodes give the others.
    _, counts = run({"prompt": (1, 2, 3), "max_tokens": 9})
    assert counts == [1, 4, 4]


def test_without_it_each_step_is_launched_alone():
    _, counts = run({"prompt": (1, 2, 3), "max_tokens": 9}, decode_steps=1)
    assert counts == [1] * 9


def test_what_is_left_before_the_last_token_is_launched_with_fewer():
    _, counts = run({"prompt": (1, 2, 3), "max_tokens": 7})
    assert counts == [1, 4, 2]


def test_a_request_that_ends_on_the_way_leaves_the_others_alone():
    # Its second and last token is the first decode; the other request needs two more times four.
    loop, counts = run({"prompt": (1, 2, 3), "max_tokens": 2}, {"prompt": (4, 5), "max_tokens": 9})
    assert counts == [1, 4, 4]
    assert [len(step) for step in loop.runner.steps] == [2, 2, 1, 1, 1, 1, 1, 1, 1]


def test_tokens_after_a_stop_token_are_dropped():
    # By hand (see fake_runner): 1 2 3 is followed by 14, 70 and 20.
    loop, counts = run({"prompt": (1, 2, 3), "max_tokens": 30, "stop_token_ids": (70,)})
    assert loop.answers["r0"] == (14, 70)
    assert counts[:2] == [1, 4]


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"presence_penalty": 0.5},
        {"logit_bias": ((7, 1.0),)},
        {"allowed_token_ids": tuple(range(100))},
    ],
)
def test_who_wants_more_than_tokens_is_served_step_by_step(wish):
    loop = EngineLoop(small_config(decode_steps=4))
    launches = Launches(loop)
    loop.add("plain", (1, 2, 3), max_tokens=5)
    loop.add("special", (4, 5, 6), max_tokens=12, **wish)
    while "special" not in loop.ends:
        loop.step()
    assert set(launches.counts) == {1}


def test_while_somebody_waits_steps_are_launched_one_by_one():
    loop = EngineLoop(small_config(decode_steps=4, max_num_seqs=1))
    launches = Launches(loop)
    loop.add("first", (1, 2, 3), max_tokens=9)
    loop.add("second", (4, 5, 6), max_tokens=9)
    while "first" not in loop.ends:
        loop.step()
    assert set(launches.counts) == {1}
    loop.run()
    assert launches.counts[-2:] == [4, 4]
    loop.check_answers()


def test_a_prompt_that_is_not_done_is_not_kept_waiting():
    loop = EngineLoop(small_config(decode_steps=4, max_num_batched_tokens=8))
    launches = Launches(loop)
    loop.add("short", (1, 2, 3), max_tokens=20)
    loop.step()
    loop.add("long", tuple(range(30)), max_tokens=4)
    while loop.requests["long"].num_computed_tokens < 30:
        loop.step()
    assert set(launches.counts) == {1}


def test_steps_of_one_launch_share_its_time():
    loop = EngineLoop(small_config(decode_steps=4), step_times=KnownTimes())
    loop.add("r", (1, 2, 3), max_tokens=9)
    loop.run()
    records = loop.core.take_records()
    assert len(records) == 9
    assert [record.index for record in records] == list(range(9))
    for before, *together in (records[0:5], records[4:9]):
        assert len({record.launched_s for record in together}) == 1
        durations = [record.duration_s for record in together]
        assert min(durations) > 0
        assert max(durations) < sum(durations) / 2
        assert sum(durations) == pytest.approx(together[-1].end_s - before.end_s)


def test_blocks_that_are_filled_on_the_way_are_shared():
    prompt = tuple(range(10))
    loop = EngineLoop(small_config(decode_steps=4))
    loop.add("first", prompt, max_tokens=30)
    loop.run()
    # Blocks of 8. The last token is not computed; those of the last launch are known too late.
    conversation = prompt + loop.answers["first"]
    again = loop.add("again", conversation, max_tokens=1)
    loop.run()
    assert again.num_cached_tokens >= (len(conversation) - 1 - 8) // 8 * 8
    loop.check_answers()


lengths = st.tuples(st.integers(1, 20), st.integers(1, 24), st.integers(0, 3))


@given(
    requests=st.lists(lengths, min_size=1, max_size=5),
    decode_steps=st.integers(2, 9),
    overlap=st.booleans(),
    caching=st.booleans(),
    num_blocks=st.sampled_from((9, 10, 40)),
)
@settings(max_examples=40)
def test_answers_are_those_of_single_steps(requests, decode_steps, overlap, caching, num_blocks):
    answers = []
    for most in (1, decode_steps):
        config = small_config(
            decode_steps=most,
            overlap=overlap,
            enable_prefix_caching=caching,
            num_blocks=num_blocks,
            max_num_batched_tokens=24,
        )
        loop = EngineLoop(config, vocab_size=23, eos=(22,))
        for index, (num_prompt, num_output, delay) in enumerate(requests):
            for _ in range(delay):
                loop.step()
            prompt = tuple(itertools.islice(itertools.cycle((3, 1, 4, 1, 5)), num_prompt))
            loop.add(f"r{index}", prompt, max_tokens=num_output)
        loop.run()
        loop.check_idle()
        loop.check_answers()
        answers.append(loop.answers)
    assert answers[0] == answers[1]
