"""What a stage says and is answered, as values and as JSON."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from frostline.control.activity.job_activity import JobActivity, count
from frostline.control.amounts import Amounts
from frostline.errors import BadRequest, SettingError

__all__ = ("KINDS", "ControlAnswer", "StageReport", "checked_job")

KINDS = ("window", "io", "node", "cache")
"""What a stage may be: a loader's window, an I/O service, a node or a cache."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What a stage says of itself. It may come late, twice or never: only the latest by ``sequence`` counts.

    Attributes:
        stage: name of the stage, which no other process of its tenant ever has.
        job: name of the job that it works for, which several stages may share.
        kind: one of ``KINDS``.
        sequence: number of the report, greater with each.
        version: version of the settings that are in force; 0 for none.
        in_force: these settings.
        demand: amounts that it would use if it might; infinite for all that there is, and 0 of what it never uses: then
            it is given none.
        used: amounts that it used since its last report, each second, or holds now; infinite where it does not say.
        moved_bytes: bytes that it has moved since it began.
        activity: account that its process gives of the job; None where it says nothing, as nodes and caches do.
        has_ended: whether this is its last report.
    """

    stage: str
    job: str
    kind: str = "window"
    sequence: int
    version: int = 0
    in_force: Amounts = field(default_factory=Amounts)
    demand: Amounts = field(default_factory=Amounts)
    used: Amounts = field(default_factory=Amounts)
    moved_bytes: int = 0
    activity: JobActivity | None = None
    has_ended: bool = False

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read a report that a stranger sent.

        Raises:
            BadRequest: It is not one; the sentence names the field.
        """
        if not isinstance(value, dict) or not {"stage", "job", "sequence"} <= value.keys() <= _READ.keys():
            raise BadRequest(f"a report needs stage, job and sequence, and may have {', '.join(sorted(_READ))}")
        try:
            return cls(**{name: _READ[name](found, name) for name, found in value.items()})
        except SettingError as error:
            raise BadRequest(str(error)) from error

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        plain = {name: getattr(self, name) for name in ("stage", "job", "kind", "sequence", "version", "moved_bytes")}
        amounts = {name: getattr(self, name).to_json() for name in ("in_force", "demand", "used")}
        said = {} if self.activity is None else {"activity": self.activity.to_json()}
        return {**plain, **amounts, **said, "has_ended": self.has_ended}

    def after(self, before: "StageReport") -> "StageReport":
        """The same, with what is not said in each report as the one before said it."""
        return self if self.activity is None else replace(self, activity=self.activity.after(before.activity))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """What a stage is to keep to from now on.

    Attributes:
        version: version of the settings; a stage takes only those with a greater one than it has.
        settings: amounts that it may use.
        round_s: seconds after which it is to report again.
        lease_s: seconds for which these amounts stay its own though it says nothing.
        notices: sentences about its job for people.
    """

    version: int
    settings: Amounts
    round_s: float
    lease_s: float
    notices: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read an answer.

        Raises:
            BadRequest: It is not one.
        """
        try:
            if not isinstance(value, Mapping):
                raise BadRequest("an answer of a control plane is an object")
            return cls(
                version=count(value.get("version"), "version"),
                settings=Amounts.from_json(value.get("settings"), "settings"),
                round_s=_seconds(value.get("round_s"), "round_s"),
                lease_s=_seconds(value.get("lease_s"), "lease_s"),
                notices=_sentences(value.get("notices")),
            )
        except SettingError as error:
            raise BadRequest(str(error)) from error

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values."""
        return {
            "version": self.version,
            "settings": self.settings.to_json(),
            "round_s": self.round_s,
            "lease_s": self.lease_s,
            "notices": list(self.notices),
        }


def checked_job(name: str) -> str:
    """Give back the name of a job.

    Raises:
        BadRequest: No job can have it.
    """
    return _name(name, "job")


def _name(value: object, name: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadRequest(f"{name} must be a name of 1 to 128 letters, digits and . _ : -")
    return value


def _kind(value: object, name: str) -> str:
    if value not in KINDS:
        raise BadRequest(f"{name} must be one of {', '.join(KINDS)}")
    return str(value)


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return value


def _seconds(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadRequest(f"{name} must be a number of seconds above 0")
    return float(value)


def _sentences(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise BadRequest("notices must be a list of sentences")
    return tuple(value)


_READ: dict[str, Callable[[object, str], Any]] = {
    "stage": _name,
    "job": _name,
    "kind": _kind,
    "sequence": count,
    "version": count,
    "in_force": Amounts.from_json,
    "demand": Amounts.from_json,
    "used": Amounts.from_json,
    "moved_bytes": count,
    "activity": lambda value, _: JobActivity.from_json(value),
    "has_ended": _switch,
}
