import click
import pytest

from gateway.commands.option_types import (
    ByteSize,
    PositiveNumber,
    Seconds,
    Share,
    TenantWeight,
    Watermark,
)


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
    assert PositiveNumber().convert(50.0, None, None) == 50
    assert TenantWeight().convert(("a", 2.0), None, None) == ("a", 2)


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_seconds_are_numbers(text, seconds):
    assert Seconds().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "-0.001", "nan", "inf", "1e999"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not a number of seconds, 0 or more"):
        Seconds().convert(text, None, None)


@pytest.mark.parametrize(("text", "number"), [("1", 1.0), ("0.25", 0.25), ("1e3", 1000.0)])
def test_numbers_above_zero_pass(text, number):
    assert PositiveNumber().convert(text, None, None) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "soon"])
def test_other_numbers_are_refused(text):
    with pytest.raises(click.BadParameter, match="is not a number above 0"):
        PositiveNumber().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "share"), [("0.3", 0.3), ("30%", 0.3), ("1", 1.0), ("100%", 1.0), (" 5 %", 0.05)]
)
def test_a_share_may_be_a_percentage(text, share):
    assert Share().convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0", "0%", "1.01", "101%", "-1%", "%", "", "nan", "nan%", "30%%"])
def test_what_is_no_part_of_the_whole_is_refused(text):
    with pytest.raises(click.BadParameter, match=r"is not a share such as 0\.3 or 30%"):
        Share().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "watermark"),
    [("0.01", 0.01), ("1%", 0.01), ("0", 0.0), ("0%", 0.0), ("1", 1.0), ("16", 16.0)],
)
def test_a_watermark_is_a_share_or_a_number_of_blocks(text, watermark):
    assert Watermark().convert(text, None, None) == pytest.approx(watermark)


@pytest.mark.parametrize("text", ["1.5", "100%", "1600%", "-0.1", "-1", "nan", "inf", "all", ""])
def test_what_is_neither_share_nor_blocks_is_refused(text):
    with pytest.raises(click.BadParameter, match="nor a number of blocks"):
        Watermark().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        ("alice=2", ("alice", 2.0)),
        ("ba7816bf8f01cfea=0.5", ("ba7816bf8f01cfea", 0.5)),
        ("a=b=3", ("a=b", 3.0)),
    ],
)
def test_a_tenant_has_a_weight(text, weight):
    assert TenantWeight().convert(text, None, None) == weight


@pytest.mark.parametrize("text", ["alice", "=2", "", "x" * 65 + "=1", "a\n=1"])
def test_a_weight_without_a_tenant_is_refused(text):
    with pytest.raises(click.BadParameter, match="is not NAME=W"):
        TenantWeight().convert(text, None, None)


@pytest.mark.parametrize("text", ["a=", "a=0", "a=-1", "a=nan", "a=inf", "a=much"])
def test_a_weight_is_a_number_above_zero(text):
    with pytest.raises(click.BadParameter, match=r"the weight in .* is not a number above 0"):
        TenantWeight().convert(text, None, None)
