import subprocess
import sys

import pytest

from kernels_pallas.gpu_graphs import LOOPS_IN_GRAPHS, put_loops_into_graphs


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
    put_loops_into_graphs(environment, nvidia_driver=tmp_path / "none")
    assert environment.get("XLA_FLAGS") == before
    put_loops_into_graphs(environment, nvidia_driver=tmp_path)
    assert environment["XLA_FLAGS"] == after


def test_xla_knows_the_flag():
    """It ends a process whose flags it does not know."""
    script = "import os; os.environ['XLA_FLAGS'] = %r; import jax; jax.devices()"
    subprocess.run([sys.executable, "-c", script % LOOPS_IN_GRAPHS], check=True, timeout=120)
