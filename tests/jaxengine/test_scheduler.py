from jaxengine.outputs import FinishReason
from jaxengine.request import RequestStatus
from scheduler_loop import SchedulerLoop, shares


def test_an_idle_scheduler_schedules_nothing():
    loop = SchedulerLoop()
    output = loop.schedule()
    assert (output.scheduled, output.num_tokens, output.num_preempted) == ((), 0, 0)
    assert not loop.scheduler.has_requests


def test_requests_are_admitted_in_order_of_arrival():
    loop = SchedulerLoop()
    for name in "abc":
        loop.add(name, 4)
    output = loop.schedule()
    assert list(shares(output).items()) == [("a", 4), ("b", 4), ("c", 4)]
    assert output.num_tokens == 12


def test_a_step_says_what_to_compute_and_where():
    loop = SchedulerLoop()
    loop.add("a", range(10))
    [item] = loop.schedule().scheduled
    assert (item.first_position, item.num_new_tokens) == (0, 10)
    assert list(item.token_ids) == list(range(10))
    assert item.block_ids == [1, 2]
    assert item.samples
    assert not item.last_is_pending


def test_a_long_prompt_is_computed_in_chunks_and_sampled_after_the_last():
    loop = SchedulerLoop()
    request = loop.add("a", range(40))
    seen = []
    for _ in range(3):
        output = loop.schedule()
        [item] = output.scheduled
        seen.append((item.first_position, list(item.token_ids), item.samples))
        assert len(loop.update(output)) == item.samples
    assert seen == [
        (0, list(range(16)), False),
        (16, list(range(16, 32)), False),
        (32, list(range(32, 40)), True),
    ]
    assert request.token_ids[40:] == [7]
    assert loop.scheduler.generation_tokens == 1


def test_running_requests_come_first_and_a_prompt_gets_what_they_leave():
    loop = SchedulerLoop()
    loop.add("a", 4)
    assert loop.step() == {"a": 4}
    loop.add("b", 40)
    assert loop.step() == {"a": 1, "b": 15}
    assert loop.step() == {"a": 1, "b": 15}
    assert loop.step() == {"a": 1, "b": 10}
    assert loop.step() == {"a": 1, "b": 1}


def test_the_token_budget_splits_the_prompt_that_does_not_fit():
    loop = SchedulerLoop()
    loop.add("a", 10)
    loop.add("b", 10)
    loop.add("c", 10)
    assert loop.step() == {"a": 10, "b": 6}
    assert loop.step() == {"a": 1, "b": 4, "c": 10}


def test_the_scheduler_can_be_given_less_than_a_step_holds():
    loop = SchedulerLoop(max_num_scheduled_tokens=5)
    loop.add("a", 12)
    assert [loop.step() for _ in range(4)] == [{"a": 5}, {"a": 5}, {"a": 2}, {"a": 1}]


def test_a_budget_of_one_token_still_makes_progress():
    loop = SchedulerLoop(max_num_scheduled_tokens=1)
    loop.add("a", 2, max_tokens=2)
    loop.add("b", 1, max_tokens=1)
    assert [loop.step() for _ in range(4)] == [{"a": 1}, {"a": 1}, {"a": 1}, {"b": 1}]
    assert not loop.scheduler.has_requests


def test_no_more_requests_run_than_allowed_and_the_next_takes_the_place_of_one_that_ends():
    loop = SchedulerLoop(max_num_seqs=2)
    loop.add("a", 2, max_tokens=2)
    loop.add("b", 2)
    loop.add("c", 2)
    assert loop.step() == {"a": 2, "b": 2}
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 1)
    assert loop.step() == {"a": 1, "b": 1}
    assert loop.step() == {"b": 1, "c": 2}


def test_each_running_request_has_a_row_of_its_own():
    loop = SchedulerLoop()
    for name in "abcd":
        loop.add(name, 2)
    first, second = loop.schedule(), None
    loop.update(first)
    second = loop.schedule()
    rows = {item.request.request_id: item.row for item in first.scheduled}
    assert sorted(rows.values()) == [0, 1, 2, 3]
    assert {item.request.request_id: item.row for item in second.scheduled} == rows


