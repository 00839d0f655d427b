"""Reads every sample of a data set once: which cannot be decoded, and which have the bytes of another."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Skipped
from frostline.core.texts import taken
from frostline.datasets.dataset import Dataset
from frostline.datasets.reading import open_samples
from frostline.errors import ObjectNotFound, SampleError
from frostline.events import Counted, Observer, PhaseStarted, SampleSkipped
from frostline.preprocess import Applied
from frostline.preprocess.apply import MOST_PIXELS
from frostline.preprocess.decoder import decoded
from frostline.preprocess.records import unpacked
from frostline.stores.faces import Readable

__all__ = ("Checked", "check")

# More than cores, so that a store some milliseconds away is hidden.
_THREADS = 16
_AT_ONCE = 256
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What reading every sample showed.

    Attributes:
        samples: that were read.
        unreadable: those that cannot be read or decoded, and why.
        duplicates: groups of names of samples whose bytes are the same, the largest group first.
        seconds: that it took.
    """

    samples: int
    unreadable: tuple[Skipped, ...]
    duplicates: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def surplus(self) -> int:
        """Samples that have the bytes of one before them."""
        return sum(len(group) - 1 for group in self.duplicates)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "surplus": self.surplus}


def check(data: Dataset, observe: Observer) -> Checked:
    """Read and decode every sample, several at a time.

    Only samples of equal size can have equal bytes, so only those are hashed. Memory is that of the images in work, and
    of some 100 bytes for each that is hashed.

    Args:
        data: all of it, or the part that matters.
        observe: told of progress, and of every sample that cannot be read.

    Raises:
        StoreError: the store failed; run it again.
    """
    started = time.perf_counter()
    observe(PhaseStarted(name="checking the samples"))
    work = _Check(data)
    unreadable: list[Skipped] = []
    with ThreadPoolExecutor(_THREADS, "frostline-check") as threads:
        for rows, samples, names in work.pieces():
            is_shared = work.may_have_twins(samples)
            found = threads.map(work.one, [samples] * len(rows), range(len(rows)), names, is_shared.tolist())
            for row, outcome in zip(rows.tolist(), found, strict=True):
                if isinstance(outcome, Skipped):
                    unreadable.append(outcome)
                    observe(SampleSkipped(id=outcome.id, object=outcome.object, reason=outcome.reason))
                elif outcome is not None:
                    work.rows_by_digest[outcome].append(row)
            observe(Counted(done=int(rows[-1]) + 1, total=len(data)))
    return Checked(
        samples=len(data),
        unreadable=tuple(unreadable),
        duplicates=work.duplicates(),
        seconds=time.perf_counter() - started,
    )


class _Check:
    """What is known of one data set while it is read."""

    def __init__(self, data: Dataset) -> None:
        self.rows_by_digest: dict[bytes, list[int]] = defaultdict(list)
        self._data = data
        self._applied: Applied | None = data.applied
        self._store: Readable = open_samples(data.url, data.reading)
        sizes, counts = np.unique(data.samples.lengths, return_counts=True)
        self._shared = sizes[counts > 1]

    def pieces(self) -> Iterator[tuple[npt.NDArray[np.int64], Samples, list[str]]]:
        """Rows, their columns and their names, some hundred at a time."""
        for start in range(0, len(self._data), _AT_ONCE):
            rows = np.arange(start, min(start + _AT_ONCE, len(self._data)), dtype=np.int64)
            yield rows, self._data.samples.take(rows), list(taken(self._data.names, rows))

    def may_have_twins(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """Which of them have the size of another."""
        places = np.searchsorted(self._shared, samples.lengths)
        if not len(self._shared):
            return np.zeros(len(samples), np.bool_)
        found: npt.NDArray[np.bool_] = self._shared[np.minimum(places, len(self._shared) - 1)] == samples.lengths
        return found

    def one(self, samples: Samples, place: int, name: str, is_hashed: bool) -> Skipped | bytes | None:
        """Why a sample cannot be read; or the digest of its bytes, where that is wanted."""
        try:
            data = self._store.read(samples.objects[place], int(samples.offsets[place]), int(samples.lengths[place]))
            if self._applied is None:
                decoded(data, "RGB", most_pixels=MOST_PIXELS)
            else:
                unpacked(self._applied.stored, data)
        except (ObjectNotFound, SampleError) as error:
            return Skipped(id=int(samples.ids[place]), object=name, reason=str(error))
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() if is_hashed else None

    def duplicates(self) -> tuple[tuple[str, ...], ...]:
        """Names of samples with the same bytes."""
        groups = [rows for rows in self.rows_by_digest.values() if len(rows) > 1]
        groups.sort(key=lambda rows: (-len(rows), rows))
        return tuple(tuple(taken(self._data.names, np.array(rows, np.int64))) for rows in groups)
