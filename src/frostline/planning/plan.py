"""The plan as a value: which share of the samples takes which way, what that gives, and what was turned down."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from frostline.core import REFERENCE, Route
from frostline.core.notebook import ShownInNotebooks
from frostline.core.units import in_percent, in_samples_per_s
from frostline.planning.candidates import Candidate
from frostline.planning.situation import Link
from frostline.profiles import Trial

__all__ = ("Plan", "Share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of the samples take one way: ``share`` is above 0 and at most 1."""

    route: Route
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ShownInNotebooks):
    """The chosen mixture and all that was not chosen.

    Attributes:
        policy: ``best``, the name of a published rule, or ``fixed`` where the user named the cut.
        mixture: the ways in use, the largest share first; shares sum to 1.
        samples_per_s: predicted, steady state, while features come from the store; infinite where nothing costs
            anything.
        bottleneck: name of the resource that holds the mixture back.
        prices: prices of each resource by name: by how many percent the throughput would grow for each percent more of
            it, the largest first; they sum to 1, or are all 0 where there is no bound. A price is exact for small
            changes and too high for large ones.
        reason: a sentence or two, without the last full stop.
        candidates: every cut with every codec that was measured, by cut, those that were turned down too.
        link: link that the figures hold for.
        epochs: number of epochs that the job takes.
        later_samples_per_s: in the epochs after the first, whose features come from the trainer's cache, so that the
            head alone bounds them; None where there are none.
        engine: engine that runs the frozen layers at the node.
        trials: trials of the node's engines, with why the others are not used.
    """

    policy: str
    mixture: tuple[Share, ...]
    samples_per_s: float
    bottleneck: str
    prices: tuple[tuple[str, float], ...]
    reason: str
    candidates: tuple[Candidate, ...]
    link: Link
    epochs: int = 1
    later_samples_per_s: float | None = None
    engine: str = REFERENCE
    trials: tuple[Trial, ...] = ()

    def __repr__(self) -> str:
        ways = ", ".join(f"{in_percent(part.share)} cut {part.route.cut}" for part in self.mixture)
        return f"Plan({ways}: {in_samples_per_s(self.samples_per_s)}, held back by {self.bottleneck})"

    def _rows(self) -> Iterator[tuple[str, str]]:
        names = {candidate.route: candidate.name for candidate in self.candidates}
        for part in self.mixture:
            yield in_percent(part.share), f"cut {part.route.cut} ({names[part.route]}), {part.route.codec}"
        yield "predicted", in_samples_per_s(self.samples_per_s)
        yield "held back by", self.bottleneck
        yield "reason", self.reason

    @property
    def route(self) -> Route:
        """The way of the largest share."""
        return self.mixture[0].route

    @property
    def cut(self) -> int:
        """Number of the cut with the largest share."""
        return self.route.cut

    @property
    def chosen(self) -> Candidate:
        """The candidate of the largest share."""
        return next(candidate for candidate in self.candidates if candidate.route == self.route)

    @property
    def engine_error(self) -> float:
        """The largest relative error of the engine in use, over the cuts at which it was tried."""
        return max((trial.error for trial in self.trials if trial.engine == self.engine), default=0.0)

    @property
    def mean_samples_per_s(self) -> float:
        """Over all epochs: the harmonic mean of the first and the later ones."""
        if self.later_samples_per_s is None:
            return self.samples_per_s
        seconds = 1 / self.samples_per_s + (self.epochs - 1) / self.later_samples_per_s
        return self.epochs / seconds if seconds > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values; a rate without bound is None."""
        return {
            "cut": self.cut,
            "codec": self.route.codec,
            "name": self.chosen.name,
            "policy": self.policy,
            "reason": self.reason,
            "mixture": [{**asdict(part.route), "share": part.share} for part in self.mixture],
            "samples_per_s": _finite(self.samples_per_s),
            "epochs": self.epochs,
            "keeps_features": self.later_samples_per_s is not None,
            "later_samples_per_s": None if self.later_samples_per_s is None else _finite(self.later_samples_per_s),
            "mean_samples_per_s": _finite(self.mean_samples_per_s),
            "bottleneck": self.bottleneck,
            "prices": dict(self.prices),
            "link": self.link.to_json(),
            "engine": self.engine,
            "trials": [{**asdict(trial), "samples_per_s": trial.samples_per_s} for trial in self.trials],
            "candidates": [_plain(candidate) for candidate in self.candidates],
        }


def _plain(one: Candidate) -> dict[str, Any]:
    rest = {name: value for name, value in asdict(one).items() if name != "route"}
    return {**asdict(one.route), **rest, "samples_per_s": _finite(one.samples_per_s), "error": _finite(one.error)}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
