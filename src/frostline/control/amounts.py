"""The resources that the control plane divides, and amounts of them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from frostline.errors import SettingError

__all__ = ("RESOURCES", "Amounts", "Row")

RESOURCES = ("compute_s_per_s", "bytes_per_s", "requests_per_s", "requests", "memory_bytes")
"""Resources by name, in the order of a row: device seconds, bytes and requests of each second; requests and bytes under
way at once."""

Row = tuple[float, ...]
"""An amount of each resource, in the order of ``RESOURCES``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """An amount of each resource; infinite where there is no bound.

    Attributes:
        compute_s_per_s: device seconds that may be used each second.
        bytes_per_s: bytes that may cross the link each second.
        requests_per_s: requests that may be made each second.
        requests: requests that may be under way at once.
        memory_bytes: bytes that may be asked for and not yet used.
    """

    compute_s_per_s: float = math.inf
    bytes_per_s: float = math.inf
    requests_per_s: float = math.inf
    requests: float = math.inf
    memory_bytes: float = math.inf

    @classmethod
    def of(cls, row: Iterable[float]) -> Self:
        """Name the amounts of a row."""
        return cls(**dict(zip(RESOURCES, row, strict=True)))

    @classmethod
    def from_json(cls, value: object, name: str) -> Self:
        """Read amounts by their resources; those that are not named have no bound.

        Args:
            value: a table of numbers, 0 or more each.
            name: name of the table, for sentences.

        Raises:
            SettingError: The table is something else.
        """
        if not isinstance(value, Mapping) or not value.keys() <= set(RESOURCES):
            raise SettingError(f"{name} must be a table of amounts, named {', '.join(RESOURCES)}")
        for resource, amount in value.items():
            if not _is_amount(amount):
                raise SettingError(f"{name}: {resource} must be a finite number, 0 or more")
        return cls(**{resource: float(amount) for resource, amount in value.items()})

    @property
    def row(self) -> Row:
        """The amounts in the order of ``RESOURCES``."""
        return (self.compute_s_per_s, self.bytes_per_s, self.requests_per_s, self.requests, self.memory_bytes)

    def to_json(self) -> dict[str, float]:
        """Those that are bounded, by their resources."""
        named = zip(RESOURCES, self.row, strict=True)
        return {resource: amount for resource, amount in named if amount < math.inf}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MAX_AMOUNT


# Beyond the bytes that any store moves in a second, and within what floats count exactly.
_MAX_AMOUNT = 2**52
