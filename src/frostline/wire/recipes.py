"""How a head is trained, as data: optimiser, batches, epochs and seed, and their JSON."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from frostline.errors import BadRequest, SettingError

__all__ = ("OPTIMIZERS", "Recipe")

_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,)}

OPTIMIZERS = ("adam", "adamw", "sgd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained, with cross-entropy as its loss; the same bits wherever it is followed on one machine.

    Attributes:
        epochs: passes over the training samples.
        batch_size: samples of one optimiser step.
        optimizer: ``adam``, ``adamw`` or ``sgd`` (momentum 0.9).
        learning_rate: of the optimiser.
        seed: of order, dropout and random preprocessing.
    """

    epochs: int
    batch_size: int
    optimizer: str = "adam"
    learning_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs must be at least 1, not {self.epochs}")
        if self.batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.optimizer not in OPTIMIZERS:
            raise SettingError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}")
        if not self.learning_rate > 0:
            raise SettingError(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")

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
            one = given.get(field.name)
            if isinstance(one, bool) or not isinstance(one, _TYPES[field.type]):
                raise BadRequest(f"the recipe's {field.name} is missing, or of another kind")
        try:
            return cls(**{field.name: given[field.name] for field in fields(cls)})
        except SettingError as error:
            raise BadRequest(f"the recipe: {error}") from error
