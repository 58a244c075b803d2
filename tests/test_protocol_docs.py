"""The examples of docs/protocol.md are test vectors, for the gateway and for the client alike."""

import re
from pathlib import Path

import msgpack
import msgspec
import orjson
import pytest
from msgspec import UNSET

from gateway.errors import GatewayError, InvalidRequest, NotFound, Overloaded
from gateway.generation import Timing, Usage
from gateway.messages import (
    SUBPROTOCOLS,
    Accepted,
    Delta,
    Done,
    Error,
    Goaway,
    Hello,
    HelloLimits,
    Pong,
    Resumed,
    ServerMessage,
)
from gateway.token_logprobs import TokenLogprob, TopLogprob
from headrace_client import messages as client_messages
from headrace_client.wire import (
    ENCODINGS,
    cancel_message,
    credit_message,
    parse_message,
    ping_message,
    request_body,
    resume_message,
    start_message,
)

DOCUMENT = Path(__file__).parents[1] / "docs" / "protocol.md"


def examples() -> dict[tuple[str, str], dict]:
    """Return the JSON blocks of the document, by section and heading."""
    found = {}
    section = heading = ""
    for part in re.split(r"(?m)^(#{2,3} .*$|```json\n(?:.*\n)*?```$)", DOCUMENT.read_text()):
        if part.startswith("## "):
            section, heading = part.removeprefix("## "), ""
        elif part.startswith("### "):
            heading = part.removeprefix("### ")
        elif part.startswith("```json"):
            assert heading, f"an example under {section!r} has no heading of its own"
            assert (section, heading) not in found, f"{heading!r} has two examples"
            found[section, heading] = orjson.loads(part.removeprefix("```json").removesuffix("```"))
    return found


EXAMPLES = examples()
FROM_CLIENT = {h: e for (section, h), e in EXAMPLES.items() if section == "Client to server"}
FROM_SERVER = {h: e for (section, h), e in EXAMPLES.items() if section == "Server to client"}

# What code builds each message from, written out by hand.
CLIENT_BUILDS = {
    "start": lambda: start_message(
        "chat-1",
        request_body(
            {"max_tokens": 64, "temperature": 0.0},
            messages=[
                {"role": "system", "content": "You answer in one sentence."},
                {"role": "user", "content": "What is the capital of France?"},
            ],
        ),
    ),
    "start with every option": lambda: start_message(
        "a.b:c_d-1",
        request_body(
            {
                "model": "smollm2-135m",
                "max_tokens": 128,
                "min_tokens": 4,
                "temperature": 0.8,
                "top_p": 0.95,
                "top_k": 40,
                "min_p": 0.05,
                "logprobs": 2,
                "seed": 1234,
                "stop": ("\n\n", "THE END"),
                "stop_token_ids": (2,),
                "include_stop_str_in_output": True,
                "ignore_eos": True,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "repetition_penalty": 1.1,
                "logit_bias": {"42": -100.0},
                "bad_words": ["goblin"],
                "allowed_token_ids": [7, 8, 9],
                "structured_outputs": {"regex": "[a-z ]+"},
                "cache_salt": "project-7",
                "tenant": "alice",
                "priority": -1,
                "queue_timeout": 2.5,
                "deadline": 60.0,
                "return_token_ids": True,
            },
            prompt="Once upon a time",
        ),
        return_token_ids=True,
    ),
    "start of a stream that can be resumed": lambda: start_message(
        "chat-5",
        request_body({"max_tokens": 256}, prompt="Once upon a time"),
        credits=64,
        resumable=True,
    ),
    "resume": lambda: resume_message("chat-5", "m2tRl0tYkXkqQx3vB9Zr1w", after=41, credits=64),
    "credit": lambda: credit_message("chat-5", 32),
    "cancel": lambda: cancel_message("chat-1"),
    "ping": lambda: ping_message(1767225600.25),
}

