"""Decides which engine runs a prefix: the fastest whose features are as near to the reference's as the job allows."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from frostline.core import EXACT, FLOAT32, LOSSY, REFERENCE
from frostline.core.units import in_rate
from frostline.profiles import PRECISIONS, Trial

__all__ = ("FLOAT32_ERROR", "Choice", "choose", "inexact", "interpolated", "may_use")

# Two runs of one measurement differ by this share on a busy machine: a gain below it is none, and the reference stays.
_NOISE = 0.05
# The coarsest precision that a named accuracy allows, by its place in PRECISIONS.
_ALLOWED = {EXACT: -1, FLOAT32: 0, **{name: PRECISIONS.index(name) for name in LOSSY}}
FLOAT32_ERROR = 1e-4
"""The largest relative error of a sample that another order of sums in 32-bit floats explains.

ONNX Runtime, OpenVINO and compiled torch differ from eager torch by 3e-7 to 5e-6 over the fourteen networks that were
measured: ten to three hundred times less. What computes in fewer bits without saying so is further off: TensorFloat-32
rounds each factor by up to 5e-4, bfloat16 by 4e-3.
"""
# What a precision explains of an error; an engine that is further off computes something else, for which a random
# vector has 1 and more. EfficientNet-lite0 at its frost line, the worst of 1,041 photographs: 0.15 in bfloat16, which
# costs a linear head nothing that can be seen, and 0.34 to 0.44 in 8 bits, which cost it 0.0 and 0.2 points of percent.
# Noise as large as these bounds on every photograph would cost 1.2 and 2.7 points (``benchmarks/accuracy.py``). fp16
# has three more bits than bfloat16, and an eighth of its error.
_EXPLAINED = {"fp32": FLOAT32_ERROR, "fp16": 0.04, "bf16": 0.3, "int8": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine to use, and every trial with why its engine is not used.

    Attributes:
        engine: its name.
        trials: as given, ``why_not`` filled in; None for the engine to use.
    """

    engine: str
    trials: tuple[Trial, ...]


def may_use(precision: str, accuracy: str | float) -> bool:
    """Whether a job may use engines of a precision at all, so that they are worth trying.

    Args:
        precision: one of ``PRECISIONS``.
        accuracy: a name (``planning.ACCURACIES``), or the largest relative error.
    """
    return not isinstance(accuracy, str) or PRECISIONS.index(precision) <= _ALLOWED[accuracy]


def choose(trials: Sequence[Trial], accuracy: str | float) -> Choice:
    """Choose an engine by what was measured.

    Speed is compared at the last cut that was tried. An engine must be exact enough at every cut at which it was
    tried, and must beat the reference by more than the noise of a measurement.

    Args:
        trials: trials of every engine, the reference among them; several cuts of one engine may be there.
        accuracy: a name (``planning.ACCURACIES``), or the largest relative error.
    """
    why_not = _refusals(trials, accuracy)
    last = max((trial.cut for trial in trials), default=0)
    seconds = {trial.engine: trial.seconds for trial in trials if trial.cut == last and trial.engine not in why_not}
    reference_s = seconds.pop(REFERENCE, None)
    fastest = min(seconds, key=seconds.__getitem__, default=REFERENCE)
    if fastest != REFERENCE and reference_s is not None and seconds[fastest] > (1 - _NOISE) * reference_s:
        fastest = REFERENCE
    chosen_s = reference_s if fastest == REFERENCE else seconds[fastest]
    judged = (replace(trial, why_not=_why(trial, fastest, chosen_s, why_not)) for trial in trials)
    return Choice(engine=fastest, trials=tuple(judged))


def interpolated(reference_s: Sequence[float], measured: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds of an engine at every cut, from those at some: between them they lie as the reference's do.

    Args:
        reference_s: the reference's seconds a sample at every cut, in order, the network's input first.
        measured: the engine's at some of them, by their place, the last cut among them.
    """
    corners = [(0.0, 0.0)]
    for place in sorted(measured):
        # Measured with noise, a later cut may seem cheaper than an earlier one.
        corners.append((max(reference_s[place], corners[-1][0]), max(measured[place], corners[-1][1])))
    theirs, ours = zip(*corners, strict=True)
    return tuple(measured.get(place, _between(here_s, theirs, ours)) for place, here_s in enumerate(reference_s))


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """The line through corners, whose ``xs`` do not fall."""
    behind = bisect.bisect_left(xs, x)
    if behind == 0:
        return ys[0]
    if behind == len(xs):
        return ys[-1]
    low, high = behind - 1, behind
    return ys[low] + (x - xs[low]) / (xs[high] - xs[low]) * (ys[high] - ys[low])


def _refusals(trials: Sequence[Trial], accuracy: str | float) -> dict[str, str]:
    """Why engines may not be used, by name; the first reason of each."""
    found: dict[str, str] = {}
    for trial in trials:
        why = trial.why_not if trial.samples_per_s is None else inexact(trial, accuracy)
        if why is not None and trial.engine != REFERENCE:
            found.setdefault(trial.engine, why)
    return found


def inexact(one: Trial, accuracy: str | float) -> str | None:
    """Why a job may not use an engine that ran, by its precision and its error; None where it may.

    Args:
        one: the trial.
        accuracy: a name (``planning.ACCURACIES``), or the largest relative error.
    """
    if one.engine == REFERENCE:
        return None
    if isinstance(accuracy, str) and not may_use(one.precision, accuracy):
        return f"computes in {one.precision}, and accuracy is {accuracy!r}"
    limit = _EXPLAINED[one.precision] if isinstance(accuracy, str) else accuracy
    if one.error <= limit:
        return None
    said = f"has an error of {one.error:.2g} at cut {one.cut}"
    if isinstance(accuracy, str):
        return f"{said}, more than {one.precision} explains"
    return f"{said}, and accuracy allows {accuracy:.2g}"


def _why(one: Trial, chosen: str, chosen_s: float | None, why_not: dict[str, str]) -> str | None:
    if one.engine == chosen:
        return None
    if one.engine in why_not:
        return why_not[one.engine]
    if chosen_s is None or one.seconds <= 0:
        return "is not faster"
    return f"is slower: {in_rate(one.samples_per_s or 0)} samples/s, and {chosen} gives {in_rate(1 / chosen_s)}"
