"""For whom engines are tried: what it costs them, and what they may have."""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ("NOBODY", "Patron")


def _nobody_pays(_: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patron:
    """For whom engines are tried.

    Attributes:
        spent: told of the seconds of each trial that is run.
        room_bytes: that an engine for it may take; one that takes more is none for it.
    """

    spent: Callable[[float], None] = _nobody_pays
    room_bytes: float = math.inf


NOBODY = Patron()
"""Who pays nothing, and is bound by the node alone."""
