"""/v1/responses on the wire; tests/integration/test_openai_responses.py is about real clients."""

import json

import pytest

URL = "/v1/responses"


async def events_of(gateway, **body):
    async with gateway.session.post(URL, json={"input": "Hi", "stream": True, **body}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return (await response.read()).decode()


async def test_each_event_is_named_and_the_last_is_the_end(gateway):
    gateway.engine.script_all("Hello")
    text = await events_of(gateway)
    assert text.endswith("\n\n")
    for message in text.removesuffix("\n\n").split("\n\n"):
        name, data = message.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert json.loads(data.removeprefix("data: "))["response"]["status"] == "completed"
    assert "[DONE]" not in text
    assert "id: " not in text


async def test_keep_alives_are_comments(start_gateway):
    gateway = await start_gateway(sse_keep_alive_interval_s=0.001)
    gateway.engine.hold()
    for background in (False, True):
        body = {"input": "Hi", "stream": True, "background": background, "max_output_tokens": 2}
        async with gateway.session.post(URL, json=body) as response:
            seen = b""
            while b": keep-alive\n\n" not in seen:
                seen += await response.content.readany()
            gateway.engine.release()
            seen += await response.read()
            gateway.engine.hold()
        assert b"response.incomplete" in seen


async def test_a_refusal_has_its_status_also_for_a_stream(gateway):
    gateway.engine.refuse("queue_full", retry_after_s=3)
    for fields in ({}, {"stream": True}, {"background": True}):
        status, answer = await gateway.post(URL, {"input": "Hi", **fields})
        assert (status, answer["error"]["code"]) == (429, "queue_full")


async def test_stream_options_need_a_stream(gateway):
    status, answer = await gateway.post(URL, {"input": "Hi", "stream_options": {}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("after", ["x", "1.5", "--1", "9" * 30, ""])
async def test_a_bad_place_to_start_is_refused(gateway, after):
    _, response = await gateway.post(
        URL, {"input": "Hi", "background": True, "max_output_tokens": 1}
    )
    status, answer = await gateway.get(f"{URL}/{response['id']}?stream=true&starting_after={after}")
    assert (status, answer["error"]["param"]) == (400, "starting_after")


async def test_what_ran_in_the_foreground_cannot_be_followed_or_cancelled(gateway):
    _, response = await gateway.post(URL, {"input": "Hi", "max_output_tokens": 1})
    status, answer = await gateway.get(f"{URL}/{response['id']}?stream=true")
    assert (status, answer["error"]["param"]) == (400, "stream")
    status, _ = await gateway.post(f"{URL}/{response['id']}/cancel", {})
    assert status == 400


async def test_forgetting_a_response_that_runs_ends_it(gateway):
    gateway.engine.hold()
    _, response = await gateway.post(URL, {"input": "Hi", "background": True})
    async with gateway.session.delete(f"{URL}/{response['id']}") as answer:
        assert await answer.json() == {
            "id": response["id"],
            "object": "response",
            "deleted": True,
        }
    await gateway.engine.wait_until_idle()
    assert (await gateway.get(f"{URL}/{response['id']}"))[0] == 404
