"""Bad and broken input to a real server process.

Nothing that a client sends may be a fault of ours (5xx), end the process, or leave work behind.
`docs/bug-reports.md` says which public bug reports stand behind these tests and their neighbours.
"""

import asyncio
import contextlib
import http.client
import io
import json
import re

import aiohttp
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connections import connection, posted
from serving import read_metrics, wait_until_idle
from stream_app import RawStream, start

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
async def nothing_is_left(session, tiny_server):
    """After each test the server lives, no request runs, and every block is free."""
    yield
    after = await wait_until_idle(session)
    assert after["kv_blocks_free"] == after["kv_blocks"]
    assert after["step_failures_total"] == 0
    assert after["compiles_after_ready"] == 0
    assert "Traceback" not in tiny_server.log
    async with session.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}) as response:
        assert response.status == 200


async def refused(session: aiohttp.ClientSession, path: str, body: dict) -> dict:
    """POST a body that must be refused as the client's fault; return the error."""
    data = io.BytesIO(json.dumps(body).encode())  # aiohttp warns of large bytes
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=data, headers=headers) as response:
        assert response.status == 400
        return (await response.json())["error"]


# ---- values that must be refused by name -------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        # Row 13: nothing to generate.
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        # Row 15: what can never fit, with both numbers in the message.
        (COMPLETIONS, {"prompt": "x" * 512}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 200, "max_tokens": 400}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        # Row 28: what templates stumble over.
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [HELLO]}, "messages[0]"),
        # Row 38: numbers that allocate or index.
        (COMPLETIONS, {"prompt": [5, 272]}, "prompt"),
        (COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": [5, 2**70]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "n": 5_000_000}, "n"),
        (COMPLETIONS, {"prompt": ["x"] * 200}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 10**9}, "logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "x", "top_k": 2**31}, "top_k"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed"),
        (COMPLETIONS, {"prompt": "x", "temperature": 999_999}, "temperature"),
        (COMPLETIONS, {"prompt": "x", "stop": ["s"] * 500_000}, "stop"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": list(range(200))}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [272]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(session, path, body, param):
    error = await refused(session, path, body)
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),  # row 25
        ({"prompt": "x", "top_p": float("inf")}, "top_p"),
        ({"prompt": [272]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x", "stop": ["s"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": b"x"}]}, "messages[0].content"),
    ],
)
async def test_msgpack_is_refused_with_the_same_care(session, request_fields, param):
    async with session.ws_connect("/v1/stream", protocols=["headrace.v1.msgpack"]) as ws:
        stream = RawStream(ws, "msgpack")
        await stream.send({"type": "start", "id": "a", "request": request_fields})
        _, last = await stream.answer("a")
    assert (last["type"], last["status"]) == ("error", 400)
    assert last["error"]["param"] == param


# ---- requests that are broken off, or are none -------------------------------------------------

BROKEN = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /health\r\n\r\n",
    "a huge line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a huge header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
    + b"a" * 100_000
    + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}"
    ),
    "a length and chunks": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "chunks that are none": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
    ),
    "a body that says it is gzip": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"
    ),
    "a length that is no number": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"
    ),
    "an upgrade without a key": (
        b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Protocol: headrace.v1.json\r\n\r\n"
    ),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_request_is_answered_as_the_clients_fault(tiny_server, data):
    async with connection(tiny_server.port) as (reader, writer):
        writer.write(data)
        writer.write_eof()
        answer = b""
        # It may close before it has read all; that resets the connection, answer or not.
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(4096):
                answer += part
    assert re.match(rb"HTTP/\d\.\d 4\d\d |$", answer), answer


@pytest.mark.parametrize("size", [0, 1, 20, 150, 250])
async def test_a_request_that_is_cut_off_anywhere_leaves_nothing(tiny_server, size):
    body = json.dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with connection(tiny_server.port) as (_, writer):
        writer.write((head + body).encode()[:size])
        await writer.drain()


async def test_a_page_of_another_site_and_a_rebound_name_are_refused(session):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        async with session.post(COMPLETIONS, json={"prompt": "x"}, headers=headers) as response:
            assert response.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            await session.ws_connect("/v1/stream", protocols=["headrace.v1.json"], headers=headers)


