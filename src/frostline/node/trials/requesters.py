"""For whom engines are tried: what it costs them, and what they may have."""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ("NOBODY", "Patron")


def _nobody_pays(_: float) -> None:
    pass


def _nobody_owes() -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patron:
    """For whom engines are tried.

    Attributes:
        name: of the tenant.
        check: called before the first trial; raises ``Overloaded`` where it had too many.
        is_abandoned: nobody waits for the trials any more; ``Trials.wake`` has it looked at.
        spent: told of the seconds of each trial that is run.
        room_bytes: that an engine for it may take; one that takes more is none for it.
    """

    name: str = ""
    check: Callable[[], None] = _nobody_owes
    is_abandoned: Callable[[], bool] = _never
    spent: Callable[[float], None] = _nobody_pays
    room_bytes: float = math.inf


NOBODY = Patron()
"""Who pays nothing, and is bound by the node alone."""
