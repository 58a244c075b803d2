import asyncio
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from click.testing import CliRunner, Result

from bench.serve import serve


async def run_against(status: int, *arguments: str) -> tuple[Result, list[dict]]:
    """Run the command in a thread against a server that streams two words, or answers `status`."""
    bodies: list[dict] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if status != 200:
            return web.json_response({"error": {"message": "busy"}}, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        for text, finish in (("a", None), ("b", "length")):
            delta = {"text": text, "delta": {"content": text}, "finish_reason": finish}
            await response.write(b"data: " + orjson.dumps({"choices": [delta]}) + b"\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        command = ["--url", str(server.make_url("/")), "--model", "m", *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, serve, command)
    return result, bodies


async def test_a_table_is_printed_and_a_result_written(tmp_path: Path):
    path = tmp_path / "result.json"
    result, bodies = await run_against(
        200,
        *("--concurrency", "1,2", "--num-prompts", "3", "--num-warmups", "1"),
        *("--output-len", "2", "--output-json", str(path), "--save-requests"),
    )
    assert result.exit_code == 0, result.output
    assert "1 streams" in result.stdout
    assert "2 streams" in result.stdout
    document = orjson.loads(path.read_bytes())
    assert [run["level"]["concurrency"] for run in document["runs"]] == [1, 2]
    assert [len(run["requests"]) for run in document["runs"]] == [3, 3]
    assert document["runs"][0]["token_count_method"] == "chunks"
    assert len(bodies) == 8
    assert len(bodies[0]["prompt"]) == 128


async def test_failed_requests_make_the_command_fail():
    result, _ = await run_against(429, "--concurrency", "1", "--num-prompts", "2")
    assert result.exit_code == 1
    assert "http 429: 2" in result.stdout
    assert "busy" in result.stdout


async def test_chat_is_asked_in_words():
    result, bodies = await run_against(
        200, "--endpoint", "chat", "--request-rate", "500", "--num-prompts", "2", "--input-len", "5"
    )
    assert result.exit_code == 0, result.output
    assert len(bodies[0]["messages"][0]["content"].split()) == 5


async def test_a_seed_repeats_the_prompts_and_no_seed_does_not():
    arguments = ("--concurrency", "1", "--num-prompts", "2", "--num-warmups", "0")
    _, first = await run_against(200, *arguments, "--seed", "3")
    _, second = await run_against(200, *arguments, "--seed", "3")
    _, third = await run_against(200, *arguments)
    prompts = [[body["prompt"] for body in bodies] for bodies in (first, second, third)]
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "not a list of numbers"),
        (["--concurrency", "0"], "at least 1"),
        (["--concurrency", "1", "--request-rate", "2"], "exclude each other"),
        (["--endpoint", "chat", "--prompt-kind", "tokens"], "--prompt-kind must be text"),
        (["--shared-prefix-len", "128"], "room for at least one own token"),
        (["--goodput", "speed:3"], "must be ttft:MS, itl:MS or e2e:MS"),
        (["--request-rate", "0"], "range"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], message: str):
    result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_server_that_is_not_there_is_one_line():
    url = f"http://127.0.0.1:{unused_port()}"
    result = CliRunner().invoke(serve, ["--url", url])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {url}: no connection")
    assert result.output.count("\n") == 1
