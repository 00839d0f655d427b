"""Decides the plan, the fastest mixture of ways, by a linear programme, and says it to people."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from frostline.core import EXACT, REFERENCE, Route
from frostline.core.errors import SettingError
from frostline.core.nouns import ShownInNotebooks
from frostline.core.units import in_bytes, in_multiple, in_percent, in_rate, in_samples_per_s, in_seconds
from frostline.planning.candidates import (
    ALL_IN_STORE,
    BEST,
    LINK,
    POLICIES,
    RULES,
    Candidate,
    Option,
    in_store,
    options,
    resources,
)
from frostline.planning.situation import Link, Situation
from frostline.profiles import Trial

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

__all__ = (
    "NOISE",
    "Optimum",
    "Plan",
    "Share",
    "TextTable",
    "against",
    "bounds",
    "engines",
    "explain",
    "explain_mixture",
    "explain_single",
    "make_plan",
    "name_candidate",
    "optimum",
    "plan_at_cut",
    "table",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of the samples take one way: ``share`` is above 0 and at most 1."""

    route: Route
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ShownInNotebooks):
    """The chosen mixture and all that was not chosen.

    Attributes:
        policy: ``best``, the name of a published rule, or ``plan_at_cut`` where the user named the cut.
        mixture: the ways in use, the largest share first; shares sum to 1.
        samples_per_s: the rate, predicted, steady state, while features come from the store; infinite where nothing
            costs anything.
        bottleneck: name of the resource that holds the mixture back.
        prices: prices of each resource by name: by how many percent the throughput would grow for each percent more of
            it, the largest first; they sum to 1, or are all 0 where there is no bound. A price is exact for small
            changes and too high for large ones.
        reason: a sentence or two, without the last full stop.
        candidates: every cut with every codec that was measured, by cut, those that were turned down too.
        link: link that the figures hold for.
        epochs: number of epochs that the job takes.
        later_samples_per_s: the rate in the epochs after the first, whose features come from the trainer's cache, so
            that the head alone bounds them; None where there are none.
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
        """The mean over all epochs: the harmonic one of the first and the later ones."""
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


def _plain(candidate: Candidate) -> dict[str, Any]:
    rest = {name: value for name, value in asdict(candidate).items() if name != "route"}
    return {
        **asdict(candidate.route),
        **rest,
        "samples_per_s": _finite(candidate.samples_per_s),
        "error": _finite(candidate.error),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


Floats = npt.NDArray[np.float64]

# A share below this is no sample of a million.
_NO_SHARE = 1e-6
# A way that takes this many times the best single way's seconds could take one sample in ten million at most.
_HOPELESS = 1e7
# The solver's strictest; numbers below 1e-9 it takes for 0.
_TOLERANCE = 1e-10
# Two mixtures whose rates differ by this share are equally fast: well above the tolerance, so that what was found
# stays possible, and far below any measurement.
_EQUAL = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest mixture.

    Attributes:
        shares: ``float64[n]``, of each way; they sum to 1, and at most as many as there are resources are above 0.
        seconds: seconds of the busiest resource, a sample, in the fastest mixture: the inverse of the greatest
            throughput. 0 where a way costs nothing.
        prices: ``float64[r]``, of each resource: by how many percent the throughput grows for each percent more of
            it; they sum to 1. All 0 where a way costs nothing.
    """

    shares: Floats
    seconds: float
    prices: Floats


