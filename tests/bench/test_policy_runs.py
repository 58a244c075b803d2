from bench.policy_runs import rotated


def test_the_modes_take_turns_in_going_first():
    modes = ["continuous", "dynamic", "static"]
    assert rotated(modes, 0) == modes
    assert rotated(modes, 1) == ["dynamic", "static", "continuous"]
    assert rotated(modes, 5) == ["static", "continuous", "dynamic"]
