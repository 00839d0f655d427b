"""Decides which engines are worth a trial on a processor and for a job, and in which order. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from frostline.core import REFERENCE
from frostline.core.units import in_seconds

__all__ = ("Prospect", "compared", "is_prompt", "not_worth", "prospects", "too_coarse", "unequipped")

# A job may give trials this share of its predicted time even where it does not win it back: other jobs do.
_SHARE = 0.05
# A gain below it is none, as where engines are chosen.
_NOISE = 0.05
# Rows that a trial runs: to warm up, to judge and to time it; fewer where it shares the node's process.
_ROWS, _ROWS_HERE = 200, 128
# A process of its own imports PyTorch and loads the weights.
_PROCESS_S = 4.0
# Engines that are ready in as many seconds are tried in the node's own process, where it serves one job alone.
_PROMPT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What is expected of an engine before anybody tried it on a network.

    Attributes:
        engine: name of its offer.
        speed_up: samples a second, as a multiple of the reference's.
        ready_s: processor seconds until it runs, the conversion among them.
        is_here: it is tried in the node's own process, instead of one of its own.
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
        ready_s: as ``Prospect.ready_s``, for EfficientNet-lite0.
        speed_ups: by what the processor must be able to do for them, in its flags' names; the first that it has is
            taken, and without any of them the engine is not tried. "" asks for nothing.
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


# Speeds are means over EfficientNet-lite0, ResNet-18 and ViT-S on two threads (``benchmarks/engines.py``), those of
# tiles (amx) their makers'; seconds are those of EfficientNet-lite0, whose conversion takes longest of these.
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
        abilities: abilities of the processor (``engines.machine.hardware.abilities``).
        here: those that are ready in a moment are tried in the node's own process.
    """
    found = []
    for engine in offers:
        speed_up = _speed_up(engine, abilities)
        if engine != REFERENCE and speed_up is not None:
            prior, is_here = _PRIORS[engine], here and is_prompt(engine)
            found.append(Prospect(engine=engine, speed_up=speed_up, ready_s=prior.ready_s, is_here=is_here))
    return sorted(found, key=lambda item: (-item.speed_up, item.ready_s))


def unequipped(engine: str, abilities: Collection[str]) -> str | None:
    """Why what computes is no good for an engine; None where it is, or there is nothing to be said.

    Args:
        engine: name of its offer.
        abilities: abilities of the processor.
    """
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


def compared(engine: str, speed_up: float, *, here: bool) -> Prospect:
    """An engine whose speed is known, and of which it is to be seen how exact it is on other samples.

    Args:
        engine: name of its offer.
        speed_up: as measured.
        here: as for ``prospects``.
    """
    return Prospect(engine=engine, speed_up=speed_up, ready_s=1.0, is_here=here and is_prompt(engine))


def is_prompt(engine: str) -> bool:
    """Whether an engine is ready in a moment, once it runs in a process that has PyTorch.

    Args:
        engine: name of its offer.
    """
    return _PRIORS[engine].ready_s <= _PROMPT_S


def not_worth(
    one: Prospect, *, reference_s: float, best_s: float, samples: int | None, spent_s: float = 0.0
) -> str | None:
    """Why an engine is not worth a trial; None where it is.

    Args:
        one: the engine.
        reference_s: seconds of the reference, a sample.
        best_s: seconds of the fastest engine that is known and exact enough, a sample.
        samples: number of samples that the job has still to compute; None where trials need not pay for themselves.
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


def _speed_up(engine: str, abilities: Collection[str]) -> float | None:
    prior = _PRIORS.get(engine)
    if prior is None:
        return None
    return next((factor for need, factor in prior.speed_ups.items() if not need or need in abilities), None)