def optimum(costs: Floats, weights: Floats, *, tolerance: float = 0.0) -> Optimum:
    """The mixture of ways with the greatest throughput; of equally fast ones that of the least weight.

    All resources work at the same time, each on another sample. With ``y_i`` samples a second on way ``i``, resource
    ``r`` works ``sum_i y_i c_ir`` of every second, so the steady state is:

        maximise T = sum_i y_i   subject to   sum_i y_i c_ir <= 1 for every r,   y >= 0.

    Way ``i`` has the share ``x_i = y_i / T`` of the samples. In shares this is the same as to minimise ``t = 1 / T``,
    the seconds of the busiest resource, subject to ``sum_i x_i = 1`` and ``sum_i x_i c_ir <= t``. A basic solution
    has no more variables above zero than rows: at most as many ways are mixed as there are resources.

    The prices are the elasticities of the throughput. If resource ``r`` did ``1 + s`` seconds of work a second, T
    would grow by ``q_r s``, where ``q_r >= 0`` is the dual of its row; so ``p_r = q_r / T`` percent for each percent.
    By strong duality the ``q_r`` sum to T, so the prices sum to one. T is concave in what each resource does, so a
    price is exact for small changes, and a bound for large ones: more gives at most that, less costs at least that.
    Where the optimum is degenerate (more rows are tight than are needed), even small changes may give less.

    Args:
        costs: ``float64[n, r]``, seconds a sample that way ``i`` takes of resource ``r``; finite, not negative.
        weights: ``float64[n]``, that breaks ties, such as bytes a sample; not negative.
        tolerance: mixtures whose throughput is less by this share count as equally fast.

    Returns:
        The optimum. Its seconds are within 5e-6 of the least possible, whatever the size of the costs: ways are
        counted in what they take of their own busiest resource, and rates in those of the fastest single way, of
        which the optimum has between 1 and r times as much.
    """
    single_s = costs.max(axis=1)
    unit_s = single_s.min()
    if unit_s == 0:
        return _free(single_s, weights, resources=costs.shape[1])
    ways = np.flatnonzero(single_s <= unit_s * _HOPELESS)
    loads, rates = costs[ways] / single_s[ways, np.newaxis], unit_s / single_s[ways]
    fastest = _fastest(loads, rates)
    chosen = _lightest(loads, rates, weights[ways], minimum=-fastest.fun * (1 - tolerance))
    # On nearly parallel ways rounding may leave one way too many: the fastest mixture of those has no more than r.
    if np.count_nonzero(chosen) > costs.shape[1]:
        few = np.flatnonzero(chosen)
        chosen[few] = _shares(_fastest(loads[few], rates[few]).x * rates[few])
    shares = np.zeros(len(costs))
    shares[ways] = chosen
    prices = np.maximum(0.0, -fastest.ineqlin.marginals)
    seconds = unit_s / -fastest.fun if tolerance else (shares @ costs).max()
    return Optimum(shares=shares, seconds=float(seconds), prices=prices / prices.sum())


def _free(single_s: Floats, weights: Floats, *, resources: int) -> Optimum:
    """Of the ways that cost nothing at all, the one of the least weight."""
    shares = np.zeros(len(single_s))
    shares[np.argmin(np.where(single_s == 0, weights, np.inf))] = 1.0
    return Optimum(shares=shares, seconds=0.0, prices=np.zeros(resources))


def _fastest(loads: Floats, rates: Floats) -> "OptimizeResult":
    """How much of its own busiest resource each way takes, where all together have the greatest rate.

    Args:
        loads: ``float64[n, r]``, of each resource while a way takes all of its busiest: the largest of a row is 1.
        rates: ``float64[n]``, of a way that takes all of its busiest resource; the largest is 1.
    """
    return _solved(-rates, loads.T, np.ones(loads.shape[1]))


def _lightest(loads: Floats, rates: Floats, weights: Floats, *, minimum: float) -> Floats:
    """Shares of the mixture of the least weight among those with at least that rate."""
    weighed = rates * weights
    heaviest = weighed.max()
    found = _solved(
        weighed / heaviest if heaviest > 0 else np.zeros(len(rates)),
        np.vstack([loads.T, -rates]),
        np.append(np.ones(loads.shape[1]), -minimum * (1 - _EQUAL)),
    )
    return _shares(found.x * rates)


