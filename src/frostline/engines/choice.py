"""Decides which engines are worth a trial for a job, and which one runs a prefix. Pure.

Decides which engine runs a prefix: the fastest whose features are as near to the reference's as the job allows.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from frostline.core import EXACT, FLOAT32, LOSSY, REFERENCE
from frostline.core.units import in_rate, in_seconds
from frostline.profiles import PRECISIONS, Trial

__all__ = (
    "FLOAT32_ERROR",
    "Choice",
    "Prospect",
    "accuracy_refusal",
    "choose",
    "comparison_prospect",
    "interpolate_seconds",
    "is_prompt",
    "may_use",
    "missing_ability",
    "prospects",
    "too_coarse",
    "trial_refusal",
)


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
# Noise as large as these bounds on every photograph would cost 1.2 and 2.7 points
# (``benchmarks/results/2026-11-22-accuracy.md``). fp16 has three more bits than bfloat16, and an eighth of its error.
_EXPLAINED = {"fp32": FLOAT32_ERROR, "fp16": 0.04, "bf16": 0.3, "int8": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine to use, and every trial with why its engine is not used.

    Attributes:
        engine: the name.
        trials: the trials as given, ``why_not`` filled in; None for the engine to use.
    """

    engine: str
    trials: tuple[Trial, ...]


def may_use(precision: str, accuracy: str | float) -> bool:
    """Whether a job may use engines of a precision at all, so that they are worth trying.

    Args:
        precision: one of ``PRECISIONS``.
        accuracy: a name (``planning.situation.ACCURACIES``), or the largest relative error.
    """
    return not isinstance(accuracy, str) or PRECISIONS.index(precision) <= _ALLOWED[accuracy]


