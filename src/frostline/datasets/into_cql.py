"""Puts a data set's samples into a table over CQL: in bounded memory, verified, and taken up again after a kill."""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Skipped
from frostline.core.texts import taken
from frostline.datasets.changes import refusing
from frostline.datasets.dataset import Dataset
from frostline.datasets.in_order import InOrder
from frostline.datasets.metadata_left import say_what_is_left
from frostline.datasets.packing import divided
from frostline.errors import SettingError, TooManySkipped
from frostline.events import Counted, Observer, PhaseStarted, SampleSkipped
from frostline.stores.cql import CqlStore
from frostline.stores.cql_putting import TableSample, seal_of
from frostline.stores.faces import Buffer
from frostline.stores.objects import open_store

__all__ = ("Put", "put_into_table")

# Asked about at once whether they are there: a round trip's worth of answers of some bytes.
_ROWS_AT_ONCE = 1024
# Read at once, and held until they are put.
_BYTES_AT_ONCE = 16 << 20
# A seal is the SHA-256 of the data, then what the data was read from, then the data set.
_SHA256_BYTES, _ORIGIN_BYTES, _SOURCE_BYTES = 32, 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """What putting samples into a table did.

    Attributes:
        url: of the table.
        samples: that are there now, each read back.
        made: those that were put now; the others were there from before.
        nbytes: of their data.
        seconds: that it took.
        skipped: samples that could not be read.
    """

    url: str
    samples: int
    made: int
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

    A sample's key follows from its name, so none is there twice, however often this is run. A table takes several data
    sets as long as no two of their samples have one name and other bytes. Each is read back, and then
    its row is sealed with the SHA-256 of its bytes and with what they were read from. Samples whose seal says that they
    are there are not read again; where the source has no versions they are read, and not put again. Names and order
    are those of the source: training on the table is training on the source. For metadata columns there is no place,
    which is said before it begins.

    Args:
        source: encoded samples in any form.
        destination: ``cql://user@host/keyspace/table``.
        workers: samples read at once.
        skip_allowance: share of the samples that may be unreadable.
        observe: told what happens.

    Raises:
        SettingError: the destination is no table, or the source has masks, or is a ready form, whose pixels no table
            can describe; or a row holds a sample of the same name that came from other data, which is left as it is.
        DataChanged: an image has changed since it was listed, and the source refuses that.
        TooManySkipped: more samples were unreadable than allowed.
        DataError: the table is of another kind, or a sample came back otherwise than it was put.
        StoreError: a store failed; run it again.
    """
    store = open_store(destination)
    if not isinstance(store, CqlStore):
        raise SettingError(f"{store.url} is no table: give cql://user@host/keyspace/table")
    source = source.refreshed()
    source.require_no_targets()
    observe = refusing(source.changed, observe)
    if source.applied is not None:
        raise SettingError(f"{source.url} is a ready form: put the images that it was made from into the table")
    say_what_is_left(source, observe)
    started = time.perf_counter()
    store.create()
    observe(PhaseStarted(name="putting samples into a table"))
    reader = _Reader(source, store, workers, math.ceil(skip_allowance * len(source)), observe)
    store.put_many(reader.missing())
    return Put(
        url=store.url,
        samples=reader.samples,
        made=reader.made,
        nbytes=reader.nbytes,
        seconds=time.perf_counter() - started,
        skipped=tuple(reader.skipped),
    )


class _Reader:
    """The samples of a data set that a table lacks, with their bytes, some at a time."""

    def __init__(self, source: Dataset, table: CqlStore, workers: int, most_skipped: int, observe: Observer) -> None:
        self._source = source
        self._table = table
        self._reader = InOrder(source.url, source.reading, most=workers)
        self._most_skipped = most_skipped
        self._observe = observe
        self.samples = 0
        self.made = 0
        self.nbytes = 0
        self.skipped: list[Skipped] = []

    def missing(self) -> Iterator[TableSample]:
        total = len(self._source)
        for start in range(0, total, _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, total), dtype=np.int64)
            asked = _Asked.of(self._source, rows)
            seals = self._table.seals(asked.names)
            unsure = [row for row in range(len(rows)) if not asked.is_there(row, seals[row])]
            self._count(asked, set(range(len(rows))) - set(unsure))
            self._observe(Counted(done=start + len(rows) - len(unsure), total=total))
            lengths = asked.samples.lengths[unsure]
            for some in divided(lengths, most_bytes=_BYTES_AT_ONCE, most_rows=_ROWS_AT_ONCE):
                yield from self._read(asked, unsure[some.start : some.stop], seals)
                self._observe(Counted(done=start + len(rows) - len(unsure) + some.stop, total=total))

    def _count(self, asked: "_Asked", rows: set[int]) -> None:
        self.samples += len(rows)
        self.nbytes += int(asked.samples.lengths[list(rows)].sum())

    def _read(self, asked: "_Asked", rows: Sequence[int], seals: Sequence[bytes]) -> Iterator[TableSample]:
        some = asked.samples.take(np.array(rows, np.int64))
        for place, data in self._reader.read(some, [asked.names[row] for row in rows]):
            if isinstance(data, Skipped):
                self._skip(data)
                continue
            row = rows[place]
            self._require_own(asked.names[row], data, seals[row])
            self._count(asked, {row})
            if seals[row] != seal_of(data, asked.origins[row]):
                self.made += 1
                yield TableSample(
                    asked.names[row], data, int(some.labels[place]), asked.classes[row], asked.origins[row]
                )

    def _require_own(self, name: str, data: Buffer, seal: bytes) -> None:
        """Make sure that a row does not hold another data set's sample, whose name is the same by chance."""
        theirs = seal[_SHA256_BYTES + _ORIGIN_BYTES :]
        if theirs and theirs != _named(self._source.url) and seal[:_SHA256_BYTES] != hashlib.sha256(data).digest():
            raise SettingError(
                f"{self._table.url} holds another sample called {name}, which was put there from other data than "
                f"{self._source.url}: put this data into another table"
            )

    def _skip(self, skipped: Skipped) -> None:
        self.skipped.append(skipped)
        self._observe(
            SampleSkipped(id=skipped.id, object=skipped.object, reason=skipped.reason, changed=skipped.changed)
        )
        if len(self.skipped) > self._most_skipped:
            raise TooManySkipped(
                f"{len(self.skipped)} samples of {self._source.url} could not be read: {skipped.reason}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """Some samples of the source, and what their seals must say."""

    samples: Samples
    names: Sequence[str]
    classes: Sequence[str | None]
    origins: Sequence[bytes]

    @classmethod
    def of(cls, source: Dataset, rows: npt.NDArray[np.int64]) -> "_Asked":
        samples = source.samples.take(rows)
        classes = [source.classes[label] if label >= 0 else None for label in samples.labels.tolist()]
        place = _named(source.url)
        origins = [_origin(samples, row, classes[row]) + place for row in range(len(rows))]
        return cls(samples=samples, names=taken(source.names, rows), classes=classes, origins=origins)

    def is_there(self, row: int, seal: bytes) -> bool:
        """Whether a seal says that the row was made from the very version of the object that is listed."""
        return bool(self.samples.versions and self.samples.versions[row]) and seal[_SHA256_BYTES:] == self.origins[row]


def _named(url: str) -> bytes:
    """Stands for a data set in the seals of its rows."""
    return hashlib.blake2b(url.encode(), digest_size=_SOURCE_BYTES).digest()


def _origin(samples: Samples, row: int, class_name: str | None) -> bytes:
    """Names the version and the place of a sample's bytes, and its class."""
    version = samples.versions[row] if samples.versions else ""
    said = (
        samples.objects[row],
        version,
        str(samples.offsets[row]),
        str(samples.lengths[row]),
        str(samples.labels[row]),
    )
    text = "\0".join([*said, class_name or ""])
    return hashlib.blake2b(text.encode(), digest_size=_ORIGIN_BYTES).digest()
