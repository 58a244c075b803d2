import msgpack
import orjson
import pytest
from msgspec import UNSET

from gateway.accounts import Account
from gateway.callers import Caller
from gateway.errors import GatewayError, InvalidRequest, Overloaded
from gateway.generation import ChatMessage, GenerationRequest
from gateway.messages import (
    SUBPROTOCOLS,
    Cancel,
    Delta,
    Error,
    InvalidFrame,
    InvalidMessage,
    Ping,
    StartRequest,
    generation_request,
)

JSON = SUBPROTOCOLS["headrace.v1.json"]
MSGPACK = SUBPROTOCOLS["headrace.v1.msgpack"]
ENCODERS = [(JSON, orjson.dumps), (MSGPACK, msgpack.packb)]
both_codecs = pytest.mark.parametrize(("codec", "dumps"), ENCODERS, ids=["json", "msgpack"])


@both_codecs
def test_both_encodings_give_the_same_message(codec, dumps):
    assert codec.decode(dumps({"type": "cancel", "id": "a"})) == Cancel(id="a")
    assert codec.decode(dumps({"type": "ping", "t": 3})) == Ping(t=3)


@both_codecs
@pytest.mark.parametrize(
    ("request_fields", "param", "words"),
    [
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"stop": {"a": 1}}, "stop", "got `object`"),
        ({"seed": 1.5}, "seed", "got `float`"),
        ({"prompt": [1, -1]}, "prompt[1]", ">= 0"),
        ("not an object", "request", "got `str`"),
    ],
)
def test_an_error_names_the_field_inside_request(codec, dumps, request_fields, param, words):
    with pytest.raises(InvalidMessage) as error:
        codec.decode(dumps({"type": "start", "id": "a", "request": request_fields}))
    assert error.value.param == param
    assert error.value.start_id == "a"
    assert words in error.value.message


def test_an_integer_beyond_64_bit_is_refused_not_rounded():
    frame = b'{"type":"start","id":"a","request":{"prompt":"x","seed":36893488147419103232}}'
    with pytest.raises(InvalidMessage) as error:
        JSON.decode(frame)
    assert error.value.param == "seed"


@pytest.mark.parametrize("value", [b"bytes", msgpack.Timestamp(1)])
def test_msgpack_types_that_json_lacks_are_refused_where_a_value_is_wanted(value):
    frame = msgpack.packb({"type": "start", "id": "a", "request": {"prompt": value}})
    with pytest.raises(InvalidMessage) as error:
        MSGPACK.decode(frame)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("t", [float("nan"), float("inf"), -0.5])
def test_a_ping_takes_finite_numbers_only(t):
    with pytest.raises(InvalidMessage) as error:
        MSGPACK.decode(msgpack.packb({"type": "ping", "t": t}))
    assert error.value.param == "t"


@pytest.mark.parametrize("depth", [500, 5000])
def test_deep_nesting_is_an_error_and_no_crash(depth):
    nested = b'{"type":"start","id":"a","request":{"prompt":' + b"[" * depth + b"]" * depth + b"}}"
    with pytest.raises((InvalidFrame, InvalidMessage)):
        JSON.decode(nested)
    packed = b"\x82\xa4type\xa5start\xa7request" + b"\x91" * depth + b"\xc0"
    with pytest.raises((InvalidFrame, InvalidMessage)):
        MSGPACK.decode(packed)


def test_optional_fields_that_are_absent_are_not_sent():
    assert orjson.loads(JSON.encode(Delta(id="a", seq=0, text="x"))) == {
        "type": "delta",
        "id": "a",
        "seq": 0,
        "text": "x",
    }


def test_an_error_takes_its_fields_from_the_gateway_error():
    error = Error.of(Overloaded("too much", retry_after_s=2.5), "a")
    assert (error.id, error.status, error.retry_after_s) == ("a", 429, 2.5)
    assert (error.error.message, error.error.code) == ("too much", "overloaded")
    alone = Error.of(InvalidRequest("bad", param="id"), None)
    assert alone.id is UNSET
    assert alone.retry_after_s is UNSET


CALLER = Caller(account=Account("anonymous"))


def gateway_request(request):
    return generation_request(request, caller=CALLER)


def test_absent_and_null_options_take_the_gateway_default():
    empty = gateway_request(StartRequest(prompt="x"))
    assert empty == GenerationRequest(prompt="x", account=CALLER.account)
    null = StartRequest(prompt="x", temperature=None, top_k=None, stop=None, ignore_eos=None)
    assert gateway_request(null) == empty


def test_zero_is_not_taken_for_absent():
    request = gateway_request(StartRequest(prompt="x", temperature=0.0, max_tokens=0))
    assert request.temperature == 0
    assert request.max_tokens == 0


def test_prompts_become_tuples_and_a_stop_string_a_tuple_of_one():
    assert gateway_request(StartRequest(prompt=[1, 2])).prompt == (1, 2)
    assert gateway_request(StartRequest(prompt="x", stop="END")).stop == ("END",)
    frame = {"messages": [{"role": "user", "content": "Hi"}]}
    start = JSON.decode(orjson.dumps({"type": "start", "id": "a", "request": frame}))
    assert gateway_request(start.request).prompt == (ChatMessage(role="user", content="Hi"),)


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [({}, "prompt"), ({"prompt": "x", "messages": []}, "messages"), ({"messages": []}, "messages")],
)
def test_exactly_one_kind_of_prompt_is_required(request_fields, param):
    with pytest.raises(GatewayError) as error:
        gateway_request(StartRequest(**request_fields))
    assert (error.value.status, error.value.param) == (400, param)


def test_scheduling_fields_are_taken_over():
    wire = StartRequest(prompt="x", priority=-3, queue_timeout=1.5, deadline=60.0)
    request = gateway_request(wire)
    assert (request.priority, request.queue_timeout_s, request.deadline_s) == (-3, 1.5, 60)


def test_the_tenant_is_the_connections_unless_the_request_names_one():
    caller = Caller(account=CALLER.account, tenant="digest")
    assert generation_request(StartRequest(prompt="x"), caller=caller).tenant == "digest"
    named = StartRequest(prompt="x", tenant="alice")
    assert generation_request(named, caller=caller).tenant == "alice"


def test_a_tenant_without_a_name_is_refused():
    with pytest.raises(GatewayError) as error:
        gateway_request(StartRequest(prompt="x", tenant=""))
    assert (error.value.status, error.value.param) == (400, "tenant")
