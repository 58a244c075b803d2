import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from connections import closed
from gateway.sse import DONE, EventStream, SlowReaderError, event


def test_an_event_is_one_data_line_and_an_empty_line():
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert DONE == b"data: [DONE]\n\n"


def test_an_event_of_our_own_has_a_name_and_an_id():
    assert event(b"{}", name="delta", event_id=7) == b"event: delta\nid: 7\ndata: {}\n\n"


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\x85"])
def test_no_text_can_end_a_line(char):
    data = event(json.dumps({"t": f"a{char}b"}, ensure_ascii=False).encode())
    assert data.decode().splitlines() == [data.decode().rstrip("\n"), ""]
    assert json.loads(data.removeprefix(b"data: ")) == {"t": f"a{char}b"}


async def test_headers_keep_proxies_from_buffering(gateway):
    body = {"prompt": "x", "stream": True, "max_tokens": 1}
    async with gateway.session.post("/v1/completions", json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"


@pytest.mark.parametrize("size", [100, 65536])
async def test_a_client_that_does_not_read_is_cut_after_the_deadline(aiohttp_server, size):
    outcome = asyncio.get_running_loop().create_future()

    async def handler(request):
        events = EventStream(request, send_timeout_s=0.05)
        await events.open()
        sent = 0
        try:
            while True:
                await events.send([b"x" * size])
                sent += size
        except SlowReaderError:
            outcome.set_result(sent)
        return events.response

    app = web.Application()
    app.router.add_get("/", handler)
    server = await aiohttp_server(app)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert await outcome < 64 * 1024 * 1024  # the socket buffers, not all that there is to send
    with contextlib.suppress(ConnectionError):
        await reader.read()  # comes to an end
    await closed(writer)


def test_an_event_may_have_a_name():
    assert event(b"{}", name="a.b") == b"event: a.b\ndata: {}\n\n"
