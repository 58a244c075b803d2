import sys

import pytest

from gateway import jax_probe
from gateway.jax_probe import Device, JaxProbe, probe_jax


def probe(script: str, timeout_s: float = 60.0) -> JaxProbe:
    return probe_jax(timeout_s, command=[sys.executable, "-c", script])


def test_jax_itself_answers():
    answer = probe_jax()
    assert answer.error is None
    assert answer.backend in ("cpu", "gpu", "tpu")
    assert len(answer.devices) >= 1


def test_the_answer_is_the_last_line():
    answer = probe(
        "print('a warning')\n"
        'print(\'{"backend": "gpu", "devices": [{"platform": "gpu", "kind": "H200", '
        '"memory_bytes": 7}]}\')'
    )
    assert answer == JaxProbe("gpu", (Device("gpu", "H200", 7),))


def test_looking_does_not_take_the_memory_of_the_gpu():
    answer = probe("import os; exit(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])")
    assert answer.error == "exit code 1: false"


def test_a_crash_is_an_answer_with_its_last_words():
    answer = probe("raise RuntimeError('CUDA driver is too old')")
    assert answer.error == "exit code 1: RuntimeError: CUDA driver is too old"
    assert answer.backend is None


def test_a_driver_that_hangs_does_not_hang_us():
    answer = probe("import signal; signal.pause()", timeout_s=0.3)
    assert answer.error == "JAX gave no answer within 0.3 s; does a driver hang?"


@pytest.mark.parametrize("output", ["hello", "{}", '{"backend": "cpu", "devices": [{"x": 1}]}', ""])
def test_nonsense_is_said_to_be_nonsense(output: str):
    answer = probe(f"print({output!r})")
    assert answer.error is not None
    assert answer.error.startswith("JAX answered with something else")


def test_without_jax_nobody_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax_probe.importlib.util, "find_spec", lambda name: None)
    assert probe("exit(3)") == JaxProbe(error="jax is not installed")
