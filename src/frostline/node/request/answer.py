"""The batches of one answer, as an iterator that any thread may close."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Literal, Self

from frostline.core import FeatureBatch
from frostline.node.scheduling.memory_pool import Abandoned

__all__ = ("BatchStream", "Ending")

Ending = Literal["abandoned", "expired", "failed", "finished"]


class BatchStream:
    """The batches of one request, in its order. A batch's memory is released when the next batch is asked for.

    Args:
        batches: makes the batches.
        cancel: cancels the work of the request; called when the stream is closed before its end.
        on_end: called once, with the stream and how it ended, when no work of it is left.
    """

    def __init__(
        self,
        batches: Iterator[FeatureBatch],
        cancel: Callable[[], None],
        on_end: "Callable[[BatchStream, Ending], None]",
    ) -> None:
        self._batches = batches
        self._cancel = cancel
        self._on_end = on_end
        self._turn = threading.Lock()
        self._has_ended = False
        self._is_complete = False
        self._is_expired = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        with self._turn:
            if self._has_ended:
                raise StopIteration
            ending: Ending | None = "failed"
            try:
                batch = next(self._batches)
                ending = None
                return batch
            except StopIteration:
                ending = "finished"
                raise
            except (Abandoned, CancelledError):
                ending = self._given_up
                raise StopIteration from None
            finally:
                if ending is not None:
                    self._end(ending)

    @property
    def has_ended(self) -> bool:
        """Whether all its work has ended; closing it then does nothing."""
        return self._has_ended

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the request was answered."""
        return self._is_complete

    @property
    def is_expired(self) -> bool:
        """Whether it was cancelled at its deadline."""
        return self._is_expired

    def expire(self) -> None:
        """Cancel the rest as ``close`` does, because the deadline has passed. Do nothing if it has ended."""
        self._is_expired = not self._has_ended
        self.close()

    def close(self) -> None:
        """Cancel the rest, wake a thread that waits in ``next``, and return when all work has ended."""
        if not self._has_ended:
            self._cancel()
        with self._turn:
            if not self._has_ended:
                close = getattr(self._batches, "close", None)
                if close is not None:
                    close()
                self._end(self._given_up)

    @property
    def _given_up(self) -> Ending:
        return "expired" if self._is_expired else "abandoned"

    def _end(self, ending: Ending) -> None:
        self._has_ended = True
        self._is_complete = ending == "finished"
        self._batches = iter(())
        self._on_end(self, ending)
