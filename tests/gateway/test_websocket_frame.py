import pytest

from gateway.websocket_frame import encode_frame


@pytest.mark.parametrize(
    ("size", "length"),
    [
        (0, b"\x00"),
        (5, b"\x05"),
        (125, b"\x7d"),
        (126, b"\x7e\x00\x7e"),
        (65535, b"\x7e\xff\xff"),
        (65536, b"\x7f\x00\x00\x00\x00\x00\x01\x00\x00"),
    ],
)
def test_the_length_takes_as_many_bytes_as_the_standard_says(size, length):
    assert encode_frame(b"x" * size, 1) == b"\x81" + length + b"x" * size


def test_the_examples_of_the_standard():  # RFC 6455, 5.7
    assert encode_frame(b"Hello", 1) == bytes.fromhex("810548656c6c6f")
    assert encode_frame(b"\0" * 256, 2).startswith(bytes.fromhex("827e0100"))
