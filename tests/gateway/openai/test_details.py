"""What choices tell besides their text, over HTTP: by hand from FakeEngine's rule."""

import json

import pytest

from fakes import FakeEngine, byte_tokenizer

URL = "/v1/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 3}
EMOJI = "🧎".encode()


async def complete(gateway, **body):
    status, answer = await gateway.post(URL, {"prompt": "Hi!", "max_tokens": 3, **body})
    assert status == 200, answer
    return answer["choices"]


async def streamed(gateway, url=URL, **body):
    body = {"prompt": "Hi!", "max_tokens": 3, "stream": True, **body}
    async with gateway.session.post(url, json=body) as response:
        assert response.status == 200
        events = (await response.read()).decode().split("\n\n")
    data = [event.removeprefix("data: ") for event in events if event.startswith("data: {")]
    return [json.loads(chunk)["choices"][0] for chunk in data]


def joined(choices):
    """The logprobs of a streamed completion, put together."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {name: [x for part in parts for x in part[name]] for name in parts[0]}


async def test_a_completion_tells_how_likely_its_tokens_were(gateway):
    """The prompt has 3 characters, so the answer is "def" from character 3 on."""
    [choice] = await complete(gateway, logprobs=1)
    assert choice["logprobs"] == {
        "tokens": ["d", "e", "f"],
        "token_logprobs": [-0.1, -0.101, -0.102],
        "top_logprobs": [
            {"e": 0.4, "d": -0.1},
            {"f": pytest.approx(0.399), "e": -0.101},
            {"g": pytest.approx(0.398), "f": -0.102},
        ],
        "text_offset": [3, 4, 5],
    }


async def test_a_stream_tells_the_same(gateway):
    [whole] = await complete(gateway, logprobs=2)
    assert joined(await streamed(gateway, logprobs=2)) == whole["logprobs"]


async def test_no_alternatives_still_tell_the_token_that_came(gateway):
    [choice] = await complete(gateway, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{"d": -0.1}, {"e": -0.101}, {"f": -0.102}]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_evaluations_read_the_prompt(gateway, max_tokens, stream):
    """As lm-eval asks: ids, echo, one token. It drops the last entry, so EOS must have one too."""
    ids = list(b"Hi!")
    gateway.engine.script(ids, [])  # EOS at once
    body = {"prompt": ids, "echo": True, "max_tokens": max_tokens, "logprobs": 1}
    if stream:
        choices = await streamed(gateway, **body)
        text, logprobs = "".join(choice["text"] for choice in choices), joined(choices)
    else:
        [choice] = await complete(gateway, **body)
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "Hi!"
    eos = ["<|im_end|>"] * max_tokens
    assert logprobs["tokens"] == ["H", "i", "!", *eos]
    assert logprobs["token_logprobs"] == [None, -0.105, -0.033, *[-0.256] * max_tokens]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"j": pytest.approx(0.395), "i": -0.105}
    assert logprobs["text_offset"] == [0, 1, 2, *[3] * max_tokens]


async def test_no_token_is_counted_where_none_is_wanted(gateway):
    body = {"prompt": "Hi!", "echo": True, "max_tokens": 0}
    status, answer = await gateway.post(URL, body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_echo_comes_first_and_once_for_every_choice(gateway):
    choices = await complete(gateway, prompt=["Hi!", "x"], n=2, echo=True, max_tokens=2)
    assert [choice["text"] for choice in choices] == ["Hi!de", "Hi!de", "xbc", "xbc"]
    assert choices[0]["logprobs"] is None
    chunks = await streamed(gateway, echo=True)
    assert "".join(chunk["text"] for chunk in chunks) == "Hi!def"


async def test_chat_tells_bytes_and_alternatives(gateway):
    status, answer = await gateway.post(
        "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}
    )
    assert status == 200
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    token_id = content[0]["bytes"][0]
    assert content[0] == {
        "token": chr(token_id),
        "logprob": -token_id / 1000,
        "bytes": [token_id],
        "top_logprobs": [
            {
                "token": chr(token_id + 1),
                "logprob": pytest.approx(0.5 - token_id / 1000),
                "bytes": [token_id + 1],
            }
        ],
    }


async def test_chat_logprobs_alone_need_no_number(gateway):
    """A public bug: `logprobs: true` without `top_logprobs` was refused."""
    status, answer = await gateway.post("/v1/chat/completions", {**CHAT, "logprobs": True})
    assert status == 200
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], [], []]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_a_cut_character_are_true(start_gateway, stream):
    """An emoji in two tokens: neither is text, both are told by their bytes."""
    tokenizer = byte_tokenizer(EMOJI[:2], EMOJI[2:])
    engine = FakeEngine(vocab_size=261)
    engine.script_all([ord("x"), 259, 260])
    gateway = await start_gateway(engine, tokenizer=tokenizer)
    body = {**CHAT, "max_tokens": 9, "logprobs": True}
    if stream:
        choices = await streamed(gateway, "/v1/chat/completions", **body)
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        content = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    else:
        _, answer = await gateway.post("/v1/chat/completions", body)
        [choice] = answer["choices"]
        text, content = choice["message"]["content"], choice["logprobs"]["content"]
    assert text == "x🧎"
    names = [entry["token"] for entry in content]
    assert names == ["x", "bytes:\\xf0\\x9f", "bytes:\\xa7\\x8e", "<|im_end|>"]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in content) == text.encode()
    assert content[-1]["bytes"] is None  # EOS is not text


async def test_tokens_that_look_alike_are_told_apart(start_gateway):
    """Two words with the same text: 259 is sampled, 260 is the alternative."""
    engine = FakeEngine(vocab_size=261)
    engine.script_all([259])
    gateway = await start_gateway(engine, tokenizer=byte_tokenizer("w", "w"))
    [choice] = await complete(gateway, logprobs=1)
    assert choice["logprobs"]["top_logprobs"][0] == {
        "w": pytest.approx(0.241),
        "token_id:259": -0.259,
    }


async def test_token_ids_are_told_if_wanted(gateway):
    [choice] = await complete(gateway, return_token_ids=True)
    assert choice["token_ids"] == list(b"def")
    assert choice["prompt_token_ids"] == list(b"Hi!")
    chunks = await streamed(gateway, return_token_ids=True)
    assert [i for chunk in chunks for i in chunk.get("token_ids", [])] == list(b"def")
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [
        list(b"Hi!")
    ]
    [choice] = await complete(gateway)
    assert not {"token_ids", "prompt_token_ids"} & set(choice)


async def test_names_may_be_ids(gateway):
    [choice] = await complete(gateway, logprobs=0, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"] == ["token_id:100", "token_id:101", "token_id:102"]


async def test_the_prompt_is_told_as_vllm_tells_it(gateway):
    """Of "Hi!" the fake says: -id/1000, and two other tokens that are likelier."""
    [choice] = await complete(gateway, prompt_logprobs=2)
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "106": {"logprob": pytest.approx(0.395), "rank": 1, "decoded_token": "j"},
        "107": {"logprob": pytest.approx(-0.605), "rank": 2, "decoded_token": "k"},
        "105": {"logprob": -0.105, "rank": None, "decoded_token": "i"},
    }
    assert third["33"] == {"logprob": -0.033, "rank": None, "decoded_token": "!"}
    status, answer = await gateway.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0})
    assert status == 200
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in answer["choices"][0]


async def test_an_echo_beside_it_has_its_own_number_of_alternatives(gateway):
    [choice] = await complete(gateway, prompt_logprobs=2, echo=True, logprobs=1)
    assert len(choice["prompt_logprobs"][1]) == 3
    assert choice["logprobs"]["top_logprobs"][1] == {"j": pytest.approx(0.395), "i": -0.105}


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 1, "prompt_logprobs": 21}])
@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_prompt_logprobs_that_cannot_be_told_are_refused_by_name(gateway, url, fields):
    body = {"prompt": "Hi!"} if url == URL else CHAT
    status, answer = await gateway.post(url, {**body, "prompt_logprobs": 1, **fields})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
