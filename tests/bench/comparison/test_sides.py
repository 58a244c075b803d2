import os
import sys
from pathlib import Path

import orjson
import pytest

from bench.comparison import sides as sides_module
from bench.comparison.plan import PeersPlan
from bench.comparison.sides import PeerPaths, Side, find_default_model, list_sides
from bench.server_process import PORT
from bench_server import flag_value

PLAN = PeersPlan(open_streams=500)
PYTHON = Path("env/bin/python")


@pytest.fixture(autouse=True)
def _headrace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides_module, "find_headrace", lambda: "headrace")


def all_sides(*arguments: str) -> dict[str, Side]:
    paths = PeerPaths(
        model=Path("m.gguf"),
        gguf=Path("m.gguf"),
        llama_server=Path("llama-server"),
        vllm_python=PYTHON,
        openvino_python=PYTHON,
        transformers_python=PYTHON,
        hf_model=Path("hf"),
    )
    return {side.name: side for side in list_sides(paths, PLAN, arguments, with_int8=True)}


def test_ours_comes_first_and_only_who_is_named_takes_part():
    (ours,) = list_sides(PeerPaths(model=Path("m.gguf")), PLAN, [], with_int8=False)
    assert ours.name == "headrace"
    assert list(all_sides()) == [
        *("headrace", "headrace int8", "llama.cpp", "vLLM", "transformers", "OpenVINO")
    ]


def test_the_limits_of_each_are_raised_to_what_is_sent():
    sides = all_sides()
    ours = sides["headrace"].command
    assert ours[:3] == ("headrace", "serve", "m.gguf")
    assert flag_value(ours, "--max-num-queued-reqs") == "516"
    assert flag_value(ours, "--max-connections") == "516"
    assert flag_value(ours, "--queue-timeout") == "0"
    assert flag_value(ours, "--max-model-len") == str(PLAN.context)
    llama = sides["llama.cpp"].command
    assert flag_value(llama, "--threads-http") == "516"
    # A slot's context is the whole over the slots.
    slots = int(flag_value(llama, "--parallel") or 0)
    assert int(flag_value(llama, "--ctx-size") or 0) == slots * PLAN.context
    assert flag_value(sides["vLLM"].command, "--max-model-len") == str(PLAN.context)


def test_every_server_but_ours_is_told_its_port():
    for side in all_sides().values():
        assert (PORT in side.command) == (side.kind == "server")


def test_arguments_reach_both_of_ours_and_int8_differs_by_an_option_only():
    sides = all_sides("--target-itl-ms", "80")
    ours, int8 = sides["headrace"].command, sides["headrace int8"].command
    assert ours[-2:] == ("--target-itl-ms", "80")
    assert int8 == (*ours, "--quantization", "int8")
    assert "--target-itl-ms" not in sides["vLLM"].command


@pytest.mark.parametrize(
    "paths",
    [
        PeerPaths(model=Path("m"), vllm_python=PYTHON),
        PeerPaths(model=Path("m"), transformers_python=PYTHON),
        PeerPaths(model=Path("m"), llama_server=Path("llama-server")),
        PeerPaths(model=Path("m"), openvino_python=PYTHON),
    ],
)
def test_a_peer_without_its_model_is_refused(paths: PeerPaths):
    with pytest.raises(ValueError, match="need"):
        list_sides(paths, PLAN, [], with_int8=False)


def test_what_they_compile_can_be_kept_in_a_folder_of_ours(tmp_path: Path):
    sides = all_sides()
    assert sides["headrace"].cold_environment(tmp_path) == {
        "HEADRACE_CACHE": str(tmp_path / "headrace_cache")
    }
    folders = sides["vLLM"].cold_environment(tmp_path)
    assert len(set(folders.values())) == len(folders) == 2
    assert sides["llama.cpp"].cold_environment(tmp_path) == {}


def test_a_python_of_its_own_finds_its_programs_and_nothing_of_ours():
    environment = all_sides()["vLLM"].environment
    assert environment["PATH"].split(os.pathsep)[0] == "env/bin"
    assert environment["PYTHONPATH"] == ""
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_who_knows_no_ignore_eos_is_asked_in_its_own_words():
    side = all_sides()["transformers"]
    assert not side.ignore_eos
    assert orjson.loads(side.body["generation_config"])["eos_token_id"] == -1
    assert side.prompts == "text"
    assert side.model == "hf"


def test_a_description_has_a_version_and_no_folders():
    script = "print('version 7'); print('and a half')"
    side = Side(
        name="x",
        kind="server",
        command=("/some/where/x", "--port", PORT, "--model", "/some/where/m.gguf"),
        version_command=(sys.executable, "-c", script),
    )
    assert side.describe() == {
        "name": "x",
        "kind": "server",
        "command": "x --port {port} --model m.gguf",
        "version": "version 7 and a half",
        "prompts": "tokens",
    }


@pytest.mark.parametrize("command", [(), ("./missing",), (sys.executable, "-c", "exit(1)")])
def test_a_side_that_tells_no_version_has_none(command: tuple[str, ...]):
    side = Side(name="x", kind="server", command=("x",), version_command=command)
    assert side.find_version() is None


def test_the_default_model_is_where_headrace_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "headrace"
    program.write_text('#!/bin/sh\n[ "$*" = "models where" ] && echo some/m.gguf\n')
    program.chmod(0o755)
    monkeypatch.setattr(sides_module, "find_headrace", lambda: str(program))
    assert find_default_model() == Path("some/m.gguf")
