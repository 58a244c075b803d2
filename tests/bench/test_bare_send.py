from bench.bare_send import measure_bare_send


def test_a_send_takes_some_time():
    us = measure_bare_send(3, 100, num_rounds=2, interval_s=0.0)
    assert 0 < us < 1e6
