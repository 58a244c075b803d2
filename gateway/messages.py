"""Messages of the native stream protocol and their two encodings (docs/protocol.md is normative).

One set of types serves both: orjson or msgpack turns a frame into plain objects, `msgspec.convert`
checks them against the types, and the way back is the same. So whatever one encoding refuses,
the other refuses with the same words.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn, Self

import msgpack  # type: ignore[import-untyped]
import msgspec
import orjson
from aiohttp import WSMsgType
from msgspec import UNSET, Meta, UnsetType

from gateway.callers import Caller
from gateway.errors import GatewayError, InvalidRequest
from gateway.generation import ChatMessage, GenerationRequest, Timing, Usage
from gateway.token_fields import TokenFields
from gateway.token_logprobs import TokenLogprob

__all__ = [
    "PROTOCOL_VERSION",
    "SUBPROTOCOLS",
    "Accepted",
    "Cancel",
    "ClientMessage",
    "Codec",
    "Credit",
    "Delta",
    "Done",
    "Error",
    "ErrorBody",
    "Goaway",
    "Hello",
    "HelloLimits",
    "InvalidFrame",
    "InvalidMessage",
    "Message",
    "Ping",
    "Pong",
    "Resume",
    "Resumed",
    "ServerMessage",
    "Start",
    "StartRequest",
    "StreamOptions",
    "generation_request",
]

PROTOCOL_VERSION = 1

StreamId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:\-]+\Z")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NumCredits = Annotated[int, Meta(ge=1, lt=2**31)]


# ---- client to server --------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str


class StartRequest(TokenFields, frozen=True, kw_only=True, omit_defaults=True):
    """What to generate; ranges are checked where requests of every wire format are prepared."""

    prompt: str | list[TokenId] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int | None = None
    queue_timeout: float | None = None
    deadline: float | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a stream is to be sent; without `credits` it is sent as fast as it can be."""

    credits: NumCredits | None = None
    resumable: bool | None = None


class Start(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="start"):
    """Begin a generation named `id`."""

    id: StreamId
    request: StartRequest
    return_token_ids: bool | None = None
    stream: StreamOptions | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    """Go on, as `id`, with a stream from another connection; `after` is its last seq there."""

    id: StreamId
    token: Annotated[str, Meta(min_length=1, max_length=128)]
    after: Annotated[int, Meta(ge=-1, lt=2**53)] | None = None
    credits: NumCredits | None = None


class Credit(msgspec.Struct, frozen=True, kw_only=True, tag="credit"):
    """Allow `n` more deltas of the stream `id`."""

    id: StreamId
    n: NumCredits


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """End the stream named `id`."""

    id: StreamId


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Ask for a `pong` with the same `t`."""

    t: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, lt=2.0**63)]  # no NaN, no infinity


ClientMessage = Start | Resume | Credit | Cancel | Ping


# ---- server to client --------------------------------------------------------------------------


class HelloLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that a client must keep."""

    max_model_len: int
    max_streams: int
    max_message_bytes: int
    resume_ttl_s: float


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a connection."""

    server: str
    version: int
    model: str
    limits: HelloLimits
    heartbeat_s: float


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The stream's request is in the engine."""

    id: str
    request_id: str
    prompt_tokens: int
    resume_token: str | UnsetType = UNSET


class Resumed(msgspec.Struct, frozen=True, kw_only=True, tag="resumed"):
    """What comes next as `id` is the rest of a stream that began on another connection."""

    id: str
    request_id: str


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """New text of a stream."""

    id: str
    seq: int
    text: str
    token_ids: list[int] | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Last message of a stream that ended well, or was cancelled."""

    id: str
    seq: int
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
    timing: Timing


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The same four fields as in an HTTP error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """Last message of a stream that failed; without `id`, an answer to a frame that starts none."""

    id: str | UnsetType = UNSET
    error: ErrorBody
    status: int
    retry_after_s: float | UnsetType = UNSET

    @classmethod
    def of(cls, error: GatewayError, stream_id: str | None) -> Self:
        """The message for `error`, as the end of a stream or, without an id, on its own."""
        return cls(
            id=UNSET if stream_id is None else stream_id,
            error=ErrorBody(**error.to_wire()),
            status=error.status,
            retry_after_s=UNSET if error.retry_after_s is None else error.retry_after_s,
        )


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """Answer to `ping`."""

    t: int | float


class Goaway(msgspec.Struct, frozen=True, kw_only=True, tag="goaway"):
    """The server is about to close the connection."""

    reason: str
    retry_after_s: float


ServerMessage = Hello | Accepted | Resumed | Delta | Done | Error | Pong | Goaway


# ---- encodings ---------------------------------------------------------------------------------


class InvalidFrame(InvalidRequest):
    """A frame that is not an object in the connection's encoding."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_frame")


