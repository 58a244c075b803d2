import threading

from engine_loop import EngineLoop, small_config
from jaxengine.stall_watch import StallWatch, describe_steps, describe_thread


def test_ten_intervals_without_a_step_are_a_stall_told_once():
    watch = StallWatch(30.0)
    assert watch.tick_interval_s == 3.0
    # The first may be one that the work came in the middle of.
    assert [watch.tick() for _ in range(13)] == [False] * 10 + [True] + [False] * 2
    assert (watch.is_stalled, watch.num_stalls) == (True, 1)


def test_progress_ends_it_and_the_next_one_counts_again():
    watch = StallWatch(30.0)
    for count in (1, 2):
        assert [watch.tick() for _ in range(11)][-1]
        assert (watch.is_stalled, watch.num_stalls) == (True, count)
        watch.note_progress()
        assert (watch.is_stalled, watch.num_stalls) == (False, count)


def test_steps_that_end_in_time_are_no_stall():
    watch = StallWatch(30.0)
    for _ in range(5):
        assert not any(watch.tick() for _ in range(10))
        watch.note_progress()


def test_steps_are_told_by_tokens_and_requests():
    loop = EngineLoop(small_config(max_num_batched_tokens=64, max_num_seqs=16))
    for number in range(10):
        loop.add(f"r{number}", [1, 2, 3])
    loop.step()
    names = ", ".join(f"r{number}" for number in range(8))
    assert describe_steps(loop.core.steps_in_flight) == f"30 tokens of 10 requests ({names}, ...)"
    assert describe_steps([]) == "none"


def test_a_thread_is_told_by_its_innermost_functions():
    waits, goes_on = threading.Event(), threading.Event()

    def innermost():
        waits.set()
        goes_on.wait()

    thread = threading.Thread(target=innermost)
    assert describe_thread(thread) == "nowhere"
    thread.start()
    waits.wait()
    text = describe_thread(thread)
    goes_on.set()
    thread.join()
    assert " < innermost (test_stall_watch.py:" in text
    assert describe_thread(thread) == "nowhere"
