"""A loader as Accelerate's ``skip_first_batches`` takes it apart: nothing is asked for of the batches it skips."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Protocol

from torch.utils.data import Dataset, SequentialSampler

__all__ = ("Skippable",)


class _Passed(Protocol):
    """What is asked of a loader that can be skipped into."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None: ...

    def state_after(self, batches: int) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Skippable:
    """The parts of a ``DataLoader`` of which Accelerate makes one that begins later, as transformers' trainer does it.

    The batches of that one are steps of a pass over this loader; the first step that is not skipped begins the pass.
    Parts are made when they are asked for, so that nothing is changed by a trainer that only looks at them.
    """

    prefetch_factor = None  # there is no worker to prefetch

    @property
    def dataset(self: _Passed) -> Dataset[Any]:
        """As long as the epoch's samples; gives a batch for a step."""
        return _Epoch(self)

    @property
    def sampler(self: _Passed) -> SequentialSampler:
        """Of batches, which come in the loader's order."""
        return SequentialSampler(range(len(self)))

    @property
    def batch_sampler(self: _Passed) -> "_Steps":
        """The steps of passes over this loader."""
        return _Steps(self)

    @staticmethod
    def collate_fn(batches: list[Any]) -> Any:
        """The batch of a step, which is made already."""
        (batch,) = batches
        return batch


class _Step(Protocol):
    def __call__(self) -> Any:
        """Its batch."""


class _Epoch(Dataset[Any]):
    def __init__(self, loader: _Passed) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return int(self._loader.state_after(0)["samples"])

    def __getitem__(self, step: _Step) -> Any:
        return step()


class _Steps:
    """A batch sampler whose indices are steps. ``set_epoch`` is for who skips before the epoch is set."""

    def __init__(self, loader: _Passed) -> None:
        self._loader = loader
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[_Step]]:
        with closing(_Pass(self._loader, self._epoch)) as own:
            for number in range(len(self)):
                yield [partial(own.batch, number)]


class _Pass:
    """A pass that begins with the first batch that is asked for."""

    def __init__(self, loader: _Passed, epoch: int | None) -> None:
        self._loader = loader
        self._epoch = epoch
        self._batches: Iterator[Any] | None = None

    def batch(self, number: int) -> Any:
        if self._batches is None:
            if self._epoch is not None:
                self._loader.set_epoch(self._epoch)
            self._loader.load_state_dict(self._loader.state_after(number))
            self._batches = iter(self._loader)
        return next(self._batches)

    def close(self) -> None:
        self._batches = iter(())
