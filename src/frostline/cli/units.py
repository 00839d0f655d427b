"""Amounts as people write them on a command line: bytes, bytes a second, factors, shares, and how exact is enough."""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from frostline.planning.situation import ACCURACIES

__all__ = ("ACCURACY", "BANDWIDTH", "BYTES", "SHARES", "TIMES", "in_binary")

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZES = {**_PREFIXES, **_BINARY}
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"


if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):
        """Click's own, which takes no parameter before 8.4."""

        def __class_getitem__(cls, _: object) -> type:
            return cls


class _Bytes(ParamType[int]):
    """A number of bytes, such as 512MiB, 2G or 1000000."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(_NUMBER + r"([kmgt]?i?)b?\s*", str(value), re.IGNORECASE)
        if match is None or match[2].lower() not in _SIZES:
            self.fail(f"{value!r} is no number of bytes; write it like 512MiB or 2GB", param, ctx)
        return int(float(match[1]) * _SIZES[match[2].lower()])


def in_binary(nbytes: int) -> str:
    """A whole number of KiB or more as it is written for ``BYTES``: ``"64KiB"``, ``"10GiB"``."""
    prefix, size = max((item for item in _BINARY.items() if nbytes % item[1] == 0), key=lambda item: item[1])
    return f"{nbytes // size}{prefix.capitalize()}B"


class _Bandwidth(ParamType[float]):
    """Bytes a second, written in bits as lines are sold (1Gbit, 100Mbit/s, 10Gbps) or in bytes (12MB, 12MiB/s)."""

    name = "bandwidth"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        # A lone small b is read as bits by some and as bytes by others, so it is refused.
        match = re.fullmatch(_NUMBER + r"((?i:[kmgt]i?|))((?i:bits?|bps)|B)(?:/s)?\s*", str(value))
        bytes_per_s = _bytes_per_s(*match.groups()) if match else 0.0
        if not 0 < bytes_per_s < math.inf:
            self.fail(f"{value!r} is no bandwidth; write it like 1Gbit, 100Mbit or 12MB, a second", param, ctx)
        return bytes_per_s


def _bytes_per_s(number: str, prefix: str, unit: str) -> float:
    return float(number) * _SIZES[prefix.lower()] / (1 if unit == "B" else 8)


class _Shares(ParamType[Mapping[str, float]]):
    """Named shares, such as train=0.8,val=0.2."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Mapping[str, float]:
        if isinstance(value, Mapping):
            return value
        shares: dict[str, float] = {}
        for item in str(value).split(","):
            name, _, number = item.partition("=")
            share = _number(number)
            if not name.strip() or share is None or name.strip() in shares:
                self.fail(f"{value!r} names no shares; write it like train=0.8,val=0.1,test=0.1", param, ctx)
            shares[name.strip()] = share
        return shares


class _Times(ParamType[float]):
    """A factor above 0, such as 0.5 or 2."""

    name = "times"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = _number(value)
        if number is None or not 0 < number < math.inf:
            self.fail(f"{value!r} is no factor; write it like 0.5 or 2", param, ctx)
        return number


class _Accuracy(ParamType[str | float]):
    """How exact features must be: exact, float32, fp16, bf16, int8, or the relative error that is allowed."""

    name = "accuracy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | float:
        if value in ACCURACIES:
            return str(value)
        number = _number(value)
        if number is None or not 0 <= number < 1:
            named = ", ".join(ACCURACIES)
            self.fail(f"{value!r} is no accuracy; write {named} or a relative error such as 0.01", param, ctx)
        return number


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


ACCURACY = _Accuracy()
BANDWIDTH = _Bandwidth()
BYTES = _Bytes()
SHARES = _Shares()
TIMES = _Times()
