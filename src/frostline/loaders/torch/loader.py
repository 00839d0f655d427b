"""Batches for a PyTorch training loop: an iterable as it stands, and a data set for its ``DataLoader``."""

import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from frostline.core import View
from frostline.errors import SettingError
from frostline.loaders.epoch.epoch_loader import ArrayLoader, Change
from frostline.loaders.epoch.epochs import Epochs
from frostline.loaders.epoch.numpy_batch import Arrays, widened_batch
from frostline.loaders.epoch.rows import EpochStream, NextPass
from frostline.loaders.epoch.worker_state import WorkerState
from frostline.loaders.torch.augment import Augment
from frostline.loaders.torch.batch import Batch, arrays_of, batch_of
from frostline.loaders.torch.skip_batches import Skippable
from frostline.ordering import RecordedOrder

__all__ = ("Loader", "Pass", "PassOwner", "end_with_trainer", "in_arrays")

# Between looks whether the training process is still the parent.
_WATCH_S = 0.5


class PassOwner:
    """Told of each pass, in whichever process it begins. For one thread at a time."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._renew()

    def __bool__(self) -> bool:
        """True where the latest pass began in a child of this process, forked or started by multiprocessing."""
        return self._process == os.getpid() and self._mark[0] != 0

    def begin(self) -> None:
        """A pass begins in the process that calls this, or it was said there where the next one does."""
        if self._process == os.getpid():
            self._renew()
        else:
            self._mark[0] = 1

    def travels(self) -> None:
        """The loader is being pickled: to a process that makes passes of it, where multiprocessing starts one."""
        if get_spawning_popen() is not None:
            self._mark[0] = 1

    def _renew(self) -> None:
        # Forked processes share these pages with the one that made them. Those of an older pass, which may still run,
        # have the mark of that one.
        self._mark = mmap.mmap(-1, 1)


def end_with_trainer() -> None:
    """Let this process, a worker of a loader, end when its training process does, however that ends.

    PyTorch's workers look whether they have another parent than at first, but only while they wait for something to
    do: one that asks for samples would go on asking until ``retry_for_s`` ends. A child of a fork server has the server
    for its parent, which lives as long as one of its children does. It is told by a pipe, that its training process
    alone holds open; of a forked child others may hold that pipe, so it looks at its parent.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        threading.Thread(target=_end_after, args=(trainer,), name="frostline-trainer-watch", daemon=True).start()


def _end_after(trainer: BaseProcess) -> None:
    if trainer.pid != os.getppid():
        trainer.join()
    while trainer.pid == os.getppid():
        time.sleep(_WATCH_S)
    os._exit(1)  # nobody is left who would take a batch, or be told why


