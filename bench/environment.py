"""Where a figure comes from: machine, versions, commit, command.

Without these a figure cannot be judged or repeated.
"""

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gateway.machine import read_machine

__all__ = ["describe_command", "describe_environment", "describe_revision", "without_folder"]

PACKAGES = ("headrace", "aiohttp", "jax", "jaxlib", "flax", "numpy")
SECRET_OPTIONS = ("--api-key",)


def describe_environment(arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that a reader needs to judge or repeat a measurement, for JSON.

    Args:
        arguments: the command line, program first.
    """
    machine = asdict(read_machine())
    del machine["memory_available_bytes"]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": describe_command(arguments),
        **describe_revision(Path(__file__).parent),
        "machine": machine,
        "load_average": os.getloadavg()[0],
        "packages": {name: installed for name in PACKAGES if (installed := find_version(name))},
    }


def describe_command(arguments: Sequence[str]) -> str:
    """The command as it can be typed again, without secrets; of absolute paths the last names."""
    words = [without_folder(word) for word in arguments]
    for position, word in enumerate(words):
        option, equals, _ = word.partition("=")
        if option in SECRET_OPTIONS and equals:
            words[position] = f"{option}=***"
        elif option in SECRET_OPTIONS and position + 1 < len(words):
            words[position + 1] = "***"
    return shlex.join(words)


def without_folder(word: str) -> str:
    """A word, or what comes after the "=" of it, without the folders of an absolute path."""
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith("/") else word


def describe_revision(folder: Path) -> dict[str, Any]:
    """Commit of a checkout and whether it was changed; nothing outside of one."""
    commit = run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {"commit": commit, "modified": bool(run_git(folder, "status", "--porcelain", "-uno"))}


def run_git(folder: Path, *arguments: str) -> str:
    """What git answers, or nothing where it does not."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def find_version(package: str) -> str | None:
    """The installed version of a package; its metadata only, so nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
