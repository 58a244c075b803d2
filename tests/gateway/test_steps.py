import asyncio
import re
from pathlib import Path

import orjson
import pytest

from connections import connection
from fakes import FakeEngine
from step_records import FIRST_S, make_step, make_steps

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


def indexes(body) -> list[int]:
    return [step["index"] for step in body["steps"]]


# ---- /v1/steps ---------------------------------------------------------------------------------


async def test_before_the_first_step_there_is_nothing(gateway):
    status, body = await gateway.get("/v1/steps")
    assert status == 200
    assert (body["steps"], body["last_index"], body["next_after"]) == ([], -1, -1)


async def test_without_after_the_newest_steps_come(gateway):
    gateway.engine.steps.extend(make_steps(0, 10))
    _, body = await gateway.get("/v1/steps?limit=3")
    assert indexes(body) == [7, 8, 9]
    assert (body["last_index"], body["next_after"], body["num_missed"]) == (9, 9, 0)


async def test_after_reads_on_from_there_oldest_first(gateway):
    gateway.engine.steps.extend(make_steps(0, 10))
    after, seen = -1, []
    while True:
        _, body = await gateway.get(f"/v1/steps?after={after}&limit=4")
        if not body["steps"]:
            break
        seen.append(indexes(body))
        after = body["next_after"]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert body["next_after"] == 9


async def test_steps_that_are_no_longer_kept_are_counted(gateway):
    gateway.engine.steps.extend(make_steps(0, 100))  # the fake keeps 64
    _, body = await gateway.get("/v1/steps?after=9&limit=1")
    assert indexes(body) == [36]
    assert body["num_missed"] == 26  # 10 to 35


async def test_an_index_from_before_a_restart_is_put_right(gateway):
    gateway.engine.steps.extend(make_steps(0, 3))
    _, body = await gateway.get("/v1/steps?after=5000")
    assert (body["steps"], body["next_after"]) == ([], 2)


async def test_shares_come_when_asked_for(gateway):
    gateway.engine.steps.extend([make_step(0)])
    _, body = await gateway.get("/v1/steps")
    assert "shares" not in body["steps"][0]
    _, body = await gateway.get("/v1/steps?shares=0")
    assert "shares" not in body["steps"][0]
    _, body = await gateway.get("/v1/steps?shares=1")
    assert [share["request_id"] for share in body["steps"][0]["shares"]] == ["a", "b"]


