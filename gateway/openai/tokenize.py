"""The tokenizer of the model, as requests meet it: /tokenize, /detokenize, /tokenizer_info."""

import msgspec
from aiohttp import web

from gateway.app_keys import CONFIG, ENGINE, GENERATOR
from gateway.errors import InvalidRequest
from gateway.json_body import convert, read_object
from gateway.openai.chat import chat_messages
from gateway.openai.protocol import MessageBody
from gateway.openai.sampling import check_model
from gateway.prompts import Prompt

__all__ = [
    "DetokenizeBody",
    "DetokenizedBody",
    "TokenizeBody",
    "TokenizedBody",
    "TokenizerInfoBody",
    "add_routes",
]

# A prompt that is too long for the model can still be counted, within reason.
MAX_CONTEXTS = 4


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to be shown as text."""

    model: str | None = None
    tokens: list[int]


class TokenizedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, and how many the model's context holds."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizedBody(msgspec.Struct, frozen=True):
    """The text of the tokens, special ones included."""

    prompt: str


class TokenizerInfoBody(msgspec.Struct, frozen=True, kw_only=True):
    """What tokenizer_config.json says, by the same names, as far as it is known."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


def add_routes(app: web.Application) -> None:
    """Serve them."""
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/tokenizer_info", tokenizer_info)


async def tokenize(request: web.Request) -> web.Response:
    body = convert(await read_object(request), TokenizeBody)
    check_model(body.model, request.app[CONFIG])
    max_model_len = request.app[ENGINE].limits.max_model_len
    prompt = _prompt(body)
    tokens: tuple[int, ...] = ()
    if prompt:
        tokens = await request.app[GENERATOR].tokenize(
            prompt,
            max_tokens=MAX_CONTEXTS * max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    return web.json_response(
        {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens}
    )


async def detokenize(request: web.Request) -> web.Response:
    body = convert(await read_object(request), DetokenizeBody)
    check_model(body.model, request.app[CONFIG])
    limits = request.app[ENGINE].limits
    if len(body.tokens) > MAX_CONTEXTS * limits.max_model_len:
        raise InvalidRequest(
            f"tokens may hold at most {MAX_CONTEXTS * limits.max_model_len} ids", param="tokens"
        )
    if not all(0 <= token_id < limits.vocab_size for token_id in body.tokens):
        raise InvalidRequest(f"tokens must be from 0 to {limits.vocab_size - 1}", param="tokens")
    text = await request.app[GENERATOR].detokenize(tuple(body.tokens))
    return web.json_response({"prompt": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """Tell remote tokenizers where a text begins and ends, and how a conversation is written."""
    tokenizer, template = request.app[GENERATOR].tokenizer, request.app[GENERATOR].chat_template
    bos = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    tokens: dict[str, str | None] = {
        "bos_token": tokenizer.decode(bos, skip_special=False) or None,
        "eos_token": tokenizer.decode(tokenizer.eos_ids[:1], skip_special=False) or None,
        **(template.tokens if template is not None else {}),
    }
    body = TokenizerInfoBody(
        bos_token=tokens["bos_token"],
        eos_token=tokens["eos_token"],
        pad_token=tokens.get("pad_token"),
        unk_token=tokens.get("unk_token"),
        add_bos_token=tokenizer.adds_bos,
        model_max_length=request.app[ENGINE].limits.max_model_len,
        chat_template=template.source if template is not None else None,
    )
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt
    return chat_messages(body.messages or [])
