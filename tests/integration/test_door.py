"""A real server with keys: who gets in, what a SIGHUP changes, and what the log says."""

import asyncio
import json
import signal

import aiohttp
import openai
import pytest

from gateway.api_keys import ApiKey, hash_of_key, write_keys
from gateway.key_ring import KeyRing
from serving import TINY, served

SECRET_PROMPT = "nobody must read this in a log"


def key(name, **fields) -> ApiKey:
    return ApiKey(name=name, sha256=hash_of_key(f"key-of-{name}"), **fields)


def bearer(name):
    return {"Authorization": f"Bearer key-of-{name}"}


async def status(session, path, name=None) -> int:
    async with session.get(path, headers=bearer(name) if name else {}) as response:
        return response.status


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.json"
    write_keys(path, [key("alice", requests_per_minute=3), key("root", admin=True)])
    return path


async def test_keys_come_and_go_by_sighup_and_no_secret_gets_into_the_log(key_file):
    arguments = ("--api-keys-file", str(key_file), "--log-format", "json", "--log-level", "debug")
    with served(*TINY, *arguments) as server:
        async with aiohttp.ClientSession(server.url) as session:
            assert await status(session, "/health") == 200
            assert await status(session, "/") == 200
            assert await status(session, "/v1/models") == 401
            assert await status(session, "/v1/models", "alice") == 200
            assert await status(session, "/metrics", "alice") == 403
            assert await status(session, "/metrics", "root") == 200

            # A model of random weights ends an answer at random.
            body = {"prompt": SECRET_PROMPT, "max_tokens": 4, "ignore_eos": True}
            for expected in (200, 200, 200, 429):
                async with session.post(
                    "/v1/completions", json=body, headers=bearer("alice")
                ) as response:
                    assert response.status == expected

            # A bad file changes nothing.
            good = key_file.read_text()
            key_file.write_text(good[:-10])
            server.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(server.wait_for_line, "the API keys stay as they were")
            assert await status(session, "/v1/models", "alice") == 200

            write_keys(key_file, [key("root", admin=True), key("bob", weight=2.0)])
            server.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(server.wait_for_line, "2 API keys are in force")
            assert await status(session, "/v1/models", "alice") == 401
            async with session.post(
                "/v1/completions", json=body, headers=bearer("bob")
            ) as response:
                assert response.status == 200
    entries = [json.loads(line) for line in server.lines if line.startswith("{")]
    ended = [entry for entry in entries if entry["message"] == "request ended"]
    assert [entry["key"] for entry in ended] == ["alice"] * 3 + ["bob"]
    assert all(entry["completion_tokens"] == 4 for entry in ended)
    assert "key-of-" not in server.log
    assert SECRET_PROMPT not in server.log


async def test_the_stock_client_knows_what_it_is_told(start_gateway):
    gateway = await start_gateway(keys=KeyRing([key("alice", requests_per_minute=3)]))

    def client(name):
        return openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=f"key-of-{name}", max_retries=0
        )

    async with client("alice") as alice, client("nobody") as nobody:
        with pytest.raises(openai.AuthenticationError) as refused:
            await nobody.models.list()
        assert refused.value.code == "invalid_api_key"
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        with pytest.raises(openai.PermissionDeniedError) as forbidden:
            await alice.completions.create(**ask, extra_body={"tenant": "root"})
        assert forbidden.value.param == "tenant"
        for left in (2, 1, 0):
            answer = await alice.completions.with_raw_response.create(**ask)
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        with pytest.raises(openai.RateLimitError) as limited:
            await alice.completions.create(**ask)
        assert limited.value.code == "requests_per_minute"
        assert 1 <= int(limited.value.response.headers["Retry-After"]) <= 20


async def test_a_sighup_without_keys_does_not_end_the_server(tiny_server):
    tiny_server.process.send_signal(signal.SIGHUP)
    await asyncio.to_thread(tiny_server.wait_for_line, "neither a key file nor a certificate")
    async with aiohttp.ClientSession(tiny_server.url) as session:
        assert await status(session, "/ready") == 200
