"""Who may do what with which key, over HTTP, event streams and websockets."""

import asyncio
import json

import aiohttp
import pytest
from yarl import URL

from fakes import FakeEngine
from gateway.api_keys import ApiKey, hash_of_key
from gateway.key_ring import KeyRing
from gateway.tenants import tenant_of_key
from jaxengine.outputs import FinishReason

PROTOCOL = "headrace.v1.json"


def key(name, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=hash_of_key(f"key-of-{name}"), **fields)


def bearer(name) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


@pytest.fixture
def ring():
    return KeyRing([key("alice", tenant="team"), key("root", admin=True)])


@pytest.fixture
async def gateway(start_gateway, ring):
    return await start_gateway(keys=ring)


async def post(gateway, path, body, headers):
    async with gateway.session.post(path, json=body, headers=headers) as response:
        return response.status, response.headers, await response.text()


async def get(gateway, path, headers):
    async with gateway.session.get(path, headers=headers) as response:
        return response.status, await response.text()


def connect(gateway, path="/v1/stream", headers=None):
    return gateway.session.ws_connect(path, protocols=[PROTOCOL], headers=headers)


async def handshake_status(gateway, path="/v1/stream", headers=None) -> int:
    try:
        async with connect(gateway, path, headers):
            return 101
    except aiohttp.WSServerHandshakeError as error:
        return error.status


async def start(ws, stream_id="a", **request):
    await ws.send_json({"type": "start", "id": stream_id, "request": {"prompt": "x"} | request})


async def last_message(ws, stream_id="a"):
    while True:
        message = json.loads((await ws.receive()).data)
        if message.get("id") == stream_id and message["type"] in ("done", "error"):
            return message


def routes(gateway):
    """Method and path of every route, with something for the variable parts."""
    for route in gateway.server._runner.app.router.routes():
        path = route.resource.canonical.replace("{name}", "x").replace("{response_id}", "x")
        if route.method != "HEAD":
            yield route.method, path


OPEN = {"/", "/dashboard", "/docs", "/health", "/ready", "/static/x"}


async def test_without_a_key_nothing_but_probes_and_pages_is_answered(gateway):
    seen = set()
    for method, path in routes(gateway):
        async with gateway.session.request(method, path) as response:
            is_refused = response.status == 401
            if is_refused:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        seen.add(path)
        assert is_refused is (path not in OPEN), path
    assert seen >= OPEN | {"/metrics", "/version", "/v1/models", "/v1/chat/completions"}


async def test_what_is_not_there_is_not_told_to_strangers(gateway):
    assert (await get(gateway, "/nowhere", {}))[0] == 401
    assert (await get(gateway, "/nowhere", bearer("alice")))[0] == 404


@pytest.mark.parametrize(
    "path", ["//health", "/health/", "/HEALTH", "/static/../v1/models", "/static/%2e%2e/metrics"]
)
async def test_no_spelling_of_an_open_path_opens_another(gateway, path):
    url = URL(gateway.url + path, encoded=True)
    async with gateway.session.get(url) as response:
        text = await response.text()
    assert response.status in (401, 404)
    assert "headrace_" not in text
    assert "owned_by" not in text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_key_lets_in_over_http_and_event_streams(gateway, stream):
    body = {"prompt": "x", "max_tokens": 2, "stream": stream}
    status, _, _ = await post(gateway, "/v1/completions", body, {})
    assert status == 401
    assert gateway.engine.requests == []
    status, _, text = await post(gateway, "/v1/completions", body, bearer("alice"))
    assert status == 200
    assert ("[DONE]" in text) is stream
    [request] = gateway.engine.requests
    assert request.tenant == "team"


async def test_a_key_lets_in_over_the_websocket(gateway):
    assert await handshake_status(gateway) == 401
    assert await handshake_status(gateway, headers=bearer("nobody")) == 401
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, max_tokens=1)
        assert (await last_message(ws))["type"] == "done"
    assert gateway.engine.requests[0].tenant == "team"


@pytest.mark.parametrize("place", ["api_key", "key", "token", "access_token", "Authorization"])
async def test_a_key_in_an_address_is_none(gateway, place):
    assert (await get(gateway, f"/v1/models?{place}=key-of-alice", {}))[0] == 401


async def test_two_keys_at_once_are_refused(gateway):
    headers = [("Authorization", f"Bearer key-of-{name}") for name in ("nobody", "alice")]
    assert (await get(gateway, "/v1/models", headers))[0] == 400


