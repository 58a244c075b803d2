import pytest

from gateway.api_keys import ApiKey, hash_of_key
from gateway.key_ring import KeyRing


def key(name, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=hash_of_key(name), **fields)


def bearer(name):
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
async def gateway(start_gateway):
    keys = KeyRing([key("alice", tokens_per_minute=1000), key("bob"), key("root", admin=True)])
    return await start_gateway(keys=keys)


async def usage(gateway, name=None) -> dict[str, dict]:
    headers = {} if name is None else bearer(name)
    async with gateway.session.get("/v1/usage", headers=headers) as response:
        assert (response.status, response.content_type) == (200, "application/json")
        body = await response.json()
    assert (body["object"], body["since_unix_s"] > 1.7e9) == ("list", True)
    return {entry["key"]: entry for entry in body["data"]}


async def complete(gateway, name, **fields):
    body = {"prompt": "abc", "max_tokens": 4} | fields
    async with gateway.session.post("/v1/completions", json=body, headers=bearer(name)) as response:
        return response.status


async def test_the_holder_of_a_key_sees_its_own_and_an_admin_all(gateway):
    gateway.engine.num_cached_tokens = 2
    assert await complete(gateway, "alice") == 200
    assert await complete(gateway, "alice", n=2) == 200
    assert await complete(gateway, "alice", temperature=-1) == 400
    assert await usage(gateway, "alice") == {
        "alice": {
            "object": "key.usage",
            "key": "alice",
            "requests": 3,
            "requests_running": 0,
            "requests_refused": 1,
            "prompt_tokens": 9,
            "cached_tokens": 6,
            "completion_tokens": 12,
            # A step of 10 ms to the first token, and three more, of each.
            "busy_s": pytest.approx(3 * 0.04),
            "limits": {
                "requests_per_minute": None,
                "tokens_per_minute": 1000,
                "max_concurrent_requests": None,
            },
        }
    }
    everybody = await usage(gateway, "root")
    assert everybody.keys() == {"alice", "bob", "root"}
    assert (everybody["alice"]["requests"], everybody["bob"]["requests"]) == (3, 0)


async def test_what_a_stop_string_cuts_off_is_not_counted_twice(gateway):
    gateway.engine.script_all("abcSTOPdef")
    assert await complete(gateway, "bob", stop="STOP", max_tokens=50) == 200
    [entry] = (await usage(gateway, "bob")).values()
    assert entry["completion_tokens"] == 7


async def test_what_runs_is_told(gateway):
    gateway.engine.hold()
    async with gateway.session.ws_connect(
        "/v1/stream", protocols=["headrace.v1.json"], headers=bearer("bob")
    ) as ws:
        await ws.send_json({"type": "start", "id": "a", "request": {"prompt": "x"}})
        await gateway.engine.wait_for_requests(1)
        assert (await usage(gateway, "bob"))["bob"]["requests_running"] == 1


async def test_without_keys_all_are_one(start_gateway):
    gateway = await start_gateway()
    assert await complete(gateway, "anybody") == 200
    [entry] = (await usage(gateway)).values()
    assert (entry["key"], entry["requests"]) == ("anonymous", 1)