async def test_the_answer_is_never_stored(gateway):
    async with gateway.session.get("/v1/steps") as response:
        assert response.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("after=x", "after"),
        ("after=", "after"),
        ("after=-2", "after"),
        ("after=1.0", "after"),
        ("after=9007199254740993", "after"),
        ("after=" + "9" * 5000, "after"),
        ("after=1&after=2", "after"),
        ("after=%D9%A3", "after"),  # a digit, but an Arabic one
        ("limit=0", "limit"),
        ("limit=-1", "limit"),
        ("limit=1001", "limit"),
        ("limit=--1", "limit"),
        ("shares=yes", "shares"),
        ("shares=", "shares"),
    ],
)
async def test_bad_parameters_are_refused_by_name(gateway, query, param):
    status, body = await gateway.get(f"/v1/steps?{query}")
    assert (status, body["error"]["param"]) == (400, param)
    assert param in body["error"]["message"]
    if param != "limit":
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        async with gateway.session.get(f"/v1/steps/stream?{query}", headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param


async def test_a_page_of_another_site_learns_nothing(gateway):
    for path in ("/v1/steps", "/v1/steps/trace", "/v1/steps/stream"):
        headers = {"Origin": "https://elsewhere.example", "Upgrade": "websocket"}
        async with gateway.session.get(path, headers=headers) as response:
            assert response.status == 403


# ---- /v1/steps/trace ---------------------------------------------------------------------------


async def test_the_trace_holds_every_kept_step_and_is_a_download(gateway):
    gateway.engine.steps.extend(make_steps(0, 100))  # the fake keeps 64: more than one chunk
    async with gateway.session.get("/v1/steps/trace") as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        assert "attachment" in response.headers["Content-Disposition"]
        trace = orjson.loads(await response.read())
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"]["origin_s"] == pytest.approx(FIRST_S + 36 * 0.02)
    steps = [
        e["name"] for e in trace["traceEvents"] if e["name"].startswith("step ") and e["ph"] == "X"
    ]
    assert steps == [f"step {i}" for i in range(36, 100)]
    assert min(e["ts"] for e in trace["traceEvents"]) == 0


async def test_a_trace_in_many_pieces_is_the_same_json(gateway, monkeypatch):
    gateway.engine.steps.extend(make_steps(0, 5))
    async with gateway.session.get("/v1/steps/trace") as response:
        whole = await response.read()
    monkeypatch.setattr("gateway.steps.TRACE_CHUNK_EVENTS", 1)
    async with gateway.session.get("/v1/steps/trace") as response:
        assert await response.read() == whole


async def test_an_empty_trace_is_valid(gateway):
    async with gateway.session.get("/v1/steps/trace") as response:
        trace = orjson.loads(await response.read())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M"}


async def test_a_client_that_does_not_read_its_trace_is_cut_off(start_gateway):
    engine = FakeEngine()
    engine.steps.extend(make_steps(0, 64, shares=make_step(0).shares * 1000))  # 20 MB
    gateway = await start_gateway(engine, send_timeout_s=0.05)
    async with connection(gateway.server.port) as (_, writer):
        writer.write(b"GET /v1/steps/trace HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises(ConnectionError):
            await write_until_cut_off(writer)
    assert await gateway.get("/health") == (200, {"status": "ok"})


async def write_until_cut_off(writer):
    while True:  # nothing is read; in the end nothing can be written either
        await asyncio.sleep(0.01)
        writer.write(b"\n")
        await writer.drain()


# ---- /v1/steps/stream: the handshake; test_step_feed.py has the rest ---------------------------


async def test_the_stream_needs_an_upgrade(gateway):
    status, body = await gateway.get("/v1/steps/stream")
    assert (status, body["error"]["code"]) == (400, "upgrade_required")


@pytest.mark.parametrize(
    ("query", "expected"), [("", [5]), ("?after=2", [3, 4]), ("?after=99", [5])]
)
async def test_the_stream_starts_with_the_next_step_unless_told_otherwise(gateway, query, expected):
    log = gateway.engine.steps
    log.extend(make_steps(0, 5))
    async with gateway.session.ws_connect(f"/v1/steps/stream{query}") as ws:
        assert (await ws.receive_json())["type"] == "hello"
        assert (await ws.receive_json())["type"] == "stats"
        if expected == [5]:
            log.extend([make_step(5)])
        assert indexes(await ws.receive_json()) == expected


async def test_watchers_count_among_the_websockets(start_gateway):
    gateway = await start_gateway(ws_max_connections=1)
    async with gateway.session.ws_connect("/v1/steps/stream"):
        for path in ("/v1/steps/stream", "/v1/stream"):
            headers = {"Upgrade": "websocket", "Sec-WebSocket-Protocol": "headrace.v1.json"}
            async with gateway.session.get(path, headers=headers) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "too_many_connections"


# ---- the document ------------------------------------------------------------------------------


async def test_the_examples_of_the_document_have_the_fields_that_are_sent(gateway):
    section = DOCUMENT.read_text().split("## Watching the steps")[1].split("\n## ")[0]
    examples = [orjson.loads(e) for e in re.findall(r"(?s)```jsonc\n(.*?)```", section)]
    answer, hello, stats, steps, goaway = examples
    gateway.engine.steps.extend([make_step(0)])
    _, body = await gateway.get("/v1/steps?shares=1")
    assert shape(answer) == shape(body)
    async with gateway.session.ws_connect("/v1/steps/stream?after=-1") as ws:
        assert shape(hello) == shape(await ws.receive_json())
        assert shape(stats) == shape(await ws.receive_json())
        assert shape(steps) == shape(await ws.receive_json())
    assert set(goaway) == {"type", "reason", "retry_after_s"}


def shape(value: object) -> object:
    """Names without values; of a list, the shape of its first element."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return None
