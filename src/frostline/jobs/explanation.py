"""What ran where and why, predicted and measured, as text for people and values for programs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from frostline.core import EXACT, REFERENCE, Cut, Route
from frostline.core.notebook import ShownInNotebooks
from frostline.core.units import in_bytes, in_rate, in_samples_per_s
from frostline.events import Tuned
from frostline.jobs.statistics import JobStatistics
from frostline.loaders.epoch.fetch import EngineChoice
from frostline.planning import Plan, Situation, explain
from frostline.planning.diagnosis import Diagnosis, diagnose

__all__ = ("Explanation", "JobTable", "whereabouts")

_UNPLANNED = (
    "no plan was measured: there is no model, or the job began with all frozen layers at the node and is too short for "
    "measuring to pay (LoaderSettings.measure_first measures before it begins)"
)


class JobTable(ShownInNotebooks):
    """How a job looks in a notebook: where each part of its work runs now."""

    @property
    def where(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a part of the work and where it runs now."""
        return ()

    def _rows(self) -> Sequence[tuple[str, str]]:
        return self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(ShownInNotebooks):
    """Predicted against measured; its text is for people, ``to_json`` for programs.

    Attributes:
        plan: in force now; None for a plain loader.
        first_plan: plan that the job began with.
        situation: situation that the plan is made from, as measured by now.
        statistics: counts of what the job did.
        where: pairs of a part of the work and where it runs.
        engine: engine that runs the frozen layers at the node now.
        fallback: why the network was not cut as it stands; None where it was.
        diagnosis: the part that holds the job back.
    """

    plan: Plan | None
    first_plan: Plan | None
    situation: Situation | None
    statistics: JobStatistics
    where: tuple[tuple[str, str], ...]
    engine: EngineChoice = field(default_factory=EngineChoice)
    fallback: str | None = None
    diagnosis: Diagnosis = field(default_factory=lambda: diagnose(None))

    def __repr__(self) -> str:
        return f"Explanation({self.diagnosis.says}; {self.plan!r})"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "held back by", self.diagnosis.held_back_by
        if self.plan is not None:
            yield "plan", self.plan.reason
        yield from self.where
        yield "measured", "; ".join(self._measured()).removeprefix("measured: ")

    def __str__(self) -> str:
        lines = [str(self.diagnosis), _UNPLANNED if self.plan is None else explain(self.plan)]
        lines += [f"not cut as it stands: {self.fallback}"] if self.fallback else []
        lines += [f"{part}: {where}" for part, where in self.where]
        lines += [
            f"after {replan.at_s:.0f} s: {replan.before} -> {replan.after}, {replan.reason}" for replan in self._replans
        ]
        lines += [_tuned(tuning) for tuning in self.statistics.tunings[-1:]]
        return "\n".join([*lines, *self._measured()])

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        done = self.statistics
        return {
            "diagnosis": self.diagnosis.to_json(),
            "plan": None if self.plan is None else self.plan.to_json(),
            "fallback": self.fallback,
            "where": dict(self.where),
            "engine": {"name": self.engine.engine, "error": self.engine.error},
            "predicted": {"samples_per_s": self._predicted_per_s},
            "measured": {
                "samples": done.samples,
                "from_cache": done.from_cache,
                "routed": [{"cut": route.cut, "codec": route.codec, "samples": rows} for route, rows in done.routed],
                "samples_per_s": done.fetched_per_s,
                "wire_bytes": done.wire_bytes,
                "payload_bytes": done.payload_bytes,
                "codec_error": done.codec_error,
                "loading_s": done.loading_s,
                "stall_s": done.stall_s,
            },
            "replans": [asdict(replan) for replan in self._replans],
            "tunings": [asdict(tuning) for tuning in self.statistics.tunings],
        }

    @property
    def _replans(self) -> Sequence[Any]:
        return self.statistics.replans

    @property
    def _predicted_per_s(self) -> float | None:
        """Of the plan that the job began with, while nothing comes from the cache; None where it has no bound."""
        if self.first_plan is None or self.first_plan.samples_per_s == float("inf"):
            return None
        return self.first_plan.samples_per_s

    def _measured(self) -> list[str]:
        done = self.statistics
        if not done.samples or not done.loading_s:
            return ["measured: nothing yet"]
        overall = (
            f"measured: {done.samples} samples, {done.from_cache} of them from the cache, "
            f"{done.samples / done.loading_s:.0f} samples/s, waiting {done.stall_s / done.loading_s:.0%} of the time, "
            f"{done.wire_bytes / 1e6:.2f} MB received"
        )
        lines = [overall]
        if done.fetched_per_s is not None and self._predicted_per_s is not None:
            lines.append(
                f"while nothing came from the cache: {in_samples_per_s(done.fetched_per_s)} measured, "
                f"{in_rate(self._predicted_per_s)} predicted"
            )
        if done.codec_error:
            lines.append(f"largest relative error by a codec: {done.codec_error:.2g}")
        return lines


def _tuned(one: Tuned) -> str:
    return (
        f"window after {one.at_s:.0f} s: {one.requests} requests and {in_bytes(one.window_bytes)} under way at most; "
        f"{one.reason}"
    )


def whereabouts(
    shares: Mapping[Route, float], cuts: Sequence[Cut], *, near: str | None, has_head: bool, engine: str = REFERENCE
) -> tuple[tuple[str, str], ...]:
    """Pairs of a part of the work and where it runs.

    Args:
        shares: shares of the samples, by way.
        cuts: cuts of the job, by number; the last is the frost line.
        near: URL of the node; None for the one in this process.
        has_head: there is a model.
        engine: engine that runs the frozen layers at the node.
    """
    node = "node in this process" if near is None else f"node at {near}"
    parts = [("reading", node)]
    for route, share in sorted(shares.items(), key=lambda item: -item[1]):
        of = "" if len(shares) == 1 else f" of {share:.0%} of the samples"
        parts += [(f"{part}{of}", where) for part, where in _one_way(route, cuts, node, engine)]
    return (*parts, ("head", "trainer")) if has_head else tuple(parts)


def _one_way(route: Route, cuts: Sequence[Cut], node: str, engine: str) -> list[tuple[str, str]]:
    cut, frost_line = cuts[route.cut], cuts[-1]
    parts = [("decoding", "trainer" if cut.number == 0 else node)]
    if cut.number > 1:
        parts.append(
            (
                f"frozen layers up to {cut.name} (cut {cut.number})",
                node if engine == REFERENCE else f"{node}, by {engine}",
            )
        )
    if route.codec != EXACT:
        parts.append((f"packing as {route.codec}", node))
    if max(1, cut.number) < frost_line.number:
        parts.append((f"frozen layers up to {frost_line.name}", "trainer"))
    return parts