def _solved(costs: Floats, rows: Floats, bounds: Floats) -> "OptimizeResult":
    """A basic solution that has the least costs, where ``rows @ x <= bounds`` and ``x >= 0``."""
    # Imported when a plan is made: it takes longer than all of the command line, which asks here for names alone.
    from scipy.optimize import linprog

    options = {"primal_feasibility_tolerance": _TOLERANCE, "dual_feasibility_tolerance": _TOLERANCE}
    found = linprog(costs, A_ub=rows, b_ub=bounds, method="highs-ds", options=options)
    assert found.success, f"some mixture is always possible, and rates are bounded: {found.message}"
    return found


def _shares(rates: Floats) -> Floats:
    """Rates as shares that sum to one, without those that are no sample."""
    shares = rates / rates.sum()
    kept = np.where(shares < _NO_SHARE, 0.0, shares)
    return np.asarray(kept / kept.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Cells as text: the names of the columns, the rows, and the candidate that each row is about."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    candidates: tuple[Candidate, ...]


_COLUMNS = ("share", "cut", "after", "codec", "bytes", "store", "link", "trainer", "memory", "samples/s", "why")
_SIDES = "><<<>>>>>><"


def explain(plan: Plan) -> str:
    """The plan as text: its reason, the link, and the table of its cuts."""
    made = table(plan)
    rows = [made.columns, *made.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, _SIDES, widths, strict=True)).rstrip()
        for row in rows
    ]
    link = f"link: {in_bytes(plan.link.bytes_per_s)}/s, round trip {in_seconds(plan.link.round_trip_s)}"
    return "\n".join([f"{plan.reason}.", link, *engines(plan), "", *lines])


def engines(plan: Plan) -> list[str]:
    """Which engine the node takes, what it loses, and why it takes no other; nothing where none was tried."""
    if not plan.trials:
        return []
    line = max(trial.cut for trial in plan.trials)
    used = (trial for trial in plan.trials if (trial.engine, trial.cut) == (plan.engine, line))
    rate = next((candidate.samples_per_s for candidate in used), None)
    lost = f", error up to {plan.engine_error:.2g}" if plan.engine_error else ""
    first = f"engine at the node: {plan.engine}, {in_samples_per_s(rate or 0.0)} alone up to the frost line{lost}"
    others = {trial.engine: trial.why_not for trial in plan.trials if trial.why_not is not None}
    return [first, *(f"  not {engine}: {why_not}" for engine, why_not in others.items())]


def table(plan: Plan, *, every: bool = False) -> TextTable:
    """One row a cut, of the fastest codec there that is possible, and one for each way in use, with its share.

    Seconds and bytes are a sample's, memory is the node's.

    Args:
        plan: the plan to show.
        every: True gives a row for each codec of each cut instead.
    """
    shares = {part.route: part.share for part in plan.mixture}
    shown: list[Candidate] = []
    for number in sorted({candidate.cut for candidate in plan.candidates}):
        here = [candidate for candidate in plan.candidates if candidate.cut == number]
        shown += here if every else [candidate for candidate in here if candidate.route in shares] or [_best_way(here)]
    rows = tuple(_row(candidate, shares.get(candidate.route)) for candidate in shown)
    return TextTable(columns=_COLUMNS, rows=rows, candidates=tuple(shown))


def name_candidate(candidate: Candidate) -> str:
    """A candidate in a sentence: ``cut 9 (layer4)``, ``cut 9 (layer4, sparse+zstd)``."""
    codec = "" if candidate.codec == EXACT else f", {candidate.codec}"
    return f"cut {candidate.cut} ({candidate.name}{codec})"


