import dataclasses
import inspect

import pytest

from fakes import FakeEngine
from jaxengine.async_engine import AsyncEngine
from jaxengine.token_engine import EngineLimits, TokenEngine

METHODS = ["check_capacity", "set_tenant_weights", "submit", "stats", "stop"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", [AsyncEngine, FakeEngine])
def test_every_engine_is_called_in_the_same_way(engine, name):
    wanted, offered = getattr(TokenEngine, name), getattr(engine, name)
    assert inspect.signature(offered) == inspect.signature(wanted)
    assert inspect.iscoroutinefunction(offered) is inspect.iscoroutinefunction(wanted)


def test_the_methods_compared_are_all_that_there_are():
    methods = {
        name
        for name, member in vars(TokenEngine).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert methods == set(METHODS)


def test_limits_cannot_be_changed():
    limits = EngineLimits(
        max_model_len=1,
        vocab_size=1,
        max_num_seqs=1,
        max_num_queued_requests=1,
        eos_token_ids=(),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.vocab_size = 2  # type: ignore[misc]
