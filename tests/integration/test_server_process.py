"""The life of a real server process: start, endpoints, and every way to end."""

import asyncio
import re
import signal
import subprocess
import sys

import aiohttp
import orjson
import pytest

from headrace_client import AsyncClient, Unavailable
from serving import TINY, read_metrics, served, wait_until_idle

# Work for seconds: nothing of it is done by the time that a signal is handled.
LONG = {"prompt": "x", "n": 16, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
# Work for minutes.
ENDLESS = LONG | {"prompt": ["x"] * 8, "max_tokens": 500}
START_ENDLESS = {
    "type": "start",
    "request": {"prompt": "x", "max_tokens": 500, "ignore_eos": True},
}

STREAM_HTTP = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
body = {"prompt": ["x"] * 8, "n": 16, "max_tokens": 500, "ignore_eos": True, "stream": True}
headers = {"Content-Type": "application/json"}
connection.request("POST", "/v1/completions", json.dumps(body), headers)
print(connection.getresponse().readline(), flush=True)
sys.stdin.read()
"""
STREAM_WEBSOCKET = """
import asyncio, sys
from headrace_client import AsyncClient

async def main():
    async with AsyncClient("http://127.0.0.1:" + sys.argv[1], resume=False) as client:
        streams = [await client.complete("x", max_tokens=500, ignore_eos=True) for _ in range(32)]
        print(await anext(streams[0]), flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


async def wait_for_requests(session: aiohttp.ClientSession, number: int) -> None:
    """Return once so many requests run or wait."""
    while True:
        numbers = await read_metrics(session)
        if numbers["num_requests_running"] + numbers["num_requests_waiting"] >= number:
            return
        await asyncio.sleep(0)


async def events(response: aiohttp.ClientResponse) -> list[str]:
    """The data of all events of a stream."""
    lines = [line.decode().rstrip("\n") async for line in response.content]
    assert lines[1::2] == [""] * (len(lines) // 2)
    return [line.removeprefix("data: ") for line in lines[::2]]


async def stream_events(session: aiohttp.ClientSession, body: dict) -> list[str]:
    async with session.post("/v1/completions", json=body | {"stream": True}) as response:
        assert response.status == 200
        return await events(response)


async def answer(session: aiohttp.ClientSession, body: dict) -> tuple[int, dict]:
    async with session.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


# ---- while it runs -----------------------------------------------------------------------------


def test_the_start_says_what_was_decided_and_where_it_listens(tiny_server):
    assert "model llama (llama), bfloat16, on cpu\n" in tiny_server.log
    assert (
        "continuous batching in steps of up to 64 tokens and 8 requests; 3 buckets compiled"
    ) in tiny_server.log
    assert "KV cache for 3.8 requests at the full length of 512 tokens\n" in tiny_server.log
    assert re.search(r"1,920 tokens in 120 blocks of 16, bfloat16 *\n", tiny_server.log)
    assert re.search(r"  memory +\d+\.\d [KMG]iB +of \d+\.\d GiB *\n", tiny_server.log)
    assert f"  chat page   {tiny_server.url}/\n" in tiny_server.log
    assert f"  dashboard   {tiny_server.url}/dashboard\n" in tiny_server.log
    assert f"  OpenAI API  {tiny_server.url}/v1\n" in tiny_server.log
    assert f"  websocket   ws://127.0.0.1:{tiny_server.port}/v1/stream\n" in tiny_server.log
    assert f"  metrics     {tiny_server.url}/metrics\n" in tiny_server.log


async def test_a_server_that_runs_says_so(session):
    for path, said in (("/health", {"status": "ok"}), ("/ready", {"status": "ready"})):
        async with session.get(path) as response:
            assert (response.status, await response.json()) == (200, said)
    async with session.get("/v1/models") as response:
        [model] = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 512)
    async with session.get("/") as response:
        assert response.content_type == "text/html"
    numbers = await read_metrics(session)
    assert (numbers["kv_blocks"], numbers["kv_block_size"]) == (120, 16)


@pytest.mark.parametrize(
    ("script", "num_tokens"),
    [(STREAM_HTTP, 8 * 16 * 500), (STREAM_WEBSOCKET, 32 * 500)],
    ids=["http", "websocket"],
)
async def test_a_client_that_is_killed_leaves_nothing_behind(
    tiny_server, session, script, num_tokens
):
    before = await wait_until_idle(session)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tiny_server.port)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert await client.stdout.readline() != b""  # it has received something
    client.kill()
    await client.communicate()
    after = await wait_until_idle(session)
    aborted = "requests_finished_total{abort}"
    assert after[aborted] > before.get(aborted, 0)
    assert after["kv_blocks_free"] == after["kv_blocks"]
    # Nobody went on to compute what nobody waits for.
    computed = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert computed < num_tokens / 2


# ---- how it ends -------------------------------------------------------------------------------


async def test_sigterm_lets_what_runs_finish_and_refuses_what_is_new():
    with served(*TINY, "--shutdown-timeout", "600") as server:
        async with (
            aiohttp.ClientSession(server.url) as session,
            AsyncClient(server.url, max_retries=0) as client,
        ):
            streamed = asyncio.create_task(stream_events(session, LONG))
            whole = asyncio.create_task(answer(session, LONG))
            streams = [
                await client.complete("x", max_tokens=400, ignore_eos=True) for _ in range(16)
            ]
            await wait_for_requests(session, 33)
            server.process.terminate()
            await asyncio.to_thread(server.wait_for_line, "stopping")
            async with session.get("/ready") as response:
                assert response.status == 503
            async with session.get("/health") as response:
                assert response.status == 200
            status, body = await answer(session, {"prompt": "x"})
            assert (status, body["error"]["type"]) == (503, "service_unavailable_error")
            with pytest.raises(Unavailable):
                await client.complete("x")
            # Whoever has lost a stream may come and get it, and start none.
            async with session.ws_connect("/v1/stream", protocols=["headrace.v1.json"]) as ws:
                assert [(await ws.receive_json())["type"] for _ in "12"] == ["hello", "goaway"]
                await ws.send_json(START_ENDLESS | {"id": "late"})
                refused = await ws.receive_json()
                assert (refused["status"], refused["error"]["code"]) == (503, "shutting_down")

            assert (await streamed)[-1] == "[DONE]"
            status, body = await whole
            assert (status, body["usage"]["completion_tokens"]) == (200, 16 * 400)
            for stream in streams:
                await stream.text()
                assert (stream.finish_reason, stream.usage.completion_tokens) == ("length", 400)
        assert server.process.wait() == 0


async def test_after_the_shutdown_timeout_the_rest_is_told_and_the_process_ends():
    with served(*TINY, "--shutdown-timeout", "0.05") as server:
        async with aiohttp.ClientSession(server.url) as session:
            streamed = asyncio.create_task(stream_events(session, ENDLESS))
            whole = asyncio.create_task(answer(session, ENDLESS))
            async with session.ws_connect("/v1/stream", protocols=["headrace.v1.json"]) as ws:
                for stream_id in ("a", "b"):
                    await ws.send_json(START_ENDLESS | {"id": stream_id})
                await wait_for_requests(session, 258)
                server.process.terminate()
                messages = [orjson.loads(message.data) async for message in ws]
                close_code = ws.close_code

            [*_, last] = await streamed
            assert orjson.loads(last)["error"]["code"] == "shutting_down"
            status, body = await whole
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            ends = [message for message in messages if message["type"] == "error"]
            assert sorted((end["id"], end["status"]) for end in ends) == [("a", 503), ("b", 503)]
            kinds = [message["type"] for message in messages]
            assert kinds.count("goaway") == 1
            assert kinds.index("goaway") < kinds.index("error")
            assert close_code == 1012
        assert server.process.wait() == 0


async def test_a_second_interrupt_does_not_wait():
    with served(*TINY, "--shutdown-timeout", "600") as server:
        async with aiohttp.ClientSession(server.url) as session:
            streamed = asyncio.create_task(stream_events(session, ENDLESS))
            await wait_for_requests(session, 128)
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.wait_for_line, "stopping")
            server.process.send_signal(signal.SIGINT)
            [*_, last] = await streamed
            assert orjson.loads(last)["error"]["code"] == "shutting_down"
        assert server.process.wait() == 0
