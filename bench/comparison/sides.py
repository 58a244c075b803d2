"""Who takes part in `headrace bench peers`: how each is started, and how it wants to be asked.

Each peer is installed in an environment of its own and is given by a path. Their limits are raised
so that none refuses what the plan sends, and they compute in bfloat16 where there is a choice;
everything else is as they come.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.comparison.plan import PeersPlan
from bench.environment import without_folder
from bench.server_process import PORT, find_headrace
from bench.workload import PromptKind

__all__ = [
    "HEADRACE",
    "HEADRACE_INT8",
    "OPENVINO",
    "SERVER_PEERS",
    "PeerPaths",
    "Side",
    "find_default_model",
    "list_sides",
]

HEADRACE = "headrace"
HEADRACE_INT8 = "headrace int8"
LLAMA = "llama.cpp"
VLLM = "vLLM"
OPENVINO = "OpenVINO"
TRANSFORMERS = "transformers"

SERVER_PEERS = (VLLM, LLAMA)  # whose best one the targets speak of

DRIVER = Path(__file__).with_name("openvino_driver.py")
SLOTS = 64  # of llama.cpp, which divides its context among them
SPARE_CONNECTIONS = 16
TRANSFORMERS_MEMORY = "0.15"  # of the machine's; by default it takes all, and is killed for it
QUIET = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
VERSION_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerPaths:
    """Where the peers are; None leaves one out.

    Attributes:
        llama_server: the program.
        vllm_python, openvino_python, transformers_python: the interpreters of their environments.
        model: that headrace serves.
        gguf: file with the same model for llama.cpp and OpenVINO.
        hf_model: directory with the same model for vLLM and transformers.
    """

    model: Path
    gguf: Path | None = None
    llama_server: Path | None = None
    vllm_python: Path | None = None
    openvino_python: Path | None = None
    transformers_python: Path | None = None
    hf_model: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One that takes part.

    Attributes:
        kind: "headrace"; "server" speaks OpenAI's completions; "offline" is a pipeline without one.
        command: that starts it.
        version_command: prints its version.
        ready_path: answers 200 when it is ready.
        environment: variables that it gets.
        cache_variables: name folders in which it keeps what it has compiled.
        model: name that requests carry; None asks the server.
        ignore_eos: it knows this field.
        body: further fields of every request.
        prompts: what it takes.
    """

    name: str
    kind: Literal["headrace", "server", "offline"]
    command: tuple[str, ...]
    version_command: tuple[str, ...] = ()
    ready_path: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    cache_variables: tuple[str, ...] = ()
    model: str | None = None
    ignore_eos: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)
    prompts: PromptKind = "tokens"

    def describe(self) -> dict[str, Any]:
        """For JSON; of paths only the last names."""
        return {
            "name": self.name,
            "kind": self.kind,
            "command": " ".join(without_folder(word) for word in self.command),
            "version": self.find_version(),
            "prompts": self.prompts,
        }

    def cold_environment(self, folder: Path) -> dict[str, str]:
        """Variables that move what it keeps into a folder of ours."""
        return {name: str(folder / name.lower()) for name in self.cache_variables}

    def find_version(self) -> str | None:
        """What it says when asked for its version."""
        if not self.version_command:
            return None
        try:
            answer = subprocess.run(
                self.version_command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=VERSION_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return " ".join(answer.stdout.split())


def find_default_model() -> Path:
    """The default model's file, fetched if need be.

    Raises:
        subprocess.SubprocessError: it cannot be had.
    """
    command = [find_headrace(), "models", "where"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(answer.stdout.strip())


def list_sides(
    paths: PeerPaths, plan: PeersPlan, serve_arguments: Sequence[str], *, with_int8: bool
) -> list[Side]:
    """Everyone that takes part, ours first.

    Args:
        paths: where the peers are.
        plan: what they must bear.
        serve_arguments: further ones for `headrace serve`.
        with_int8: headrace takes part a second time, with int8 weights.

    Raises:
        ValueError: a peer lacks its model.
        ServerFailed: headrace is not installed.
    """
    if (paths.vllm_python or paths.transformers_python) and paths.hf_model is None:
        raise ValueError("vLLM and transformers need the directory of a model")
    if (paths.llama_server or paths.openvino_python) and paths.gguf is None:
        raise ValueError("llama.cpp and OpenVINO need a GGUF file")
    ours = headrace_side(paths, plan, serve_arguments)
    sides = [ours]
    if with_int8:
        sides.append(int8_side(ours))
    if paths.llama_server is not None and paths.gguf is not None:
        sides.append(llama_side(paths.llama_server, paths.gguf, plan))
    if paths.vllm_python is not None and paths.hf_model is not None:
        sides.append(vllm_side(paths.vllm_python, paths.hf_model, plan))
    if paths.transformers_python is not None and paths.hf_model is not None:
        sides.append(transformers_side(paths.transformers_python, paths.hf_model))
    if paths.openvino_python is not None and paths.gguf is not None:
        sides.append(openvino_side(paths.openvino_python, paths.gguf))
    return sides


def headrace_side(paths: PeerPaths, plan: PeersPlan, serve_arguments: Sequence[str]) -> Side:
    """Ourselves, with the peers' file and room for the open streams."""
    room = str(plan.open_streams + SPARE_CONNECTIONS)
    command = [
        *(find_headrace(), "serve", str(paths.model)),
        *("--max-model-len", str(plan.context)),
        *("--max-num-queued-reqs", room),
        *("--max-connections", room),
        *("--queue-timeout", "0"),
        *serve_arguments,
    ]
    return Side(
        name=HEADRACE,
        kind="headrace",
        command=tuple(command),
        version_command=(find_headrace(), "--version"),
        cache_variables=("HEADRACE_CACHE",),
    )


def int8_side(ours: Side) -> Side:
    """Ourselves with int8 weights."""
    return Side(
        name=HEADRACE_INT8,
        kind="headrace",
        command=(*ours.command, "--quantization", "int8"),
        version_command=ours.version_command,
        cache_variables=ours.cache_variables,
    )


def llama_side(program: Path, gguf: Path, plan: PeersPlan) -> Side:
    """llama.cpp's server: a slot for each stream, and a thread for each connection."""
    command = [
        *(str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", PORT),
        *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * plan.context)),
        *("--threads-http", str(plan.open_streams + SPARE_CONNECTIONS)),
    ]
    return Side(
        name=LLAMA,
        kind="server",
        command=tuple(command),
        version_command=(str(program), "--version"),
    )


def vllm_side(python: Path, model: Path, plan: PeersPlan) -> Side:
    """The server of vLLM."""
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", PORT),
        *("--dtype", "bfloat16", "--max-model-len", str(plan.context)),
    ]
    return Side(
        name=VLLM,
        kind="server",
        command=tuple(command),
        version_command=package_version(python, "vllm"),
        environment={**activated(python), **QUIET},
        cache_variables=("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"),
    )


