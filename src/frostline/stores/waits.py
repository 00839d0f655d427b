"""Decides how long a store is waited for: by the environment, since a URL says which data it is, not how it is read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from frostline.errors import SettingError

__all__ = ("PATIENCE", "PREFIX", "TIMEOUT", "Waits")

PREFIX = "FROSTLINE_STORE_"
"""What the names of these variables begin with."""
TIMEOUT = f"{PREFIX}TIMEOUT_S"
PATIENCE = f"{PREFIX}PATIENCE_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long stores behind the driver are waited for.

    Attributes:
        timeout_s: without a byte from the store before a request is given up. What comes steadily may take any time.
        patience_s: while it refuses for its rate, or does not answer though it did before, until its caller is told.
    """

    timeout_s: float = 30.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value, least in ((TIMEOUT, self.timeout_s, 1e-3), (PATIENCE, self.patience_s, 0.0)):
            if not least <= value < math.inf:
                raise SettingError(f"{name} is a number of seconds, such as 30, not {value!r}")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Waits":
        """What the environment says, and the defaults where it says nothing.

        Raises:
            SettingError: a variable is no number of seconds.
        """
        said = {"timeout_s": TIMEOUT, "patience_s": PATIENCE}
        return cls(**{field: _seconds(name, environment[name]) for field, name in said.items() if name in environment})


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise SettingError(f"{name} is a number of seconds, such as 30, not {text[:40]!a}") from error