def explain_single(best: Candidate, *, near: int, noise: float, encoded: Candidate, min_bytes: float) -> str:
    """Why one way was taken for all samples."""
    among = "is the fastest"
    if near > 1:
        among = f"ships the fewest bytes of the {near} ways within {_percent(noise)} of the fastest"
    if near > 1 and best.wire_bytes_per_sample > min_bytes:
        among = (
            f"is the cut with the fewest bytes among the {near} ways within {_percent(noise)} of the fastest; "
            "on one machine its fastest codec is used"
        )
    size = in_bytes(best.wire_bytes_per_sample)
    return f"{name_candidate(best)} {among}: {size} a sample{_beside_encoded(best, encoded)}"


def explain_mixture(ways: Sequence[tuple[Candidate, float]], *, gain: float) -> str:
    """Why several ways are mixed, where together they are faster by ``gain`` than the fastest one alone."""
    parts = [f"{_percent(share)} of the samples at {name_candidate(candidate)}" for candidate, share in ways]
    wire_bytes = sum(share * candidate.wire_bytes_per_sample for candidate, share in ways)
    return (
        f"{', '.join(parts[:-1])} and {parts[-1]} are together {_percent(gain)} faster than any one way for all: "
        f"{in_bytes(wire_bytes)} a sample"
    )


def bounds(samples_per_s: float, bottleneck: str, prices: Sequence[tuple[str, float]]) -> str:
    """The rate, what holds it back, and what more of each resource would give at most."""
    if math.isinf(samples_per_s):
        return "nothing holds it back"
    (first, gain), *others = [(_more_of(name), _percent(price / 10)) for name, price in prices if price >= 0.05]
    more = "".join(f", 10 % more {name} {gain}" for name, gain in others)
    return (
        f"{in_samples_per_s(samples_per_s)}, held back by the {bottleneck}; "
        f"10 % more {first} would give up to {gain}{more}"
    )


def _over_epochs(plan: Plan) -> str:
    """What the epochs after the first give, to be put after a plan's reason; nothing where they are alike."""
    if plan.later_samples_per_s is None:
        return ""
    return (
        f"; later epochs come from the cache: {in_samples_per_s(plan.later_samples_per_s)}, "
        f"{in_rate(plan.mean_samples_per_s)} on average over {plan.epochs} epochs"
    )


def _in_the_store(candidate: Candidate) -> str:
    """That training in the store too would be faster, to be put after a plan's reason."""
    return f"; training in the store too would give {in_samples_per_s(candidate.samples_per_s)} (policy all_in_store)"


def against(candidate: Candidate, samples_per_s: float, wire_bytes: float, *, noise: float) -> str:
    """Why a possible way was not taken, where the plan has ``samples_per_s`` and ``wire_bytes`` a sample."""
    if candidate.samples_per_s < (1 - noise) * samples_per_s:
        return f"{_percent(1 - candidate.samples_per_s / samples_per_s)} slower"
    times = candidate.wire_bytes_per_sample / max(1.0, wire_bytes)
    as_many = f"{in_multiple(times)} times the" if candidate.wire_bytes_per_sample > wire_bytes else "the same"
    return f"as fast within {_percent(noise)}, with {as_many} bytes"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _more_of(resource: str) -> str:
    return "bandwidth" if resource == LINK else resource


def _best_way(here: Sequence[Candidate]) -> Candidate:
    """Of one cut's ways the one to show: possible ones first, then fast ones, then those with few bytes."""
    return max(here, key=lambda item: (item.is_possible, item.samples_per_s, -item.wire_bytes_per_sample))


def _row(candidate: Candidate, share: float | None) -> tuple[str, ...]:
    return (
        "" if share is None else _percent(share),
        str(candidate.cut),
        candidate.name,
        candidate.codec,
        in_bytes(candidate.wire_bytes_per_sample),
        in_seconds(candidate.store_s),
        in_seconds(candidate.link_s),
        in_seconds(candidate.trainer_s),
        in_bytes(candidate.memory_bytes),
        in_rate(candidate.samples_per_s),
        candidate.rejected or "chosen",
    )


