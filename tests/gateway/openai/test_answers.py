"""The order and form of streamed answers, as stock clients and load tools need them."""

import json

import pytest

from connections import posted
from fakes import FakeEngine, byte_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "yo"}]


async def streamed(gateway, path=CHAT, **body):
    """Return the data of each event, and check what holds for every stream."""
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi!"}
    body = {**prompt, "stream": True, "max_tokens": 4, **body}
    async with gateway.session.post(path, json=body) as response:
        assert response.status == 200
        raw = (await response.read()).decode()
    assert raw.endswith("\n\n")
    events = raw.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    chunks = [json.loads(d) for d in data if d != "[DONE]"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    return chunks, data[-1] == "[DONE]"


def by_choice(chunks, index=0):
    return [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]


async def test_a_chat_stream_is_role_text_finish_done(gateway):
    gateway.engine.script_all("ab")
    chunks, done = await streamed(gateway)
    assert done
    first, *texts, last = by_choice(chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in texts) == "ab"
    assert all(choice["delta"].keys() == {"content"} for choice in texts)
    assert last["delta"] == {"content": ""}
    assert [c["finish_reason"] for c in (first, *texts)] == [None] * (1 + len(texts))
    assert last["finish_reason"] == "stop"
    assert all(c["logprobs"] is None for c in (first, *texts, last))
    assert "usage" not in chunks[0]
    assert chunks[-1]["system_fingerprint"].startswith("headrace-")
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_a_completion_stream_is_text_finish_done(gateway):
    chunks, done = await streamed(gateway, COMPLETIONS)
    assert done
    *texts, last = by_choice(chunks)
    assert "".join(choice["text"] for choice in texts) == "defg"
    assert (last["text"], last["finish_reason"]) == ("", "length")
    assert all(choice["finish_reason"] is None for choice in texts)
    assert chunks[0]["object"] == "text_completion"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_choice_is_finished_by_exactly_one_chunk_and_the_last(gateway, path):
    chunks, done = await streamed(gateway, path, n=3)
    assert done
    for index in range(3):
        reasons = [c["finish_reason"] for c in by_choice(chunks, index)]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert "timing" in by_choice(chunks, index)[-1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_usage_comes_last_without_choices_and_is_null_before(gateway, path):
    chunks, done = await streamed(gateway, path, n=2, stream_options={"include_usage": True})
    assert done
    *before, last = chunks
    assert all(chunk["usage"] is None for chunk in before)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_continuous_usage_counts_up_on_every_chunk(gateway):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, _ = await streamed(gateway, COMPLETIONS, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


async def test_stream_options_may_be_null(gateway):
    chunks, done = await streamed(gateway, stream_options={"include_usage": None})
    assert done
    assert "usage" not in chunks[0]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_says_what_the_whole_answer_says(gateway, path):
    gateway.engine.script_all("naïve 🧎‍♀️ text")
    chunks, _ = await streamed(gateway, path, max_tokens=50)
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi!"}
    _, whole = await gateway.post(path, {**prompt, "max_tokens": 50})
    [choice] = whole["choices"]
    if path == CHAT:
        text = "".join(c["delta"]["content"] for c in by_choice(chunks))
        assert text == choice["message"]["content"]
    else:
        text = "".join(c["text"] for c in by_choice(chunks))
        assert text == choice["text"]
    assert text == "naïve 🧎‍♀️ text"
    assert by_choice(chunks)[-1]["finish_reason"] == choice["finish_reason"] == "stop"


async def test_no_chunk_is_empty_while_a_stop_string_is_held_back(gateway):
    chunks, _ = await streamed(gateway, COMPLETIONS, max_tokens=20, stop=["fghiX", "jk"])
    *texts, last = by_choice(chunks)
    assert all(choice["text"] for choice in texts)
    assert "".join(choice["text"] for choice in texts) == "defghi"
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "jk")
    assert (gateway.engine.num_active, gateway.engine.num_aborts) == (0, 1)


async def test_an_answer_without_text_still_has_a_role_and_a_finish(gateway):
    gateway.engine.script_all("")
    chunks, done = await streamed(gateway)
    assert done
    assert [c["delta"] for c in by_choice(chunks)] == [
        {"role": "assistant", "content": ""},
        {"content": ""},
    ]


async def read_event(response):
    lines = []
    while (line := (await response.content.readline()).decode()) != "\n":
        lines.append(line.rstrip("\n"))
    return "\n".join(lines)


async def test_the_role_comes_with_the_first_token_and_comments_before(start_gateway):
    gateway = await start_gateway(sse_keep_alive_interval_s=0.01)
    gateway.engine.hold()
    body = {"messages": MESSAGES, "stream": True}
    async with gateway.session.post(CHAT, json=body) as response:
        assert await read_event(response) == ": keep-alive"
        assert await read_event(response) == ": keep-alive"
        gateway.engine.step()
        while (first := await read_event(response)) == ": keep-alive":
            pass
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"]
    await gateway.engine.wait_until_idle()


async def test_comments_lose_no_token(start_gateway):
    gateway = await start_gateway(sse_keep_alive_interval_s=0.001)
    gateway.engine.hold()
    body = {"prompt": "Hi!", "stream": True, "max_tokens": 8}
    text, comments = "", 0
    async with gateway.session.post(COMPLETIONS, json=body) as response:
        while (event := await read_event(response)) != "data: [DONE]":
            if event == ": keep-alive":
                comments += 1
                if comments % 2 == 0:
                    gateway.engine.step()
                continue
            text += json.loads(event.removeprefix("data: "))["choices"][0]["text"]
    assert text == "defghijk"
    assert comments >= 16


async def test_without_an_interval_there_are_no_comments(start_gateway):
    gateway = await start_gateway(sse_keep_alive_interval_s=None)
    _, done = await streamed(gateway)
    assert done


async def test_a_failure_in_mid_stream_is_an_error_event_and_no_done(gateway):
    gateway.engine.hold()
    body = {"prompt": "Hi!", "stream": True, "n": 2}
    async with gateway.session.post(COMPLETIONS, json=body) as response:
        await gateway.engine.wait_for_requests(2)
        gateway.engine.step()
        await read_event(response)
        gateway.engine.fail_requests("the step failed at /root/x.y/z.py")
        rest = (await response.read()).decode()
    *_, last = rest.removesuffix("\n\n").split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "the step failed at <path>"
    assert "[DONE]" not in rest
    assert '"finish_reason":"' not in rest


async def test_a_dying_engine_is_told_as_unavailable(gateway):
    gateway.engine.hold()
    body = {"prompt": "Hi!", "stream": True}
    async with gateway.session.post(COMPLETIONS, json=body) as response:
        await gateway.engine.wait_for_requests(1)
        gateway.engine.die()
        text = (await response.read()).decode()
    assert '"code":"engine_dead"' in text


async def test_a_bug_of_ours_in_mid_stream_is_an_error_event(gateway, caplog):
    def token_bytes(token_id):
        raise RuntimeError("secret")

    gateway.tokenizer.token_bytes = token_bytes
    body = {"prompt": "Hi!", "stream": True}
    async with gateway.session.post(COMPLETIONS, json=body) as response:
        text = (await response.read()).decode()
    assert '"code":"internal_error"' in text
    assert "[DONE]" not in text
    assert "secret" not in text
    assert "secret" in caplog.text
    assert gateway.engine.num_active == 0


async def test_a_reader_that_does_not_read_is_cut_and_its_request_ends(start_gateway):
    word = "x" * 60_000  # a token this long fills the socket buffers within a few hundred
    tokenizer = byte_tokenizer(word)
    engine = FakeEngine(max_model_len=10_000, vocab_size=tokenizer.vocab_size)
    engine.script_all([259] * 9_000)
    gateway = await start_gateway(engine, tokenizer=tokenizer, send_timeout_s=0.05)
    async with posted(gateway.server.port, {"prompt": "x", "stream": True}):
        await engine.wait_for_requests(1)
        other = await gateway.post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 1})
        assert other[0] == 200  # nobody else is held up
        await engine.wait_until_idle()
    assert engine.num_aborts == 1


async def test_tokens_merge_for_a_reader_that_is_slower_than_the_engine(gateway):
    gateway.engine.hold()
    body = {"prompt": "Hi!", "stream": True, "max_tokens": 6}
    async with gateway.session.post(COMPLETIONS, json=body) as response:
        await gateway.engine.wait_for_requests(1)
        gateway.engine.step(6)  # in one turn of the loop: nobody can have read in between
        first = json.loads((await read_event(response)).removeprefix("data: "))
    assert first["choices"][0]["text"] == "defghi"
