"""Decides what is shown of a job of several processes, and what all jobs saved together."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frostline.checks import check_fields
from frostline.control.activity.job_activity import JobActivity
from frostline.errors import SettingError

__all__ = ("Prices", "saved", "summarised")

_MAX_CURRENCY = 8
_MAX_PRICE = 1e9
_HOUR_S = 3600.0
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What is paid for what Frostline saves.

    Attributes:
        per_gb: price of a gigabyte (10⁹ bytes) that crosses from the store side to a trainer.
        per_trainer_hour: price of an hour of a trainer.
        currency: how amounts are called, in at most eight characters.
    """

    per_gb: float = 0.0
    per_trainer_hour: float = 0.0
    currency: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("per_gb", "per_trainer_hour"):
            if not 0 <= getattr(self, name) <= _MAX_PRICE:
                raise SettingError(f"the price {name} must be from 0 to {_MAX_PRICE:.0f}, not {getattr(self, name)}")
        if len(self.currency) > _MAX_CURRENCY or not self.currency.isprintable():
            raise SettingError(f"a currency has at most {_MAX_CURRENCY} printable characters, not {self.currency!r}")


def saved(activities: Sequence[JobActivity], prices: Prices | None) -> dict[str, float | None]:
    """Bytes, seconds of the link and money that jobs saved.

    Args:
        activities: the last word of each process, those that have ended too.
        prices: prices of both; None where nobody said.

    Returns:
        ``bytes``, ``seconds`` of those who know their bandwidth, None where nobody does, and ``money``, None without
        prices.
    """
    known = [activity.saved_s for activity in activities if activity.saved_s is not None]
    nbytes, seconds = sum(activity.saved_bytes for activity in activities), sum(known) if known else None
    money = None
    if prices is not None:
        money = nbytes / _GB * prices.per_gb + (seconds or 0.0) / _HOUR_S * prices.per_trainer_hour
    return {"bytes": nbytes, "seconds": seconds, "money": money}


def summarised(
    running: Sequence[JobActivity], ended: Sequence[JobActivity], prices: Prices | None
) -> dict[str, Any] | None:
    """What is shown of a job.

    Ranks and workers each take a part of an epoch, so samples, rates and bytes add up. Progress is that of the epoch
    which the most advanced one is in. The share of waiting is the mean over those that take samples, and what holds the
    job back is what the one says that waits longest.

    Args:
        running: the last word of each process that is there.
        ended: the last word of those that have ended, which counts in sums.
        prices: prices of what is saved.

    Returns:
        A dictionary of plain values; None where no process said anything.
    """
    if not running:
        return None
    taking = [activity for activity in running if activity.epoch_samples]
    epoch = max((activity.epoch for activity in taking), default=0)
    passes = [activity for activity in taking if activity.epoch == epoch]
    said = [activity for activity in running if activity.hindrance is not None]
    slowest = max(said, key=lambda activity: activity.stall_share, default=None)
    plan = next((activity.plan for activity in running if activity.plan is not None), None)
    everything = [*running, *ended]
    return {
        "processes": len(running),
        "epoch": epoch,
        "taken": sum(activity.taken for activity in passes),
        "epoch_samples": sum(activity.epoch_samples for activity in passes),
        "samples": sum(activity.samples for activity in everything),
        "samples_per_s": sum(activity.samples_per_s for activity in running),
        "stall_share": sum(activity.stall_share for activity in taking) / max(1, len(taking)),
        "wire_bytes": sum(activity.wire_bytes for activity in everything),
        "saved": saved(everything, prices),
        "hindrance": None if slowest is None or slowest.hindrance is None else asdict(slowest.hindrance),
        "plan": None if plan is None else asdict(plan),
    }
