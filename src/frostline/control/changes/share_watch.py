"""Decides which jobs' shares changed by much from one decision to the next, and says why."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from frostline.control.amounts import RESOURCES, Row
from frostline.control.changes.changes import amount_words

__all__ = ("Cause", "JobShare", "ShareWatch")

# A change by less is no news.
_MIN_PART = 0.25
# Jobs named for one decision: after a change of the capacity there may be thousands.
_MAX_JOBS = 8
_MAX_CAUSES = 3
_MAX_NOTED = 64
_UNITS = {
    "compute_s_per_s": "device seconds a second",
    "bytes_per_s": "a second",
    "requests_per_s": "requests a second",
    "requests": "requests at once",
    "memory_bytes": "of memory",
}

JobName = tuple[str, str]


@dataclass(frozen=True, slots=True)
class JobShare:
    """The share of a job, in all its stages.

    Attributes:
        given: amounts that it may use.
        wanted: those of them that it wants now. The rest is what others leave, whose coming and going is no news.
    """

    given: Row
    wanted: Row


@dataclass(frozen=True, slots=True)
class Cause:
    """Why shares may change.

    Attributes:
        tenant: tenant whose stages or settings changed; None for what is everybody's.
        words: words about it for that tenant: ``"job night joined"``.
        for_others: the same for others, who are told no names.
    """

    tenant: str | None
    words: str
    for_others: str


class ShareWatch:
    """Compares the shares of jobs with those of the decision before. Not for several threads."""

    def __init__(self) -> None:
        self._shares: Mapping[JobName, JobShare] = {}
        self._causes: list[Cause] = []

    def note(self, tenant: str | None, words: str, for_others: str) -> None:
        """Note what may change shares at the next decision; see ``Cause``."""
        cause = Cause(tenant, words, for_others)
        if cause not in self._causes and len(self._causes) < _MAX_NOTED:
            self._causes.append(cause)

    def news(self, shares: Mapping[JobName, JobShare]) -> list[tuple[JobName, str]]:
        """The jobs whose shares changed most, with a sentence each; none where nothing was noted.

        Args:
            shares: share of each job after a decision.
        """
        before, causes = self._shares, self._causes
        self._shares, self._causes = shares, []
        if not causes:
            return []
        changed = [
            (_part(before[job].wanted[place], share.wanted[place]), job, place)
            for job, share in shares.items()
            if job in before and (place := _greatest_change(before[job].wanted, share.wanted)) is not None
        ]
        changed.sort(key=lambda entry: (-entry[0], entry[1]))
        return [
            (job, f"{_said(job[1], place, before[job].given, shares[job].given)}: {_why(job[0], causes)}")
            for _, job, place in changed[:_MAX_JOBS]
        ]


def _greatest_change(before: Row, after: Row) -> int | None:
    parts = [_part(old, new) for old, new in zip(before, after, strict=True)]
    place = max(range(len(parts)), key=parts.__getitem__)
    return place if parts[place] > _MIN_PART else None


def _part(before: float, after: float) -> float:
    """How far a share moved, as a part of what it was."""
    if before == after:
        return 0.0
    return abs(after - before) / before if before > 0 else math.inf


def _said(job: str, place: int, before: Row, after: Row) -> str:
    resource = RESOURCES[place]
    old, new = (amount_words(resource, row[place]) for row in (before, after))
    return f"job {job} may use {new} {_UNITS[resource]} instead of {old}"


def _why(tenant: str, causes: list[Cause]) -> str:
    words = list(dict.fromkeys(_words(tenant, causes)))
    return ", ".join(words[:_MAX_CAUSES]) + (" and more" if len(words) > _MAX_CAUSES else "")


def _words(tenant: str, causes: list[Cause]) -> Iterator[str]:
    for cause in causes:
        yield cause.words if cause.tenant in (None, tenant) else cause.for_others
