"""The client's frames, in bytes written by hand. docs/protocol.md's own: test_protocol_docs.py."""

import math

import msgpack
import pytest

from headrace_client.errors import ProtocolError
from headrace_client.messages import Delta, Pong
from headrace_client.wire import (
    ENCODINGS,
    cancel_message,
    parse_message,
    request_body,
    start_message,
)
from scripted_server import DONE, HELLO, delta, done

both_encodings = pytest.mark.parametrize("encoding", ["json", "msgpack"])

ENTRY = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}

# ---- writing -----------------------------------------------------------------------------------


def test_an_option_that_is_none_is_left_out_and_one_that_is_false_is_sent():
    body = request_body(
        {"seed": None, "temperature": 0.0, "top_k": 0, "ignore_eos": False}, prompt="x"
    )
    assert body == {"prompt": "x", "temperature": 0.0, "top_k": 0, "ignore_eos": False}


def test_any_sequence_is_sent_as_a_list_and_a_string_as_itself():
    options = {"stop": "END", "stop_token_ids": range(2, 4)}
    assert request_body(options, prompt=(7, 8)) == {
        "prompt": [7, 8],
        "stop": "END",
        "stop_token_ids": [2, 3],
    }


def test_a_conversation_is_sent_as_role_and_content_alone():
    turn = {"role": "user", "content": "Hi!", "seen": True}
    assert request_body({}, messages=[turn]) == {"messages": [{"role": "user", "content": "Hi!"}]}


def test_asking_for_token_ids_belongs_to_the_stream_and_not_to_the_request():
    body = request_body({"return_token_ids": True}, prompt="x")
    assert start_message("s1", body, return_token_ids=True) == {
        "type": "start",
        "id": "s1",
        "request": {"prompt": "x"},
        "return_token_ids": True,
    }


def test_an_option_of_unknown_name_is_a_type_error():
    with pytest.raises(TypeError, match="'max_token'"):
        request_body({"max_token": 5}, prompt="x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_a_value_error(value):
    with pytest.raises(ValueError, match="temperature must be finite"):
        request_body({"temperature": value}, prompt="x")


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [
        ("json", b'{"type":"cancel","id":"s1"}'),
        ("msgpack", b"\x82\xa4type\xa6cancel\xa2id\xa2s1"),
    ],
)
def test_a_message_becomes_these_bytes(encoding, frame):
    assert ENCODINGS[encoding].encode(cancel_message("s1")) == frame


@both_encodings
@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, {1, 2}, "\ud800"])
def test_a_value_that_no_frame_can_carry_is_a_local_error(encoding, value):
    with pytest.raises((TypeError, ValueError, OverflowError)):
        ENCODINGS[encoding].encode({"value": value})


# ---- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [
        ("json", b'{"type":"pong","t":1.5}'),
        ("msgpack", b"\x82\xa4type\xa4pong\xa1t\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    ],
)
def test_these_bytes_become_a_message(encoding, frame):
    assert ENCODINGS[encoding].decode(frame) == Pong(t=1.5)


def test_fields_of_the_future_are_ignored():
    message = parse_message({**delta("s1", 0, "x"), "entropy": []})
    assert message == Delta(id="s1", seq=0, text="x", token_ids=None)


@pytest.mark.parametrize(
    ("encoding", "frame"),
    [
        ("json", b""),
        ("json", b'{"type":"pong"'),
        ("json", b'{"type":"pong","t":NaN}'),
        ("json", b'{"type":"\xff"}'),
        ("json", b"\x80"),
        ("msgpack", b""),
        ("msgpack", b"\x82\xa4type"),
        ("msgpack", b"\x80\x80"),  # two messages
        ("msgpack", b"\x81\xa4type\xa1\xff"),  # no UTF-8
        ("msgpack", b"\x81\x01\x02"),  # a key that is no string
        ("msgpack", b'{"type":"pong","t":1.5}'),
    ],
)
def test_a_frame_that_is_not_in_the_encoding_is_refused(encoding, frame):
    with pytest.raises(ProtocolError, match=f"not headrace.v1.{encoding}$"):
        ENCODINGS[encoding].decode(frame)


@pytest.mark.parametrize("value", [None, 1, "pong", [], ["delta"]])
def test_a_frame_that_is_no_object_is_refused(value):
    with pytest.raises(ProtocolError, match="no object"):
        parse_message(value)


def test_a_type_of_msgpack_that_the_protocol_does_not_have_is_refused():
    for value in (b"x", msgpack.ExtType(1, b"x"), msgpack.Timestamp(1)):
        frame = msgpack.packb({**delta("s1", 0, "x"), "text": value})
        with pytest.raises(ProtocolError, match="'text'"):
            ENCODINGS["msgpack"].decode(frame)


@pytest.mark.parametrize(
    ("message", "at_fault"),
    [
        ({}, "'type'"),
        ({"type": None}, "'type'"),
        ({"type": 1}, "'type'"),
        ({"type": "pong"}, "'t'"),
        ({"type": "pong", "t": "1"}, "'t'"),
        ({"type": "pong", "t": True}, "'t'"),
        ({"type": "pong", "t": math.nan}, "'t'"),
        ({**delta("s1", 0, "x"), "seq": "0"}, "'seq'"),
        ({**delta("s1", 0, "x"), "seq": False}, "'seq'"),
        ({**delta("s1", 0, "x"), "seq": 0.0}, "'seq'"),
        ({**delta("s1", 0, "x"), "token_ids": 3}, "'token_ids'"),
        ({**delta("s1", 0, "x"), "token_ids": ["x", None]}, "token_ids"),
        ({**delta("s1", 0, "x"), "logprobs": {}}, "'logprobs'"),
        ({**delta("s1", 0, "x"), "logprobs": ["x"]}, "str"),
        ({**delta("s1", 0, "x"), "logprobs": [{**ENTRY, "token": 1}]}, "'token'"),
        ({**delta("s1", 0, "x"), "logprobs": [{**ENTRY, "logprob": None}]}, "'logprob'"),
        ({**delta("s1", 0, "x"), "logprobs": [{**ENTRY, "bytes": [256]}]}, "byte"),
        ({**delta("s1", 0, "x"), "logprobs": [{**ENTRY, "bytes": ["x"]}]}, "byte"),
        ({**delta("s1", 0, "x"), "logprobs": [{**ENTRY, "top_logprobs": [3]}]}, "int"),
        (done("s1", 0, stop_reason=True), "stop_reason"),
        ({**HELLO, "limits": [8192]}, "'limits'"),
        (done("s1", 0, stop_reason=["x"]), "stop_reason"),
        (done("s1", 0, usage=None), "no object"),
        (done("s1", 0, timing={**DONE["timing"], "queue_s": None}), "'queue_s'"),
        (done("s1", 0, timing={**DONE["timing"], "itl_p99_s": "fast"}), "'itl_p99_s'"),
        ({"type": "error", "status": 400}, "no object"),
        ({"type": "error", "status": 400, "error": {"message": "no"}}, "'type'"),
        ({"type": "error", "error": {"message": "no", "type": "t"}}, "'status'"),
    ],
)
def test_a_field_that_lacks_or_is_of_the_wrong_type_is_named(message, at_fault):
    with pytest.raises(ProtocolError, match=at_fault):
        parse_message(message)
