"""Streams over one carrier of the gateway, read as fast as they come, in a process of its own.

    python -m bench.carrier_load websocket|sse URL STREAMS PROMPT_TOKENS OUTPUT_TOKENS VOCAB SEED

It says "ready" when it is connected, waits for a line, and prints what it has read as JSON. A
process of its own, because a client in the server's would be measured with it. Times are those of
CLOCK_MONOTONIC, so that several of these can be compared.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Literal

import aiohttp
import orjson

from bench.scenario import plan_prompts
from bench.sse import EventStreamParser
from bench.target import Target, make_body, open_session

__all__ = ["Carrier", "StreamCounts", "StreamFailed", "load_sse", "load_websocket"]

Carrier = Literal["websocket", "sse"]

SILENCE_S = 120.0


class StreamFailed(Exception):
    """A stream did not end as it should."""


@dataclass(kw_only=True, slots=True)
class StreamCounts:
    """What came.

    Attributes:
        messages: events or messages that carried text.
        cpu_s: of this process.
    """

    output_tokens: int = 0
    messages: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    cpu_s: float = 0.0


async def load_websocket(
    url: str,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    begin: Callable[[], Awaitable[None]],
) -> StreamCounts:
    """Stream one answer for each prompt over as few websockets as carry them.

    Args:
        url: of the server.
        prompts: token ids.
        output_len: tokens of each answer.
        begin: called when everything is connected; returns when it is time to start.

    Raises:
        StreamFailed: an answer is not as long as wanted, or there is none.
    """
    counts = StreamCounts()
    address = f"{url.replace('http', 'ws', 1)}/v1/stream"
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session(None, SILENCE_S))
        sockets = []
        waiting = list(prompts)
        while waiting:
            socket = await stack.enter_async_context(
                session.ws_connect(address, protocols=["headrace.v1.json"], max_msg_size=0)
            )
            hello = orjson.loads(await socket.receive_str())
            max_streams = hello["limits"]["max_streams"]
            sockets.append((socket, waiting[:max_streams]))
            del waiting[:max_streams]
        await begin()
        counts.start_s = time.monotonic()
        async with asyncio.TaskGroup() as streams:
            for socket, share in sockets:
                streams.create_task(_read_websocket(socket, share, output_len, counts))
        counts.end_s = time.monotonic()
    return counts


async def _read_websocket(
    socket: "aiohttp.ClientWebSocketResponse[bool]",
    prompts: Sequence[Sequence[int]],
    output_len: int,
    counts: StreamCounts,
) -> None:
    for index, prompt in enumerate(prompts):
        request = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        start = {"type": "start", "id": str(index), "request": request}
        await socket.send_str(orjson.dumps(start).decode())
    num_open = len(prompts)
    while num_open:
        message = orjson.loads(await socket.receive_str())
        match message["type"]:
            case "delta":
                counts.messages += 1
            case "done":
                _check_length(message["usage"]["completion_tokens"], output_len)
                counts.output_tokens += output_len
                num_open -= 1
            case "error":
                raise StreamFailed(str(message))


async def load_sse(
    url: str,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    begin: Callable[[], Awaitable[None]],
) -> StreamCounts:
    """Stream one answer for each prompt as server-sent events of /v1/completions.

    Arguments and errors as of `load_websocket`.
    """
    counts = StreamCounts()
    async with open_session(None, SILENCE_S) as session:
        target = Target(url=url, model="", continuous_usage=False)
        async with session.get(f"{url}/v1/models") as response:
            listed = orjson.loads(await response.read())
        extra = {"model": listed["data"][0]["id"]}
        bodies = [make_body(target, list(prompt), output_len, extra) for prompt in prompts]
        await begin()
        counts.start_s = time.monotonic()
        async with asyncio.TaskGroup() as streams:
            for body in bodies:
                streams.create_task(_read_sse(session, target, body, output_len, counts))
        counts.end_s = time.monotonic()
    return counts


async def _read_sse(
    session: aiohttp.ClientSession,
    target: Target,
    body: bytes,
    output_len: int,
    counts: StreamCounts,
) -> None:
    headers = {"Content-Type": "application/json"}
    usage = None
    parser = EventStreamParser()
    async with session.post(target.request_url, data=body, headers=headers) as response:
        if response.status != 200:
            raise StreamFailed((await response.text())[:300])
        async for chunk in response.content.iter_any():
            for data in parser.feed(chunk):
                if data == b"[DONE]":
                    continue
                event = orjson.loads(data)
                counts.messages += bool(event.get("choices"))
                usage = event.get("usage") or usage
    if usage is None:
        raise StreamFailed("the stream ended without usage")
    _check_length(usage["completion_tokens"], output_len)
    counts.output_tokens += output_len


def _check_length(output_tokens: int, wanted: int) -> None:
    if output_tokens != wanted:
        raise StreamFailed(f"{output_tokens} tokens instead of {wanted}")


async def _begin() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


def main(carrier: str, url: str, *numbers: str) -> None:
    """Run; the exit code is 1 if a stream failed."""
    num_streams, prompt_len, output_len, vocab_size, seed = map(int, numbers)
    prompts = plan_prompts([prompt_len] * num_streams, seed=seed, vocab_size=vocab_size)
    load = load_websocket if carrier == "websocket" else load_sse
    cpu_s = time.process_time()
    try:
        counts = asyncio.run(
            load(url, [p for p in prompts if isinstance(p, list)], output_len, _begin)
        )
    except* (StreamFailed, aiohttp.ClientError, TypeError) as failures:
        sys.exit(f"error: {failures.exceptions[0]}")
    counts.cpu_s = time.process_time() - cpu_s
    sys.stdout.write(orjson.dumps(asdict(counts)).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
