"""Batches for a PyTorch training loop: an iterable as it stands, and a data set for its ``DataLoader``."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from torch.utils.data import IterableDataset

from frostline.core import View
from frostline.loaders.array_loader import ArrayLoader, Change
from frostline.loaders.arrays import Arrays
from frostline.loaders.augment import Augment
from frostline.loaders.batch import Batch, arrays_of, batch_of
from frostline.loaders.rows import EpochRows
from frostline.ordering import RecordedOrder
from frostline.prefetch.stretches import Delivery

__all__ = ("Loader", "in_arrays")


class Loader(IterableDataset[Batch]):
    """The batches of one epoch, in the seeded order. Iterate it once or again: each pass is the same epoch.

    Leaving a pass early cancels what it had asked for. It is for one thread at a time.

    Args:
        arrays: the same batches as NumPy arrays, which become tensors without a copy.
        augment: changes each batch, by seed and epoch; None leaves it as it is.

    Attributes:
        arrays: as given.
    """

    def __init__(self, arrays: ArrayLoader, *, augment: Augment | None = None) -> None:
        self.arrays = arrays
        self._augment = augment

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.arrays.epoch

    def __len__(self) -> int:
        """Batches in the whole epoch; for one rank, if no further sample turns out to be unreadable."""
        return len(self.arrays)

    def __iter__(self) -> Iterator[Batch]:
        """A pass over the epoch; see ``ArrayLoader.__iter__``."""
        return self._batches(iter(self.arrays))

    def in_epoch(self, epoch: int) -> "Loader":
        """The same kind of loader of another epoch."""
        return Loader(self.arrays.in_epoch(epoch), augment=self._augment)

    def rows(self) -> EpochRows:
        """See ``ArrayLoader``."""
        return self.arrays.rows()

    def follow(self, rows: Callable[[], tuple[EpochRows, Iterator[Delivery]]]) -> None:
        """See ``ArrayLoader``."""
        self.arrays.follow(rows)

    def state_dict(self) -> dict[str, Any]:
        """See ``ArrayLoader.state_dict``."""
        return self.arrays.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``ArrayLoader.load_state_dict``."""
        self.arrays.load_state_dict(state)

    def recorded(self) -> RecordedOrder:
        """See ``ArrayLoader.recorded``."""
        return self.arrays.recorded()

    def _batches(self, arrays: Generator[Arrays]) -> Iterator[Batch]:
        with closing(arrays):
            for one in arrays:
                batch = batch_of(one)
                yield batch if self._augment is None else self._augment(batch, self.arrays.view)


def in_arrays(augment: Augment) -> Change:
    """The same change, of arrays."""

    def change(arrays: Arrays, view: View) -> Arrays:
        return arrays_of(augment(batch_of(arrays), view))

    return change