def test_a_small_request_does_not_overtake_a_large_one_that_has_to_wait():
    loop = SchedulerLoop(num_blocks=9)  # 8 blocks, 64 tokens
    loop.add("a", 16)
    assert loop.step() == {"a": 16}
    loop.add("b", 56)  # 7 blocks; 6 are free
    loop.add("c", 1)
    assert loop.step() == {"a": 1}
    assert loop.scheduler.num_waiting == 2
    loop.abort("a")
    assert loop.step() == {"b": 16}


def test_a_request_is_admitted_only_if_all_of_it_fits():
    loop = SchedulerLoop(num_blocks=9)
    loop.add("a", 32)  # 4 blocks
    assert [loop.step(), loop.step()] == [{"a": 16}, {"a": 16}]
    loop.add("b", 32)  # its first chunk of 15 tokens would fit into the 3 blocks that are left
    assert loop.step() == {"a": 1}
    assert loop.kv.num_free_blocks == 3
    loop.abort("a")
    assert loop.step() == {"b": 16}


def test_the_watermark_keeps_blocks_for_those_who_run():
    loop = SchedulerLoop(num_blocks=11, watermark=0.2)  # 2 of 10 blocks
    loop.add("a", 16)
    loop.step()
    loop.add("b", 48)  # 6 of the 8 free blocks, less 1 for a, less the watermark: one short
    assert loop.step() == {"a": 1}
    loop.abort("b")
    loop.add("c", 40)
    assert loop.step() == {"a": 1, "c": 15}


def test_the_watermark_does_not_count_on_an_idle_engine():
    loop = SchedulerLoop(num_blocks=9, watermark=0.9)
    loop.add("a", 63)
    assert loop.step() == {"a": 16}


def test_a_shared_beginning_is_not_computed_again():
    loop = SchedulerLoop()
    loop.add("a", range(16))
    loop.step()
    request = loop.add("b", [*range(16), 50, 51])
    output = loop.schedule()
    item = output.scheduled[1]
    assert (item.first_position, list(item.token_ids)) == (16, [50, 51])
    assert item.block_ids[:2] == output.scheduled[0].block_ids[:2]
    assert request.num_cached_tokens == 16
    assert [o.num_cached_tokens for o in loop.update(output)] == [0, 16]
    assert (loop.kv.prefix_queries, loop.kv.prefix_hits) == (34, 16)
    assert loop.scheduler.roster.tokens_admitted == 34


def test_two_requests_that_arrive_together_share_their_beginning():
    loop = SchedulerLoop()
    loop.add("a", range(10))
    loop.add("b", range(10))
    assert loop.step() == {"a": 10, "b": 2}


def test_salts_keep_tenants_apart():
    loop = SchedulerLoop(max_num_batched_tokens=64)
    loop.add("a", range(10), salt="one")
    loop.add("b", range(10), salt="two")
    loop.add("c", range(10), salt="one")
    assert loop.step() == {"a": 10, "b": 10, "c": 2}


# A failed step.


def test_a_failure_ends_the_given_requests_and_the_others_start_over_in_order():
    loop = SchedulerLoop(max_num_seqs=3)
    requests = {name: loop.add(name, 4) for name in "abcd"}
    loop.step()
    loop.schedule()  # the step that fails
    outputs = loop.scheduler.fail([requests["b"]], "it broke", 9.0)
    loop.scheduler.check_integrity()
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("b", FinishReason.ERROR, "it broke")
    ]
    assert requests["a"].status is RequestStatus.PREEMPTED
    assert loop.kv.num_free_blocks == loop.kv.num_blocks
    assert loop.kv.num_cached_blocks == 0
    # Prompts and the one token each had; the one in flight is lost. Then d, which waited.
    assert list(loop.step().items()) == [("a", 5), ("c", 5), ("d", 4)]


def test_a_failure_ends_no_request_twice():
    loop = SchedulerLoop()
    request = loop.add("a", 4, max_tokens=1)
    loop.step()
    assert loop.scheduler.fail([request], "it broke", 9.0) == []