def choose(trials: Sequence[Trial], accuracy: str | float) -> Choice:
    """Choose an engine by what was measured.

    Speed is compared at the last cut that was tried. An engine must be exact enough at every cut at which it was
    tried, and must beat the reference by more than the noise of a measurement.

    Args:
        trials: trials of every engine, the reference among them; several cuts of one engine may be there.
        accuracy: a name (``planning.situation.ACCURACIES``), or the largest relative error.
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


def interpolate_seconds(reference_s: Sequence[float], measured: Mapping[int, float]) -> tuple[float, ...]:
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
        why = trial.why_not if trial.samples_per_s is None else accuracy_refusal(trial, accuracy)
        if why is not None and trial.engine != REFERENCE:
            found.setdefault(trial.engine, why)
    return found


def accuracy_refusal(trial: Trial, accuracy: str | float) -> str | None:
    """Why a job may not use an engine that ran, by its precision and its error; None where it may.

    Args:
        trial: the trial.
        accuracy: a name (``planning.situation.ACCURACIES``), or the largest relative error.
    """
    if trial.engine == REFERENCE:
        return None
    if isinstance(accuracy, str) and not may_use(trial.precision, accuracy):
        return f"computes in {trial.precision}, and accuracy is {accuracy!r}"
    limit = _EXPLAINED[trial.precision] if isinstance(accuracy, str) else accuracy
    if trial.error <= limit:
        return None
    said = f"has an error of {trial.error:.2g} at cut {trial.cut}"
    if isinstance(accuracy, str):
        return f"{said}, more than {trial.precision} explains"
    return f"{said}, and accuracy allows {accuracy:.2g}"


def largest_error(accuracy: str | float) -> float:
    """The largest relative error of a sample that an accuracy explains; 0 where all is to be equal to the bit.

    Args:
        accuracy: a name (``planning.situation.ACCURACIES``), or the largest relative error.
    """
    if not isinstance(accuracy, str):
        return accuracy
    return 0.0 if accuracy == EXACT else _EXPLAINED[PRECISIONS[_ALLOWED[accuracy]]]


def _why(trial: Trial, chosen: str, chosen_s: float | None, why_not: dict[str, str]) -> str | None:
    if trial.engine == chosen:
        return None
    if trial.engine in why_not:
        return why_not[trial.engine]
    if chosen_s is None or trial.seconds <= 0:
        return "is not faster"
    return f"is slower: {in_rate(trial.samples_per_s or 0)} samples/s, and {chosen} gives {in_rate(1 / chosen_s)}"


# A job may give trials this share of its predicted time even where it does not win it back: other jobs do.
_SHARE = 0.05
# Rows that a trial runs: to warm up, to judge and to time it; fewer where it shares the node's process.
_ROWS, _ROWS_HERE = 200, 128
# A process of its own imports PyTorch and loads the weights.
_PROCESS_S = 4.0
# What the other settings of an engine take to be tried, and its memory to be seen.
_SETTINGS_S = 6.0
# Engines that are ready in as many seconds are tried in the node's own process, where it serves one job alone.
_PROMPT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is expected of an engine before anybody tried it on a network.

    Attributes:
        engine: name of its offer.
        speed_up: samples a second, as a multiple of the reference's.
        ready_s: processor seconds until it runs, the conversion among them.
        is_here: True if it is tried in the node's own process, instead of one of its own.
    """

    engine: str
    speed_up: float
    ready_s: float
    is_here: bool = False

    def trial_s(self, reference_s: float) -> float:
        """What a trial takes where the reference takes so long a sample."""
        row_s = reference_s / self.speed_up
        return self.ready_s + (_ROWS_HERE * row_s if self.is_here else _PROCESS_S + _ROWS * row_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prior:
    """What is known of an engine before any trial.

    Attributes:
        ready_s: seconds until it is ready for EfficientNet-lite0, as ``Prospect.ready_s``.
        speed_ups: the factors by what the processor must be able to do for them, in its flags' names; the first that it
            has is taken, and without any of them the engine is not tried. "" asks for nothing.
        wants: abilities that the processor lacks.
    """

    ready_s: float
    speed_ups: Mapping[str, float]
    wants: str = ""


_BF16, _INT8 = "bfloat16", "products of 8-bit integers"
_OF_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
_OF_INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp", "avx2")


def _speeds(flags: Sequence[str], *speed_ups: float) -> dict[str, float]:
    return dict(zip(flags, speed_ups, strict=True))


# Speeds are means over EfficientNet-lite0, ResNet-18 and ViT-S on two threads
# (``benchmarks/results/2026-11-21-engines.md``), those of tiles (amx) their makers'; seconds are those of
# EfficientNet-lite0, whose conversion takes longest of these.
_PRIORS: Mapping[str, _Prior] = {
    "openvino": _Prior(ready_s=1, speed_ups={"": 1.8}),
    "openvino-bf16": _Prior(ready_s=1, speed_ups=_speeds(_OF_BF16, 5.0, 2.8, 2.0), wants=_BF16),
    "openvino-int8": _Prior(ready_s=60, speed_ups=_speeds(_OF_INT8, 6.0, 4.2, 3.5, 3.0, 2.5, 2.2), wants=_INT8),
    "onnxruntime": _Prior(ready_s=11, speed_ups={"": 1.3}),
    "onnxruntime-int8": _Prior(ready_s=40, speed_ups=_speeds(_OF_INT8, 3.5, 3.2, 2.5, 2.2, 2.0, 1.5), wants=_INT8),
    "onnxruntime-cuda": _Prior(ready_s=25, speed_ups={"cuda": 1.2}),
    "tensorrt": _Prior(ready_s=90, speed_ups={"cuda": 4.0}),
    "torch-channels-last": _Prior(ready_s=1, speed_ups={"cuda": 1.2, "": 1.15}),
    "torch-compiled": _Prior(ready_s=60, speed_ups={"cuda": 1.6, "": 1.35}),
    "torch-bf16": _Prior(ready_s=1, speed_ups=_speeds(("cuda", *_OF_BF16), 2.4, 3.5, 2.0, 1.5), wants=_BF16),
    "torch-fp16": _Prior(ready_s=4, speed_ups={"cuda": 2.5}),
    "torch-compiled-bf16": _Prior(ready_s=60, speed_ups=_speeds(("cuda", *_OF_BF16), 2.8, 4.0, 2.5, 1.8), wants=_BF16),
}
# Errors that no network stays below, whose last numbers at least are rounded: about a third of half a step.
_MIN_ERRORS = {"fp32": 0.0, "fp16": 1.5e-4, "bf16": 1.2e-3, "int8": 2e-3}


def prospects(offers: Collection[str], abilities: Collection[str], *, here: bool = False) -> list[Prospect]:
    """Engines that are worth a look on a processor, the best first.

    Args:
        offers: names of those that the job may use and the machine has; the reference is none of them.
        abilities: abilities of the processor (``engines.machine.abilities``).
        here: True tries engines that are ready in a moment in the node's own process.
    """
    found = []
    for engine in offers:
        speed_up = _speed_up(engine, abilities)
        if engine != REFERENCE and speed_up is not None:
            prior, is_here = _PRIORS[engine], here and is_prompt(engine)
            found.append(Prospect(engine=engine, speed_up=speed_up, ready_s=prior.ready_s, is_here=is_here))
    return sorted(found, key=lambda item: (-item.speed_up, item.ready_s))


def missing_ability(engine: str, abilities: Collection[str]) -> str | None:
    """Why what computes is no good for an engine; None where it is, or there is nothing to be said."""
    if engine == REFERENCE or _speed_up(engine, abilities) is not None:
        return None
    return f"was not tried: this processor has no instructions for {_PRIORS[engine].wants}"


def too_coarse(precision: str, accuracy: str | float) -> str | None:
    """Why no engine of a precision can be as exact as a job asks; None where one may be.

    Args:
        precision: one of ``profiles.PRECISIONS``.
        accuracy: accuracy that the job allows; ``choice.may_use`` interprets names.
    """
    if isinstance(accuracy, str) or accuracy >= _MIN_ERRORS[precision]:
        return None
    return f"was not tried: to round to {precision} alone costs more than the {accuracy:.2g} that accuracy allows"


def comparison_prospect(engine: str, speed_up: float, *, here: bool) -> Prospect:
    """An engine whose speed is known, and of which it is to be seen how exact it is on other samples.

    Args:
        engine: name of its offer.
        speed_up: the speed up as measured.
        here: True tries quick engines in the node's own process, as for ``prospects``.
    """
    return Prospect(engine=engine, speed_up=speed_up, ready_s=1.0, is_here=here and is_prompt(engine))


def is_prompt(engine: str) -> bool:
    """Whether an engine is ready in a moment, once it runs in a process that has PyTorch."""
    return _PRIORS[engine].ready_s <= _PROMPT_S


def trial_refusal(
    prospect: Prospect, *, reference_s: float, best_s: float, samples: int | None, spent_s: float = 0.0
) -> str | None:
    """Why an engine is not worth a trial; None where it is.

    Args:
        prospect: the engine.
        reference_s: seconds of the reference, a sample.
        best_s: seconds of the fastest engine that is known and exact enough, a sample.
        samples: number of samples that the job has still to compute; None where trials need not pay for themselves.
        spent_s: the time spent on trials for this job before.
    """
    expected_s = reference_s / prospect.speed_up
    if expected_s > (1 - _NOISE) * best_s:
        return "was not tried: it is not expected to be faster than what was found"
    if samples is None:
        return None
    saved_s, cost_s = samples * (best_s - expected_s), prospect.trial_s(reference_s)
    if saved_s > cost_s or spent_s + cost_s <= _SHARE * samples * reference_s:
        return None
    saved = in_seconds(max(0.0, saved_s))
    return f"was not tried: that takes about {in_seconds(cost_s)}, and it would save this job {saved}"


def is_short(*, reference_s: float, samples: int) -> bool:
    """Whether a job is so short that to try several settings of an engine costs it more than the best one gains.

    Args:
        reference_s: seconds of the reference, a sample.
        samples: number of samples that the job has still to compute.
    """
    return reference_s * samples * _NOISE < _SETTINGS_S


def _speed_up(engine: str, abilities: Collection[str]) -> float | None:
    prior = _PRIORS.get(engine)
    if prior is None:
        return None
    return next((factor for need, factor in prior.speed_ups.items() if not need or need in abilities), None)
