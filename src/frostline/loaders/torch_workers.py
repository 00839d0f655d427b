"""A loader's batches from worker processes, with a state like the loader's own, and a sentence where one dies."""

import multiprocessing
import traceback
from collections.abc import Generator, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

from frostline.core.errors import SettingError, Unavailable
from frostline.loaders.epoch_loader import PassStart
from frostline.loaders.torch_loader import Batch, Loader

__all__ = ("WorkerLoader",)

_ITS_OWN = {"batch_size": None, "in_order": True, "persistent_workers": False}
_WHY = {
    "batch_size": "the loader makes the batches",
    "in_order": "its states count batches in the loader's order",
    "persistent_workers": "workers that stay learn nothing of another epoch, nor of a state to go on from",
}
# How PyTorch begins what it makes of an error that was raised in a worker.
_RAISED = "Caught "
# Between the end of a worker's connections and its own.
_DEATH_S = 1.0


class WorkerLoader:
    """PyTorch's ``DataLoader`` over a loader, which counts what it handed out. It is for one thread at a time.

    Batches, their order and their states are the loader's. Leaving a pass early ends its workers, and so does an error,
    whoever keeps it. Whoever keeps a pass that was left early closes it: its workers wait for its next batch till then.

    Args:
        loader: loader of an epoch; it is not to be iterated elsewhere meanwhile.
        workers: number of processes that take its steps in turn.
        start: the way that they are started: ``fork``, ``spawn`` or ``forkserver``; the platform's way by default.
        options: options of ``DataLoader``, such as ``prefetch_factor``.

    Raises:
        SettingError: an option with which its batches would not be the loader's.
    """

    def __init__(self, loader: Loader, workers: int, *, start: str | None = None, **options: Any) -> None:
        for name, value in _ITS_OWN.items():
            if options.get(name, value) != value:
                raise SettingError(f"WorkerLoader needs {name}={value}: {_WHY[name]}")
        self._loader = loader
        options |= _ITS_OWN
        self._data = DataLoader(loader, num_workers=workers, multiprocessing_context=start, **options)
        self._state = loader.state_after(0)
        self._latest = object()

    @property
    def epoch(self) -> int:
        """The number of the loader's epoch."""
        return self._loader.epoch

    def __len__(self) -> int:
        """Batches in the whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Generator[Batch]:
        """A pass over the epoch, from where ``load_state_dict`` put it; the next pass is whole again.

        Its workers are started for its first batch. States are those of the pass that was begun last.

        Raises:
            NetworkChanged: The network has changed since its features were computed; the sentence names what changed.
            OrderMismatch: the ranks would not read the same epoch.
            Unavailable: a worker died, or a rank did not say what it is about to read.
        """
        self._state = self._loader.state_after(0)
        self._latest = latest = object()
        self._loader.arrays.require_unchanged()()
        self._loader.arrays.agree()
        return self._pass(self._loader.arrays.begin, latest)

    def set_epoch(self, epoch: int) -> None:
        """Become the loader of another epoch, for trainers that pass over one loader again and again."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far it is; see ``ArrayLoader.state_dict``."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; see ``ArrayLoader.load_state_dict``."""
        self._loader.load_state_dict(state)
        self._state = self._loader.state_dict()

    def _pass(self, begin: PassStart, own: object) -> Generator[Batch]:
        batches, given = self._started(begin), 0
        while True:
            try:
                batch = _next(batches)
            except BaseException as error:
                _let_go(error)
                del batches
                if not isinstance(error, RuntimeError) or str(error).startswith(_RAISED):
                    raise
                raise Unavailable(
                    f"a worker of the loader is gone ({error}): was it killed, or short of memory? A new pass has new "
                    "workers, and goes on from the loader's state"
                ) from error
            finally:
                self._loader.arrays.catch_up()
            if batch is None:
                return
            given += 1
            if self._latest is own:
                self._state = self._loader.arrays.state_after(given, begin)
            yield batch

    def _started(self, begin: PassStart) -> Iterator[Batch]:
        """Workers that begin there; the next ones begin where the loader was put since, or at the beginning."""
        arrays = self._loader.arrays
        later = PassStart() if arrays.begin is begin else arrays.begin
        arrays.begin_at(begin)
        try:
            return iter(self._data)
        finally:
            arrays.begin_at(later)


def _next(batches: Iterator[Batch]) -> Batch | None:
    """The next batch, and None after the last.

    Raises:
        RuntimeError: A worker died (PyTorch says so from a signal handler, at any time), or memory that it had sent
            cannot be opened any more.
    """
    try:
        return next(batches, None)
    except (EOFError, OSError) as error:
        _join_the_dead()
        raise RuntimeError(str(error) or type(error).__name__) from error


def _let_go(error: BaseException | None) -> None:
    """Forget what the frames of an error hold: PyTorch ends the workers once nobody has its iterator any more."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _join_the_dead() -> None:
    """Return, or raise what the signal handler says, when a death is known, so that it does not break the shutdown."""
    children = {child.sentinel: child for child in multiprocessing.active_children()}
    for sentinel in wait(list(children), _DEATH_S):
        if isinstance(sentinel, int):
            children[sentinel].join()
