"""A request in which samples stand twice, as draws have them: each is asked for once, and handed out as often."""

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Route, Samples, Skipped
from frostline.loaders.epoch.fetch import FetchRows

__all__ = ("Repeats", "fetch_each")

_Ints = npt.NDArray[np.int64]


def fetch_each(fetch: FetchRows, samples: Samples, route: Route) -> Iterator[FeatureBatch]:
    """The rows of these samples in their order, also where one stands there more than once."""
    _, firsts, which = np.unique(samples.ids, return_index=True, return_inverse=True)
    if len(firsts) == len(samples):
        return fetch(samples, route)
    asked = samples.take(np.sort(firsts))
    places = np.argsort(np.argsort(firsts))  # of each id, by where it first stands
    return Repeats(fetch(asked, route), asked.ids, places[which])


class Repeats:
    """Rows handed out more than once. ``close`` may be called from another thread, as that of the answer.

    Args:
        answer: rows of samples that differ, in their order.
        ids: ``int64[m]``, of these samples.
        which: ``int64[n]``, which of them stands at each place; the first time each comes is in their order.
    """

    def __init__(self, answer: Iterator[FeatureBatch], ids: _Ints, which: _Ints) -> None:
        self._answer = answer
        self._ids = ids
        self._which = which
        self._places = 0
        self._come = 0
        self._rows = np.full(len(ids), -1, np.int64)
        self._skipped: dict[int, Skipped] = {}
        self._kept = 0
        self._tensors: tuple[npt.NDArray[np.generic], ...] = ()
        self._encoded: list[bytes | memoryview] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        self._take(next(self._answer))
        # A sample that has not come yet stands nowhere before the first place that waits for it.
        waiting = np.flatnonzero(self._which[self._places :] >= self._come)
        stop = self._places + int(waiting[0]) if len(waiting) else len(self._which)
        some = self._which[self._places : stop]
        self._places = stop
        kept = some[self._rows[some] >= 0]
        return FeatureBatch(
            ids=self._ids[kept],
            tensors=tuple(tensor[self._rows[kept]] for tensor in self._tensors),
            encoded=[self._encoded[row] for row in self._rows[kept].tolist()] if self._encoded else (),
            skipped=tuple(self._skipped[one] for one in self._ids[some[self._rows[some] < 0]].tolist()),
        )

    def close(self) -> None:
        """Abandon the rest of the answer."""
        close = getattr(self._answer, "close", None)
        if close is not None:
            close()

    def _take(self, batch: FeatureBatch) -> None:
        """Keep what arrived, for the places further on."""
        self._skipped |= {one.id: one for one in batch.skipped}
        stop = self._come + len(batch) + len(batch.skipped)
        come = np.arange(self._come, stop)
        there = come[~np.isin(self._ids[come], list(self._skipped))]
        self._rows[there] = np.arange(self._kept, self._kept + len(there))
        self._kept += len(there)
        self._encoded.extend(batch.encoded)
        if self._tensors and len(there):
            self._tensors = tuple(np.concatenate(pair) for pair in zip(self._tensors, batch.tensors, strict=True))
        elif len(there):
            self._tensors = batch.tensors
        self._come = stop
