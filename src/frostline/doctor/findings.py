"""What an examination says of one part of a set-up: fine, worth a look, or in need of a change, in a sentence."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from frostline.errors import FrostlineError

__all__ = ("FINE", "PROBLEM", "WARNING", "Finding", "attempt", "worst")

FINE = "fine"
WARNING = "warning"
PROBLEM = "problem"
LEVELS = (FINE, WARNING, PROBLEM)
"""From nothing to do to something that stops a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        part: the part of the set-up that was looked at, such as ``data`` or ``node http://store:7070``.
        level: ``fine``, ``warning`` or ``problem``.
        says: the finding, in one sentence.
        mend: the change that helps; None where the sentence says it, or there is nothing to change.
    """

    part: str
    level: str
    says: str
    mend: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> str:
    """The worst level of all findings; ``fine`` where there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=FINE)


def attempt(part: str, examined: Callable[[], Iterator[Finding]], *, mend: str | None = None) -> Iterator[Finding]:
    """Run a check; an error that Frostline puts into a sentence ends it and is a finding like any other.

    Args:
        part: the part of the set-up that is looked at.
        examined: gives the findings.
        mend: the change that helps where it fails and the error does not say.
    """
    try:
        yield from examined()
    except FrostlineError as error:
        yield Finding(part=part, level=PROBLEM, says=str(error), mend=mend)