class InvalidMessage(InvalidRequest):
    """An object that is not a message of the protocol.

    Attributes:
        start_id: the valid id of a `start` or `resume`: the stream that the message would open.
    """

    def __init__(
        self, message: str, *, param: str | None, code: str, start_id: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.start_id = start_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """One encoding of the messages, named by its websocket subprotocol."""

    subprotocol: str
    frame_type: WSMsgType
    loads: Callable[[bytes], object]
    encode: Callable[[ServerMessage], bytes]

    def decode(self, frame: bytes) -> ClientMessage:
        """Read one frame of a client.

        Raises:
            InvalidFrame: it is not an object of this encoding.
            InvalidMessage: it is not a message of the protocol.
        """
        try:
            fields = self.loads(frame)
        # msgpack raises TypeError for maps whose keys cannot be hashed.
        except (ValueError, TypeError, RecursionError):
            raise InvalidFrame(f"the frame is not valid {self.subprotocol}") from None
        if not isinstance(fields, dict):
            raise InvalidFrame(f"a message must be an object, got {_kind(fields)}")
        return _convert(fields)


def _load_msgpack(frame: bytes) -> object:
    return msgpack.unpackb(frame, raw=False, ext_hook=_refuse_extension)


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed")


SUBPROTOCOLS: dict[str, Codec] = {
    codec.subprotocol: codec
    for codec in (
        Codec(
            subprotocol="headrace.v1.json",
            frame_type=WSMsgType.TEXT,
            loads=orjson.loads,
            encode=msgspec.json.Encoder().encode,
        ),
        Codec(
            subprotocol="headrace.v1.msgpack",
            frame_type=WSMsgType.BINARY,
            loads=_load_msgpack,
            encode=msgspec.msgpack.Encoder().encode,
        ),
    )
}

_TYPES: dict[str, type[ClientMessage]] = {
    "start": Start,
    "resume": Resume,
    "credit": Credit,
    "cancel": Cancel,
    "ping": Ping,
}
_STREAM_ID = re.compile(r"[A-Za-z0-9_.:\-]{1,128}")
# msgspec ends its message with the path of the value at fault: "... - at `$.request.stop[0]`".
_PATH = re.compile(r" - at `\$\.?(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def _convert(fields: dict[str, object]) -> ClientMessage:
    kind = fields.get("type")
    message_type = _TYPES.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        known = ", ".join(_TYPES)
        raise InvalidMessage(f"type must be one of {known}", param="type", code="unknown_type")
    try:
        return msgspec.convert(fields, message_type)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error))
    raise InvalidMessage(
        message,
        param=param,
        code="invalid_message",
        start_id=_valid_id(fields.get("id")) if message_type in (Start, Resume) else None,
    )


def _explain(text: str) -> tuple[str, str | None]:
    """Split msgspec's message into a sentence and the field at fault, as a client spells it."""
    found = _PATH.search(text)
    path = found[1] if found else ""
    problem = text[: found.start()] if found else text
    if missing := _MISSING.search(problem):
        path = f"{path}.{missing[1]}" if path else missing[1]
        problem = "this field is required"
    param = path.removeprefix("request.") or None
    return (f"{param}: {problem}" if param else problem), param


def _valid_id(value: object) -> str | None:
    return value if isinstance(value, str) and _STREAM_ID.fullmatch(value) else None


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", type(None): "null"}.get(type(value), "a number")


def generation_request(request: StartRequest, *, caller: Caller) -> GenerationRequest:
    """Turn the wire's request into the gateway's; what is absent keeps the gateway's default.

    Args:
        request: as it came.
        caller: who is asking.

    Raises:
        InvalidMessage: not exactly one of `prompt` and `messages` is given, or no message.
        InvalidRequest: the tenant cannot be one.
        Forbidden: it is not the caller's.
    """
    if (request.prompt is None) == (request.messages is None):
        raise InvalidMessage(
            "exactly one of prompt and messages is required",
            param="messages" if request.prompt is not None else "prompt",
            code="invalid_message",
        )
    prompt: str | tuple[int, ...] | tuple[ChatMessage, ...]
    if request.messages is not None:
        if not request.messages:
            raise InvalidMessage(
                "messages must not be empty", param="messages", code="invalid_message"
            )
        prompt = tuple(ChatMessage(role=m.role, content=m.content) for m in request.messages)
    else:
        prompt = request.prompt if isinstance(request.prompt, str) else tuple(request.prompt or ())
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    default = GenerationRequest(prompt=prompt)
    return GenerationRequest(
        prompt=prompt,
        max_tokens=request.max_tokens,
        min_tokens=_either(request.min_tokens, default.min_tokens),
        temperature=_either(request.temperature, default.temperature),
        top_k=_either(request.top_k, default.top_k),
        top_p=_either(request.top_p, default.top_p),
        min_p=_either(request.min_p, default.min_p),
        seed=request.seed,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=_either(
            request.include_stop_str_in_output, default.include_stop_str_in_output
        ),
        ignore_eos=_either(request.ignore_eos, default.ignore_eos),
        tokens=request.wishes(logprobs=request.logprobs),
        cache_salt=request.cache_salt,
        tenant=caller.tenant_of(request.tenant),
        account=caller.account,
        priority=_either(request.priority, default.priority),
        queue_timeout_s=request.queue_timeout,
        deadline_s=request.deadline,
    )


def _either[T](value: T | None, default: T) -> T:
    return default if value is None else value
