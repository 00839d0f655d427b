"""A loader's batches from worker processes, with a state like the loader's own, and a sentence where one dies."""

import multiprocessing
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader

from frostline.errors import Unavailable
from frostline.loaders.batch import Batch
from frostline.loaders.loader import Loader
from frostline.loaders.passport import Begin

__all__ = ("WorkerLoader",)

# How PyTorch begins what it makes of an error that was raised in a worker.
_RAISED = "Caught "
# Between the end of a worker's connections and its own.
_DEATH_S = 1.0


class WorkerLoader:
    """PyTorch's ``DataLoader`` over a loader, which counts what it handed out. It is for one thread at a time.

    Batches, their order and their states are the loader's. Leaving a pass early ends its workers.

    Args:
        loader: of an epoch; it is not to be iterated elsewhere meanwhile.
        workers: how many processes take its steps in turn.
        start: how they are started: ``fork``, ``spawn`` or ``forkserver``; the platform's way by default.
        options: of ``DataLoader``, such as ``prefetch_factor``.
    """

    def __init__(self, loader: Loader, workers: int, *, start: str | None = None, **options: Any) -> None:
        self._loader = loader
        self._data = DataLoader(loader, batch_size=None, num_workers=workers, multiprocessing_context=start, **options)
        self._state = loader.state_dict()

    @property
    def epoch(self) -> int:
        """Its number."""
        return self._loader.epoch

    def __len__(self) -> int:
        """Batches in the whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        """A pass over the epoch, from where ``load_state_dict`` put it; the next pass is whole again.

        Raises:
            Unavailable: a worker died.
        """
        begin = self._loader.arrays.begin
        self._state = self._loader.state_after(0)
        batches = iter(self._data)
        self._loader.arrays.begin_at(Begin())
        return self._pass(batches, begin)

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

    def _pass(self, batches: Iterator[Batch], begin: Begin) -> Iterator[Batch]:
        given = 0
        while True:
            try:
                batch = _next(batches)
            except RuntimeError as error:
                if str(error).startswith(_RAISED):
                    raise
                raise Unavailable(
                    f"a worker of the loader is gone ({error}): was it killed, or short of memory? A new pass has new "
                    "workers, and goes on from the loader's state"
                ) from error
            if batch is None:
                return
            given += 1
            self._state = self._loader.arrays.state_after(given, begin)
            yield batch


def _next(batches: Iterator[Batch]) -> Batch | None:
    """The next batch, and None after the last.

    Raises:
        RuntimeError: what PyTorch says of a dead worker, from a signal handler at any time; or what cannot be opened
            any more of that which the worker had sent.
    """
    try:
        return next(batches, None)
    except (EOFError, OSError) as error:
        _join_the_dead()
        raise RuntimeError(str(error) or type(error).__name__) from error


def _join_the_dead() -> None:
    """Return, or raise what the signal handler says, when a death is known, so that it does not break the shutdown."""
    children = {one.sentinel: one for one in multiprocessing.active_children()}
    for sentinel in wait(list(children), _DEATH_S):
        if isinstance(sentinel, int):
            children[sentinel].join()
