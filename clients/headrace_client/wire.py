"""Frames of the stream protocol, written and read by the client (docs/protocol.md is normative).

Written a second time on purpose: client and server share the document, not code.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack  # type: ignore[import-untyped]
import orjson

from headrace_client.errors import ProtocolError
from headrace_client.messages import (
    Accepted,
    ChatMessage,
    Delta,
    Done,
    GenerationOptions,
    Goaway,
    Hello,
    Pong,
    Resumed,
    ServerError,
    ServerMessage,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)

__all__ = [
    "ENCODINGS",
    "Encoding",
    "EncodingName",
    "cancel_message",
    "credit_message",
    "parse_message",
    "ping_message",
    "request_body",
    "resume_message",
    "start_message",
]

EncodingName = Literal["json", "msgpack"]

# ---- writing -----------------------------------------------------------------------------------


def request_body(
    options: GenerationOptions,
    *,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[ChatMessage] | None = None,
) -> dict[str, object]:
    """Return the `request` of a start message.

    Raises:
        TypeError: an option has an unknown name.
        ValueError: a number is not finite.
    """
    if unknown := options.keys() - GenerationOptions.__annotations__.keys():
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}")
    body: dict[str, object] = {}
    if messages is not None:
        body["messages"] = [{"role": m["role"], "content": m["content"]} for m in messages]
    if prompt is not None:
        body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
        if value is not None and name != "return_token_ids":
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            body[name] = list(value) if is_list else value  # type: ignore[call-overload]
    return body


def start_message(
    stream_id: str,
    request: Mapping[str, object],
    *,
    return_token_ids: bool = False,
    credits: int | None = None,
    resumable: bool = False,
) -> dict[str, object]:
    """Return the message that begins a stream; `request` is what `request_body` returned."""
    message: dict[str, object] = {"type": "start", "id": stream_id, "request": request}
    if return_token_ids:
        message["return_token_ids"] = True
    options: dict[str, object] = {}
    if credits is not None:
        options["credits"] = credits
    if resumable:
        options["resumable"] = True
    if options:
        message["stream"] = options
    return message


def resume_message(stream_id: str, token: str, *, after: int, credits: int) -> dict[str, object]:
    """Return the message that goes on with a stream after the delta numbered `after`."""
    return {"type": "resume", "id": stream_id, "token": token, "after": after, "credits": credits}


def credit_message(stream_id: str, n: int) -> dict[str, object]:
    """Return the message that lets the server send `n` more deltas."""
    return {"type": "credit", "id": stream_id, "n": n}


def cancel_message(stream_id: str) -> dict[str, object]:
    """Return the message that ends a stream early."""
    return {"type": "cancel", "id": stream_id}


def ping_message(t: float) -> dict[str, object]:
    """Return the message that asks for a pong with the same `t`."""
    return {"type": "ping", "t": t}


# ---- reading -----------------------------------------------------------------------------------


def parse_message(fields: object) -> ServerMessage | None:
    """Read one decoded frame of the server; None for a type that this client does not know.

    Raises:
        ProtocolError: a known message lacks a field, or has one of the wrong type.
    """
    message = _Fields(fields)
    match message.text("type"):
        case "delta":
            return _parse_delta(message)
        case "accepted":
            return Accepted(
                id=message.text("id"),
                request_id=message.text("request_id"),
                prompt_tokens=message.count("prompt_tokens"),
                resume_token=message.optional("resume_token", str),
            )
        case "resumed":
            return Resumed(id=message.text("id"), request_id=message.text("request_id"))
        case "done":
            return _parse_done(message)
        case "error":
            return _parse_error(message)
        case "hello":
            return Hello(
                server=message.text("server"),
                version=message.count("version"),
                model=message.text("model"),
                limits=message.required("limits", dict),
                heartbeat_s=message.number("heartbeat_s"),
            )
        case "pong":
            return Pong(t=message.number("t"))
        case "goaway":
            return Goaway(
                reason=message.text("reason"), retry_after_s=message.number("retry_after_s")
            )
        case _:
            return None


class _Fields:
    """Typed access to the fields of one decoded object."""

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict):
            raise ProtocolError(f"the server sent no object but {type(fields).__name__}")
        self._fields = fields

    def optional[T](self, name: str, kind: type[T]) -> T | None:
        value = self._fields.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ProtocolError(f"field {name!r} of the server's message is {value!r:.50}")
        return value

    def required[T](self, name: str, kind: type[T]) -> T:
        value = self.optional(name, kind)
        if value is None:
            raise ProtocolError(f"the server's message lacks the field {name!r}")
        return value

    def inner(self, name: str) -> "_Fields":
        return _Fields(self._fields.get(name))

    def raw(self, name: str) -> Any:
        return self._fields.get(name)

    def text(self, name: str) -> str:
        return self.required(name, str)

    def count(self, name: str) -> int:
        return self.required(name, int)

    def number(self, name: str) -> float:
        value = self.number_or_none(name)
        if value is None:
            raise ProtocolError(f"the server's message lacks the field {name!r}")
        return value

    def number_or_none(self, name: str) -> float | None:
        value = self._fields.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value)):
            raise ProtocolError(f"field {name!r} of the server's message is {value!r:.50}")
        return value


def _parse_delta(message: _Fields) -> Delta:
    ids = message.optional("token_ids", list)
    if ids is not None and not all(type(token_id) is int for token_id in ids):
        raise ProtocolError("token_ids holds something that is no integer")
    logprobs = message.optional("logprobs", list)
    return Delta(
        id=message.text("id"),
        seq=message.count("seq"),
        text=message.text("text"),
        token_ids=None if ids is None else tuple(ids),
        logprobs=None if logprobs is None else tuple(map(_parse_token_logprob, logprobs)),
    )


def _parse_token_logprob(fields: object) -> TokenLogprob:
    entry = _Fields(fields)
    return TokenLogprob(
        token=entry.text("token"),
        logprob=entry.number("logprob"),
        bytes=_parse_bytes(entry),
        top_logprobs=tuple(
            TopLogprob(
                token=top.text("token"), logprob=top.number("logprob"), bytes=_parse_bytes(top)
            )
            for top in map(_Fields, entry.required("top_logprobs", list))
        ),
    )


def _parse_bytes(entry: _Fields) -> bytes | None:
    values = entry.optional("bytes", list)
    try:
        return None if values is None else bytes(values)
    except (TypeError, ValueError):
        raise ProtocolError("bytes holds something that is no byte") from None


def _parse_done(message: _Fields) -> Done:
    usage, timing = message.inner("usage"), message.inner("timing")
    stop_reason = message.raw("stop_reason")
    if isinstance(stop_reason, bool) or not isinstance(stop_reason, str | int | None):
        raise ProtocolError(f"stop_reason is {stop_reason!r:.50}")
    return Done(
        id=message.text("id"),
        seq=message.count("seq"),
        finish_reason=message.text("finish_reason"),
        stop_reason=stop_reason,
        usage=Usage(
            prompt_tokens=usage.count("prompt_tokens"),
            completion_tokens=usage.count("completion_tokens"),
            cached_tokens=usage.count("cached_tokens"),
        ),
        timing=Timing(
            queue_s=timing.number("queue_s"),
            ttft_s=timing.number_or_none("ttft_s"),
            prefill_s=timing.number("prefill_s"),
            decode_s=timing.number("decode_s"),
            e2e_s=timing.number("e2e_s"),
            itl_mean_s=timing.number_or_none("itl_mean_s"),
            itl_p50_s=timing.number_or_none("itl_p50_s"),
            itl_p99_s=timing.number_or_none("itl_p99_s"),
            itl_max_s=timing.number_or_none("itl_max_s"),
            num_preemptions=timing.count("num_preemptions"),
        ),
    )


def _parse_error(message: _Fields) -> ServerError:
    error = message.inner("error")
    return ServerError(
        id=message.optional("id", str),
        message=error.text("message"),
        type=error.text("type"),
        param=error.optional("param", str),
        code=error.optional("code", str),
        status=message.count("status"),
        retry_after_s=message.number_or_none("retry_after_s"),
    )


# ---- encodings ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """One encoding of the messages, named by its websocket subprotocol."""

    subprotocol: str
    is_text: bool
    loads: Callable[[bytes], object]
    dumps: Callable[[object], bytes]

    def encode(self, message: Mapping[str, object]) -> bytes:
        """Return the frame of a message.

        Raises:
            TypeError, ValueError, OverflowError: a value cannot be sent, such as a set or an
                integer beyond 64 bit.
        """
        return self.dumps(message)

    def decode(self, frame: bytes) -> ServerMessage | None:
        """Read one frame of the server; None for a message type that this client does not know.

        Raises:
            ProtocolError: it is not a message of the protocol.
        """
        try:
            fields = self.loads(frame)
        except (ValueError, TypeError):
            raise ProtocolError(f"the server sent a frame that is not {self.subprotocol}") from None
        return parse_message(fields)


def _load_msgpack(frame: bytes) -> object:
    return msgpack.unpackb(frame, raw=False)


def _dump_msgpack(message: object) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


ENCODINGS: dict[EncodingName, Encoding] = {
    "json": Encoding(
        subprotocol="headrace.v1.json", is_text=True, loads=orjson.loads, dumps=orjson.dumps
    ),
    "msgpack": Encoding(
        subprotocol="headrace.v1.msgpack", is_text=False, loads=_load_msgpack, dumps=_dump_msgpack
    ),
}
