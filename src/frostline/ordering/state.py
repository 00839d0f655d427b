"""How far a run is in its order of samples: one small value for all frameworks, and who may go on from there."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Self

from frostline.errors import OrderMismatch, SettingError
from frostline.ordering.permutation import check_number

__all__ = ("SCHEMA", "OrderState")

SCHEMA = 2
"""Version of the JSON schema; a state of a later version is refused."""

# What the first schema does not know of would be handed out again by those who read no other.
_WITHOUT_AHEAD = 1
_MAX_AHEAD = 1 << 20

_KEY = "frostline_order"
_MAX = (1 << 63) - 1
_TEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """A place in an order of samples. It knows of no rank, worker or framework: any number of any goes on from it.

    Attributes:
        manifest: digest of the samples (``Dataset.digest``).
        order: name of the kind of order (``EpochOrder.name``).
        seed: seed of the order.
        epoch: epoch under way.
        position: samples of the epoch that all ranks were handed; as many as ``samples`` when the epoch is over.
        samples: in the epoch.
        batch_size: samples of a step of all ranks, when it was saved. Whoever goes on may take others.
        last: treatment of the samples that filled no step (``ordering.LAST``); it may change too.
        ahead: positions beyond ``position`` that were handed out, ascending; there are some where slack allows it.
    """

    manifest: str
    order: str
    seed: int
    epoch: int
    position: int
    samples: int
    batch_size: int
    last: str
    ahead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("manifest", "order", "last"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > _TEXT or not value.isascii():
                raise SettingError(f"{name} of a state has up to {_TEXT} ASCII characters, not {value!r}")
        for name in ("seed", "epoch", "samples", "batch_size"):
            check_number(name, getattr(self, name), _MAX)
        if not 0 <= self.position <= self.samples:
            raise SettingError(f"position {self.position} lies beyond the {self.samples} samples of the epoch")
        bounds = (self.position, *self.ahead, self.samples)
        if len(self.ahead) > _MAX_AHEAD or any(bound >= other for bound, other in pairwise(bounds) if self.ahead):
            raise SettingError("what was handed out ahead is no ascending list of positions of the epoch")

    @property
    def is_over(self) -> bool:
        """Every sample of the epoch was handed out, or left out at its end."""
        return self.position == self.samples

    def to_json(self) -> dict[str, Any]:
        """Numbers and texts by name, for ``json.dumps`` or a checkpoint of any framework."""
        value = asdict(self)
        ahead = list(value.pop("ahead"))
        return {_KEY: SCHEMA, **value, "ahead": ahead} if ahead else {_KEY: _WITHOUT_AHEAD, **value}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            OrderMismatch: the value is no such state, or has a later schema.
        """
        if not isinstance(value, Mapping):
            raise OrderMismatch(f"this is no state of a loader: it is a {type(value).__name__}")
        schema = value.get(_KEY)
        if not isinstance(schema, int) or isinstance(schema, bool):
            raise OrderMismatch(f"this is no state of a loader: it has no {_KEY!r}")
        if schema > SCHEMA:
            raise OrderMismatch(
                f"this state was written by a newer Frostline (schema {schema}, and this one reads up to {SCHEMA}): "
                "install that version or a later one"
            )
        names = [field.name for field in fields(cls) if field.name != "ahead"]
        ahead = value.get("ahead", [])
        if not isinstance(ahead, list | tuple) or not all(map(_is_whole, ahead)):
            raise OrderMismatch("this state of a loader is damaged: 'ahead' is no list of positions")
        broken = [name for name in names if not (isinstance(value.get(name), str) or _is_whole(value.get(name)))]
        if broken:
            raise OrderMismatch(f"this state of a loader is damaged: {broken[0]!r} is missing or makes no sense")
        try:
            return cls(**{name: value[name] for name in names}, ahead=tuple(ahead))
        except (SettingError, TypeError) as error:
            raise OrderMismatch(f"this state of a loader is damaged: {error}") from error

    def require(self, own: "OrderState") -> None:
        """Make sure that a loader may go on from here.

        Args:
            own: where the loader stands, whatever its epoch and position.

        Raises:
            OrderMismatch: its samples or their order are others.
        """
        if self.manifest != own.manifest:
            raise OrderMismatch(
                f"this state is one of other samples (manifest {self.manifest[:12]}, and this loader's is "
                f"{own.manifest[:12]}): give the loader the data set as it was listed and divided then"
            )
        if self.seed != own.seed:
            raise OrderMismatch(
                f"this state was saved with seed {self.seed}, and this loader has seed {own.seed}: make it with "
                f"seed={self.seed}"
            )
        if self.order != own.order:
            raise OrderMismatch(
                f"this state was saved in the order {self.order!r}, and this loader's is {own.order!r}: make it with "
                "the same shuffle, weights or mixture"
            )
        if self.samples != own.samples:
            raise OrderMismatch(
                f"this state's epoch has {self.samples} samples, and this loader's {own.samples}: make it with as many"
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
