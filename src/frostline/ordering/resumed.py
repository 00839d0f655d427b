"""An order that goes on from a state whose samples were handed out ahead of earlier ones."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.ordering.order import EpochOrder, check_inside
from frostline.ordering.state import OrderState

__all__ = ("Progress", "Resumed")

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resumed:
    """An ``EpochOrder`` that begins with what a state says was handed out; all else follows as it stood.

    So how far a loader is in it is one number again, from which shards of any ranks go on.

    Attributes:
        order: in which the state's positions are positions.
        state: where it goes on.
    """

    order: EpochOrder
    state: OrderState

    def __len__(self) -> int:
        return len(self.order)

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return self.order.name

    @property
    def seed(self) -> int:
        """See ``EpochOrder.seed``."""
        return self.order.seed

    @property
    def epoch(self) -> int:
        """See ``EpochOrder.epoch``."""
        return self.order.epoch

    @property
    def start(self) -> int:
        """The number of positions that were handed out."""
        return self.state.position + len(self.state.ahead)

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, len(self))
        return self.order.at(self.original(positions))

    def original(self, positions: _Rows) -> _Rows:
        """``int64[n]``: where in ``order`` stands what stands here at each position, up to the length itself."""
        ahead = np.array(self.state.ahead, np.int64)
        found = positions.astype(np.int64)
        is_ahead = (positions >= self.state.position) & (positions < self.start)
        found[is_ahead] = ahead[positions[is_ahead] - self.state.position]
        rest = positions >= self.start
        # Before the k-th one ahead stand so many that were missing: what follows them has moved by k places.
        missing_before = ahead - self.state.position - np.arange(len(ahead))
        moved = positions[rest] - self.start
        found[rest] = self.state.position + moved + np.searchsorted(missing_before, moved, side="right")
        return found

    def in_epoch(self, epoch: int) -> Self:
        """The same in another epoch, at its beginning."""
        if epoch == self.epoch:
            return self
        state = replace(self.state, epoch=epoch, position=0, ahead=())
        return replace(self, order=self.order.in_epoch(epoch), state=state)


class Progress:
    """What was handed out of an epoch: all below a position, and some beyond it. Memory grows with the latter alone.

    Args:
        position: all below it was handed out or cannot be read.
        ahead: positions beyond it, ascending.
    """

    def __init__(self, position: int = 0, ahead: tuple[int, ...] = ()) -> None:
        self.position = position
        self._ahead = np.array(ahead, np.int64)

    @property
    def ahead(self) -> tuple[int, ...]:
        """Positions beyond ``position`` that were handed out, ascending."""
        return tuple(self._ahead.tolist())

    def give(self, positions: _Rows, missing: int) -> None:
        """Samples were handed out.

        Args:
            positions: theirs.
            missing: nothing below this position is still to come but what ``positions`` name.
        """
        given = np.union1d(self._ahead, positions)
        position = max(self.position, missing)
        given = given[given >= position]
        run = int(np.argmin(np.append(given == position + np.arange(len(given)), False)))
        self.position = position + run
        self._ahead = given[run:]