def _beside_encoded(best: Candidate, encoded: Candidate) -> str:
    ours, theirs = best.wire_bytes_per_sample, encoded.wire_bytes_per_sample
    if best.cut == encoded.cut or ours == theirs or not (ours and theirs):
        return ""
    times, word = (theirs / ours, "fewer") if ours < theirs else (ours / theirs, "more")
    return f", {in_multiple(times)} times {word} than encoded"


NOISE = 0.05
"""Two runs of one measurement differ by this share on a busy machine; a smaller gain is none."""
# Of mixtures this near to the fastest the one with the fewest bytes is taken. The last percent of a busy link, and the
# processors' work for its bytes, which nobody measured, cost more than that: ResNet-18 over 1 Gbit/s got 38 samples/s
# of 57 predicted from a mixture that shipped pixels for half of the samples (benchmarks/results).
_LIGHTER = 0.02
# A way with a smaller share gains less than it takes to keep it ready.
_MIN_SHARE = 0.01
# A user's loop stays where it is; that it could run elsewhere is worth saying from this gain on.
_WORTH_SAYING = 0.25
# Rates and loads this near to each other are the same but for rounding.
_ROUNDING = 1e-6


def make_plan(situation: Situation, policy: str = BEST, *, noise: float = NOISE) -> Plan:
    """Decide which share of the samples takes which way.

    The policy ``best`` finds the mixture of cuts and codecs with the greatest throughput (``optimum``). Where one way
    for all samples is as fast within ``noise``, that is taken instead, and of several such the one with the fewest
    bytes, or on one machine the fastest codec at its cut; and of mixtures as fast within 2 % too. Cut 0 ships the
    encoded samples and is possible wherever the trainer has memory for the frozen layers, so that no job is planned
    slower than loading without a node by more than that.
    Every other policy is a published rule (``policies``).

    Features that are kept between epochs are those at the frost line, whatever the way: later epochs then cost the
    same for every candidate, so the choice for the first epoch is the choice for all.

    Args:
        situation: situation: measurements and what is allowed.
        policy: one of ``POLICIES``.
        noise: a gain below this share is none; 0 gives the exact optimum.

    Raises:
        SettingError: No policy has that name, or no cut fits the memory of both sides.
    """
    if policy == BEST:
        return _best(situation, noise)
    if policy not in RULES:
        raise SettingError(f"there is no policy {policy!r}: it is one of {', '.join(POLICIES)}")
    return _by_rule(situation, policy)


def plan_at_cut(situation: Situation, cut: int, codec: str | None = None) -> Plan:
    """Take the cut that the user named, with the named codec, or with the one that ``best`` would take there.

    Raises:
        SettingError: There is no such cut or codec, the cut does not fit the memory of both sides, or the job's
            accuracy does not allow the codec.
    """
    found = options(situation)
    here = [option for option in found if option.candidate.cut == cut]
    if not here:
        raise SettingError(f"there is no cut {cut}: this job has cuts 0 to {situation.frost_line.number}")
    known = [option.candidate.codec for option in here]
    if codec is not None and codec not in known:
        raise SettingError(f"codec {codec!r} was not measured at cut {cut}; there are {', '.join(known)}")
    here = [option for option in here if codec in (None, option.candidate.codec)]
    possible = [option for option in here if option.candidate.is_possible]
    if not possible:
        raise _refusal(here[0].candidate)
    fastest = max(option.candidate.samples_per_s for option in possible)
    chosen = _near(possible, fastest, NOISE, same_host=situation.same_host)[0]
    return _alone(situation, "fixed", found, chosen, f"{name_candidate(chosen.candidate)} was asked for")


