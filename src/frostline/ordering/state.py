"""How far a run is in its order of samples, and orders that happened, as values to go on from."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from frostline.core.declared import parse_json, refuse_unknown_fields
from frostline.core.errors import OrderMismatch, SettingError
from frostline.core.system import __version__
from frostline.ordering.orders import EpochOrder, check_inside, check_number

__all__ = ("SCHEMA", "OrderState", "RecordedOrder", "Replay")


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
    """A position in an order of samples, from which any number of ranks and workers can continue, in any framework.

    Attributes:
        manifest: digest of the samples (``Dataset.digest``).
        order: name of the kind of order (``EpochOrder.name``).
        seed: seed of the order.
        epoch: epoch under way.
        position: samples of the epoch that all ranks were handed; as many as ``samples`` when the epoch is over.
        samples: number of samples in the epoch.
        batch_size: samples of a step of all ranks, when it was saved. Whoever goes on may take others.
        last: treatment of the samples that filled no step (``ordering.LAST``); it may change too.
        ahead: positions beyond ``position`` that were handed out, ascending; some where ``max_reorder`` allows it.
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
        for name, minimum in (("seed", 0), ("epoch", 0), ("samples", 0), ("batch_size", 1)):
            check_number(name, getattr(self, name), _MAX, minimum=minimum)
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
        refuse_unknown_fields(value, (*names, "ahead", _KEY), "a state of a loader", OrderMismatch)
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
            own: the place where the loader stands, whatever its epoch and position.

        Raises:
            OrderMismatch: The state is of other samples or of another order.
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


_RECORDED = 1
_NAME = b"frostline order "
_MAGIC = _NAME + b"%d\n" % _RECORDED
_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
_DIGEST_BYTES = 32

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedOrder:
    """The order in which an epoch's positions were handed out, if it was not the planned one.

    Attributes:
        state: state that the positions belong to; its own ``position`` is how many were handed out or left out.
        positions: ``int64[n]``, as they came, none twice; what could not be read is missing.
    """

    state: OrderState
    positions: _Rows

    def __post_init__(self) -> None:
        _check(self.positions, self.state.samples)

    def __len__(self) -> int:
        return len(self.positions)

    def to_bytes(self) -> bytes:
        """A file: a line of JSON, how far each position is from its place in the fewest bytes, and a checksum.

        With ``max_reorder`` up to 127 this is a byte a sample.
        """
        moved = self.positions - np.arange(len(self.positions))
        maximum = int(np.abs(moved).max(initial=0))
        width = next(dtype for dtype in _WIDTHS if maximum <= np.iinfo(dtype).max)
        about = {"state": self.state.to_json(), "rows": len(self.positions), "bytes": np.dtype(width).itemsize}
        line = json.dumps(about, separators=(",", ":")).encode() + b"\n"
        body = _MAGIC + line + moved.astype(np.dtype(width).newbyteorder("<")).tobytes()
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, file: bytes) -> Self:
        """What ``to_bytes`` gave.

        Raises:
            OrderMismatch: the bytes are no such file, damaged, or of a later schema.
        """
        body, digest = file[:-_DIGEST_BYTES], file[-_DIGEST_BYTES:]
        if not body.startswith(_MAGIC):
            if not body.startswith(_NAME):
                raise OrderMismatch("this is no recorded order")
            schema = body[len(_NAME) : len(_NAME) + 4].partition(b"\n")[0].decode(errors="replace")
            raise OrderMismatch(
                f"this order was recorded by another version of Frostline (schema {schema}), this is {__version__}, "
                f"which reads schema {_RECORDED}: read it with the version that wrote it"
            )
        if hashlib.sha256(body).digest() != digest:
            raise OrderMismatch("this recorded order is damaged: its checksum does not hold")
        line, _, moved = body.removeprefix(_MAGIC).partition(b"\n")
        try:
            about = parse_json(line)
            refuse_unknown_fields(about, ("state", "rows", "bytes"), "a recorded order", OrderMismatch)
            width = next(dtype for dtype in _WIDTHS if np.dtype(dtype).itemsize == about["bytes"])
            offsets = np.frombuffer(moved, np.dtype(width).newbyteorder("<"), about["rows"])
            positions = offsets.astype(np.int64) + np.arange(len(offsets))
            return cls(state=OrderState.from_json(about["state"]), positions=positions)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise OrderMismatch(f"this recorded order is damaged: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """An ``EpochOrder`` that repeats a recorded order.

    Attributes:
        recorded: the recorded order.
        order: the order in which the positions were positions.

    Raises:
        OrderMismatch: the positions were recorded in another order.
    """

    recorded: RecordedOrder
    order: EpochOrder

    def __post_init__(self) -> None:
        state = self.recorded.state
        for name, had, has in (
            ("seed", state.seed, self.order.seed),
            ("epoch", state.epoch, self.order.epoch),
            ("order", state.order, self.order.name),
            ("samples", state.samples, len(self.order)),
        ):
            if had != has:
                raise OrderMismatch(f"what happened was recorded with {name} {had}, and is to be replayed with {has}")

    def __len__(self) -> int:
        return len(self.recorded)

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        content = self.order.name.encode() + self.recorded.positions.astype("<i8").tobytes()
        return f"replayed {hashlib.sha256(content).hexdigest()[:32]}"

    @property
    def seed(self) -> int:
        """See ``EpochOrder.seed``."""
        return self.order.seed

    @property
    def epoch(self) -> int:
        """See ``EpochOrder.epoch``."""
        return self.order.epoch

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, len(self))
        return self.order.at(self.recorded.positions[positions])

    def in_epoch(self, epoch: int) -> Self:
        """The same where it is the epoch that was recorded.

        Raises:
            OrderMismatch: the epoch is another one.
        """
        if epoch != self.epoch:
            raise OrderMismatch(f"epoch {self.epoch} was recorded, and epoch {epoch} is to be replayed")
        return self


def _check(positions: _Rows, samples: int) -> None:
    try:
        check_inside(positions, samples)
    except IndexError as error:
        raise OrderMismatch(f"a recorded order leaves its epoch: {error}") from error
    if len(np.unique(positions)) != len(positions):
        raise OrderMismatch("a recorded order has a position twice")
