"""Puts a data set's samples into a table over CQL: in bounded memory, and the same however often it is run."""

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from frostline.core import Samples, Skipped
from frostline.datasets.dataset import Dataset
from frostline.datasets.reading import open_samples
from frostline.errors import ObjectNotFound, SettingError, TooManySkipped
from frostline.events import Counted, Observer, PhaseStarted, SampleSkipped
from frostline.stores.cql import CqlStore, TableSample
from frostline.stores.faces import Buffer, Versioned
from frostline.stores.objects import open_store

__all__ = ("Put", "put_into_table")

# Read at once, and held until they are put: of 100 kB, some megabytes.
_SAMPLES_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """What putting samples into a table did.

    Attributes:
        url: of the table.
        samples: that were put, new ones and those that were there.
        nbytes: of their data.
        seconds: that it took.
        skipped: samples that could not be read.
    """

    url: str
    samples: int
    nbytes: int
    seconds: float
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "skipped": [asdict(one) for one in self.skipped]}


def put_into_table(
    source: Dataset, destination: str, *, workers: int = 16, skip_allowance: float = 0.01, observe: Observer
) -> Put:
    """Put every sample with its name, label and size into a table, which is made where it is missing.

    A sample's key follows from its name, so after a kill it is run again, and no sample is there twice. Names and
    order are those of the source: training on the table is training on the source.

    Args:
        source: encoded samples in any form.
        destination: ``cql://user@host/keyspace/table``.
        workers: samples read at once.
        skip_allowance: share of the samples that may be unreadable.
        observe: told what happens.

    Raises:
        SettingError: the destination is no table, or the source has masks, or is a ready form, whose pixels no table
            can describe.
        TooManySkipped: more samples were unreadable than allowed.
        DataError: the table is of another kind.
        StoreError: a store failed; run it again.
    """
    store = open_store(destination)
    if not isinstance(store, CqlStore):
        raise SettingError(f"{store.url} is no table: give cql://user@host/keyspace/table")
    source.require_no_targets()
    if source.applied is not None:
        raise SettingError(f"{source.url} is a ready form: put the images that it was made from into the table")
    started = time.perf_counter()
    store.create()
    observe(PhaseStarted(name="putting samples into a table"))
    reader = _Reader(source, workers, math.ceil(skip_allowance * len(source)), observe)
    store.put_many(reader.samples())
    return Put(
        url=store.url,
        samples=reader.count,
        nbytes=reader.nbytes,
        seconds=time.perf_counter() - started,
        skipped=tuple(reader.skipped),
    )


class _Reader:
    """The samples of a data set with their bytes, some at a time."""

    def __init__(self, source: Dataset, workers: int, most_skipped: int, observe: Observer) -> None:
        self._source = source
        self._workers = workers
        self._store = open_samples(source.url, source.reading)
        self._most_skipped = most_skipped
        self._observe = observe
        self.count = 0
        self.nbytes = 0
        self.skipped: list[Skipped] = []

    def samples(self) -> Iterator[TableSample]:
        with ThreadPoolExecutor(self._workers, "frostline-put") as threads:
            for start in range(0, len(self._source), _SAMPLES_AT_ONCE):
                rows = np.arange(start, min(start + _SAMPLES_AT_ONCE, len(self._source)))
                yield from self._some(rows.tolist(), self._source.samples.take(rows), threads)
                self._observe(Counted(done=start + len(rows), total=len(self._source)))

    def _some(self, rows: list[int], samples: Samples, threads: ThreadPoolExecutor) -> Iterator[TableSample]:
        read = threads.map(lambda place: _read(self._store, samples, place), range(len(rows)))
        for place, (row, data) in enumerate(zip(rows, read, strict=True)):
            if isinstance(data, Skipped):
                self._skip(data)
                continue
            label = int(samples.labels[place])
            self.count += 1
            self.nbytes += len(data)
            class_name = self._source.classes[label] if label >= 0 else None
            yield TableSample(self._source.names[row], data, label, class_name)

    def _skip(self, skipped: Skipped) -> None:
        self.skipped.append(skipped)
        self._observe(SampleSkipped(id=skipped.id, object=skipped.object, reason=skipped.reason))
        if len(self.skipped) > self._most_skipped:
            raise TooManySkipped(
                f"{len(self.skipped)} samples of {self._source.url} could not be read: {skipped.reason}"
            )


def _read(store: Versioned, samples: Samples, place: int) -> Buffer | Skipped:
    try:
        name, offset, length = samples.objects[place], int(samples.offsets[place]), int(samples.lengths[place])
        return store.read(name, offset, length)
    except ObjectNotFound as error:
        return Skipped(id=int(samples.ids[place]), object=samples.objects[place], reason=str(error))