async def test_two_requests_of_one_client_id_do_not_mix(session):
    async def text(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        headers = {"X-Request-Id": "a"}
        async with session.post(COMPLETIONS, json=body, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "a"
            return (await response.json())["choices"][0]["text"]

    alone = [await text("one"), await text("two")]
    assert alone[0] != alone[1]
    assert await asyncio.gather(text("one"), text("two")) == alone


async def test_the_turn_after_a_cancelled_one_starts_afresh(session):
    """On the same socket, under the same id, at once."""
    options = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    async with session.ws_connect("/v1/stream", protocols=["headrace.v1.json"]) as ws:
        stream = RawStream(ws, "json")
        await stream.send(start("a", "hello", **options))
        alone, _ = await stream.answer("a")
        for number in range(10):
            await stream.send(start("a", f"something else {number}", **options))
            await stream.send({"type": "cancel", "id": "a"})
            _, last = await stream.answer("a")
            assert last["finish_reason"] in ("cancelled", "length")
            await stream.send(start("a", "hello", **options))
            assert (await stream.answer("a"))[0] == alone


async def test_health_answers_while_megabytes_are_refused(tiny_server, session):
    body = {"prompt": "x" * 5_000_000}
    async with posted(tiny_server.port, body) as (reader, _):
        async with session.get("/health") as response:
            assert response.status == 200
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")


# ---- anything at all ---------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**30])
    | st.floats()
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
OPTIONS = [
    *("model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "cache_salt", "echo"),
    *("stream", "stream_options", "logprobs", "logit_bias", "tools", "response_format", "user"),
    *("tool_choice", "parallel_tool_calls", "input", "instructions", "previous_response_id"),
    *("background", "store", "metadata", "text", "reasoning", "include", "max_output_tokens"),
]
MUTATIONS = st.dictionaries(st.sampled_from([*OPTIONS, "prompt", "messages"]), VALUES, max_size=4)
# Where to write over a text, and what with.
SCRATCHES = st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), max_size=2)


def scratched(data: bytes, scratches: list[tuple[int, bytes]]) -> bytes:
    for position, patch in scratches:
        data = data[:position] + patch + data[position + len(patch) :]
    return data


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, RESPONSES, "/tokenize", "/detokenize"]),
    mutations=MUTATIONS,
    scratches=SCRATCHES,
)
def test_no_body_is_a_fault_of_ours(tiny_server, path, mutations, scratches):
    texts = {"prompt": "hello", "input": "hello", "messages": HELLO, "tokens": [1, 2]}
    body = {**texts, "max_tokens": 4, "max_output_tokens": 4, **mutations}
    client = http.client.HTTPConnection("127.0.0.1", tiny_server.port)
    try:
        client.request(
            "POST",
            path,
            scratched(json.dumps(body).encode(), scratches),
            {"Content-Type": "application/json"},
        )
        response = client.getresponse()
        answer = response.read().decode()
    finally:
        client.close()
    assert response.status in (200, 400, 404), answer
    if response.status != 200:
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    elif response.getheader("Content-Type", "").startswith("text/event-stream"):
        end = "\n\n" if path == RESPONSES else "data: [DONE]\n\n"
        assert answer.endswith(end)


def as_json(message: object) -> bytes:
    return json.dumps(message).encode()  # with NaN, Infinity and surrogates


MESSAGES = st.builds(
    lambda kind, stream_id, mutations: {
        "type": kind,
        "id": stream_id,
        "t": 1,
        "request": {"prompt": "hello", "max_tokens": 4} | mutations,
    },
    st.sampled_from(["start", "start", "start", "cancel", "ping"]) | VALUES,
    st.sampled_from(["a", "b"]) | VALUES,
    MUTATIONS,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    encoding=st.sampled_from(["json", "msgpack"]),
    messages=st.lists(st.tuples(MESSAGES, SCRATCHES), min_size=1, max_size=5),
)
async def test_no_frame_is_a_fault_of_ours(tiny_server, encoding, messages):
    pack = as_json if encoding == "json" else pack_or_skip
    async with (
        aiohttp.ClientSession(tiny_server.url) as session,
        session.ws_connect("/v1/stream", protocols=[f"headrace.v1.{encoding}"]) as ws,
    ):
        stream = RawStream(ws, encoding)
        for message, scratches in messages:
            await stream.send_raw(scratched(pack(message), scratches))
        await stream.send({"type": "ping", "t": 0.125})
        # Then it goes, whatever still runs.
        while (message := await stream.receive()) != {"type": "pong", "t": 0.125}:
            if message["type"] == "error":
                assert 400 <= message["status"] < 500, message


def pack_or_skip(message: object) -> bytes:
    try:
        packed: bytes = msgpack.packb(message)
    except (OverflowError, UnicodeEncodeError):  # what msgpack cannot say
        return b""
    return packed


async def test_ten_thousand_short_requests_leave_the_memory_as_it_was(tiny_server, session):
    """Row 14: `max_tokens` 1 begins and ends a request in one step."""
    body = {"prompt": [[i] for i in range(128)], "max_tokens": 1, "ignore_eos": True}

    async def send(number: int) -> None:
        for _ in range(number):
            async with session.post(COMPLETIONS, json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 128

    await send(10)
    before, done = tiny_server.rss_bytes, (await read_metrics(session))["generation_tokens_total"]
    await send(80)
    assert (await read_metrics(session))["generation_tokens_total"] == done + 80 * 128
    assert tiny_server.rss_bytes - before < 8 << 20
