"""Peak memory of a process and all that it has started, from /proc."""

from pathlib import Path

__all__ = ["peak_memory_bytes"]

PROC = Path("/proc")


def peak_memory_bytes(pid: int, proc: Path = PROC) -> int | None:
    """The highest resident sets, added over a process and its descendants.

    The kernel remembers each process's own peak, so that nothing has to watch while others work.
    Pages that processes share count in each; children that have ended do not count.

    Args:
        pid: of the first process.
        proc: where the system tells.

    Returns:
        None where nothing is told.
    """
    parents = {int(path.name): parent_of(path) for path in proc.glob("[0-9]*")}
    tree, found = {pid}, [pid]
    while found:
        found = [
            child for child, parent in parents.items() if parent in found and child not in tree
        ]
        tree.update(found)
    peaks = [peak for member in tree if (peak := peak_of(proc / str(member))) is not None]
    return sum(peaks) if peaks else None


def parent_of(folder: Path) -> int | None:
    """The parent of a process; None when it has ended."""
    value = read_status(folder, "PPid:")
    return None if value is None else int(value)


def peak_of(folder: Path) -> int | None:
    """The highest resident set of a process; None when it has ended."""
    value = read_status(folder, "VmHWM:")
    return None if value is None else int(value) << 10


def read_status(folder: Path, key: str) -> str | None:
    """The first word after a key of a process's status."""
    try:
        lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split()[1] for line in lines if line.startswith(key)), None)