def _best(situation: Situation, noise: float) -> Plan:
    found, names = options(situation), resources(situation)
    possible = _possible(found)
    exact = optimum(
        np.array([[option.seconds[name] for name in names] for option in possible]),
        np.array([option.candidate.wire_bytes_per_sample for option in possible], np.float64),
        tolerance=min(noise, _LIGHTER),
    )
    greatest = 1 / exact.seconds if exact.seconds > 0 else math.inf
    near = _near(possible, greatest, noise, same_host=situation.same_host)
    if near:
        mix = _Mix.of([(near[0], 1.0)])
        fewest = min(option.candidate.wire_bytes_per_sample for option in near)
        why = explain_single(
            near[0].candidate, near=len(near), noise=noise, encoded=found[0].candidate, min_bytes=fewest
        )
    else:
        mix = _Mix.of(_used(possible, exact.shares.tolist(), minimum=_MIN_SHARE if noise else 0.0))
        fastest = max(option.candidate.samples_per_s for option in possible)
        why = explain_mixture(
            [(option.candidate, share) for option, share in mix.ways], gain=mix.samples_per_s / fastest - 1
        )
    prices = dict(zip(names, exact.prices.tolist(), strict=True))
    judged = _judged(found, mix, lambda item: against(item, mix.samples_per_s, mix.wire_bytes_per_sample, noise=noise))
    plan = _plan(situation, BEST, mix, prices, why, judged)
    return replace(plan, reason=f"{plan.reason}{_elsewhere(situation, plan)}")


def _elsewhere(situation: Situation, plan: Plan) -> str:
    """That training in the store would be faster, where it would; only the user can move the loop there."""
    has_network = situation.frost_line.number > 1
    if not has_network or situation.same_host or plan.later_samples_per_s is not None:
        return ""
    moved = in_store(situation).candidate
    is_faster = moved.samples_per_s > (1 + _WORTH_SAYING) * plan.samples_per_s
    return _in_the_store(moved) if moved.is_possible and is_faster else ""


def _by_rule(situation: Situation, policy: str) -> Plan:
    """What a published rule takes; where a side cannot run that, the first cut that both can run."""
    found = options(situation)
    exact = [option for option in found if option.candidate.codec == EXACT]
    possible = _possible(exact)
    number = RULES[policy]([option.candidate for option in possible], situation)
    chosen = next(option for option in exact if option.candidate.cut == number)
    why = f"the rule {policy} takes {name_candidate(chosen.candidate)}"
    if not chosen.candidate.is_possible:
        instead = possible[0]
        taken = name_candidate(instead.candidate)
        why = f"{why}, which cannot be used ({chosen.candidate.rejected}), so it is {taken} instead"
        chosen = instead
    elif policy == ALL_IN_STORE:
        chosen = in_store(situation)
        found = tuple(chosen if option.candidate.route == chosen.candidate.route else option for option in found)
    return _alone(situation, policy, found, chosen, why)


def _possible(found: Sequence[Option]) -> list[Option]:
    possible = [option for option in found if option.candidate.is_possible]
    if not possible:
        first, last = found[0].candidate, found[-1].candidate
        raise SettingError(f"{_refusal(first)}; {_refusal(last)}")
    return possible


def _alone(situation: Situation, policy: str, found: Sequence[Option], chosen: Option, why: str) -> Plan:
    """A plan of one way, whatever others would give: only more of its busiest resource makes it faster."""
    mix = _Mix.of([(chosen, 1.0)])
    bottleneck = mix.bottleneck({})
    is_bound = mix.loads[bottleneck] > 0
    prices = {name: float(is_bound and name == bottleneck) for name in mix.loads}
    return _plan(situation, policy, mix, prices, why, _judged(found, mix, lambda _: why))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mix:
    """Ways with their shares, the largest first, and the seconds that each resource works for an average sample."""

    ways: tuple[tuple[Option, float], ...]
    loads: Mapping[str, float]

    @classmethod
    def of(cls, ways: Sequence[tuple[Option, float]]) -> "_Mix":
        names = ways[0][0].seconds
        loads = {name: sum(share * option.seconds[name] for option, share in ways) for name in names}
        return cls(ways=tuple(ways), loads=loads)

    @property
    def samples_per_s(self) -> float:
        max_s = max(self.loads.values())
        return 1 / max_s if max_s > 0 else math.inf

    @property
    def wire_bytes_per_sample(self) -> float:
        return sum(share * option.candidate.wire_bytes_per_sample for option, share in self.ways)

    def bottleneck(self, prices: Mapping[str, float]) -> str:
        """The busiest resource; of several equally busy ones the one with the highest price."""
        max_s = max(self.loads.values())
        busiest = [name for name, load_s in self.loads.items() if load_s >= (1 - _ROUNDING) * max_s]
        return max(busiest, key=lambda name: prices.get(name, 0.0))


