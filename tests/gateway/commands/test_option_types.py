import click
import pytest

from gateway.commands.option_types import ByteSize, Seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1073741824", 1 << 30),
        ("512M", 512 << 20),
        ("1G", 1 << 30),
        ("1.5GiB", 3 << 29),
        ("2gb", 2 << 30),
        (" 3 k", 3 << 10),
        ("1T", 1 << 40),
    ],
)
def test_a_number_of_bytes_may_have_a_unit(text, size):
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "G", "abc", "1X", "1 G G", "nan", "inf", "1e400", "1e400G"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not a number of bytes such as 512M or 1G"):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize("text", ["0", "-1G", "0.1"])
def test_less_than_a_byte_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not positive"):
        ByteSize().convert(text, None, None)


def test_a_default_that_is_a_number_passes():
    assert ByteSize().convert(5, None, None) == 5
    assert Seconds().convert(1.5, None, None) == 1.5


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_seconds_are_numbers(text, seconds):
    assert Seconds().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "-0.001", "nan", "inf", "1e999"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not a number of seconds, 0 or more"):
        Seconds().convert(text, None, None)
