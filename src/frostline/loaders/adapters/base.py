"""A loader's passes for a framework that takes batches ahead of its loop: states count what the loop has."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from frostline.core.errors import FrostlineError, OrderMismatch, SettingError
from frostline.loaders.epoch import Epochs
from frostline.loaders.epoch_loader import ArrayLoader
from frostline.loaders.row_source import Arrays

__all__ = ("COLUMNS", "Fed", "FrameworkIterator", "Parts", "checked_columns", "checked_loader", "columns_of")

COLUMNS = ("features", "labels", "ids", "targets")
"""What a framework may be given of a batch."""

# Beside what a framework holds, it may be making one batch and the loop may not have said yet that it has another.
_BETWEEN = 2

_State = dict[str, Any]
Fed = ArrayLoader | Epochs[ArrayLoader]
"""What a framework's loader is made of."""
Parts = tuple[Any, ...]
"""Columns of a batch: arrays, tuples of them where several tensors cross the frost line, and what targets are."""


class FrameworkIterator:
    """The passes over a loader, one at a time, and how far the loop is that they reach through a framework.

    A framework may take its batches in a thread of its own; ``count_taken`` and the states may be asked in another.

    Args:
        loader: loader of an epoch, so that each pass is that epoch; or several epochs, one a pass, and from the first
            again.
        columns: columns of a batch, by name.
        ahead: batches that the framework may hold. With 0 the loop has what the framework took; else it says so itself
            by ``count_taken``.
        fit: function that makes of a batch's columns what the framework takes, and refuses what it would refuse.

    Attributes:
        failure: the reason why the last pass ended early, in our words; None where it did not.
        one: the loader, or that of any epoch.

    Raises:
        SettingError: ``ahead`` is negative, there is no such column, or the batches are no arrays.
    """

    def __init__(
        self, loader: Fed, columns: Sequence[str], ahead: int = 0, fit: Callable[[Parts], Parts] | None = None
    ) -> None:
        if ahead < 0:
            raise SettingError(f"a framework can hold 0 batches or more, not {ahead}")
        self.failure: FrostlineError | None = None
        self.one = checked_loader(loader)
        self._loader = loader
        self._columns = checked_columns(columns)
        self._fit = fit
        self._ahead = ahead
        self._epochs: Iterator[ArrayLoader] = iter(())
        self._pass: Generator[Arrays] | None = None
        self._left: Generator[Arrays] | None = None
        self._has_taken = False
        self._held: deque[_State | None] = deque()
        self._had: _State | None = None
        self._counting = threading.Lock()

    def batches(self) -> Generator[Parts]:
        """The batches of a pass, each as its columns. The pass before it cannot go on; one that was left just ends.

        Raises:
            OrderMismatch: A newer pass over the same loader has begun.
            SettingError: a batch has no such column.
        """
        self._break_off()
        self.failure = None
        try:
            own = self._pass = iter(self._next())
            self._start()
            with closing(own):
                for batch in own:
                    if not self._goes_on(own):
                        return
                    self._hold()
                    parts = columns_of(batch, self._columns)
                    yield parts if self._fit is None else self._fit(parts)
            if self._goes_on(own):
                self._end()
        except FrostlineError as error:
            self.failure = error
            raise

    @property
    def under_way(self) -> object | None:
        """The pass that was begun last, as ``leave`` takes it."""
        return self._pass

    def leave(self, own: object | None) -> None:
        """Leave this pass, as ``close`` does, where no other has begun meanwhile."""
        if own is not None and self._pass is own:
            self.close()

    def close(self) -> None:
        """Leave the pass that is under way, and cancel what was asked for.

        Whoever leaves a pass calls it. A generator that a framework forgets is closed by Python's collector, in any
        thread and at any time, and what it would wait for then may be that thread.
        """
        self._left = self._pass
        self._break_off()

    def begin_again(self) -> None:
        """Begin the pass again of which batches were taken and the loop has none: somebody only looked at them."""
        with self._counting:
            state = None if self._has_taken else self._had
        if state is not None:
            self.close()
            self.load_state_dict(state)

    def count_taken(self, batches: int = 1, *, own: object | None = None) -> None:
        """The loop has so many more of the batches that the framework took, or all. With ``ahead=0`` that is known.

        Those of another pass than the one under way, which a framework may still hold, count no more.
        """
        with self._counting:
            if own is not None and self._pass is not own:
                return
            for _ in range(min(batches, len(self._held))):
                self._had, self._has_taken = self._held.popleft(), True

    def state_dict(self) -> _State:
        """How far the loop is; see ``ArrayLoader.state_dict``.

        Raises:
            SettingError: the loop did not say what it has.
        """
        if len(self._held) > self._ahead + _BETWEEN:
            raise SettingError(
                f"{len(self._held)} batches were taken and the loop did not say which of them it has, so that no state "
                "is right: let it say so after each (took), or take none ahead"
            )
        return self._loader.state_dict() if self._had is None else self._had

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from there; see ``ArrayLoader.load_state_dict``."""
        self._break_off()
        self._loader.load_state_dict(state)
        self._epochs = iter(())
        self._held, self._had = deque(), None

    def _next(self) -> ArrayLoader:
        """The loader of the next pass."""
        if isinstance(self._loader, ArrayLoader):
            return self._loader
        while (found := next(self._epochs, None)) is None:  # twice where nothing was left of the epochs
            self._epochs = iter(self._loader)
        return found

    def _break_off(self) -> None:
        own, self._pass = self._pass, None
        if own is not None:
            with suppress(ValueError):  # it runs in the framework's thread, which sees next that it is over
                own.close()

    def _goes_on(self, own: Generator[Arrays]) -> bool:
        """Whether the pass is still the one under way; not where it was left."""
        if self._pass is not own and self._left is not own:
            raise OrderMismatch("another pass over the loader has begun: it has one at a time")
        return self._pass is own

    def _start(self) -> None:
        with self._counting:
            self._held, self._had, self._has_taken = deque(), self._state(), False

    def _state(self) -> _State | None:
        """After what was given; None where nothing is held."""
        return self._loader.state_dict() if self._ahead else None

    def _hold(self) -> None:
        with self._counting:
            if self._ahead:
                self._held.append(self._state())

    def _end(self) -> None:
        """After the last batch the epoch is over, with what was left out at its end."""
        with self._counting:
            if self._held:
                self._held[-1] = self._state()
            else:
                self._had = self._state()


def checked_loader(loader: Fed) -> ArrayLoader:
    """The loader of arrays that is given, or that of any of the epochs.

    Raises:
        SettingError: The argument is no loader of arrays, such as one of PyTorch's tensors.
    """
    found: object = loader.loader if isinstance(loader, Epochs) else loader
    if not isinstance(found, ArrayLoader):
        raise SettingError(
            "loader takes what job.arrays(...) gives, or job.arrays(...).epochs(range(10)), and these are the batches "
            f"of a {type(found).__name__}"
        )
    return found


def checked_columns(columns: Sequence[str]) -> tuple[str, ...]:
    """The names, which must be some of ``COLUMNS``.

    Raises:
        SettingError: a name is not one of ``COLUMNS``.
    """
    if not columns or isinstance(columns, str) or not set(columns) <= set(COLUMNS):
        raise SettingError(f"columns are some of {', '.join(COLUMNS)}, and {columns!r} are not")
    return tuple(columns)


def columns_of(arrays: Arrays, columns: Sequence[str]) -> Parts:
    """These of a batch, in this order.

    Raises:
        SettingError: the batch has no such column.
    """
    found = tuple(getattr(arrays, name) for name in columns)
    if any(array is None for array in found):
        raise SettingError("targets are there where the data set declares some or has masks, and this one has none")
    return found
