import jax
import jax.numpy as jnp
import pytest

from jaxengine.compile_guard import CompileGuard


@pytest.fixture
def guard():
    guard = CompileGuard()
    yield guard
    guard.disarm()


def compile_something_new():
    """A fresh function is a program that JAX has not compiled yet."""
    return jax.jit(lambda x: x * 3 + 1)(jnp.arange(5)).block_until_ready()


def test_what_is_compiled_before_arming_does_not_count(guard):
    compile_something_new()
    assert guard.num_compiles == 0


def test_every_compilation_counts_once_armed(guard):
    guard.arm()
    compile_something_new()
    first = guard.num_compiles
    assert first >= 1
    compile_something_new()
    assert guard.num_compiles > first


def test_running_a_compiled_program_does_not_count(guard):
    function = jax.jit(lambda x: x * 5 - 2)
    argument = jnp.arange(7)
    function(argument)
    guard.arm()
    function(argument)
    assert guard.num_compiles == 0


def test_arming_twice_counts_once(guard):
    other = CompileGuard()
    other.arm()
    guard.arm()
    guard.arm()
    compile_something_new()
    other.disarm()
    assert guard.num_compiles == other.num_compiles


def test_nothing_counts_after_disarming(guard):
    guard.arm()
    guard.disarm()
    guard.disarm()
    compile_something_new()
    assert guard.num_compiles == 0
