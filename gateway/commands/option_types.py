"""Types of command-line options that click does not have."""

import math

import click

from gateway.tenants import MAX_TENANT_LENGTH, is_tenant_name

__all__ = ["ByteSize", "PositiveNumber", "Seconds", "Share", "TenantWeight", "Watermark"]

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
        seconds = _number(value)
        if not 0 <= seconds < math.inf:
            self.fail(f"{value!r} is not a number of seconds, 0 or more", param, ctx)
        return seconds


class PositiveNumber(click.ParamType[float]):
    """A finite number above 0."""

    name = "number"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = _number(value)
        if not 0 < number < math.inf:
            self.fail(f"{value!r} is not a number above 0", param, ctx)
        return number


class Share(click.ParamType[float]):
    """A part of the whole, above 0 and at most 1: 0.3, 30%."""

    name = "share"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        share = _number_or_percentage(value)
        if not 0 < share <= 1:
            self.fail(f"{value!r} is not a share such as 0.3 or 30%", param, ctx)
        return share


class Watermark(click.ParamType[float]):
    """A share below 1 (0.01, 1%), or a whole number of blocks (16)."""

    name = "share or blocks"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = _number_or_percentage(value)
        is_share = 0 <= number < 1
        is_count = not str(value).endswith("%") and number >= 1 and number.is_integer()
        if not is_share and not is_count:
            self.fail(
                f"{value!r} is neither a share such as 0.01 or 1% nor a number of blocks",
                param,
                ctx,
            )
        return number


class TenantWeight(click.ParamType[tuple[str, float]]):
    """A tenant and its weight: alice=2.5."""

    name = "name=weight"

    def convert(
        self,
        value: str | tuple[str, float],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        tenant, _, text = value.rpartition("=")
        weight = _number(text)
        if not is_tenant_name(tenant):
            self.fail(
                f"{value!r} is not NAME=W with a name of 1 to {MAX_TENANT_LENGTH} characters",
                param,
                ctx,
            )
        if not 0 < weight < math.inf:
            self.fail(f"the weight in {value!r} is not a number above 0", param, ctx)
        return tenant, weight


def _number(value: str | float) -> float:
    """Return the number; NaN for what is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _number_or_percentage(value: str | float) -> float:
    text = str(value).strip()
    return _number(text.removesuffix("%")) / 100 if text.endswith("%") else _number(text)
