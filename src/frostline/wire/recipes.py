"""How a head is trained, as data, and the events that a training on a node tells, as lines of JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from frostline.core.declared import refuse_unknown_fields
from frostline.core.errors import BadRequest, SettingError
from frostline.core.events import (
    BatchDelivered,
    EpochFinished,
    EpochsChosen,
    EpochStarted,
    EpochTrained,
    Evaluated,
    Event,
    HeadSelected,
    RequestRetried,
    RowsNotFinite,
    SampleSkipped,
    StepFinished,
    WaitingForRows,
)
from frostline.core.hints import add_field_hints

__all__ = (
    "FEW_EPOCHS",
    "LOSSES",
    "METRICS_OF",
    "OPTIMIZERS",
    "SCHEDULES",
    "TASKS",
    "Passes",
    "Recipe",
    "event_from_json",
    "event_to_json",
    "line_of",
)


_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    int | None: (int, type(None)),
    float: (int, float),
    float | None: (int, float, type(None)),
    str: (str,),
}

OPTIMIZERS = ("adam", "adamw", "sgd")

SCHEDULES = ("constant", "cosine", "linear")
"""What becomes of the learning rate behind the warm-up: it stays, or falls to nothing by the last step."""

TASKS = {"cross-entropy": "classes", "bce": "labels", "mse": "numbers"}
"""What each loss is for: one class of several, several labels, or numbers and vectors."""

LOSSES = tuple(TASKS)
"""Cross-entropy over classes, binary cross-entropy over several labels, and the mean squared error of numbers."""

METRICS_OF = {"classes": ("accuracy", "macro_f1"), "labels": ("macro_f1", "auroc"), "numbers": ("mae", "rmse")}
"""The metrics that there are for each task."""

FEW_EPOCHS = 5
"""Passes where nobody said how many, and each of them computes all features again."""
# Where features are kept a pass costs what its steps cost. Chosen with the other defaults of a recipe, by the accuracy
# that a logistic regression has on the same features (docs/decisions/0060).
_ENOUGH_EPOCHS = 20
_MAX_EPOCHS = 100
_PATIENCE = 5
# A fall that is smaller than this share of the first pass's loss is noise: a head that is right of all samples becomes
# surer of itself for ever, and nothing is gained.
_NOISE = 0.005
_UNKEPT = "features are not kept, so that each epoch computes them again"
_UNSCORED = "no samples are held out that may choose the epoch"
_SCORED = "training ends when the loss of the held-out samples falls no more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The number of passes that a training makes.

    Attributes:
        maximum: passes over the training samples.
        patience: passes without a lower held-out loss after which training ends; the head of the pass with the lowest
            loss is kept then. None makes all passes and keeps the last head.
        noise: share of the first pass's loss by which losses must fall, in one pass or several, for patience to begin
            anew.
        reason: the reason why so many, in words; empty where somebody said how many.
    """

    maximum: int
    patience: int | None = None
    noise: float = 0.0
    reason: str = ""

    def best_pass(self, losses: Sequence[float]) -> int | None:
        """The pass whose head is kept, by the held-out loss after each: the first with the lowest; None for the last.

        A loss that is not a number is no low one.
        """
        if self.patience is None or not losses:
            return None
        return min(range(len(losses)), key=lambda place: (not losses[place] < math.inf, losses[place], place))

    def are_over(self, losses: Sequence[float], *, since: int = 0) -> bool:
        """Whether training ends after these passes, by the held-out loss after each.

        Args:
            losses: the losses after each pass.
            since: pass, counted from 0, from which on patience counts; those before it are made in any case.
        """
        if self.patience is None or not losses:
            return False
        gained, low = 0, math.inf
        least = self.noise * abs(next((loss for loss in losses if math.isfinite(loss)), 0.0))
        for place, loss in enumerate(losses):
            if loss < low - least:
                gained, low = place, loss
        return len(losses) - max(gained + 1, since) >= self.patience


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of training a head, as data. Trainer and node get the same bits from it on one machine.

    Attributes:
        epochs: passes over the training samples. None trains until the held-out loss no longer falls, or as many as
            ``passes`` decides.
        batch_size: samples in one optimiser step.
        optimizer: name of the optimiser: ``adam``, ``adamw`` or ``sgd`` (momentum 0.9).
        learning_rate: learning rate of the optimiser; with a schedule or warm-up the highest one.
        weight_decay: weight decay of the optimiser. None is the optimiser's own default (0.01 for ``adamw``, else 0).
        label_smoothing: share of each label, from 0 to below 1, that the cross-entropy spreads over all classes.
        schedule: course of the learning rate after the warm-up: ``constant``, or falling to 0 at the last step by a
            ``cosine`` or ``linear`` curve.
        warm_up: number of steps in which the learning rate rises to ``learning_rate``; below 1 a share of all steps.
        bf16: True computes scores in bfloat16, by autocast. Parameters, loss and optimiser stay in float32.
        patience: passes without a lower held-out loss after which training stops and keeps the best head. None is 5 if
            ``epochs`` is None; otherwise all passes are made.
        seed: seed of the order, dropout and random preprocessing.
        selects: True if held-out samples may decide when training stops, and so which head is kept; False if they are a
            final test.
    """

    epochs: int | None = None
    batch_size: int = 32
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    weight_decay: float | None = None
    label_smoothing: float = 0.0
    schedule: str = SCHEDULES[0]
    warm_up: float = 0.0
    bf16: bool = False
    patience: int | None = None
    seed: int = 0
    selects: bool = True

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise SettingError(f"epochs must be at least 1, not {self.epochs}")
        if self.batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}")
        if not self.learning_rate > 0:
            raise SettingError(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= (self.weight_decay or 0) < math.inf:
            raise SettingError(f"weight_decay must be at least 0, not {self.weight_decay}")
        if not 0 <= self.label_smoothing < 1:
            raise SettingError(f"label_smoothing is a share from 0 to below 1, not {self.label_smoothing}")
        if self.patience is not None and self.patience < 1:
            raise SettingError(f"patience must be at least 1, not {self.patience}")
        self._check_rates()
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")

    def _check_rates(self) -> None:
        if self.schedule not in SCHEDULES:
            raise SettingError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if not 0 <= self.warm_up < math.inf or (self.warm_up > 1 and self.warm_up % 1):
            raise SettingError(f"warm_up is a share below 1 or a whole number of steps, not {self.warm_up}")
        if self.epochs is None and (self.schedule != SCHEDULES[0] or 0 < self.warm_up < 1):
            what = f"schedule {self.schedule}" if self.schedule != SCHEDULES[0] else f"a warm_up of {self.warm_up}"
            raise SettingError(f"{what} depends on the number of all steps: say how many epochs there are (epochs)")

    @property
    def changes_rate(self) -> bool:
        """Whether the learning rate is not the same at every step."""
        return self.schedule != SCHEDULES[0] or self.warm_up > 0

    def rate_share(self, step: int, steps: int) -> float:
        """Share of the learning rate at a step, counted from 0, as ``LinearLR`` and ``CosineAnnealingLR`` have it.

        Args:
            step: number of steps before it.
            steps: number of all steps.
        """
        warm = round(self.warm_up * steps) if self.warm_up < 1 else int(self.warm_up)
        if step < warm:
            return (step + 1) / (warm + 1)
        if self.schedule == "constant":
            return 1.0
        left = 1 - min(1.0, (step - warm) / max(1, steps - warm))
        return left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2

    def passes(self, *, keeps_features: bool, has_held_out: bool) -> Passes:
        """How many passes there are, and whether held-out samples end them.

        Args:
            keeps_features: a later pass takes its features from memory or disk.
            has_held_out: samples are scored after each pass.
        """
        patience = self.patience if has_held_out and self.selects else None
        if self.epochs is not None:
            return Passes(maximum=self.epochs, patience=patience)
        if not keeps_features:
            return Passes(maximum=FEW_EPOCHS, patience=patience, reason=_UNKEPT)
        if not (has_held_out and self.selects):
            return Passes(maximum=_ENOUGH_EPOCHS, reason=_UNSCORED)
        noise = 0.0 if patience else _NOISE  # who names a patience means every fall
        return Passes(maximum=_MAX_EPOCHS, patience=patience or _PATIENCE, noise=noise, reason=_SCORED)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Recipe":
        """The inverse of ``to_json``.

        Raises:
            BadRequest: A field is missing or makes no sense; the message names it.
        """
        given = value if isinstance(value, dict) else {}
        refuse_unknown_fields(given, (field.name for field in fields(cls)), "the recipe")
        for field in fields(cls):
            one = given.get(field.name, ...)
            if isinstance(one, bool) is not (field.type is bool) or not isinstance(one, _TYPES[field.type]):
                raise BadRequest(f"the recipe's {field.name} is missing, or of another kind")
        try:
            return cls(**{field.name: given[field.name] for field in fields(cls)})
        except SettingError as error:
            raise BadRequest(f"the recipe: {error}") from error


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        BatchDelivered,
        EpochFinished,
        EpochStarted,
        EpochsChosen,
        EpochTrained,
        Evaluated,
        HeadSelected,
        RequestRetried,
        RowsNotFinite,
        SampleSkipped,
        StepFinished,
        WaitingForRows,
    )
}
_EVENT_TYPES: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def event_to_json(event: Event) -> dict[str, Any] | None:
    """An event by the name of its kind, under ``event``; None for a kind that does not travel.

    Floats that JSON does not know (a loss that is not finite) are written as text.
    """
    kind = type(event)
    if kind.__name__ not in _KINDS:
        return None
    values = {field.name: getattr(event, field.name) for field in fields(kind)}
    return {"event": kind.__name__, **{name: _plain(value) for name, value in values.items()}}


def event_from_json(value: dict[str, Any]) -> Event | None:
    """The inverse of ``event_to_json``; None for what is no event of a job.

    Raises:
        BadRequest: A field of it is missing or of another kind.
    """
    kind = _KINDS.get(str(value.get("event")))
    if kind is None:
        return None
    read = {field.name: _read(value.get(field.name), field.type, field.name) for field in fields(kind)}
    event: Event = kind(**read)
    return event


def line_of(value: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: object, kind: object, name: str) -> object:
    if kind == Mapping[str, float]:
        return {str(key): _read(item, float, name) for key, item in _items(value, name)}
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(str(value))
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, _EVENT_TYPES[kind]):
        raise BadRequest(f"an event's {name} is missing, or of another kind")
    return float(value) if kind is float else value  # type: ignore[arg-type]


def _items(value: object, name: str) -> list[tuple[object, object]]:
    if not isinstance(value, dict):
        raise BadRequest(f"an event's {name} is missing, or of another kind")
    return list(value.items())
