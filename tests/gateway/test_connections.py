import asyncio
import dataclasses

import pytest
from aiohttp import WSMsgType, web

from fakes import FakeEngine
from gateway.app_keys import CONFIG, METRICS
from gateway.config import GatewayConfig
from gateway.connections import (
    AGE_REASON,
    DRAINING,
    IDLE_REASON,
    STREAM_CONNECTIONS,
    MessageRate,
    begin_drain,
    check_room,
    close_all,
    serve_connection,
)
from gateway.errors import Unavailable
from gateway.metrics import Metrics
from stream_app import serve_streams, start, until


class FakeConnection:
    """Runs until it is cut, or told goodbye if it is polite."""

    def __init__(self, *, is_polite: bool = True) -> None:
        self.is_polite = is_polite
        self.heard: list[str] = []
        self.ended = asyncio.Event()

    is_busy = False

    def retire(self, reason: str) -> None:
        self.heard.append(f"retire: {reason}")

    async def run(self) -> None:
        await self.ended.wait()

    def drain(self, reason: str) -> None:
        self.heard.append(f"drain: {reason}")

    def shut_down(self, reason: str) -> None:
        self.heard.append(reason)
        if self.is_polite:
            self.ended.set()

    async def wait_ended(self) -> None:
        await self.ended.wait()

    def cut(self) -> None:
        self.heard.append("cut")
        self.ended.set()


@pytest.fixture
def app():
    app = web.Application()
    app[CONFIG] = GatewayConfig(ws_max_connections=2, ws_close_timeout_s=0.01)
    app[METRICS] = Metrics("m")
    app[STREAM_CONNECTIONS] = set()
    app[DRAINING] = asyncio.Event()
    return app


def num_open_metric(app) -> float:
    body, _ = app[METRICS].render()
    line = next(line for line in body.decode().splitlines() if "websockets_open{" in line)
    return float(line.split()[-1])


async def test_a_connection_counts_while_it_runs(app):
    connection = FakeConnection()
    serving = asyncio.create_task(serve_connection(app, connection))
    await asyncio.sleep(0)
    assert app[STREAM_CONNECTIONS] == {connection}
    assert num_open_metric(app) == 1
    connection.ended.set()
    await serving
    assert app[STREAM_CONNECTIONS] == set()
    assert num_open_metric(app) == 0


async def test_one_connection_too_many_is_refused(app):
    app[STREAM_CONNECTIONS].add(FakeConnection())
    check_room(app)
    app[STREAM_CONNECTIONS].add(FakeConnection())
    with pytest.raises(Unavailable, match="too many websockets") as caught:
        check_room(app)
    assert (caught.value.status, caught.value.code) == (503, "too_many_connections")


async def test_at_a_stop_all_are_told_and_the_deaf_are_cut(app):
    polite, deaf = FakeConnection(), FakeConnection(is_polite=False)
    serving = [asyncio.create_task(serve_connection(app, c)) for c in (polite, deaf)]
    await asyncio.sleep(0)
    await close_all(app, "bye")
    await asyncio.gather(*serving)
    assert deaf.heard == ["bye", "cut"]
    assert polite.heard[0] == "bye"
    assert app[STREAM_CONNECTIONS] == set()


async def test_a_drain_is_told_to_all_and_to_those_that_come_later(app):
    early, late = FakeConnection(), FakeConnection()
    serving = [asyncio.create_task(serve_connection(app, early))]
    await asyncio.sleep(0)
    begin_drain(app)
    serving.append(asyncio.create_task(serve_connection(app, late)))
    await asyncio.sleep(0)
    assert early.heard == late.heard == ["drain: the server is shutting down"]
    await close_all(app, "bye")
    await asyncio.gather(*serving)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"ws_idle_timeout_s": 0.02}, IDLE_REASON), ({"ws_max_age_s": 0.02}, AGE_REASON)],
)
async def test_what_is_idle_or_old_is_retired(app, limits, reason):
    app[CONFIG] = dataclasses.replace(app[CONFIG], **limits)
    connection = FakeConnection()
    serving = asyncio.create_task(serve_connection(app, connection))
    await until(lambda: connection.heard)
    assert connection.heard == [f"retire: {reason}"]
    connection.ended.set()
    await serving


async def test_what_is_busy_is_not_idle_but_grows_old(app):
    app[CONFIG] = dataclasses.replace(app[CONFIG], ws_idle_timeout_s=0.01, ws_max_age_s=0.05)
    connection = FakeConnection()
    connection.is_busy = True
    serving = asyncio.create_task(serve_connection(app, connection))
    await until(lambda: connection.heard)
    assert connection.heard == [f"retire: {AGE_REASON}"]
    connection.ended.set()
    await serving


@pytest.mark.parametrize(
    ("path", "protocols", "code"),
    [
        ("/v1/stream", ["headrace.v1.json"], 1001),
        ("/v1/responses", [], 1012),
        ("/v1/steps/stream", [], 1012),
    ],
)
async def test_a_websocket_on_which_nothing_runs_is_closed(start_gateway, path, protocols, code):
    gateway = await start_gateway(ws_idle_timeout_s=0.02, ws_max_age_s=0.1)
    async with gateway.session.ws_connect(path, protocols=protocols) as ws:
        told = [message.data async for message in ws if "goaway" in message.data]
        assert ws.close_code == code
    assert len(told) == (path != "/v1/responses")
    assert await gateway.get("/health") == (200, {"status": "ok"})


async def test_an_old_connection_lets_its_streams_finish_and_takes_no_others():
    engine = FakeEngine()
    engine.hold()
    async with (
        serve_streams(engine, ws_max_age_s=0.02) as gateway,
        gateway.connect() as stream,
    ):
        await stream.send(start("a"))
        assert (await stream.receive())["type"] == "accepted"
        goaway = await stream.receive()
        assert (goaway["type"], goaway["retry_after_s"]) == ("goaway", 0.0)
        await stream.send(start("b"))
        refusal = await stream.receive()
        assert (refusal["id"], refusal["error"]["code"]) == ("b", "shutting_down")
        engine.release()
        assert (await stream.answer("a"))[0] == "defg"
        assert await stream.receive_close() == 1001


@pytest.mark.parametrize(
    ("path", "protocols"),
    [("/v1/stream", ["headrace.v1.json"]), ("/v1/responses", []), ("/v1/steps/stream", [])],
)
async def test_who_is_told_goodbye_can_still_answer(start_gateway, path, protocols):
    gateway = await start_gateway()
    async with gateway.session.ws_connect(path, protocols=protocols, autoclose=False) as ws:
        stopping = asyncio.create_task(gateway.server.stop())
        while (message := await ws.receive()).type is WSMsgType.TEXT:
            pass
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1012)
        for _ in range(100):  # turns of the loop, in which the server could hang up
            await asyncio.sleep(0)
        assert ws._response.connection.transport is not None
        await ws.close()
        assert ws.close_code == 1012
        await stopping


async def test_messages_beyond_a_burst_wait_for_their_turn(monkeypatch):
    now_s, waits_s = 1000.0, []

    async def sleep(seconds):
        waits_s.append(seconds)

    monkeypatch.setattr("gateway.connections.asyncio.sleep", sleep)
    rate = MessageRate(2.0, clock=lambda: now_s)
    for _ in range(6):  # 2 s of silence are good for 4 messages
        await rate.wait()
    assert waits_s == [0.5, 1.0]
    now_s += 3600.0
    for _ in range(5):
        await rate.wait()
    assert waits_s == [0.5, 1.0, 0.5]