SERVER_BUILDS: dict[str, ServerMessage] = {
    "hello": Hello(
        server="headrace/0.1.0",
        version=1,
        model="smollm2-135m",
        limits=HelloLimits(
            max_model_len=8192, max_streams=32, max_message_bytes=8 * 1024 * 1024, resume_ttl_s=30.0
        ),
        heartbeat_s=20.0,
    ),
    "accepted": Accepted(id="chat-1", request_id="req-5f0c", prompt_tokens=31),
    "accepted, resumable": Accepted(
        id="chat-5",
        request_id="req-77a1",
        prompt_tokens=4,
        resume_token="m2tRl0tYkXkqQx3vB9Zr1w",
    ),
    "resumed": Resumed(id="chat-5", request_id="req-77a1"),
    "delta": Delta(id="chat-1", seq=0, text="The capital"),
    "delta with token ids": Delta(id="a.b:c_d-1", seq=7, text=" there was", token_ids=[665, 436]),
    "delta with log-probabilities": Delta(
        id="chat-6",
        seq=0,
        text="Hi",
        logprobs=[
            TokenLogprob(
                token="Hi",
                logprob=-0.25,
                bytes=(72, 105),
                top_logprobs=(
                    TopLogprob(token="Hi", logprob=-0.25, bytes=(72, 105)),
                    TopLogprob(token="<|im_end|>", logprob=-2.5, bytes=None),
                ),
            )
        ],
    ),
    "done": Done(
        id="chat-1",
        seq=7,
        finish_reason="stop",
        stop_reason=None,
        usage=Usage(prompt_tokens=31, completion_tokens=8, cached_tokens=16),
        timing=Timing(
            queue_s=0.001,
            ttft_s=0.05,
            prefill_s=0.049,
            decode_s=0.14,
            e2e_s=0.19,
            itl_mean_s=0.02,
            itl_p50_s=0.019,
            itl_p99_s=0.031,
            itl_max_s=0.031,
            num_preemptions=0,
        ),
    ),
    "done after a cancel before the first token": Done(
        id="chat-2",
        seq=0,
        finish_reason="cancelled",
        stop_reason=None,
        usage=Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0),
        timing=Timing(
            queue_s=0.0,
            ttft_s=None,
            prefill_s=0.0,
            decode_s=0.0,
            e2e_s=0.004,
            itl_mean_s=None,
            itl_p50_s=None,
            itl_p99_s=None,
            itl_max_s=None,
            num_preemptions=0,
        ),
    ),
    "done at the deadline": Done(
        id="chat-4",
        seq=3,
        finish_reason="deadline",
        stop_reason=None,
        usage=Usage(prompt_tokens=31, completion_tokens=3, cached_tokens=0),
        timing=Timing(
            queue_s=0.5,
            ttft_s=0.55,
            prefill_s=0.05,
            decode_s=0.04,
            e2e_s=0.6,
            itl_mean_s=0.02,
            itl_p50_s=0.019,
            itl_p99_s=0.021,
            itl_max_s=0.021,
            num_preemptions=1,
        ),
    ),
    "error that ends a stream": Error.of(
        InvalidRequest("temperature must be in [0, 100], got -1.0", param="temperature"), "chat-1"
    ),
    "error with a time to retry after": Error.of(
        Overloaded("too many requests wait", retry_after_s=1.5, code="queued_requests"), "chat-3"
    ),
    "error that belongs to no stream": Error.of(
        NotFound("no open stream has the id 'chat-9'", param="id", code="unknown_id"), None
    ),
    "error of a resume that came too late": Error.of(
        GatewayError(
            "what comes after 41 is not kept",
            status=410,
            type="invalid_request_error",
            param="after",
            code="resume_gap",
        ),
        "chat-5",
    ),
    "pong": Pong(t=1767225600.25),
    "goaway": Goaway(reason="the server is shutting down", retry_after_s=5.0),
}


def load(subprotocol: str, frame: bytes) -> object:
    """Decode a frame independently of the code under test."""
    return orjson.loads(frame) if subprotocol.endswith("json") else msgpack.unpackb(frame)


def dump(subprotocol: str, message: object) -> bytes:
    return orjson.dumps(message) if subprotocol.endswith("json") else msgpack.packb(message)


both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])


def test_every_example_is_built_here_and_nothing_else():
    assert set(FROM_CLIENT) == set(CLIENT_BUILDS)
    assert set(FROM_SERVER) == set(SERVER_BUILDS)
    assert len(EXAMPLES) == len(FROM_CLIENT) + len(FROM_SERVER)


@both_encodings
@pytest.mark.parametrize("heading", FROM_CLIENT)
def test_the_client_emits_exactly_the_example(heading, encoding):
    frame = ENCODINGS[encoding].encode(CLIENT_BUILDS[heading]())
    assert load(ENCODINGS[encoding].subprotocol, frame) == FROM_CLIENT[heading]


@both_encodings
@pytest.mark.parametrize("heading", FROM_CLIENT)
def test_the_gateway_parses_exactly_the_example(heading, encoding):
    codec = SUBPROTOCOLS[f"headrace.v1.{encoding}"]
    message = codec.decode(dump(codec.subprotocol, FROM_CLIENT[heading]))
    # Back to plain objects: each field of the example was understood, and none was made up.
    assert msgspec.to_builtins(message) == FROM_CLIENT[heading]


@both_encodings
@pytest.mark.parametrize("heading", FROM_SERVER)
def test_the_gateway_emits_exactly_the_example(heading, encoding):
    codec = SUBPROTOCOLS[f"headrace.v1.{encoding}"]
    emitted = load(codec.subprotocol, codec.encode(SERVER_BUILDS[heading]))
    assert emitted == FROM_SERVER[heading]


@both_encodings
@pytest.mark.parametrize("heading", FROM_SERVER)
def test_the_client_parses_exactly_the_example(heading, encoding):
    subprotocol = f"headrace.v1.{encoding}"
    example = FROM_SERVER[heading]
    parsed = ENCODINGS[encoding].decode(dump(subprotocol, example))
    assert parsed is not None
    assert type(parsed).__name__ == {"error": "ServerError"}.get(
        example["type"], example["type"].capitalize()
    )
    assert _flat(_fields(parsed)) == _flat({k: v for k, v in example.items() if k != "type"})


def _fields(parsed) -> dict:
    """Return a parsed message in the shape of the document; absent options are left out."""
    fields = {
        name: _value(value)
        for name in parsed.__dataclass_fields__
        if (value := getattr(parsed, name)) is not None
        or name in ("stop_reason", "param", "code", "bytes")
        or (name.endswith("_s") and isinstance(parsed, client_messages.Timing))
    }
    if isinstance(parsed, client_messages.ServerError):
        fields["error"] = {n: fields.pop(n) for n in ("message", "type", "param", "code")}
    return fields


def _value(value):
    if hasattr(value, "__dataclass_fields__"):
        return _fields(value)
    return [_value(item) for item in value] if isinstance(value, tuple | bytes) else value


def _flat(fields: dict) -> dict:
    """Return tuples as the lists that they were on the wire."""
    return {
        name: _flat(value)
        if isinstance(value, dict)
        else list(value)
        if isinstance(value, tuple | list)
        else value
        for name, value in fields.items()
    }


def test_a_client_ignores_a_message_type_that_it_does_not_know():
    assert parse_message({"type": "rewound", "id": "a"}) is None


def test_the_fields_of_an_absent_option_are_absent_on_the_wire():
    assert SERVER_BUILDS["delta"].token_ids is UNSET
    assert "token_ids" not in FROM_SERVER["delta"]