@pytest.mark.parametrize("path", ["/metrics", "/v1/steps", "/v1/steps/trace"])
async def test_what_concerns_all_is_for_admins(gateway, path):
    status, text = await get(gateway, path, bearer("alice"))
    assert (status, json.loads(text)["error"]["code"]) == (403, "admin_key_required")
    assert (await get(gateway, path, bearer("root")))[0] == 200


async def test_the_feed_of_steps_is_for_admins(gateway):
    assert await handshake_status(gateway, "/v1/steps/stream", bearer("alice")) == 403
    assert await handshake_status(gateway, "/v1/steps/stream", bearer("root")) == 101


async def test_a_preflight_needs_no_key_because_it_cannot_have_one(start_gateway, ring):
    gateway = await start_gateway(keys=ring, allowed_origins=("https://chat.example",))
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization"
    async with gateway.session.options("/v1/completions", headers=headers) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Headers"] == "authorization"
    async with gateway.session.get(
        "/v1/models", headers={"Origin": "https://chat.example"}
    ) as response:
        assert response.status == 401
        # So that the page can read what is wrong.
        assert response.headers["Access-Control-Allow-Origin"] == "https://chat.example"


async def test_a_strange_origin_is_refused_even_with_a_key(gateway):
    headers = bearer("alice") | {"Origin": "http://evil.example"}
    assert (await get(gateway, "/v1/models", headers))[0] == 403
    assert await handshake_status(gateway, headers=headers) == 403


# ---- tenants -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_over_http_a_request_cannot_name_another_tenant(gateway, path):
    message = {"messages": [{"role": "user", "content": "x"}]}
    body = {"max_tokens": 1, **({"prompt": "x"} if path == "/v1/completions" else message)}
    status, _, text = await post(gateway, path, body | {"tenant": "root"}, bearer("alice"))
    assert (status, json.loads(text)["error"]["param"]) == (403, "tenant")
    assert gateway.engine.requests == []
    status, _, _ = await post(gateway, path, body | {"tenant": "team"}, bearer("alice"))
    assert status == 200


async def test_on_the_websocket_a_request_cannot_name_another_tenant(gateway):
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, tenant="root")
        error = await last_message(ws)
        assert (error["status"], error["error"]["code"]) == (403, "tenant_not_allowed")
    assert gateway.engine.requests == []


# ---- tickets -----------------------------------------------------------------------------------


async def ticket(gateway, name) -> str:
    status, headers, text = await post(gateway, "/v1/ws-ticket", {}, bearer(name))
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    body = json.loads(text)
    assert body["expires_in_s"] == 30
    return body["ticket"]


async def test_a_ticket_opens_one_websocket_in_the_name_of_its_key(gateway):
    path = f"/v1/stream?ticket={await ticket(gateway, 'alice')}"
    async with connect(gateway, path) as ws:
        await start(ws, max_tokens=1)
        assert (await last_message(ws))["type"] == "done"
    assert gateway.engine.requests[0].tenant == "team"
    assert await handshake_status(gateway, path) == 401


async def test_a_ticket_may_what_its_key_may(gateway):
    for name, status in (("alice", 403), ("root", 101)):
        path = f"/v1/steps/stream?ticket={await ticket(gateway, name)}"
        assert await handshake_status(gateway, path) == status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/ws-ticket"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/x"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/stream"),
    ],
)
async def test_a_ticket_opens_nothing_but_a_websocket(gateway, method, path):
    granted = await ticket(gateway, "root")
    ticketed = f"{path}?ticket={granted}"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    for headers in ({}, upgrade):
        async with gateway.session.request(method, ticketed, headers=headers) as response:
            assert response.status == 401
    assert await handshake_status(gateway, f"/v1/stream?ticket={granted}") == 101


async def test_a_ticket_without_an_upgrade_is_refused_and_not_used_up(gateway):
    path = f"/v1/stream?ticket={await ticket(gateway, 'alice')}"
    assert (await get(gateway, path, {}))[0] == 401
    assert await handshake_status(gateway, path) == 101


