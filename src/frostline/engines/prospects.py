"""Decides which engines are worth a trial on a processor and for a job, and in which order. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from frostline.core import REFERENCE
from frostline.core.amounts import in_seconds

__all__ = ("CHEAPEST_TRIAL_S", "Prospect", "not_worth", "prospects", "too_coarse", "trial_budget_s", "unequipped")

# A job may give trials this share of its predicted time even where it does not win it back: other jobs do.
_SHARE = 0.05
# A gain below it is none, as where engines are chosen.
_NOISE = 0.05
# Rows that a trial runs: to warm up, to judge and to time it.
_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is expected of an engine before anybody tried it on a network.

    Attributes:
        engine: name of its offer.
        speed_up: samples a second, as a multiple of the reference's.
        ready_s: processor seconds until it runs: a process, imports, and the conversion.
    """

    engine: str
    speed_up: float
    ready_s: float

    def trial_s(self, reference_s: float) -> float:
        """What a trial takes where the reference takes so long a sample."""
        return self.ready_s + _ROWS * reference_s / self.speed_up


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prior:
    """What is known of an engine before any trial.

    Attributes:
        ready_s: as ``Prospect.ready_s``.
        speed_ups: by what the processor must be able to do for them, in its flags' names; the first that it has is
            taken, and without any of them the engine is not tried. "" asks for nothing.
        wants: what a processor is said to lack.
    """

    ready_s: float
    speed_ups: Mapping[str, float]
    wants: str = ""


_BF16, _INT8 = "bfloat16", "products of 8-bit integers"
_OF_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
_OF_INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp", "avx2")


def _speeds(flags: Sequence[str], *speed_ups: float) -> dict[str, float]:
    return dict(zip(flags, speed_ups, strict=True))


# Speeds are means over EfficientNet-lite0, ResNet-18 and ViT-S on two threads (``benchmarks/engines.py``), those of
# tiles (amx) their makers'; seconds are those of EfficientNet-lite0, whose conversion takes longest of these.
_PRIORS: Mapping[str, _Prior] = {
    "openvino": _Prior(ready_s=5, speed_ups={"": 1.8}),
    "openvino-bf16": _Prior(ready_s=5, speed_ups=_speeds(_OF_BF16, 5.0, 2.8, 2.0), wants=_BF16),
    "openvino-int8": _Prior(ready_s=60, speed_ups=_speeds(_OF_INT8, 6.0, 4.2, 3.5, 3.0, 2.5, 2.2), wants=_INT8),
    "onnxruntime": _Prior(ready_s=15, speed_ups={"": 1.3}),
    "onnxruntime-int8": _Prior(ready_s=40, speed_ups=_speeds(_OF_INT8, 3.5, 3.2, 2.5, 2.2, 2.0, 1.5), wants=_INT8),
    "onnxruntime-cuda": _Prior(ready_s=25, speed_ups={"cuda": 1.2}),
    "tensorrt": _Prior(ready_s=90, speed_ups={"cuda": 4.0}),
    "torch-channels-last": _Prior(ready_s=4, speed_ups={"cuda": 1.2, "": 1.15}),
    "torch-compiled": _Prior(ready_s=60, speed_ups={"cuda": 1.6, "": 1.35}),
    "torch-bf16": _Prior(ready_s=4, speed_ups=_speeds(("cuda", *_OF_BF16), 2.4, 3.5, 2.0, 1.5), wants=_BF16),
    "torch-fp16": _Prior(ready_s=4, speed_ups={"cuda": 2.5}),
    "torch-compiled-bf16": _Prior(ready_s=60, speed_ups=_speeds(("cuda", *_OF_BF16), 2.8, 4.0, 2.5, 1.8), wants=_BF16),
}
# Errors that no network stays below, whose last numbers at least are rounded: about a third of half a step.
_LEAST_ERRORS = {"fp32": 0.0, "fp16": 1.5e-4, "bf16": 1.2e-3, "int8": 2e-3}
# The engine that most jobs come to, where they may round as 32-bit floats do.
_USUAL = "openvino"

CHEAPEST_TRIAL_S = _PRIORS[_USUAL].ready_s
"""What the trial of the usual engine takes at least."""


def prospects(offers: Collection[str], abilities: Collection[str]) -> list[Prospect]:
    """Engines that are worth a look on a processor, the best first.

    Args:
        offers: names of those that the job may use and the machine has; the reference is none of them.
        abilities: of what computes (``engines.hardware.abilities``).
    """
    found = []
    for engine in offers:
        speed_up = _speed_up(engine, abilities)
        if engine != REFERENCE and speed_up is not None:
            found.append(Prospect(engine=engine, speed_up=speed_up, ready_s=_PRIORS[engine].ready_s))
    return sorted(found, key=lambda one: (-one.speed_up, one.ready_s))


def unequipped(engine: str, abilities: Collection[str]) -> str | None:
    """Why what computes is no good for an engine; None where it is, or there is nothing to be said.

    Args:
        engine: name of its offer.
        abilities: of what computes.
    """
    if engine == REFERENCE or _speed_up(engine, abilities) is not None:
        return None
    return f"was not tried: this processor has no instructions for {_PRIORS[engine].wants}"


def too_coarse(precision: str, accuracy: str | float) -> str | None:
    """Why no engine of a precision can be as exact as a job asks; None where one may be.

    Args:
        precision: one of ``profiles.PRECISIONS``.
        accuracy: that the job allows; of names ``choice.may_use`` tells.
    """
    if isinstance(accuracy, str) or accuracy >= _LEAST_ERRORS[precision]:
        return None
    return f"was not tried: to round to {precision} alone costs more than the {accuracy:.2g} that accuracy allows"


def not_worth(
    one: Prospect, *, reference_s: float, best_s: float, samples: int | None, spent_s: float = 0.0
) -> str | None:
    """Why an engine is not worth a trial; None where it is.

    Args:
        one: the engine.
        reference_s: of the reference, a sample.
        best_s: of the fastest engine that is known and exact enough, a sample.
        samples: that the job has still to compute; None where trials need not pay for themselves.
        spent_s: on trials for this job before.
    """
    expected_s = reference_s / one.speed_up
    if expected_s > (1 - _NOISE) * best_s:
        return "was not tried: it is not expected to be faster than what was found"
    if samples is None:
        return None
    saved_s, cost_s = samples * (best_s - expected_s), one.trial_s(reference_s)
    if saved_s > cost_s or spent_s + cost_s <= _SHARE * samples * reference_s:
        return None
    saved = in_seconds(max(0.0, saved_s))
    return f"was not tried: that takes about {in_seconds(cost_s)}, and it would save this job {saved}"


def trial_budget_s(samples: int, samples_per_s: float) -> float:
    """What a job may spend on trials: no more than the usual engine is expected to save, and nothing for nothing.

    Args:
        samples: that it has still to compute.
        samples_per_s: of the reference, as measured or predicted.
    """
    predicted_s = samples / samples_per_s if samples_per_s > 0 else 0.0
    saved_s = predicted_s * (1 - 1 / _PRIORS[_USUAL].speed_ups[""])
    budget_s = max(saved_s, _SHARE * predicted_s)
    return budget_s if budget_s >= CHEAPEST_TRIAL_S else 0.0


def _speed_up(engine: str, abilities: Collection[str]) -> float | None:
    prior = _PRIORS.get(engine)
    if prior is None:
        return None
    return next((factor for need, factor in prior.speed_ups.items() if not need or need in abilities), None)
