"""Decides which of several devices takes the next batch: the one that is expected to finish it first."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("DeviceLoad", "batch_seconds", "combined_speed", "first_to_finish")

# Expected seconds of a batch that no device has run yet.
_UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What one of several devices has to do.

    Attributes:
        waiting_s: expected seconds of the batches that it was given and has not finished.
        batch_s: measured seconds of a batch like the next one; None if it has run none.
        may_take: whether it may be given the next batch.
    """

    waiting_s: float
    batch_s: float | None
    may_take: bool = True


def batch_seconds(loads: Sequence[DeviceLoad]) -> tuple[float, ...]:
    """The expected seconds of the next batch on each device.

    A device that has run none is taken for as fast as the fastest one, so that it is soon measured.

    Args:
        loads: work of each device.
    """
    known = [load.batch_s for load in loads if load.batch_s is not None]
    fastest = min(known, default=_UNKNOWN_S)
    return tuple(fastest if load.batch_s is None else load.batch_s for load in loads)


def first_to_finish(loads: Sequence[DeviceLoad]) -> int:
    """The number of the device that is expected to finish the next batch first; of equal ones the first.

    Args:
        loads: work of each device; at least one may take the batch.
    """
    ends = [load.waiting_s + seconds for load, seconds in zip(loads, batch_seconds(loads), strict=True)]
    return min((number for number, load in enumerate(loads) if load.may_take), key=ends.__getitem__)


def combined_speed(seconds: Sequence[float | None]) -> float:
    """How many times as fast some devices are together as the first of them.

    Args:
        seconds: measured seconds of the same work on each device; None if it was not measured there, which is then
            taken for as fast as the first.
    """
    first_s = seconds[0]
    if first_s is None:
        return float(len(seconds))
    return sum(1.0 if each_s is None or each_s <= 0 else first_s / each_s for each_s in seconds)
