"""One question, asked in every way there is, of the real model in a real server process.

What the answer must be was made with Hugging Face's implementation (tests/golden/README.md).
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgpack
import openai
import orjson
import pytest

from golden_model import GOLDEN_DIR
from headrace_client import AsyncClient
from serving import read_metrics, served

# The first start on a machine downloads the model and compiles it.
pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = json.loads((GOLDEN_DIR / "golden_smollm2.json").read_text())["cases"][0]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
MODEL = "smollm2-135m"

# Continued by the model with more of the same: 🧎‍♀️ is four code points in thirteen bytes.
KNEELING = "\U0001f9ce\N{ZERO WIDTH JOINER}\N{FEMALE SIGN}\N{VARIATION SELECTOR-16}"
EMOJI_PROMPT = " ".join([KNEELING] * 4)
CHINESE_PROMPT = "你好,世界。你好,世界。你好,"

salts = (f"salt-{number}" for number in itertools.count())


class Told(NamedTuple):
    """What a client learns of an answer."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@pytest.fixture(scope="module")
def server():
    with served("--max-num-seqs", "8", "--max-num-batched-tokens", "64") as server:
        yield server


@pytest.fixture
async def session(server):
    async with aiohttp.ClientSession(server.url) as session:
        yield session


# ---- ways to ask -------------------------------------------------------------------------------


async def over_websocket(url: str, options: dict, *, encoding: str) -> Told:
    dumps, loads = (
        (orjson.dumps, orjson.loads) if encoding == "json" else (msgpack.packb, msgpack.unpackb)
    )
    is_text = encoding == "json"
    start = {"type": "start", "id": "a", "request": {"messages": MESSAGES, **options}}
    messages = []
    async with (
        aiohttp.ClientSession(url) as session,
        session.ws_connect("/v1/stream", protocols=[f"headrace.v1.{encoding}"]) as ws,
    ):
        await (ws.send_str(dumps(start).decode()) if is_text else ws.send_bytes(dumps(start)))
        while not messages or messages[-1]["type"] != "done":
            messages.append(loads((await ws.receive()).data))
    text = "".join(message["text"] for message in messages if message["type"] == "delta")
    done = messages[-1]
    return Told(text, done["finish_reason"], *done["usage"].values())


async def over_websocket_json(url: str, options: dict) -> Told:
    return await over_websocket(url, options, encoding="json")


async def over_websocket_msgpack(url: str, options: dict) -> Told:
    return await over_websocket(url, options, encoding="msgpack")


async def with_the_client(url: str, options: dict, *, encoding: str) -> Told:
    async with (
        AsyncClient(url, encoding=encoding) as client,
        await client.chat(QUESTION, **options) as stream,
    ):
        text = await stream.text()
    usage = stream.usage
    return Told(
        text,
        stream.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
    )


async def with_the_client_in_json(url: str, options: dict) -> Told:
    return await with_the_client(url, options, encoding="json")


async def with_the_client_in_msgpack(url: str, options: dict) -> Told:
    return await with_the_client(url, options, encoding="msgpack")


