"""How a head is trained, as data: optimiser, batches, epochs and seed, and their JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from frostline.errors import BadRequest, SettingError

__all__ = ("FEW_EPOCHS", "LOSSES", "OPTIMIZERS", "Passes", "Recipe")

_TYPES: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    int | None: (int, type(None)),
    float: (int, float),
    str: (str,),
}

OPTIMIZERS = ("adam", "adamw", "sgd")

LOSSES = ("cross_entropy", "bce", "mse")
"""Cross-entropy over classes, binary cross-entropy over several labels, and the mean squared error of numbers."""

FEW_EPOCHS = 5
"""Passes where nobody said how many, and each of them computes all features again."""
# Where features are kept a pass costs what its steps cost. Chosen with the other defaults of a recipe, by the accuracy
# that a logistic regression has on the same features (docs/decisions/0060).
_ENOUGH_EPOCHS = 20
_MAX_EPOCHS = 100
_PATIENCE = 5
_UNKEPT = "features are not kept, so that each epoch computes them again"
_UNSCORED = "no samples are held out that may choose the epoch"
_SCORED = "training ends when the loss of the held-out samples falls no more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How many passes a training makes.

    Attributes:
        maximum: passes over the training samples.
        patience: passes without a lower held-out loss after which training ends; the head of the pass with the lowest
            loss is kept then. None makes all passes and keeps the last head.
        reason: why so many, in words; empty where somebody said how many.
    """

    maximum: int
    patience: int | None = None
    reason: str = ""

    def best(self, losses: Sequence[float]) -> int | None:
        """The pass whose head is kept, by the held-out loss after each: the first with the lowest; None for the last.

        A loss that is not a number is no low one.
        """
        if self.patience is None or not losses:
            return None
        return min(range(len(losses)), key=lambda place: (not losses[place] < math.inf, losses[place], place))

    def are_over(self, losses: Sequence[float]) -> bool:
        """Whether training ends after these passes, by the held-out loss after each."""
        best = self.best(losses)
        return best is not None and self.patience is not None and len(losses) - 1 - best >= self.patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained, with cross-entropy as its loss; the same bits wherever it is followed on one machine.

    Attributes:
        epochs: passes over the training samples; None makes as many as suit the job, as ``passes`` decides.
        batch_size: samples of one optimiser step.
        optimizer: ``adam``, ``adamw`` or ``sgd`` (momentum 0.9).
        learning_rate: learning rate of the optimiser.
        seed: seed of order, dropout and random preprocessing.
        selects: whether the held-out samples may decide how many passes there are; False where they are a last test.
    """

    epochs: int | None = None
    batch_size: int = 32
    optimizer: str = "adam"
    learning_rate: float = 2e-3
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
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")

    def passes(self, *, keeps_features: bool, has_held_out: bool) -> Passes:
        """How many passes there are, and whether held-out samples end them.

        Args:
            keeps_features: a later pass takes its features from memory or disk.
            has_held_out: samples are scored after each pass.
        """
        if self.epochs is not None:
            return Passes(maximum=self.epochs)
        if not keeps_features:
            return Passes(maximum=FEW_EPOCHS, reason=_UNKEPT)
        if not (has_held_out and self.selects):
            return Passes(maximum=_ENOUGH_EPOCHS, reason=_UNSCORED)
        return Passes(maximum=_MAX_EPOCHS, patience=_PATIENCE, reason=_SCORED)

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
        for field in fields(cls):
            one = given.get(field.name, ...)
            if isinstance(one, bool) is not (field.type is bool) or not isinstance(one, _TYPES[field.type]):
                raise BadRequest(f"the recipe's {field.name} is missing, or of another kind")
        try:
            return cls(**{field.name: given[field.name] for field in fields(cls)})
        except SettingError as error:
            raise BadRequest(f"the recipe: {error}") from error
