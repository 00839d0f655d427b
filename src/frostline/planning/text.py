"""How a plan is said to people: its reason in a sentence, why the others were turned down, and a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frostline.core import EXACT
from frostline.core.units import in_bytes, in_multiple, in_rate, in_samples_per_s, in_seconds
from frostline.planning.candidates import LINK, Candidate
from frostline.planning.plan import Plan

__all__ = (
    "TextTable",
    "against",
    "bounds",
    "engines",
    "explain",
    "in_the_store",
    "mixed",
    "named",
    "over_epochs",
    "single",
    "table",
)


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
        plan: to show.
        every: one row for each codec of each cut instead.
    """
    shares = {part.route: part.share for part in plan.mixture}
    shown: list[Candidate] = []
    for number in sorted({candidate.cut for candidate in plan.candidates}):
        here = [candidate for candidate in plan.candidates if candidate.cut == number]
        shown += here if every else [candidate for candidate in here if candidate.route in shares] or [_best(here)]
    rows = tuple(_row(candidate, shares.get(candidate.route)) for candidate in shown)
    return TextTable(columns=_COLUMNS, rows=rows, candidates=tuple(shown))


def named(one: Candidate) -> str:
    """A candidate in a sentence: ``cut 9 (layer4)``, ``cut 9 (layer4, sparse+zstd)``."""
    codec = "" if one.codec == EXACT else f", {one.codec}"
    return f"cut {one.cut} ({one.name}{codec})"


def single(best: Candidate, *, near: int, noise: float, encoded: Candidate, min_bytes: float) -> str:
    """Why one way was taken for all samples."""
    among = "is the fastest"
    if near > 1:
        among = f"ships the fewest bytes of the {near} ways within {_percent(noise)} of the fastest"
    if near > 1 and best.wire_bytes_per_sample > min_bytes:
        among = f"has the fastest codec on one machine, of the {near} ways within {_percent(noise)} of the fastest"
    return f"{named(best)} {among}: {in_bytes(best.wire_bytes_per_sample)} a sample{_beside_encoded(best, encoded)}"


def mixed(ways: Sequence[tuple[Candidate, float]], *, gain: float) -> str:
    """Why several ways are mixed, where together they are faster by ``gain`` than the fastest one alone."""
    parts = [f"{_percent(share)} of the samples at {named(candidate)}" for candidate, share in ways]
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


def over_epochs(plan: Plan) -> str:
    """What the epochs after the first give, to be put after a plan's reason; nothing where they are alike."""
    if plan.later_samples_per_s is None:
        return ""
    return (
        f"; later epochs come from the cache: {in_samples_per_s(plan.later_samples_per_s)}, "
        f"{in_rate(plan.mean_samples_per_s)} on average over {plan.epochs} epochs"
    )


def in_the_store(one: Candidate) -> str:
    """That training in the store too would be faster, to be put after a plan's reason."""
    return f"; training in the store too would give {in_samples_per_s(one.samples_per_s)} (policy all_in_store)"


def against(one: Candidate, samples_per_s: float, wire_bytes: float, *, noise: float) -> str:
    """Why a possible way was not taken, where the plan has ``samples_per_s`` and ``wire_bytes`` a sample."""
    if one.samples_per_s < (1 - noise) * samples_per_s:
        return f"{_percent(1 - one.samples_per_s / samples_per_s)} slower"
    times = one.wire_bytes_per_sample / max(1.0, wire_bytes)
    as_many = f"{in_multiple(times)} times the" if one.wire_bytes_per_sample > wire_bytes else "the same"
    return f"as fast within {_percent(noise)}, with {as_many} bytes"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _more_of(resource: str) -> str:
    return "bandwidth" if resource == LINK else resource


def _best(here: Sequence[Candidate]) -> Candidate:
    """Of one cut's ways the one to show: possible ones first, then fast ones, then those with few bytes."""
    return max(here, key=lambda item: (item.is_possible, item.samples_per_s, -item.wire_bytes_per_sample))


def _row(one: Candidate, share: float | None) -> tuple[str, ...]:
    return (
        "" if share is None else _percent(share),
        str(one.cut),
        one.name,
        one.codec,
        in_bytes(one.wire_bytes_per_sample),
        in_seconds(one.store_s),
        in_seconds(one.link_s),
        in_seconds(one.trainer_s),
        in_bytes(one.memory_bytes),
        in_rate(one.samples_per_s),
        one.rejected or "chosen",
    )


def _beside_encoded(best: Candidate, encoded: Candidate) -> str:
    ours, theirs = best.wire_bytes_per_sample, encoded.wire_bytes_per_sample
    if best.cut == encoded.cut or ours == theirs or not (ours and theirs):
        return ""
    times, word = (theirs / ours, "fewer") if ours < theirs else (ours / theirs, "more")
    return f", {in_multiple(times)} times {word} than encoded"
