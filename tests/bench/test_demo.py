from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from bench import demo as demo_module
from bench.demo import demo, describe_answer
from bench.server_process import ServerFailed, ServerProcess
from headrace_client import ConnectFailed, Timing, Usage

USAGE = Usage(prompt_tokens=37, completion_tokens=8, cached_tokens=0)
TIMING = Timing(
    queue_s=0.0005,
    ttft_s=0.05,
    prefill_s=0.0495,
    decode_s=0.07,
    e2e_s=0.12,
    itl_mean_s=0.01,
    itl_p50_s=0.01,
    itl_p99_s=0.011,
    itl_max_s=0.011,
    num_preemptions=0,
)


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []

    @contextmanager
    def running(command: Sequence[str], **_: object) -> Iterator[ServerProcess]:
        if "broken" in command:
            raise ServerFailed("it ended")
        events.append(" ".join(command))
        yield ServerProcess("http://127.0.0.1:9", 0.1, 3.25, 1)
        events.append("stopped")

    monkeypatch.setattr(demo_module, "running_server", running)
    monkeypatch.setattr(demo_module, "find_headrace", lambda: "headrace")
    return events


def test_the_demo_shows_answer_and_figures_and_stops_the_server(
    server: list[str], monkeypatch: pytest.MonkeyPatch
):
    async def stream_chat(url: str, question: str) -> tuple[Usage, Timing]:
        assert url == "http://127.0.0.1:9"
        return USAGE, TIMING

    monkeypatch.setattr(demo_module, "stream_chat", stream_chat)
    result = CliRunner().invoke(demo, ["tiny", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "Ready after 3.2 s" in result.output
    assert "> What is the capital of France?" in result.output
    assert "37 tokens in, 8 out · queue 0.5 ms · first token after 50.0 ms" in result.output
    assert "10.0 ms per token · total 120 ms" in result.output
    assert server == ["headrace serve tiny --dtype float32", "stopped"]


def test_a_server_that_does_not_start_is_one_line():
    result = CliRunner().invoke(demo, ["broken"])
    assert result.exit_code == 1
    assert result.output == "Error: it ended\n"


def test_a_connection_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch):
    async def stream_chat(url: str, question: str) -> tuple[Usage, Timing]:
        raise ConnectFailed("nobody there")

    monkeypatch.setattr(demo_module, "stream_chat", stream_chat)
    result = CliRunner().invoke(demo, [])
    assert result.exit_code == 1
    assert "Error: nobody there" in result.output


def test_figures_that_the_server_does_not_have_are_left_out():
    assert describe_answer(None, None) == "The server gave no figures."