async def over_http(url: str, options: dict) -> Told:
    body = {"model": MODEL, "messages": MESSAGES, **options}
    async with (
        aiohttp.ClientSession(url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
    [choice], usage = answer["choices"], answer["usage"]
    return Told(
        choice["message"]["content"],
        choice["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


async def over_sse(url: str, options: dict) -> Told:
    body = {"model": MODEL, "messages": MESSAGES, **options}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        aiohttp.ClientSession(url) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        lines = [line.decode().strip() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    *chunks, last = [orjson.loads(event) for event in events]
    choices = [chunk["choices"][0] for chunk in chunks]
    usage = last["usage"]
    return Told(
        "".join(choice["delta"]["content"] for choice in choices),
        choices[-1]["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


async def with_openai(url: str, options: dict) -> Told:
    extra = {"cache_salt": options["cache_salt"]}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=options["temperature"], extra_body=extra
        )
    [choice], usage = answer.choices, answer.usage
    return Told(
        choice.message.content,
        choice.finish_reason,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens_details.cached_tokens,
    )


async def with_openai_streaming(url: str, options: dict) -> Told:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            temperature=options["temperature"],
            extra_body={"cache_salt": options["cache_salt"]},
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]
    return Told(
        "".join(chunk.choices[0].delta.content for chunk in chunks),
        chunks[-1].choices[0].finish_reason,
        last.usage.prompt_tokens,
        last.usage.completion_tokens,
        last.usage.prompt_tokens_details.cached_tokens,
    )


WAYS = [
    over_websocket_json,
    over_websocket_msgpack,
    with_the_client_in_json,
    with_the_client_in_msgpack,
    over_http,
    over_sse,
    with_openai,
    with_openai_streaming,
]


async def in_the_terminal(command: str, *arguments: str, stdin: str = "") -> tuple[str, str]:
    """Run `headrace COMMAND`; return its stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("headrace"), command, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode())
    assert process.returncode == 0, err.decode()
    return out.decode(), err.decode()


# ---- what is true of all of them ---------------------------------------------------------------


@pytest.mark.parametrize("ask", WAYS)
async def test_the_answer_and_its_usage_are_the_same_whichever_way_it_is_asked(server, ask):
    options = {"temperature": 0, "cache_salt": next(salts)}
    num_prompt, num_output = len(GOLDEN["prompt_ids"]), len(GOLDEN["output_ids"])
    assert await ask(server.url, options) == Told(ANSWER, "stop", num_prompt, num_output, 0)
    # The second time the full blocks of the prompt are there already.
    cached = (num_prompt - 1) // 16 * 16
    assert await ask(server.url, options) == Told(ANSWER, "stop", num_prompt, num_output, cached)


async def test_all_at_once_give_the_same_answer(server, session):
    options = {"temperature": 0, "cache_salt": next(salts)}
    told = await asyncio.gather(*(ask(server.url, options) for ask in WAYS * 2))
    assert {answer.text for answer in told} == {ANSWER}
    assert (await read_metrics(session))["compiles_after_ready"] == 0


async def test_the_terminal_says_the_same(server):
    options = ("--url", server.url, "--temperature", "0")
    out, err = await in_the_terminal("chat", *options, stdin=f"{QUESTION}\n")
    assert out == f"{ANSWER}\n"
    assert f"{len(GOLDEN['output_ids'])} tokens" in err
    # The same prompt, with the template written out.
    out, _ = await in_the_terminal("complete", *options, GOLDEN["prompt"])
    assert out == f"{ANSWER}\n"


async def completion(session: aiohttp.ClientSession, **body: object) -> tuple[list[str], dict]:
    """Text pieces and the finished choice of a streamed completion, which equals a whole one."""
    body = {"temperature": 0, "max_tokens": 24, **body}
    async with session.post("/v1/completions", json=body) as response:
        [whole] = (await response.json())["choices"]
    async with session.post("/v1/completions", json=body | {"stream": True}) as response:
        lines = [line.decode().strip() async for line in response.content]
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    choices = [orjson.loads(event)["choices"][0] for event in events]
    pieces = [choice["text"] for choice in choices]
    assert "".join(pieces) == whole["text"]
    ends = [(choice["finish_reason"], choice.get("stop_reason")) for choice in (whole, choices[-1])]
    assert ends[0] == ends[1]
    return pieces, whole


async def test_an_emoji_of_many_tokens_is_streamed_whole(session):
    pieces, whole = await completion(session, prompt=EMOJI_PROMPT, stop="\n")
    assert whole["text"] == f" {KNEELING} {KNEELING}"
    assert whole["stop_reason"] == "\n"
    # By code points, each of which is several tokens, and none of them in parts.
    assert len(pieces) > 4
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


async def test_a_stop_string_of_wide_characters_is_cut_off_and_nothing_of_it_sent(session):
    stop = "\N{FULLWIDTH EXCLAMATION MARK}" * 3
    pieces, whole = await completion(session, prompt=CHINESE_PROMPT, stop=[stop, "never"])
    assert whole["text"] == "世界"
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    assert all(pieces[:-1])  # held back, not sent empty


async def test_a_stop_string_inside_a_token_cuts_at_the_character(server):
    async with AsyncClient(server.url) as client:
        stream = await client.chat(QUESTION, temperature=0, stop="ance")
        assert await stream.text() == "The capital of Fr"
        assert (stream.finish_reason, stream.stop_reason) == ("stop", "ance")


async def test_an_answer_that_is_cut_in_a_code_point_says_the_same_whole_and_streamed(session):
    _, whole = await completion(session, prompt=EMOJI_PROMPT, max_tokens=2)
    assert whole["finish_reason"] == "length"


async def test_the_prefix_of_another_salt_is_not_found(server):
    first, second = next(salts), next(salts)
    for salt in (first, second):
        told = await over_http(server.url, {"temperature": 0, "cache_salt": salt})
        assert told.cached_tokens == 0
