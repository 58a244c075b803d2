import math
from collections import Counter

import numpy as np
import pytest

from bench.simulation.router import (
    ROUTERS,
    DecayingLoads,
    LeastLoaded,
    PrefixAffine,
    RoundRobin,
    make_router,
)


def test_round_robin_takes_turns():
    router = RoundRobin()
    assert [router.choose(0, 1.0, np.zeros(3)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_least_loaded_is_chosen_the_first_of_equals():
    router = LeastLoaded()
    assert router.choose(0, 1.0, np.array([5.0, 2.0, 9.0])) == 1
    assert router.choose(0, 1.0, np.array([5.0, 2.0, 2.0])) == 1


def test_a_key_stays_where_it_is_while_there_is_room():
    router = PrefixAffine(10)
    assert len({router.choose(7, 1.0, np.zeros(10)) for _ in range(20)}) == 1


def test_keys_spread_over_all_replicas():
    router = PrefixAffine(10)
    counts = Counter(router.choose(key, 1.0, np.zeros(10)) for key in range(5000))
    assert len(counts) == 10
    assert max(counts.values()) < 2 * min(counts.values())


def test_another_replica_takes_few_keys_from_the_others():
    ten, eleven = PrefixAffine(10), PrefixAffine(11)
    moved = [
        key
        for key in range(2000)
        if ten.choose(key, 1.0, np.zeros(10)) != eleven.choose(key, 1.0, np.zeros(11))
    ]
    # An eleventh of them in expectation, and only to the new one.
    assert len(moved) < 2000 / 11 * 1.5
    assert {eleven.choose(key, 1.0, np.zeros(11)) for key in moved} == {10}


def test_no_replica_is_loaded_beyond_the_bound():
    router, loads = PrefixAffine(4, load_bound=1.25), np.zeros(4)
    for _ in range(1000):
        loads[router.choose(7, 1.0, loads)] += 1.0  # always the same key
    assert loads.max() <= 1.25 * 1000 / 4 + 2


def test_the_guess_drains_by_a_factor_of_e_in_the_time_of_a_request():
    loads = DecayingLoads(2, residence_s=10.0)
    loads.add(0, 100.0)
    loads.advance(10.0)
    loads.add(1, 100.0)
    assert loads.values.tolist() == pytest.approx([100 / math.e, 100.0])


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_chooses_a_replica(name: str):
    assert 0 <= make_router(name, 3).choose(1, 10.0, np.zeros(3)) < 3
