"""An order that happened: the positions of an epoch as they were handed out, as a value, a file, and an order again."""

import hashlib
import json
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.errors import OrderMismatch
from frostline.ordering.order import EpochOrder, check_inside
from frostline.ordering.state import OrderState

__all__ = ("RecordedOrder", "Replay")

_MAGIC = b"frostline order 1\n"
_WIDTHS = (np.int8, np.int16, np.int32, np.int64)
_DIGEST_BYTES = 32

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedOrder:
    """In which order an epoch's positions were handed out, where that was not one after the other.

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

        With a slack of up to 127 places this is a byte a sample.
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
            raise OrderMismatch("this is no recorded order, or one of a newer Frostline")
        if hashlib.sha256(body).digest() != digest:
            raise OrderMismatch("this recorded order is damaged: its checksum does not hold")
        line, _, moved = body.removeprefix(_MAGIC).partition(b"\n")
        try:
            about = json.loads(line)
            width = next(dtype for dtype in _WIDTHS if np.dtype(dtype).itemsize == about["bytes"])
            offsets = np.frombuffer(moved, np.dtype(width).newbyteorder("<"), about["rows"])
            positions = offsets.astype(np.int64) + np.arange(len(offsets))
            return cls(state=OrderState.from_json(about["state"]), positions=positions)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
            raise OrderMismatch(f"this recorded order is damaged: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """An ``EpochOrder`` that repeats what was recorded, place by place.

    Attributes:
        recorded: recorded order.
        order: in which the positions were positions.

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
