"""The requester of trials: what trials cost it, and how much memory its engine may take."""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ("NOBODY", "Requester")


def _nobody_pays(_: float) -> None:
    pass


def _nobody_owes() -> None:
    pass


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requester:
    """The tenant and request for which engines are tried.

    Attributes:
        name: name of the tenant.
        check: called before the first trial; raises ``Overloaded`` if the tenant has used up its trial time.
        is_abandoned: whether the request was cancelled; ``Trials.wake`` has it checked.
        spent: called with the seconds of each trial.
        room_bytes: maximum memory of an engine for it.
    """

    name: str = ""
    check: Callable[[], None] = _nobody_owes
    is_abandoned: Callable[[], bool] = _never
    spent: Callable[[float], None] = _nobody_pays
    room_bytes: float = math.inf


NOBODY = Requester()
"""A requester that pays nothing and is limited by the node alone."""
