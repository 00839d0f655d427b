"""What one process of a job says of the job: progress, rates, what it saved, what holds it back, and its plan."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from frostline.errors import BadRequest

__all__ = ("MAX_BLOCKS", "MAX_NAME", "MAX_SENTENCE", "Hindrance", "JobActivity", "PlanOutline", "count")

MAX_BLOCKS = 64
"""Blocks of a network that an outline has at most."""

MAX_NAME = 64
"""Characters of a name at most."""

MAX_SENTENCE = 512
"""Characters of a sentence at most."""

_MAX_COUNT = 2**52


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindrance:
    """What holds a job back, as ``Job.diagnosis`` found it.

    Attributes:
        held_back_by: name of the part.
        says: the finding in one sentence.
        gain: how many times as many samples a second there would be without it.
    """

    held_back_by: str
    says: str
    gain: float

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent; raises ``BadRequest`` where it is something else."""
        table = _table(value, "diagnosis", ("held_back_by", "says", "gain"))
        return cls(
            held_back_by=_text(table["held_back_by"], "held_back_by", MAX_NAME),
            says=_text(table["says"], "says", MAX_SENTENCE),
            gain=_at_least_0(table["gain"], "gain"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutline:
    """A job's plan along its network, of 64 blocks at most.

    Attributes:
        names: names of the places between blocks in order, from the encoded sample to the frost line.
        nbytes: bytes of one sample at each, uncompressed; those of the encoded sample are the mean.
        cut: which of them most samples cross the network at now, counted from 0.
        codec: name of the codec that they cross with.
    """

    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    cut: int
    codec: str

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent; raises ``BadRequest`` where it is something else."""
        table = _table(value, "plan", ("names", "nbytes", "cut", "codec"))
        names, nbytes = (_list(table[name], name) for name in ("names", "nbytes"))
        cut = count(table["cut"], "cut")
        if len(names) != len(nbytes) or cut >= len(names):
            raise BadRequest("a plan has a number of bytes for each name, and a cut among them")
        return cls(
            names=tuple(_text(name, "names", MAX_NAME) for name in names),
            nbytes=tuple(count(number, "nbytes") for number in nbytes),
            cut=cut,
            codec=_text(table["codec"], "codec", MAX_NAME),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobActivity:
    """What one process of a job says of it. Sums are since the process began, and of this process alone.

    Attributes:
        epoch: number of the epoch of the pass that runs, or ran last.
        taken: samples of that pass that the loop has taken.
        epoch_samples: samples of that pass in all; 0 before the first one.
        samples: samples that the loop took.
        samples_per_s: samples a second in the last ten seconds.
        stall_share: share of these in which the loop waited for a batch.
        wire_bytes: bytes that came from the store side, bodies and headers.
        saved_bytes: bytes of the samples taken as they are stored, less ``wire_bytes``; below 0 where features are
            larger than the samples.
        saved_s: seconds in which the link, at its measured bandwidth, would have moved ``saved_bytes``. They are the
            link's: a loop that never waits for it is no sooner done. None where the bandwidth is not known.
        hindrance: the part that holds the job back; None where this report does not say.
        plan: its plan; None where this report does not say.
    """

    epoch: int = 0
    taken: int = 0
    epoch_samples: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    stall_share: float = 0.0
    wire_bytes: int = 0
    saved_bytes: float = 0.0
    saved_s: float | None = None
    hindrance: Hindrance | None = None
    plan: PlanOutline | None = None

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what a stranger sent.

        Raises:
            BadRequest: It is something else; the sentence names the field.
        """
        table = _table(value, "activity", tuple(_READ), is_whole=False)
        return cls(**{name: _READ[name](found, name) for name, found in table.items()})

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, without what it does not say."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def after(self, before: "JobActivity | None") -> "JobActivity":
        """The same, with what this report does not say as the one before said it."""
        if before is None:
            return self
        return replace(self, hindrance=self.hindrance or before.hindrance, plan=self.plan or before.plan)

    def brief(self) -> "JobActivity":
        """The same without what is said again within seconds."""
        return replace(self, hindrance=None, plan=None)


def _table(value: object, name: str, fields: tuple[str, ...], *, is_whole: bool = True) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value.keys() <= set(fields) or (is_whole and len(value) < len(fields)):
        raise BadRequest(f"{name} is an object of {', '.join(fields)}")
    return value


def _list(value: object, name: str) -> Sequence[object]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_BLOCKS:
        raise BadRequest(f"{name} must be a list of 1 to {MAX_BLOCKS}")
    return value


def _text(value: object, name: str, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest or not value.isprintable():
        raise BadRequest(f"{name} must be a printable text of at most {longest} characters")
    return value


def count(value: object, name: str) -> int:
    """Read a count that a stranger sent.

    Args:
        value: the count, as JSON gave it.
        name: name of its field, for the sentence.

    Raises:
        BadRequest: It is no whole number from 0 to 2^52.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise BadRequest(f"{name} must be a whole number from 0 to {_MAX_COUNT}")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not -_MAX_COUNT <= value <= _MAX_COUNT:
        raise BadRequest(f"{name} must be a finite number, at most {_MAX_COUNT}")
    return float(value)


def _at_least_0(value: object, name: str) -> float:
    number = _number(value, name)
    if number < 0:
        raise BadRequest(f"{name} must be 0 or more")
    return number


def _share(value: object, name: str) -> float:
    number = _at_least_0(value, name)
    if number > 1:
        raise BadRequest(f"{name} must be at most 1")
    return number


_READ: dict[str, Callable[[object, str], Any]] = {
    "epoch": count,
    "taken": count,
    "epoch_samples": count,
    "samples": count,
    "samples_per_s": _at_least_0,
    "stall_share": _share,
    "wire_bytes": count,
    "saved_bytes": _number,
    "saved_s": _number,
    "hindrance": lambda value, _: Hindrance.from_json(value),
    "plan": lambda value, _: PlanOutline.from_json(value),
}
