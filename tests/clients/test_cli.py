"""The terminal commands, run as a user runs them: processes with pipes, or with a terminal."""

import asyncio
import os
import pty
import re
import signal
import socket
import sys
from types import SimpleNamespace

import pytest

from fakes import FakeEngine
from gateway.api_keys import ApiKey, hash_of_key
from gateway.key_ring import KeyRing
from headrace_client.cli import chat
from stream_app import serve_streams

RUN = "import sys, headrace_client.cli as c; sys.argv[0] = 'headrace'; c.{}()"


async def run(command: str, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command with pipes; return exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN.format(command), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode(errors="surrogateescape"))
    return process.returncode or 0, out.decode(), err.decode()


class Terminal:
    """A command under a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._read = asyncio.Event()
        self.screen = ""

    async def __aenter__(self) -> "Terminal":
        self._master, slave = pty.openpty()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", RUN.format("chat"), *self._arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        asyncio.get_running_loop().add_reader(self._master, self._on_output)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)

    def _on_output(self) -> None:
        try:
            data = os.read(self._master, 4096)
        except OSError:  # the process has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self.screen += data.decode().replace("\r\n", "\n")
        self._read.set()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def wait_for(self, text: str) -> str:
        """Wait until the text is on the screen; return what was before it, and forget both."""
        while text not in self.screen:
            self._read.clear()
            await self._read.wait()
        before, _, self.screen = self.screen.partition(text)
        return before


async def test_complete_prints_the_answer_alone_on_stdout_and_numbers_on_stderr():
    async with serve_streams() as gateway:
        code, out, err = await run(
            "complete", "--url", gateway.base_url, "--max-tokens", "4", "Hi!"
        )
    assert (code, out) == (0, "defg\n")
    assert re.fullmatch(r"4 tokens · TTFT 10 ms · 100\.0 tok/s · ended by length\n", err)


async def test_complete_reads_its_prompt_from_a_pipe():
    async with serve_streams() as gateway:
        arguments = ["--url", gateway.base_url, "--max-tokens", "2", "-"]
        code, out, _ = await run("complete", *arguments, stdin="Hi!")
    assert (code, out) == (0, "de\n")


async def test_options_reach_the_server():
    async with serve_streams() as gateway:
        options = ["--temperature", "0", "--top-p", "0.5", "--seed", "7", "--max-tokens", "3"]
        await run("complete", "--url", gateway.base_url, *options, "x")
    params = gateway.engine.submitted[0][1]
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0, 0.5, 7, 3)


async def test_options_of_scheduling_reach_the_server():
    options = ["--priority", "-7", "--tenant", "alice", "--cache-salt", "salt"]
    times = ["--queue-timeout", "1.5", "--deadline", "60"]
    async with serve_streams() as gateway:
        arguments = ["--url", gateway.base_url, *options, *times, "--max-tokens", "1"]
        assert (await run("complete", *arguments, "x"))[0] == 0
    [request] = gateway.engine.requests
    assert (request.priority, request.tenant, request.cache_salt) == (-7, "alice", "salt")
    assert (request.queue_timeout_s, request.deadline_s) == (1.5, 60)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--url", "here", "'here' does not look like http://127.0.0.1:8000"),
        ("--seed", "9" * 30, "is not in the range"),
        ("--temperature", "nan", "temperature must be finite, got nan"),
        ("--deadline", "inf", "deadline must be finite, got inf"),
        ("--max-tokens", "9" * 30, "64-bit"),
    ],
)
async def test_a_value_that_cannot_be_sent_is_a_wrong_command_line(option, value, said):
    async with serve_streams() as gateway:
        code, out, err = await run("complete", "--url", gateway.base_url, option, value, "x")
        assert gateway.engine.submitted == []
    assert (code, out.strip()) == (2, "")
    assert said in err.splitlines()[-1]


async def test_bytes_that_are_no_text_reach_the_server_as_replacement_characters():
    async with serve_streams() as gateway:
        gateway.engine.script_all("ok")
        for arguments, stdin in ((["-"], "a\udcff"), (["a\udcff"], "")):
            code, _, _ = await run("complete", "--url", gateway.base_url, *arguments, stdin=stdin)
            assert code == 0
        code, _, _ = await run(
            "chat", "--url", gateway.base_url, "--system", "b\udcfe", stdin="a\udcff\n"
        )
        assert code == 0
    prompts = [bytes(i for i in p if i < 256).decode() for p, _ in gateway.engine.submitted]
    assert prompts[:2] == ["a\N{REPLACEMENT CHARACTER}"] * 2
    assert "a\N{REPLACEMENT CHARACTER}" in prompts[2]
    assert "b\N{REPLACEMENT CHARACTER}" in prompts[2]


async def test_chat_answers_each_line_of_a_pipe_on_its_own():
    async with serve_streams() as gateway:
        gateway.engine.script_all("hello")
        code, out, _ = await run(
            "chat", "--url", gateway.base_url, stdin="one\n\ntwo\n/quit\nthree\n"
        )
        first, second = (bytes(i for i in p if i < 256) for p, _ in gateway.engine.submitted)
    assert (code, out) == (0, "hello\nhello\n")
    assert b"one" in first
    assert b"two" in second
    assert b"one" not in second


async def test_the_system_text_goes_first():
    async with serve_streams() as gateway:
        arguments = ["--url", gateway.base_url, "--system", "Be brief.", "--max-tokens", "1"]
        await run("chat", *arguments, stdin="Hi!\n")
        prompt = bytes(i for i in gateway.engine.submitted[0][0] if i < 256)
    assert prompt.startswith(b"system\nBe brief.")


@pytest.mark.parametrize(("command", "arguments"), [("chat", []), ("complete", ["x"])])
async def test_no_server_is_one_clear_line(command, arguments):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, out, err = await run(command, "--url", url, *arguments, stdin="Hi!\n")
    assert code == 1
    assert out == ""
    assert re.fullmatch(r"Error: no server answers at ws://\S+: Connection refused\n", err)


async def test_a_key_comes_from_the_environment_or_an_option(start_gateway, monkeypatch):
    gateway = await start_gateway(
        keys=KeyRing([ApiKey(name="alice", sha256=hash_of_key("the-key"))])
    )
    arguments = ("complete", "Hi!", "--url", gateway.url, "--max-tokens", "4")
    code, _, err = await run(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert "wants an API key" in err
    assert (await run(*arguments, "--api-key", "the-key"))[:2] == (0, "defg\n")
    monkeypatch.setenv("HEADRACE_API_KEY", "the-key")
    assert (await run(*arguments))[:2] == (0, "defg\n")


async def test_a_refused_request_is_one_clear_line():
    async with serve_streams() as gateway:
        code, _, err = await run("complete", "--url", gateway.base_url, "--top-p", "2", "x")
    assert code == 1
    assert err.startswith("Error: top_p")
    assert err.count("\n") == 1


async def test_a_conversation_in_a_terminal_remembers_until_reset():
    async with serve_streams() as gateway:
        gateway.engine.script_all("hello")
        async with Terminal("--url", gateway.base_url) as terminal:
            await terminal.wait_for("fake-model")
            await terminal.wait_for("> ")
            terminal.type("one\n")
            await terminal.wait_for("hello")
            await terminal.wait_for("tok/s")
            await terminal.wait_for("> ")
            terminal.type("two\n")
            await terminal.wait_for("hello")
            await terminal.wait_for("> ")
            terminal.type("/stats\n")
            await terminal.wait_for("2 answers, 12 tokens")
            terminal.type("/reset\n")
            await terminal.wait_for("anew")
            await terminal.wait_for("> ")
            terminal.type("three\n")
            await terminal.wait_for("hello")
            await terminal.wait_for("> ")
            terminal.type("/quit\n")
            assert await terminal.process.wait() == 0
        prompts = [bytes(i for i in p if i < 256) for p, _ in gateway.engine.submitted]
    assert b"one" in prompts[1]
    assert b"hello" in prompts[1]
    assert b"one" not in prompts[2]


async def test_ctrl_c_stops_the_answer_and_not_the_program():
    engine = FakeEngine()
    engine.script_all("ZZZZ")
    engine.hold()
    async with serve_streams(engine) as gateway, Terminal("--url", gateway.base_url) as terminal:
        await terminal.wait_for("> ")
        terminal.type("Hi!\n")
        await engine.wait_for_requests(1)
        engine.step(2)
        await terminal.wait_for("ZZ")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.wait_for("ended by cancelled")
        assert engine.num_active == 0
        await terminal.wait_for("> ")
        engine.release()
        engine.script_all("again")
        terminal.type("more\n")
        await terminal.wait_for("again")
        await terminal.wait_for("> ")
        terminal.type("\x04")  # Ctrl-D
        assert await terminal.process.wait() == 0


async def test_ctrl_c_and_empty_lines_at_the_prompt_leave_the_conversation_open(monkeypatch):
    # In a thread: a signal sent to a process may come between its prompt and its wait for a key.
    typed = iter([KeyboardInterrupt(), "", "/nonsense", "/help", "Hi!", "/quit"])

    def fake_input(prompt):
        line = next(typed)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr("builtins.input", fake_input)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    async with serve_streams() as gateway:
        assert chat.callback is not None
        await asyncio.to_thread(chat.callback, url=gateway.base_url, system=None, max_tokens=2)
    assert len(gateway.engine.submitted) == 1
    assert next(typed, None) is None