class Loader(Skippable, IterableDataset[Batch]):
    """The batches of one epoch, in the seeded order. Iterate it once or again: each pass is the same epoch.

    Leaving a pass early cancels what it had asked for. It is for one thread at a time.

    Args:
        arrays: the same batches as NumPy arrays, which become tensors without a copy.
        augment: changes each batch, by seed and epoch; None leaves it as it is.

    In a worker of ``DataLoader`` (``batch_size=None``) it makes connections of its own, and the workers take its steps
    in turn, so that together they give its batches in its order. The loader in the process that made them learns
    nothing of that, and refuses to give a state then: ``state_after`` says how far so many batches are.
    """

    def __init__(self, arrays: ArrayLoader, *, augment: Augment | None = None) -> None:
        self._arrays: ArrayLoader | None = arrays
        self._worker_state: WorkerState | None = None
        self._process = os.getpid()
        self._augment = augment
        self._elsewhere = PassOwner()

    def _become(self, state: WorkerState, augment: Augment | None) -> None:
        self._arrays, self._worker_state, self._process, self._augment = None, state, os.getpid(), augment
        self._elsewhere = PassOwner()

    def __reduce__(self) -> tuple[Any, ...]:
        self._elsewhere.travels()
        return _travelled, (self.arrays.for_worker(), self._augment)

    def __repr__(self) -> str:
        return repr(self.arrays).replace("ArrayLoader", "Loader", 1)

    @property
    def arrays(self) -> ArrayLoader:
        """The same batches as arrays; in another process than the one that made it, those of this worker."""
        if self._arrays is None or self._process != os.getpid():
            state = self._worker_state if self._arrays is None else self._arrays.for_worker()
            assert state is not None
            info = get_worker_info()
            self._arrays = state.open() if info is None else state.open(info.id, info.num_workers)
            self._process = os.getpid()
            if info is not None:
                end_with_trainer()
        return self._arrays

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.arrays.epoch

    def __len__(self) -> int:
        """Batches in the whole epoch; for one rank, if no further sample turns out to be unreadable."""
        return len(self.arrays)

    def __iter__(self) -> "Pass":
        """A pass over the epoch; see ``ArrayLoader.__iter__``."""
        self._elsewhere.begin()
        return Pass(self._batches(iter(self.arrays), self.arrays.view), self.arrays)

    def in_epoch(self, epoch: int) -> "Loader":
        """The same kind of loader of another epoch."""
        return Loader(self.arrays.in_epoch(epoch), augment=self._augment)

    def epochs(self, numbers: Sequence[int]) -> "Epochs[Loader]":
        """Several epochs like this one, such as ``range(10)``: each asked for while the one before it ends.

        Raises:
            SettingError: no epoch is named, or one is named twice.
        """
        return Epochs(self, numbers)

    def rows(self) -> EpochStream:
        """See ``ArrayLoader``."""
        return self.arrays.rows()

    def follow(self, rows: NextPass) -> None:
        """See ``ArrayLoader``."""
        self.arrays.follow(rows)

    def state_dict(self) -> dict[str, Any]:
        """See ``ArrayLoader.state_dict``.

        Raises:
            SettingError: workers make the latest pass, and this process does not see how far they are.
        """
        self._require_here("state")
        return self.arrays.state_dict()

    def state_after(self, batches: int) -> dict[str, Any]:
        """See ``ArrayLoader.state_after``."""
        return self.arrays.state_after(batches)

    def set_epoch(self, epoch: int) -> None:
        """Become the loader of another epoch, for trainers that pass over one loader again and again."""
        if epoch != self.epoch:
            self._arrays = self.arrays.in_epoch(epoch)
            self._elsewhere.begin()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``ArrayLoader.load_state_dict``."""
        self.arrays.load_state_dict(state)
        self._elsewhere.begin()

    def recorded(self) -> RecordedOrder:
        """See ``ArrayLoader.recorded``.

        Raises:
            SettingError: as there; or workers make the latest pass.
        """
        self._require_here("recorded order")
        return self.arrays.recorded()

    def _require_here(self, what: str) -> None:
        if self._elsewhere:
            raise SettingError(
                f"this loader has no {what}: workers make its latest pass, and it does not see how far they are; for a "
                "state use torchdata's StatefulDataLoader or frostline.loaders.WorkerLoader in place of DataLoader, or "
                "count batches and ask for state_after"
            )

    def _batches(self, arrays: Generator[Arrays], view: View) -> Generator[Batch]:
        with closing(arrays):
            for array in arrays:
                batch = batch_of(array)
                yield batch if self._augment is None else self._augment(batch, view)


class Pass(Iterator[Batch]):
    """One pass over a loader: an iterator of batches, which whoever leaves it early may close.

    Its state is for torchdata's ``StatefulDataLoader`` alone, which saves it beside the loader's and begins a whole
    pass after one that was over. With workers it asks the loader of the training process for that, which was put
    nowhere. Without any it asks the loader that was just put to the end, and says so only here.

    Args:
        batches: batches of the pass.
        arrays: loader whose pass it is.
    """

    def __init__(self, batches: Generator[Batch], arrays: ArrayLoader) -> None:
        self._batches = batches
        self._arrays = arrays
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        try:
            return next(self._batches)
        except StopIteration:
            self._is_over = True
            raise

    def close(self) -> None:
        """Cancel what it had asked for. Closing it again does nothing."""
        self._batches.close()

    def state_dict(self) -> dict[str, bool]:
        """Whether the loop was told that the pass is over, which is one step after the last batch."""
        return {"is_over": self._is_over}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Let the pass after this one be whole, where this one is over before it begins."""
        self._is_over = state["is_over"]
        if self._is_over:
            self._arrays.begin_whole()


def in_arrays(augment: Augment | None) -> Change:
    """The same change, of arrays; as these are handed out they hold no bfloat16."""

    def change(arrays: Arrays, view: View) -> Arrays:
        return widened_batch(arrays if augment is None else arrays_of(augment(batch_of(arrays), view)))

    return change


def _travelled(state: WorkerState, augment: Augment | None) -> Loader:
    """A loader that came to another process, where nothing is opened before it is asked for."""
    loader = Loader.__new__(Loader)
    loader._become(state, augment)  # noqa: SLF001
    return loader