async def test_a_ticket_opens_a_websocket_of_responses(gateway):
    path = f"/v1/responses?ticket={await ticket(gateway, 'alice')}"
    async with gateway.session.ws_connect(path) as ws:
        await ws.send_json({"type": "response.create", "input": "x", "max_output_tokens": 1})
        while (await ws.receive_json())["type"] != "response.incomplete":
            pass
    assert gateway.engine.requests[0].tenant == "team"


async def test_a_ticket_needs_a_key(gateway):
    assert (await post(gateway, "/v1/ws-ticket", {}, {}))[0] == 401


async def test_two_tickets_at_once_are_refused(gateway):
    path = "/v1/stream?" + "&".join([f"ticket={await ticket(gateway, 'alice')}"] * 2)
    assert await handshake_status(gateway, path) == 400


async def test_without_keys_a_page_may_do_the_same(start_gateway):
    gateway = await start_gateway()
    headers = {"Authorization": "Bearer a page's name"}
    async with gateway.session.post("/v1/ws-ticket", headers=headers) as response:
        granted = (await response.json())["ticket"]
    path = f"/v1/stream?ticket={granted}"
    async with connect(gateway, path) as ws:
        await start(ws, max_tokens=1)
        assert (await last_message(ws))["type"] == "done"
    assert gateway.engine.requests[0].tenant == tenant_of_key("Bearer a page's name")
    assert await handshake_status(gateway, path) == 401  # it was used


# ---- limits ------------------------------------------------------------------------------------


async def test_a_rate_is_kept_over_http_and_the_answer_says_when_to_come_back(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", requests_per_minute=2), key("bob")]))
    body = {"prompt": "x", "max_tokens": 1}
    for _ in range(2):
        assert (await post(gateway, "/v1/completions", body, bearer("alice")))[0] == 200
    status, headers, text = await post(gateway, "/v1/completions", body, bearer("alice"))
    assert (status, json.loads(text)["error"]["code"]) == (429, "requests_per_minute")
    assert 1 <= int(headers["Retry-After"]) <= 30
    assert (await post(gateway, "/v1/completions", body, bearer("bob")))[0] == 200


async def test_each_choice_of_each_prompt_counts(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", requests_per_minute=5)]))
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 1}
    assert (await post(gateway, "/v1/completions", body, bearer("alice")))[0] == 200
    assert (await post(gateway, "/v1/completions", body, bearer("alice")))[0] == 429
    body["n"] = 3
    status, _, text = await post(gateway, "/v1/completions", body, bearer("alice"))
    assert (status, json.loads(text)["error"]["param"]) == (400, "n")


async def test_a_rate_is_kept_on_the_websocket(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", tokens_per_minute=60)]))
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, "a", max_tokens=100)
        assert (await last_message(ws, "a"))["type"] == "done"
        await start(ws, "b")
        error = await last_message(ws, "b")
        assert (error["status"], error["error"]["code"]) == (429, "tokens_per_minute")
        assert 41 <= error["retry_after_s"] <= 42  # 1 + 100 of 60 were used, and 1 is needed


async def test_streams_of_one_key_are_counted_whatever_they_come_through(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", max_concurrent_requests=2)]))
    gateway.engine.hold()
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, "a", max_tokens=1)
        streamed = asyncio.create_task(
            post(
                gateway,
                "/v1/completions",
                {"prompt": "x", "stream": True, "max_tokens": 1},
                bearer("alice"),
            )
        )
        await gateway.engine.wait_for_requests(2)
        status, _, text = await post(gateway, "/v1/completions", {"prompt": "x"}, bearer("alice"))
        assert (status, json.loads(text)["error"]["code"]) == (429, "concurrent_requests")
        gateway.engine.release()
        assert (await streamed)[0] == 200
        assert (await last_message(ws, "a"))["type"] == "done"
    status, _, _ = await post(
        gateway, "/v1/completions", {"prompt": "x", "max_tokens": 1}, bearer("alice")
    )
    assert status == 200


async def test_a_client_that_leaves_gives_its_place_back(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", max_concurrent_requests=1)]))
    gateway.engine.hold()
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws)
        await gateway.engine.wait_for_requests(1)
    await gateway.engine.wait_until_idle()
    gateway.engine.release()
    body = {"prompt": "x", "max_tokens": 1}
    assert (await post(gateway, "/v1/completions", body, bearer("alice")))[0] == 200


async def test_what_the_engine_refuses_costs_no_quota(start_gateway):
    ring = KeyRing([key("alice", requests_per_minute=1, max_concurrent_requests=1)])
    gateway = await start_gateway(keys=ring)
    gateway.engine.refuse("queued_tokens", retry_after_s=3.0)
    body = {"prompt": "x", "max_tokens": 1}
    for _ in range(3):
        status, _, text = await post(gateway, "/v1/completions", body, bearer("alice"))
        assert (status, json.loads(text)["error"]["code"]) == (429, "queued_tokens")
    [account] = ring.accounts
    assert (account.num_running, account.usage.num_requests, account.usage.num_refused) == (0, 0, 3)


async def test_a_request_that_only_ever_waited_costs_no_quota(start_gateway):
    quota = {"requests_per_minute": 1, "tokens_per_minute": 1, "max_concurrent_requests": 1}
    gateway = await start_gateway(keys=KeyRing([key("alice", **quota)]))
    gateway.engine.hold()
    body = {"prompt": "x", "max_tokens": 1}
    waiting = asyncio.create_task(post(gateway, "/v1/completions", body, bearer("alice")))
    await gateway.engine.wait_for_requests(1)
    gateway.engine.expire(FinishReason.QUEUE_TIMEOUT)
    status, _, text = await waiting
    assert (status, json.loads(text)["error"]["code"]) == (429, "queue_timeout")
    gateway.engine.release()
    assert (await post(gateway, "/v1/completions", body, bearer("alice")))[0] == 200


async def test_a_revoked_key_begins_nothing_on_an_open_websocket(gateway, ring):
    gateway.engine.hold()
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, "running", max_tokens=2)
        await gateway.engine.wait_for_requests(1)
        ring.replace([key("root", admin=True)])
        await start(ws, "new")
        error = await last_message(ws, "new")
        assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")
        gateway.engine.release()
        assert (await last_message(ws, "running"))["type"] == "done"


