import asyncio
import threading

import pytest

from fakes import BOS, EOS, IM_START, ByteChatTemplate, byte_tokenizer
from gateway.errors import InvalidRequest, Overloaded
from gateway.prompts import PromptEncoder
from gateway.text_codec import ChatMessage

TEMPLATE = ByteChatTemplate()


@pytest.fixture
def make_encoder():
    encoders = []

    def make(tokenizer=None, chat_template=TEMPLATE, max_concurrent=8):
        encoder = PromptEncoder(
            tokenizer or byte_tokenizer(),
            chat_template,
            num_threads=1,
            max_concurrent=max_concurrent,
        )
        encoders.append(encoder)
        return encoder

    yield make
    for encoder in encoders:
        encoder.close()


async def encode(encoder, prompt, max_tokens=100, **options):
    return await encoder.encode(
        prompt, max_tokens=max_tokens, bound="fit", vocab_size=259, **options
    )


def user(content):
    return ChatMessage(role="user", content=content)


async def refused(encoder, prompt, **options):
    with pytest.raises(InvalidRequest) as caught:
        await encode(encoder, prompt, **options)
    return caught.value


async def test_text_becomes_its_tokens(make_encoder):
    assert await encode(make_encoder(), "aé") == (0x61, 0xC3, 0xA9)


async def test_a_raw_prompt_may_name_special_tokens(make_encoder):
    assert await encode(make_encoder(), "a<|im_end|>") == (ord("a"), EOS)


async def test_a_chat_message_cannot_forge_a_special_token(make_encoder):
    ids = await encode(make_encoder(), (user("a<|im_end|>"),), add_generation_prompt=False)
    assert ids == (IM_START, *b"user\na<|im_end|>", EOS, ord("\n"))


async def test_a_bos_is_added_where_the_model_has_one_and_the_caller_wants_it(make_encoder):
    tokenizer = byte_tokenizer()
    tokenizer.adds_bos = True
    encoder = make_encoder(tokenizer)
    assert await encode(encoder, "a") == (BOS, ord("a"))
    assert await encode(encoder, "a", add_special_tokens=False) == (ord("a"),)


async def test_token_ids_pass_as_they_are(make_encoder):
    assert await encode(make_encoder(), (1, 258)) == (1, 258)


@pytest.mark.parametrize("ids", [(259,), (-1,), (5, 10**30)])
async def test_token_ids_outside_the_vocabulary_are_refused(make_encoder, ids):
    error = await refused(make_encoder(), ids)
    assert error.param == "prompt"
    assert "from 0 to 258" in error.message


@pytest.mark.parametrize("prompt", ["", ()])
async def test_an_empty_prompt_is_refused(make_encoder, prompt):
    assert (await refused(make_encoder(), prompt)).param == "prompt"


@pytest.mark.parametrize("prompt", ["x" * 101, (1,) * 101])
async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(make_encoder, prompt):
    error = await refused(make_encoder(), prompt)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert "101" in error.message
    assert "100" in error.message


async def test_a_conversation_that_is_too_long_names_the_messages(make_encoder):
    # 4 + 4 + 90 tokens fit 100, but not with the 11 of the generation prompt.
    error = await refused(make_encoder(), (user("x" * 90),))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert "109" in error.message


async def test_text_that_cannot_fit_is_never_tokenized(make_encoder):
    tokenizer = byte_tokenizer(b"1234")  # the longest token has 4 bytes
    tokenizer.encode = None  # would raise if called
    error = await refused(make_encoder(tokenizer), "x" * 401)
    assert "at least 101" in error.message


async def test_messages_that_cannot_fit_are_never_rendered(make_encoder):
    error = await refused(make_encoder(chat_template=None), (user(""),) * 101)
    assert error.code == "context_length_exceeded"


async def test_what_the_template_refuses_is_a_client_error(make_encoder):
    error = await refused(make_encoder(), (user("refuse"),))
    assert error.param == "messages"
    assert "the template refuses this conversation" in error.message


async def test_a_model_without_template_has_no_chat(make_encoder):
    error = await refused(make_encoder(chat_template=None), (user("x"),))
    assert error.param == "messages"
    assert "no chat template" in error.message


class GatedTokenizer:
    """Blocks its thread in `encode` until the gate opens."""

    vocab_size = 256
    adds_bos = False

    def __init__(self):
        self.gate = threading.Event()
        self.entered = threading.Event()

    def token_bytes(self, token_id):
        return b"x"

    def encode(self, text, *, parse_special, add_bos):
        self.entered.set()
        self.gate.wait(10)  # so that a failing test does not hang at exit
        return [1]


async def test_the_event_loop_runs_while_a_prompt_is_tokenized(make_encoder):
    tokenizer = GatedTokenizer()
    task = asyncio.create_task(encode(make_encoder(tokenizer), "x"))
    await asyncio.to_thread(tokenizer.entered.wait)
    assert not task.done()
    tokenizer.gate.set()
    assert await task == (1,)


async def test_a_cancelled_caller_does_not_wait_for_the_thread(make_encoder):
    tokenizer = GatedTokenizer()
    task = asyncio.create_task(encode(make_encoder(tokenizer), "x"))
    await asyncio.to_thread(tokenizer.entered.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    tokenizer.gate.set()


async def test_only_so_many_prompts_may_wait(make_encoder):
    tokenizer = GatedTokenizer()
    encoder = make_encoder(tokenizer, max_concurrent=1)
    task = asyncio.create_task(encode(encoder, "x"))
    await asyncio.to_thread(tokenizer.entered.wait)
    with pytest.raises(Overloaded):
        await encode(encoder, "x")
    tokenizer.gate.set()
    assert await task == (1,)
    assert await encode(encoder, "x") == (1,)
