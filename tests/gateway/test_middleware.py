import asyncio
import re

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.config import GatewayConfig
from gateway.errors import Forbidden
from gateway.middleware import errors_as_json, host_and_origin_guard


async def passes(config, headers):
    async def handler(request):
        return web.Response()

    request = make_mocked_request("GET", "/", headers=headers)
    try:
        await host_and_origin_guard(config)(request, handler)
    except Forbidden:
        return False
    return True


LAN = GatewayConfig(host="192.168.1.7")
EVERYWHERE = GatewayConfig(host="0.0.0.0")
NAMED = GatewayConfig(allowed_hosts=("llm.example",))


@pytest.mark.parametrize(
    ("config", "host", "allowed"),
    [
        (GatewayConfig(), "localhost", True),
        (GatewayConfig(), "localhost:8000", True),
        (GatewayConfig(), "LOCALHOST:1", True),
        (GatewayConfig(), "127.0.0.1:8000", True),
        (GatewayConfig(), "[::1]:8000", True),
        (GatewayConfig(), "evil.example", False),
        (GatewayConfig(), "evil.example:8000", False),
        (GatewayConfig(), "localhost.evil.example", False),
        (GatewayConfig(), "localhost@evil.example", False),
        (GatewayConfig(), "evil.example/localhost", False),
        (GatewayConfig(), "localhost:port", False),
        (GatewayConfig(), "", False),
        (GatewayConfig(), "10.0.0.1", False),
        (LAN, "192.168.1.7:8000", True),
        (EVERYWHERE, "10.0.0.1:8000", True),
        (EVERYWHERE, "[fe80::1]:8000", True),
        (EVERYWHERE, "evil.example", False),
        (NAMED, "llm.example", True),
        (NAMED, "LLM.example:443", True),
        (GatewayConfig(allowed_hosts=("*",)), "anything.example", True),
    ],
)
async def test_only_hosts_that_we_know_are_answered(config, host, allowed):
    assert await passes(config, {"Host": host}) is allowed


async def test_a_request_without_host_is_refused():
    assert not await passes(GatewayConfig(), {})


PAGES = GatewayConfig(allowed_origins=("https://chat.example",))


@pytest.mark.parametrize(
    ("config", "origin", "allowed"),
    [
        (GatewayConfig(), "http://localhost:8000", True),
        (GatewayConfig(), "https://localhost:8000", True),
        (GatewayConfig(), "http://localhost:9000", False),
        (GatewayConfig(), "http://evil.example", False),
        (GatewayConfig(), "http://localhost:8000.evil.example", False),
        (GatewayConfig(), "null", False),
        (GatewayConfig(), "", False),
        (PAGES, "https://chat.example", True),
        (PAGES, "https://CHAT.example", True),
        (PAGES, "http://chat.example", False),
        (GatewayConfig(allowed_origins=("*",)), "http://any.example", True),
    ],
)
async def test_only_pages_of_ours_or_of_allowed_origins_may_ask(config, origin, allowed):
    assert await passes(config, {"Host": "localhost:8000", "Origin": origin}) is allowed


@pytest.mark.parametrize("path", ["/v1/models", "/v1/stream", "/", "/nowhere", "/v1/completions"])
async def test_a_strange_origin_is_status_403_before_anything_else(gateway, path):
    headers = {"Origin": "http://evil.example", "Upgrade": "websocket", "Connection": "Upgrade"}
    async with gateway.session.get(path, headers=headers) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "origin_not_allowed"
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_rebound_host_is_status_403(gateway):
    async with gateway.session.get("/v1/models", headers={"Host": "evil.example"}) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "host_not_allowed"


async def test_a_page_of_an_allowed_origin_can_read_the_answer(start_gateway):
    gateway = await start_gateway(allowed_origins=("https://chat.example",))
    origin = {"Origin": "https://chat.example"}
    async with gateway.session.get("/v1/models", headers=origin) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"
        assert response.headers["Vary"] == "Origin"
    ask = {**origin, "Access-Control-Request-Method": "POST"}
    async with gateway.session.options("/v1/completions", headers=ask) as response:
        assert response.status == 204
        assert "POST" in response.headers["Access-Control-Allow-Methods"]


async def test_unknown_addresses_and_methods_are_json_errors(gateway):
    status, body = await gateway.get("/nowhere")
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    async with gateway.session.get("/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_an_unexpected_error_tells_the_log_and_not_the_client(caplog):
    async def handler(request):
        raise RuntimeError("secret /etc/passwd")

    response = await errors_as_json(make_mocked_request("GET", "/"), handler)
    assert response.status == 500
    assert b"secret" not in response.body
    assert "secret" in caplog.text


async def test_each_request_is_one_line_of_the_debug_log_without_its_query(gateway, caplog):
    with caplog.at_level("DEBUG", logger="gateway.middleware"):
        async with gateway.session.get("/nowhere?ticket=secret") as response:
            assert response.status == 404
    [record] = [record for record in caplog.records if record.getMessage() == "answered"]
    fields = record.fields
    assert (fields["method"], fields["path"], fields["status"]) == ("GET", "/nowhere", 404)
    assert fields["duration_s"] >= 0
    assert "secret" not in str(vars(record))


async def test_a_cancelled_handler_stays_cancelled():
    async def handler(request):
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await errors_as_json(make_mocked_request("GET", "/"), handler)


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("my-id_1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
async def test_a_request_id_is_echoed_only_in_a_safe_form(gateway, sent, echoed):
    async with gateway.session.get("/health", headers={"X-Request-Id": sent}) as response:
        answered = response.headers["X-Request-Id"]
    assert answered == sent if echoed else re.fullmatch("[0-9a-f]{32}", answered)


async def test_answers_carry_common_headers_and_no_versions(gateway):
    for path in ("/health", "/nowhere"):
        async with gateway.session.get(path) as response:
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"
            assert response.headers["Server"] == "headrace"
