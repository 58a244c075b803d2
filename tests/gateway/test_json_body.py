import msgspec
import pytest

from connections import connection
from gateway.errors import InvalidRequest
from gateway.json_body import MAX_COMMAS, convert, decode_object

BAD_BODIES = {
    "empty": b"",
    "blank": b" \n",
    "not json": b"{",
    "two values": b"{} {}",
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "deep": b"[" * 20_000,
    "deep in an object": b'{"a":' * 2_000 + b"1" + b"}" * 2_000,
    "lone surrogate": b'{"prompt":"\\ud800"}',
    "bad utf-8": b'{"prompt":"\xff"}',
    "utf-16": '{"prompt":"x"}'.encode("utf-16"),
    "nan": b'{"temperature":NaN}',
    "infinity": b'{"temperature":Infinity}',
    "float overflow": b'{"temperature":1e999}',
    "integer of 5000 digits": b'{"seed":' + b"9" * 5000 + b"}",
    "duplicate key": b'{"n":1,"n":2}',
    "duplicate key inside": b'{"a":{"n":1,"n":2}}',
    "commas": b"[" + b"," * (MAX_COMMAS + 1),
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_what_is_no_plain_json_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        decode_object(body)


def test_an_integer_beyond_64_bits_stays_an_integer():
    assert decode_object(b'{"seed":18446744073709551616}') == {"seed": 2**64}


def test_the_key_that_comes_twice_is_named():
    with pytest.raises(InvalidRequest, match="'n' comes twice"):
        decode_object(b'{"n":1,"n":2}')


class Part(msgspec.Struct):
    role: str


class Body(msgspec.Struct):
    parts: list[Part]
    n: int | None = None
    top_p: float | None = None


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "parts"),
        ({"parts": 1}, "parts"),
        ({"parts": [{"role": "x"}, {}]}, "parts[1].role"),
        ({"parts": [{"role": 5}]}, "parts[0].role"),
        ({"parts": [], "n": True}, "n"),
        ({"parts": [], "n": 1.5}, "n"),
        ({"parts": [], "n": "1"}, "n"),
        ({"parts": [], "top_p": "x"}, "top_p"),
        ({"parts": [], "top_p": True}, "top_p"),
    ],
)
def test_the_field_at_fault_is_named(value, param):
    with pytest.raises(InvalidRequest) as caught:
        convert(value, Body)
    assert caught.value.param == param
    assert param in caught.value.message


def test_nulls_integers_for_floats_and_unknown_fields_pass():
    assert convert({"parts": [], "n": None, "top_p": 1, "x": 2}, Body) == Body(parts=[], top_p=1.0)


async def test_only_json_is_read(gateway):
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        async with gateway.session.post(
            "/v1/completions", data=b"{}", headers={"Content-Type": content_type}
        ) as response:
            assert response.status == 415
            assert (await response.json())["error"]["code"] == "unsupported_media_type"


async def test_json_in_another_charset_is_refused(gateway):
    headers = {"Content-Type": "application/json; charset=latin-1"}
    async with gateway.session.post("/v1/completions", data=b"{}", headers=headers) as response:
        assert response.status == 415


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_body_that_is_too_large_is_refused_as_json(start_gateway, declared):
    gateway = await start_gateway(max_body_bytes=1000)
    body = b'{"prompt":"' + b"x" * 2000 + b'"}'

    async def chunks():
        yield body

    async with gateway.session.post(
        "/v1/completions",
        data=body if declared else chunks(),
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_body_that_never_comes_times_out(start_gateway):
    gateway = await start_gateway(body_read_timeout_s=0.01)
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")


async def test_bad_bodies_are_status_400_and_the_server_lives(gateway):
    for name, body in BAD_BODIES.items():
        async with gateway.session.post(
            "/v1/completions", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400, name
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    assert (await gateway.get("/health"))[0] == 200


async def test_a_body_that_is_not_what_its_encoding_says_is_status_400(gateway):
    async with gateway.session.post(
        "/v1/completions",
        data=b"not gzip",
        headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ) as response:
        assert response.status == 400


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "x"])
async def test_an_encoding_that_is_not_known_is_status_415(gateway, encoding):
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Encoding: {encoding}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    )
    async with connection(gateway.server.port) as (reader, writer):
        writer.write(head.encode())
        answer = await reader.read()
    assert answer.split(b" ")[1] == b"415"
    assert b"Content-Encoding" in answer.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("charset", ["UTF-8", "utf-8", '"Utf-8"'])
async def test_utf_8_may_be_spelled_in_any_case(gateway, charset):
    headers = {"Content-Type": f"application/json; charset={charset}"}
    body = b'{"prompt":"x","max_tokens":1}'
    async with gateway.session.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200
