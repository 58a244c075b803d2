from pathlib import Path

import pytest

from bench.comparison.memory import peak_memory_bytes


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """1 -> 10 -> 11 -> 12, and 20 of somebody else; 13 is just ending."""
    for pid, parent, peak in ((10, 1, 100), (11, 10, 20), (12, 11, 3), (20, 1, 7000)):
        (tmp_path / str(pid)).mkdir()
        status = f"Name:\tx\nPPid:\t{parent}\nVmPeak:\t 999999 kB\nVmHWM:\t   {peak} kB\n"
        (tmp_path / str(pid) / "status").write_text(status)
    (tmp_path / "13").mkdir()
    (tmp_path / "self").mkdir()
    return tmp_path


def test_the_peaks_of_a_process_and_its_descendants_are_added(proc: Path):
    assert peak_memory_bytes(10, proc) == (100 + 20 + 3) * 1024
    assert peak_memory_bytes(12, proc) == 3 * 1024


def test_a_kernel_thread_has_no_memory(proc: Path):
    (proc / "12" / "status").write_text("PPid:\t11\n")
    assert peak_memory_bytes(10, proc) == 120 * 1024


def test_nothing_is_known_of_a_process_that_is_gone_or_where_there_is_no_proc(proc: Path):
    assert peak_memory_bytes(13, proc) is None
    assert peak_memory_bytes(10, proc / "missing") is None