def _plan(
    situation: Situation,
    policy: str,
    mix: _Mix,
    prices: Mapping[str, float],
    why: str,
    candidates: tuple[Candidate, ...],
) -> Plan:
    bottleneck, ranked = mix.bottleneck(prices), tuple(sorted(prices.items(), key=lambda item: -item[1]))
    plan = Plan(
        policy=policy,
        mixture=tuple(Share(route=option.candidate.route, share=share) for option, share in mix.ways),
        samples_per_s=mix.samples_per_s,
        bottleneck=bottleneck,
        prices=ranked,
        reason=f"{why}, {bounds(mix.samples_per_s, bottleneck, ranked)}",
        candidates=candidates,
        link=situation.link,
        epochs=situation.epochs,
        later_samples_per_s=_later(situation),
        engine=situation.store.engine,
        trials=situation.store.trials,
    )
    return replace(plan, reason=f"{plan.reason}{_over_epochs(plan)}")


def _later(situation: Situation) -> float | None:
    """Samples a second of the epochs after the first, where those come from the cache: the head alone bounds them."""
    if not situation.keeps_features or situation.epochs == 1:
        return None
    return 1 / situation.head_s if situation.head_s > 0 else math.inf


def _used(possible: Sequence[Option], shares: Sequence[float], *, minimum: float) -> list[tuple[Option, float]]:
    """The ways with more than the least share, the largest first; together they take all samples."""
    used = [(option, share) for option, share in zip(possible, shares, strict=True) if share > minimum]
    total = sum(share for _, share in used)
    used = [(option, share / total) for option, share in used]
    return sorted(used, key=lambda way: (-round(way[1], 4), way[0].candidate.route))


def _near(possible: Sequence[Option], samples_per_s: float, noise: float, *, same_host: bool) -> list[Option]:
    """The ways that are alone as fast as that within the noise, the fewest bytes first.

    On one machine nobody waits for a byte, and packing takes the cores that do the rest: of the codecs at that cut the
    fastest comes first. The cut stays, because what its bytes cost the cores beside packing nobody measured.
    """
    enough = (1 - max(noise, _ROUNDING)) * samples_per_s
    near = sorted(
        (option for option in possible if option.candidate.samples_per_s >= enough),
        key=lambda item: _preference(item.candidate),
    )
    if near and same_host:
        cut = near[0].candidate.cut
        near.sort(key=lambda item: (item.candidate.cut != cut, -item.candidate.samples_per_s))
    return near


def _preference(candidate: Candidate) -> tuple[float, float, int]:
    return candidate.wire_bytes_per_sample, -candidate.samples_per_s, -candidate.cut


def _judged(found: Sequence[Option], mix: _Mix, why_not: Callable[[Candidate], str]) -> tuple[Candidate, ...]:
    """All candidates, each that is not in use with its reason."""
    used = {option.candidate.route for option, _ in mix.ways}
    return tuple(
        replace(candidate, rejected=None if candidate.route in used else candidate.rejected or why_not(candidate))
        for candidate in (option.candidate for option in found)
    )


def _refusal(candidate: Candidate) -> SettingError:
    return SettingError(f"{name_candidate(candidate)} cannot be used: {candidate.rejected}")
