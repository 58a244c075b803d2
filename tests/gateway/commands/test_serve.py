"""What `headrace serve` refuses before it loads anything; tests/integration has the rest."""

import socket

import pytest

from compile_cache import without_compile_cache
from gateway.cli import main
from gateway.commands import serve as serve_module
from gateway.commands.serve import device_memory_bytes, serve
from gateway.machine import read_machine
from golden_model import TINY_DIR

TINY = str(TINY_DIR / "llama")


def refused(capsys, *arguments: str) -> str:
    """Run the command, which must end with a wrong command line; return its last line."""
    assert main(["serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


def failed(capsys, *arguments: str) -> str:
    """Run the command, which must fail with one line on stderr; return it."""
    assert main(["serve", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    return line


def use_no_cache(monkeypatch, tmp_path) -> None:
    """Keep the command from setting JAX's cache of compiled programs in this process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "99999"),
        ("--port", "http"),
        ("--dtype", "float16"),
        ("--block-size", "12"),
        ("--max-num-seqs", "0"),
        ("--max-num-batched-tokens", "1"),
        ("--max-num-queued-reqs", "-1"),
        ("--kv-cache-memory-bytes", "much"),
        ("--kv-cache-memory-bytes", "-1G"),
        ("--watermark", "1.5"),
        ("--watermark", "nan"),
        ("--kv-cache-memory-share", "120%"),
        ("--kv-cache-dtype", "fp4"),
        ("--batching", "eager"),
        ("--batch-window-ms", "0"),
        ("--scheduling-policy", "random"),
        ("--priority-aging-s", "0"),
        ("--tenant-weight", "alice"),
        ("--target-itl-ms", "0"),
        ("--long-prefill-token-threshold", "-1"),
        ("--max-num-queued-tokens", "0"),
        ("--queue-timeout", "-1"),
        ("--num-step-records", "0"),
        ("--shutdown-timeout", "nan"),
        ("--shutdown-timeout", "-1"),
        ("--sse-keep-alive-interval", "inf"),
        ("--chat-template", "no/such/file"),
        ("--metrics-prefix", "other"),
        ("--log-level", "loud"),
        ("--log-format", "xml"),
        ("--api-keys-file", "no/such/file"),
        ("--ssl-certfile", "no/such/file"),
        ("--max-body-bytes", "much"),
        ("--header-timeout", "0"),
        ("--send-timeout", "nan"),
        ("--tensor-parallel-size", "0"),
        ("--num-processes", "0"),
        ("--process-id", "-1"),
    ],
)
def test_a_bad_value_is_refused_and_its_option_named(capsys, option, value):
    line = refused(capsys, TINY, option, value)
    assert line.startswith(f"Error: Invalid value for '{option}': ")


def test_an_unknown_option_is_refused(capsys):
    assert "No such option '--max-seqs'" in refused(capsys, "--max-seqs", "3")


def test_a_port_file_that_is_a_folder_is_refused(capsys, tmp_path):
    assert "'--port-file'" in refused(capsys, TINY, "--port-file", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--max-num-seqs", "9", "--max-num-batched-tokens", "8"],
            "Error: --max-num-seqs (9) must not exceed --max-num-batched-tokens (8)",
        ),
        (
            ["--max-num-scheduled-tokens", "600"],
            "Error: --max-num-scheduled-tokens must be in [1, 512], got 600",
        ),
        (
            ["--served-model-name", ""],
            "Error: --served-model-name must hold at least one name, none of them empty",
        ),
        (
            ["--allowed-origin", "example.com"],
            "Error: allowed origin 'example.com' must look like https://chat.example",
        ),
        (
            ["--watermark", "10", "--num-kv-blocks", "10"],
            "Error: watermark (10.0) leaves none of 10 blocks",
        ),
        (
            ["--kv-cache-memory-share", "10%", "--num-kv-blocks", "10"],
            "Error: give only one of --kv-cache-memory-share and --num-kv-blocks",
        ),
        (
            ["--tensor-parallel-size", "64"],
            "Error: --tensor-parallel-size 64 needs as many devices, but there is 1 (cpu); "
            "XLA_FLAGS=--xla_force_host_platform_device_count=64 makes as many of a CPU, to try it",
        ),
        (
            ["--num-processes", "2"],
            "Error: give all of --coordinator-address, --num-processes and --process-id, or none",
        ),
        (
            [*("--num-processes", "2", "--process-id", "2"), "--coordinator-address", "h:1"],
            "Error: --process-id must be from 0 to 1, got 2",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(capsys, tmp_path, monkeypatch, arguments, line):
    use_no_cache(monkeypatch, tmp_path)
    assert refused(capsys, TINY, "--port", "0", *arguments) == line


def test_an_address_that_others_reach_needs_keys_or_a_word(capsys):
    line = refused(capsys, TINY, "--host", "0.0.0.0", "--port", "0")
    assert line.startswith("Error: others can reach 0.0.0.0")
    assert "--api-keys-file" in line
    assert "--allow-unauthenticated" in line


@pytest.mark.parametrize("more", [["--allow-unauthenticated"], ["--api-key", "0123456789abcdef"]])
def test_with_either_it_goes_on_to_the_model(capsys, more):
    line = failed(capsys, "no such model", "--host", "0.0.0.0", "--port", "0", *more)
    assert line.startswith("Error: unknown model")


def test_a_key_file_that_is_none_is_refused_before_anything_is_loaded(capsys, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text("[]")
    line = refused(capsys, "no such model", "--api-keys-file", str(path))
    assert line.startswith(f"Error: --api-keys-file {path}: ")


def test_a_variable_sets_an_option(capsys, monkeypatch):
    monkeypatch.setenv("HEADRACE_BLOCK_SIZE", "5")
    assert "'--block-size'" in refused(capsys, TINY)


def test_a_taken_port_is_one_line_and_said_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = failed(capsys, "no such model", "--port", str(port))
    assert line == f"Error: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_an_unknown_model_is_one_line(capsys):
    line = failed(capsys, "no such model", "--port", "0")
    assert line.startswith("Error: unknown model 'no such model': ")


def test_a_folder_that_is_no_model_is_one_line(capsys, tmp_path):
    line = failed(capsys, str(tmp_path), "--port", "0")
    assert line.endswith("it lacks config.json, tokenizer.json, *.safetensors")


def test_a_damaged_model_file_is_one_line(capsys, tmp_path, monkeypatch):
    use_no_cache(monkeypatch, tmp_path)
    whole = (TINY_DIR / "llama" / "tiny-llama.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    line = failed(capsys, str(tmp_path / "half.gguf"), "--port", "0")
    assert "half.gguf is not a well-formed GGUF file" in line


def test_a_template_that_is_no_text_is_one_line(capsys, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff\xfe")
    line = failed(capsys, TINY, "--port", "0", "--chat-template", str(path))
    assert line.startswith(f"Error: cannot read --chat-template {path}: ")


def test_a_port_file_that_cannot_be_written_is_one_line(capsys, tmp_path):
    path = tmp_path / "nothing" / "port"
    line = failed(capsys, TINY, "--port", "0", "--port-file", str(path))
    assert line == f"Error: cannot write --port-file {path}: No such file or directory"


def test_help_names_every_option_and_its_default(capsys):
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for parameter in serve.params:
        assert parameter.opts[0] in shown or parameter.name == "model"
    assert "[default: 127.0.0.1]" in shown
    assert "HEADRACE_<OPTION>" in shown
    assert "MODEL is a directory" in shown


class Device:
    def __init__(self, stats):
        self._stats = stats

    def memory_stats(self):
        return self._stats


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_a_device_without_memory_of_its_own_has_that_of_the_machine(stats):
    assert device_memory_bytes(Device(stats)) == read_machine().memory_bytes > 1 << 30


def test_a_device_with_memory_of_its_own_has_that_and_no_more():
    assert device_memory_bytes(Device({"bytes_limit": 123 << 30})) == 123 << 30


def test_devices_made_of_one_cpu_share_its_memory():
    whole = read_machine().memory_bytes
    assert device_memory_bytes(Device(None), num_sharing=4) == whole // 4
    assert device_memory_bytes(Device({"bytes_limit": 123}), num_sharing=4) == 123


def test_where_no_memory_is_known_there_is_a_little(monkeypatch):
    class Unknown:
        memory_bytes = None

    monkeypatch.setattr(serve_module, "read_machine", Unknown)
    assert device_memory_bytes(Device(None)) == 4 << 30


def test_the_folder_of_programs_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with without_compile_cache():
        folder = serve_module._programs_dir()
    assert folder == tmp_path / "cache" / "compiled"
    assert folder.stat().st_mode & 0o777 == 0o700