def transformers_side(python: Path, model: Path) -> Side:
    """`transformers serve`: it takes texts only, and no field that it does not know."""
    command = [
        *(str(python), "-m", "transformers.cli.transformers", "serve", str(model)),
        *("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"),
        *("--cb-max-memory-percent", TRANSFORMERS_MEMORY),
        *("--host", "127.0.0.1", "--port", PORT),
    ]
    settings = {"do_sample": False, "eos_token_id": -1}
    return Side(
        name=TRANSFORMERS,
        kind="server",
        command=tuple(command),
        version_command=package_version(python, "transformers"),
        environment={**activated(python), **QUIET},
        model=str(model),
        ignore_eos=False,
        body={"generation_config": json.dumps(settings)},
        prompts="text",
    )


def openvino_side(python: Path, gguf: Path) -> Side:
    """OpenVINO GenAI's pipeline in a process of its own, without any server."""
    return Side(
        name=OPENVINO,
        kind="offline",
        command=(str(python), "-I", str(DRIVER), str(gguf)),  # -I: our folder is not on its path
        version_command=package_version(python, "openvino-genai"),
        environment=activated(python),
    )


def package_version(python: Path, package: str) -> tuple[str, ...]:
    """A command that prints the version of a package of an environment."""
    script = f"from importlib.metadata import version; print(version({package!r}))"
    return (str(python), "-c", script)


def activated(python: Path) -> dict[str, str]:
    """Its own programs come first, and nothing of ours is in the way."""
    return {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": "",
        "VIRTUAL_ENV": str(python.parent.parent),
    }
