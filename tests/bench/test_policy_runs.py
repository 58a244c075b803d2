from bench.policy_plan import PolicyPlan
from bench.policy_runs import rotated, server_flags


def test_the_modes_take_turns_in_going_first():
    modes = ["continuous", "dynamic", "static"]
    assert rotated(modes, 0) == modes
    assert rotated(modes, 1) == ["dynamic", "static", "continuous"]
    assert rotated(modes, 5) == ["static", "continuous", "dynamic"]


def test_every_server_has_the_same_rows_and_room_for_the_whole_burst():
    plan = PolicyPlan(batch_size=64, num_batches=20)
    assert server_flags("static", plan) == [
        *("--batching", "static", "--max-num-seqs", "64", "--max-num-queued-reqs", "1280"),
        *("--queue-timeout", "0"),
    ]
    assert server_flags("dynamic", PolicyPlan())[-3] == "1024"
