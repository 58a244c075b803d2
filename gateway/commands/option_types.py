"""Types of command-line options that click does not have."""

import math

import click

__all__ = ["ByteSize", "Seconds"]

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class ByteSize(click.ParamType[int]):
    """A number of bytes: 1073741824, 512M, 1G, 1.5GiB."""

    name = "bytes"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1:]) if text[-1:].isalpha() else (text, "")
        try:
            size = int(float(number) * UNITS[unit])
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is not a number of bytes such as 512M or 1G", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is not positive", param, ctx)
        return size


class Seconds(click.ParamType[float]):
    """A finite number of seconds from 0 up. click.FloatRange would let "nan" pass."""

    name = "seconds"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds, 0 or more", param, ctx)
        return seconds