async def test_a_key_of_another_tenant_now_begins_nothing_in_the_name_of_the_old_one(gateway, ring):
    async with connect(gateway, headers=bearer("alice")) as ws:
        ring.replace([key("alice", tenant="other"), key("root", admin=True)])
        await start(ws)
        assert (await last_message(ws))["status"] == 401
    async with connect(gateway, headers=bearer("alice")) as ws:
        await start(ws, max_tokens=1)
        assert (await last_message(ws))["type"] == "done"
    assert [request.tenant for request in gateway.engine.requests] == ["other"]


async def test_who_is_an_admin_no_more_watches_no_more(gateway, ring):
    async with gateway.session.ws_connect("/v1/steps/stream", headers=bearer("root")) as ws:
        ring.replace([key("root")])
        while (await ws.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
        assert ws.close_code == 1008


# ---- what does not get out ---------------------------------------------------------------------


async def test_no_key_ticket_or_prompt_gets_into_the_log(gateway, caplog):
    secret = "the secret prompt"
    with caplog.at_level("DEBUG"):
        granted = await ticket(gateway, "alice")
        await handshake_status(gateway, f"/v1/stream?ticket={granted}")
        await handshake_status(gateway, f"/v1/stream?ticket={granted}")
        body = {"prompt": secret, "max_tokens": 2}
        await post(gateway, "/v1/completions", body, bearer("alice"))
        await post(gateway, "/v1/completions", body | {"temperature": -1}, bearer("alice"))
        await post(gateway, "/v1/completions", body, bearer("nobody"))
        gateway.engine.hold()
        failing = asyncio.create_task(post(gateway, "/v1/completions", body, bearer("alice")))
        await gateway.engine.wait_for_requests(2)
        gateway.engine.fail_requests()
        await failing
    logged = [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    assert any("request ended" in line and "'key': 'alice'" in line for line in logged)
    assert any("/v1/stream" in line for line in logged)
    for line in logged:
        for hidden in ("key-of-", granted, secret):
            assert hidden not in line


async def test_a_dead_engine_tells_strangers_nothing_of_itself(start_gateway, ring):
    gateway = await start_gateway(FakeEngine(), keys=ring)
    gateway.engine.die("XlaRuntimeError: INTERNAL: at device 0 in /opt/secret.py")
    told = '{"status": "dead", "reason": "the engine has failed"}'
    assert await get(gateway, "/health", {}) == (503, told)
    status, _, text = await post(gateway, "/v1/completions", {"prompt": "x"}, bearer("alice"))
    assert status == 503
    assert "Xla" not in text
