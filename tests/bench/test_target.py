from collections.abc import Awaitable, Callable

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from bench.stream import RequestFailed, RequestRecord
from bench.target import (
    Target,
    describe_server,
    find_model,
    get_text,
    make_body,
    open_session,
    send,
)

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FixedClock:
    def __call__(self) -> float:
        return 10.0


async def send_to(handler: Handler, **target_fields: object) -> RequestRecord:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    async with TestServer(app) as server, open_session("secret", timeout_s=30) as session:
        target = Target(url=str(server.make_url("/")), model="m", **target_fields)
        record = RequestRecord(index=0, start_s=10.0)
        await send(session, target, make_body(target, [1, 2], 3), record, FixedClock())
        return record


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def test_a_body_asks_for_a_stream_of_exactly_so_many_tokens():
    body = orjson.loads(make_body(Target(url="http://x", model="m"), [5, 6], 7))
    assert body == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 7,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_extensions_can_be_left_out_for_servers_that_refuse_them():
    target = Target(
        url="http://x", model="m", endpoint="chat", ignore_eos=False, continuous_usage=False
    )
    body = orjson.loads(make_body(target, "hello", 7))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert "ignore_eos" not in body
    assert body["stream_options"] == {"include_usage": True}


def test_further_fields_go_into_the_body():
    body = orjson.loads(make_body(Target(url="http://x", model="m"), [5], 7, {"tenant": "a"}))
    assert (body["tenant"], body["max_tokens"]) == ("a", 7)


@pytest.mark.parametrize("url", ["http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"])
def test_the_url_may_end_in_v1_or_not(url: str):
    assert str(Target(url=url, model="m").request_url) == "http://x:1/v1/completions"


async def test_one_request_is_sent_and_its_stream_measured():
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.path == "/v1/chat/completions"
        assert (await request.json())["max_tokens"] == 3
        return await stream(
            request,
            b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n',
            b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
        )

    record = await send_to(answer, endpoint="chat")
    assert record.error is None
    assert (record.output_tokens, record.finish_reason) == (1, "stop")


async def test_a_refusal_is_named_by_its_status_and_keeps_its_message():
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "queue is full"}}, status=429, headers={"Retry-After": "7"}
        )

    record = await send_to(answer)
    assert record.retry_after == "7"
    assert record.error == "http 429"
    assert record.error_detail is not None
    assert "queue is full" in record.error_detail
    assert record.end_s == 0.0


async def test_a_connection_that_breaks_in_the_stream_is_cut_off():
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await stream(request, b'data: {"choices":[{"text":"a"}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    assert (await send_to(answer)).error == "cut off"


async def test_a_server_that_is_silent_for_too_long_is_a_timeout():
    async def fail(*_: object) -> None:
        raise aiohttp.SocketTimeoutError("no bytes")

    class Session:
        def post(self, *_: object, **__: object) -> "Session":
            return self

        __aenter__ = fail
        __aexit__ = fail

    record = RequestRecord(index=0, start_s=10.0)
    target = Target(url="http://x", model="m")
    await send(Session(), target, b"", record, FixedClock())
    assert record.error == "timeout"


async def test_nobody_listening_is_no_connection():
    record = RequestRecord(index=0, start_s=10.0)
    target = Target(url=f"http://127.0.0.1:{unused_port()}", model="m")
    async with open_session(None, timeout_s=5) as session:
        await send(session, target, b"{}", record, FixedClock())
    assert record.error == "no connection"


async def serve_json(path: str, document: object) -> TestServer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(document)

    app = web.Application()
    app.router.add_get(path, answer)
    server = TestServer(app)
    await server.start_server()
    return server


async def test_the_model_is_the_first_that_the_server_lists():
    server = await serve_json("/v1/models", {"data": [{"id": "first"}, {"id": "second"}]})
    async with server, open_session(None, 5) as session:
        assert await find_model(session, str(server.make_url("/"))) == {"id": "first"}


@pytest.mark.parametrize("document", [{"data": []}, {}, [], {"data": ["x"]}])
async def test_a_server_without_models_is_said_to_have_none(document: object):
    server = await serve_json("/v1/models", document)
    async with server, open_session(None, 5) as session:
        with pytest.raises(RequestFailed, match="name one with --model"):
            await find_model(session, str(server.make_url("/")))


async def test_a_server_that_is_not_there_is_said_to_be_missing():
    async with open_session(None, 5) as session:
        with pytest.raises(RequestFailed, match="no connection"):
            await find_model(session, f"http://127.0.0.1:{unused_port()}")


async def test_an_answer_that_is_not_json_is_said_to_be_none():
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as server, open_session(None, 5) as session:
        with pytest.raises(RequestFailed, match="does not answer with JSON"):
            await find_model(session, str(server.make_url("/")))


async def test_a_page_beside_v1_is_read_as_text():
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="a 1\n")

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as server, open_session(None, 5) as session:
        assert await get_text(session, str(server.make_url("/v1")), "metrics") == "a 1\n"
        with pytest.raises(RequestFailed, match="http 404"):
            await get_text(session, str(server.make_url("/")), "other")


async def test_the_version_is_noted_where_there_is_one():
    server = await serve_json("/version", {"version": "1.2"})
    async with server, open_session(None, 5) as session:
        assert await describe_server(session, str(server.make_url("/v1"))) == {"version": "1.2"}
        assert await describe_server(session, str(server.make_url("/other/v1"))) == {}
