import subprocess
import sys

import pytest

from kernels_pallas.gpu_graphs import LOOPS_IN_GRAPHS, prepare_for_gpu


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, LOOPS_IN_GRAPHS),
        ("--xla_dump_to=x", f"--xla_dump_to=x {LOOPS_IN_GRAPHS}"),
        ("--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
    ],
)
def test_xla_is_told_where_there_is_a_gpu_and_nobody_decided_otherwise(before, after, tmp_path):
    environment = {} if before is None else {"XLA_FLAGS": before}
    prepare_for_gpu(environment, nvidia_driver=tmp_path / "none")
    assert environment.get("XLA_FLAGS") == before
    prepare_for_gpu(environment, nvidia_driver=tmp_path)
    assert environment["XLA_FLAGS"] == after


def test_most_of_the_memory_is_taken_unless_somebody_decided_otherwise(tmp_path):
    environment = {}
    prepare_for_gpu(environment, nvidia_driver=tmp_path / "none")
    assert environment == {}
    prepare_for_gpu(environment, nvidia_driver=tmp_path)
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.90"
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    prepare_for_gpu(environment, nvidia_driver=tmp_path)
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_xla_knows_the_flag():
    """It ends a process whose flags it does not know."""
    script = "import os; os.environ['XLA_FLAGS'] = %r; import jax; jax.devices()"
    subprocess.run([sys.executable, "-c", script % LOOPS_IN_GRAPHS], check=True, timeout=120)
