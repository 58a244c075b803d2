from pathlib import Path

from gateway.machine import read_machine

CPUINFO = """processor : 0
model name : AMD EPYC 9R14
flags : fpu avx2 avx512f avx512_bf16 sse

processor : 1
model name : another
flags : fpu amx_bf16
"""


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_is_read_from_the_kernels_files(tmp_path: Path):
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\nMemAvailable: 1024 kB\nHugePages: 0\n")
    machine = read_machine(tmp_path)
    assert machine.cpu == "AMD EPYC 9R14"
    assert machine.cpu_flags == ("avx2", "avx512f", "avx512_bf16")
    assert machine.memory_bytes == 2048 * 1024
    assert machine.memory_available_bytes == 1024 * 1024
    assert machine.cpu_quota is None
    assert machine.num_cpus >= 1


def test_the_limits_of_a_container_count(tmp_path: Path):
    write(tmp_path, "proc/meminfo", "MemTotal: 2048 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    machine = read_machine(tmp_path)
    assert machine.memory_bytes == 1000
    assert machine.cpu_quota == 1.5


def test_no_limit_is_none(tmp_path: Path):
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    machine = read_machine(tmp_path)
    assert machine.memory_bytes is None
    assert machine.cpu_quota is None


def test_an_arm_cpu_has_features_and_no_name(tmp_path: Path):
    write(tmp_path, "proc/cpuinfo", "processor : 0\nFeatures : fp asimd bf16 i8mm\n")
    machine = read_machine(tmp_path)
    assert machine.cpu is None
    assert machine.cpu_flags == ("asimd", "bf16", "i8mm")


def test_a_system_without_those_files_tells_what_it_can(tmp_path: Path):
    machine = read_machine(tmp_path)
    assert machine.memory_bytes is None
    assert machine.cpu_flags == ()
    assert machine.python.startswith("CPython 3.1")
