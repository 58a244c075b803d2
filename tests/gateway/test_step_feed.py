"""The live feed of steps: what it sends, to whom it does not, and how it ends."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest
from aiohttp import WSMsgType

from fakes import FakeEngine
from gateway import step_feed
from gateway.app_keys import KEY_RING
from gateway.connections import STREAM_CONNECTIONS, MessageRate, close_all
from step_records import make_step, make_steps
from stream_app import serve_streams, until


@asynccontextmanager
async def watching(gateway, query="", **options):
    """Open a feed and take its hello and first stats."""
    async with gateway.client.ws_connect(f"/v1/steps/stream{query}", **options) as ws:
        assert (await ws.receive_json())["type"] == "hello"
        assert (await ws.receive_json())["type"] == "stats"
        yield ws


async def next_steps(ws):
    while (message := await ws.receive_json())["type"] != "steps":
        pass
    return message


def indexes(message) -> list[int]:
    return [step["index"] for step in message["steps"]]


async def test_it_says_hello_with_the_model_the_clock_and_where_it_stands():
    async with serve_streams() as gateway:
        gateway.engine.steps.extend(make_steps(0, 3))
        async with gateway.client.ws_connect("/v1/steps/stream") as ws:
            hello = await ws.receive_json()
    assert (hello["type"], hello["model"], hello["last_index"]) == ("hello", "fake-model", 2)
    assert hello["now_s"] > 0
    assert (hello["batch_interval_s"], hello["stats_interval_s"]) == (0.1, 1.0)


async def test_steps_come_as_they_are_done_and_each_comes_once(monkeypatch):
    monkeypatch.setattr(step_feed, "BATCH_INTERVAL_S", 0.001)
    async with serve_streams() as gateway, watching(gateway) as ws:
        for index in range(5):
            gateway.engine.steps.extend([make_step(index)])
            message = await next_steps(ws)
            assert (indexes(message), message["num_missed"]) == ([index], 0)
            assert message["steps"][0]["duration_s"] == 0.016
            assert "shares" not in message["steps"][0]


async def test_steps_that_come_close_together_share_a_message():
    async with serve_streams() as gateway, watching(gateway) as ws:
        log = gateway.engine.steps
        log.extend([make_step(0)])
        assert indexes(await next_steps(ws)) == [0]
        for index in range(1, 8):
            log.extend([make_step(index)])
            await asyncio.sleep(0)
        assert indexes(await next_steps(ws)) == [1, 2, 3, 4, 5, 6, 7]


async def test_shares_come_when_asked_for():
    async with serve_streams() as gateway, watching(gateway, "?shares=1") as ws:
        gateway.engine.steps.extend([make_step(0)])
        message = await next_steps(ws)
        assert [share["request_id"] for share in message["steps"][0]["shares"]] == ["a", "b"]


async def test_more_than_a_message_holds_is_skipped_and_counted(monkeypatch):
    monkeypatch.setattr(step_feed, "MAX_STEPS", 4)
    async with serve_streams() as gateway:
        gateway.engine.steps.extend(make_steps(0, 10))
        async with watching(gateway, "?after=1") as ws:
            message = await next_steps(ws)
            assert (indexes(message), message["num_missed"]) == ([6, 7, 8, 9], 4)  # 2 to 5


@pytest.mark.parametrize(("max_shares", "expected"), [(4, [8, 9]), (5, [8, 9]), (1, [9])])
async def test_many_shares_make_fewer_steps_but_one_always_comes(monkeypatch, max_shares, expected):
    monkeypatch.setattr(step_feed, "MAX_SHARES", max_shares)  # each step has 2
    async with serve_streams() as gateway:
        gateway.engine.steps.extend(make_steps(0, 10))
        async with watching(gateway, "?after=4&shares=1") as ws:
            message = await next_steps(ws)
            assert indexes(message) == expected
            assert message["num_missed"] == expected[0] - 5
        async with watching(gateway, "?after=4") as ws:
            assert indexes(await next_steps(ws)) == [5, 6, 7, 8, 9]


async def test_stats_come_again_and_again(monkeypatch):
    monkeypatch.setattr(step_feed, "STATS_INTERVAL_S", 0.001)
    async with serve_streams() as gateway, watching(gateway) as ws:
        for _ in range(3):
            message = await ws.receive_json()
            assert (message["type"], message["status"]) == ("stats", "ready")
            assert message["stats"]["num_blocks"] == 100
        gateway.engine.is_ready = False
        while message["status"] == "ready":
            message = await ws.receive_json()
        assert message["status"] == "not_ready"


async def test_a_dead_engine_can_be_watched():
    async with serve_streams() as gateway:
        gateway.engine.die()
        async with gateway.client.ws_connect("/v1/steps/stream") as ws:
            await ws.receive_json()
            assert (await ws.receive_json())["status"] == "dead"


async def test_what_a_watcher_says_is_ignored_but_its_pings_are_answered():
    async with serve_streams() as gateway, watching(gateway, autoping=False) as ws:
        await ws.send_str("{")
        await ws.send_bytes(b"\xff")
        await ws.ping(b"hey")
        pong = await ws.receive()
        assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"hey")


async def test_a_watcher_that_says_too_much_is_closed():
    async with serve_streams() as gateway, watching(gateway) as ws:
        await ws.send_str("x" * 5000)
        while (frame := await ws.receive()).type is WSMsgType.TEXT:
            pass
        assert frame.type is WSMsgType.CLOSE
        assert ws.close_code == 1009


async def test_a_watcher_that_leaves_is_forgotten():
    async with serve_streams() as gateway:
        async with watching(gateway):
            assert len(gateway.app[STREAM_CONNECTIONS]) == 1
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])


async def test_a_watcher_that_does_not_read_costs_no_memory_and_is_cut_off(caplog):
    caplog.set_level(logging.INFO)
    many = make_step(0).shares * 1000
    engine = FakeEngine()
    async with (
        serve_streams(engine, send_timeout_s=0.2) as gateway,
        watching(gateway, "?shares=1"),
    ):
        [feed] = gateway.app[STREAM_CONNECTIONS]
        log = engine.steps
        while gateway.app[STREAM_CONNECTIONS]:
            log.extend([make_step(log.last_index + 1, shares=many)])  # 160 kB each
            # Two messages at most, though hundreds of steps pass.
            assert feed._transport.get_write_buffer_size() < 4 * 1024 * 1024
            await asyncio.sleep(0.002)
    assert log.last_index > 64
    assert "does not read" in caplog.text


async def test_at_a_stop_a_watcher_hears_goodbye_and_is_closed():
    async with serve_streams() as gateway, watching(gateway) as ws:
        closing = asyncio.create_task(close_all(gateway.app, "going down"))
        goaway = await ws.receive_json()
        assert goaway == {"type": "goaway", "reason": "going down", "retry_after_s": 5.0}
        frame = await ws.receive()
        assert (frame.type, frame.data, frame.extra) == (WSMsgType.CLOSE, 1012, "going down")
        await closing
        assert gateway.app[STREAM_CONNECTIONS] == set()


async def test_a_real_stop_ends_a_feed_in_the_middle_of_steps(start_gateway):
    gateway = await start_gateway()
    async with gateway.session.ws_connect("/v1/steps/stream") as ws:
        stopping = asyncio.create_task(gateway.server.stop())
        seen = []
        while (frame := await ws.receive()).type is WSMsgType.TEXT:
            seen.append(frame.json()["type"])
        await stopping
    assert seen[-1] == "goaway"
    assert ws.close_code == 1012


async def test_a_watcher_whose_key_is_revoked_is_closed(monkeypatch):
    monkeypatch.setattr(step_feed, "STATS_INTERVAL_S", 0.001)
    async with serve_streams() as gateway, watching(gateway) as ws:
        [account] = gateway.app[KEY_RING].accounts
        account.close()
        while (frame := await ws.receive()).type is WSMsgType.TEXT:
            pass
        assert (frame.type, ws.close_code) == (WSMsgType.CLOSE, 1008)
        assert frame.extra == "this API key was revoked"
        await until(lambda: not gateway.app[STREAM_CONNECTIONS])


async def test_a_watcher_that_talks_is_read_no_faster_than_any_websocket(monkeypatch):
    waited = []

    async def wait(self):
        waited.append(self)

    monkeypatch.setattr(MessageRate, "wait", wait)
    async with serve_streams() as gateway, watching(gateway, autoping=False) as ws:
        await ws.send_str("{")
        await ws.ping(b"hey")
        while (await ws.receive()).type is not WSMsgType.PONG:
            pass
        assert len(waited) == 2
