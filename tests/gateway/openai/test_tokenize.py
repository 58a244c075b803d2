import pytest

from fakes import BOS, EOS, FakeEngine, byte_tokenizer


async def test_a_text_is_tokenized_as_a_completion_prompt(gateway):
    status, body = await gateway.post("/tokenize", {"prompt": "é<|im_end|>"})
    assert status == 200
    assert body == {"count": 3, "max_model_len": 1024, "tokens": [0xC3, 0xA9, EOS]}


async def test_a_conversation_is_tokenized_with_its_template(gateway):
    messages = [{"role": "user", "content": "yo"}]
    _, body = await gateway.post("/tokenize", {"messages": messages})
    assert body["count"] == 4 + len("user") + len("yo") + 11
    _, body = await gateway.post(
        "/tokenize", {"messages": messages, "add_generation_prompt": False}
    )
    assert body["count"] == 4 + len("user") + len("yo")


async def test_the_beginning_of_sequence_token_can_be_left_out(start_gateway):
    tokenizer = byte_tokenizer()
    tokenizer.adds_bos = True
    gateway = await start_gateway(tokenizer=tokenizer)
    _, body = await gateway.post("/tokenize", {"prompt": "a"})
    assert body["tokens"] == [BOS, ord("a")]
    _, body = await gateway.post("/tokenize", {"prompt": "a", "add_special_tokens": False})
    assert body["tokens"] == [ord("a")]


async def test_an_empty_text_has_no_tokens(gateway):
    assert (await gateway.post("/tokenize", {"prompt": ""}))[1]["tokens"] == []


async def test_tokens_become_text_again_specials_included(gateway):
    status, body = await gateway.post("/detokenize", {"tokens": [0xC3, 0xA9, EOS]})
    assert (status, body) == (200, {"prompt": "é<|im_end|>"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x" * 41}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 41}, "tokens"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(start_gateway, path, body, param):
    gateway = await start_gateway(FakeEngine(max_model_len=10))
    status, answer = await gateway.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_the_special_tokens_and_the_template_are_told(gateway):
    status, body = await gateway.get("/tokenizer_info")
    assert (status, body["bos_token"], body["eos_token"]) == (200, "<s>", "<|im_end|>")
    assert (body["chat_template"], body["add_bos_token"]) == ("{{ messages }}", False)
    assert body["model_max_length"] == 1024


async def test_a_model_without_a_template_still_tells_where_a_text_ends(start_gateway):
    gateway = await start_gateway(chat_template=None)
    _, body = await gateway.get("/tokenizer_info")
    assert (body["bos_token"], body["eos_token"]) == ("<s>", "<|im_end|>")
    assert body["chat_template"] is None
