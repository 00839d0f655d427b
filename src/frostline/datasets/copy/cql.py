"""Puts a data set's samples into a table over CQL: in bounded memory, verified, and taken up again after a kill."""

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Skipped
from frostline.core.errors import SettingError
from frostline.core.events import Observer, PhaseStarted, SetupWarning
from frostline.core.nouns import take_texts
from frostline.datasets.copy.layout import (
    Metadata,
    Scaling,
    check_side,
    divide_samples,
    say_orientation,
    say_what_is_left,
)
from frostline.datasets.copy.parts import (
    CopyPart,
    CopyResult,
    PartRunner,
    PartTally,
    finished_future,
    make_in_process,
    whole_parts,
)
from frostline.datasets.dataset import Dataset, refresh_locally, require_one_part
from frostline.datasets.formats.labels import are_numbers, in_order
from frostline.datasets.manifest import refusing_observer
from frostline.stores.cql.store import CqlStore
from frostline.stores.cql.writer import TableSample, row_digest
from frostline.stores.open import open_store

__all__ = ("CopyResult", "put_into_table")

# A part: asked about at once whether they are there, and put again by a task whose process died.
_ROWS_A_PART = 512
_CLASSES_SHOWN = 20
# Read at once, and held until they are put.
_BYTES_AT_ONCE = 16 << 20
# A digest is the SHA-256 of the data, then what the data was read from, then the data set.
_SHA256_BYTES, _ORIGIN_BYTES, _SOURCE_BYTES = 32, 16, 16


def put_into_table(
    source: Dataset,
    destination: str,
    *,
    shorter_side: int | None = None,
    workers: int = 16,
    max_skipped_fraction: float = 0.01,
    verify: bool = False,
    on_event: Observer,
    runner: PartRunner = make_in_process,
) -> CopyResult:
    """Put every sample with its name, label, mask, size and metadata into a table, which is made where it is missing.

    A sample's key follows from its name, so none is there twice, however often this is run. A table takes several data
    sets as long as no two of their samples have one name and other bytes. Each is read back, and then
    its row gets a digest: the SHA-256 of its bytes and what they were read from. Samples whose digest says that they
    are there are not read again; where the source has no versions they are read, and not put again. Names and order
    are those of the source: training on the table is training on the source. Columns that the table lacks are added;
    where this user may not do that, which metadata stays behind is said before it begins.

    Args:
        source: samples in any format; of a ready format, the pixels become PNGs, which decode to them.
        destination: ``cql://user@host/keyspace/table``.
        shorter_side: pixels to which images and masks are scaled down and encoded again; None leaves their bytes as
            they are.
        workers: samples read, and scaled, at once.
        max_skipped_fraction: share of the samples that may be unreadable.
        verify: read the data and the masks of rows that are there already too, and put those again whose SHA-256 is
            not that of their digest.
        on_event: function that is called with each event.
        runner: runner that writes the samples, some hundred at a time.

    Raises:
        SettingError: the destination is no table, or a row holds a sample of the same name that came from other data,
            which is left as it is.
        DataChanged: an image has changed since it was listed, and the source refuses that.
        TooManySkipped: more samples were unreadable than allowed.
        DataError: the table is of another kind, has other values in columns of the metadata's names or no place for
            masks, or a sample came back otherwise than it was put.
        StoreError: a store failed; run it again.
    """
    store = open_store(destination)
    if not isinstance(store, CqlStore):
        raise SettingError(f"{store.url} is no table: give cql://user@host/keyspace/table")
    check_side(shorter_side)
    require_one_part(source)
    source = refresh_locally(source)
    on_event = refusing_observer(source.source.on_change, on_event)
    started = time.perf_counter()
    metadata = Metadata(source)
    free = dict(zip(metadata.kinds, store.free_names(tuple(metadata.kinds), has_masks=source.has_targets), strict=True))
    kinds = {free[name]: kind for name, kind in metadata.kinds.items()}
    lacking = store.create(kinds, has_masks=source.has_targets)
    behind = [name for name, called in free.items() if called in lacking]
    say_what_is_left(source, on_event, [*metadata.nested, *behind])
    say_orientation(source, shorter_side, on_event)
    _say_other_numbers(source, on_event)
    on_event(PhaseStarted(name="putting samples into a table"))
    kept = {name: called for name, called in free.items() if called not in lacking}
    plan = _TablePlan(source=source, table=store, columns=kept, side=shorter_side, workers=workers, verify=verify)
    ranges = (range(start, min(start + _ROWS_A_PART, len(source))) for start in range(0, len(source), _ROWS_A_PART))
    tally = PartTally(len(source), math.ceil(max_skipped_fraction * len(source)), on_event)
    parts: list[_PartPut]
    parts, _ = whole_parts(runner, plan, itertools.starmap(CopyPart, enumerate(ranges)), tally)
    return CopyResult(
        url=store.url,
        samples=sum(part.samples for part in parts),
        made=sum(part.made for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        seconds=time.perf_counter() - started,
        skipped=tuple(skipped for part in parts for skipped in part.skipped),
        left_out=source.manifest.left_out,
    )


def _say_other_numbers(source: Dataset, on_event: Observer) -> None:
    """Say if the table, which has no place for the classes' order and for those without samples, numbers them anew."""
    there = [source.classes[label] for label, count in source.selection.per_label.items() if count and label >= 0]
    if are_numbers(source.classes) or list(source.classes) == in_order(there):
        return
    on_event(
        SetupWarning(
            reason=f"a table cannot hold the order of classes: {len(there)} have samples, and are numbered there "
            f"in the order of their names, not as {', '.join(source.classes[:_CLASSES_SHOWN])}"
            f"{', …' if len(source.classes) > _CLASSES_SHOWN else ''}"
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PartPut:
    """What was done for the samples of a part.

    Attributes:
        samples: number of those that are in the table, read back.
        made: number of samples that it did not hold before.
        nbytes: size of their data in bytes.
        skipped: samples that could not be read.
    """

    samples: int
    made: int
    nbytes: int
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TablePlan:
    """How a data set is put into a table; ``columns`` are those of the table, by the names of the metadata."""

    source: Dataset
    table: CqlStore
    columns: Mapping[str, str]
    side: int | None
    workers: int
    verify: bool

    def open(self, stack: ExitStack) -> "_TableWriter":
        return _TableWriter(self, Scaling(self.source, self.side, self.workers, stack))


class _Before(NamedTuple):
    """The digests of some samples, and the places of those whose rows hold other bytes than their digests say."""

    digests: Sequence[bytes]
    damaged: Sequence[int]


class _TableWriter:
    """Puts the samples that a table lacks, with their bytes, some at a time."""

    def __init__(self, plan: _TablePlan, scaling: Scaling) -> None:
        metadata = Metadata(plan.source)
        self._source = plan.source
        self._metadata = metadata.without([name for name in metadata.kinds if name not in plan.columns])
        self._columns = [plan.columns[name] for name in self._metadata.kinds]
        self._table = plan.table
        self._scaling = scaling
        self._verify = plan.verify

    def look(self, part: CopyPart) -> _Before:
        names = take_texts(self._source.names, np.array(part.rows, np.int64))
        digests = self._table.digests(names)
        return _Before(digests, self._table.find_damaged(names, digests) if self._verify else ())

    def make(self, part: CopyPart, before: _Before) -> Future[_PartPut]:
        """Rows that lacked samples are all put, also those that another call has put since: with the same bytes."""
        rows = np.array(part.rows, np.int64)
        about = self._metadata.rows(part.rows.start, part.rows.stop)
        asked = _Asked.of(self._source, rows, about, self._scaling.side)
        reader = _Reader(asked, before, self._scaling, self._source.url, self._table.url)
        self._table.put_many(reader.missing(), columns=self._columns)
        return finished_future(reader.done())


class _Reader:
    """The samples of a part that a table lacks, with their bytes, some megabytes at a time."""

    def __init__(self, asked: "_Asked", before: _Before, scaling: Scaling, source: str, table: str) -> None:
        self._asked = asked
        self._digests = before.digests
        self._damaged = frozenset(before.damaged)
        self._scaling = scaling
        self._source = source
        self._table = table
        self._there: set[int] = set()
        self._made = 0
        self._skipped: list[Skipped] = []

    def done(self) -> _PartPut:
        return _PartPut(
            samples=len(self._there),
            made=self._made,
            nbytes=int(self._asked.samples.lengths[list(self._there)].sum()),
            skipped=tuple(self._skipped),
        )

    def missing(self) -> Iterator[TableSample]:
        rows = range(len(self._asked.names))
        unsure = [row for row in rows if row in self._damaged or not self._asked.is_there(row, self._digests[row])]
        self._there |= set(rows).difference(unsure)
        for some in divide_samples(self._asked.lengths[unsure], max_bytes=_BYTES_AT_ONCE, max_rows=_ROWS_A_PART):
            yield from self._read(unsure[some.start : some.stop])

    def _read(self, rows: Sequence[int]) -> Iterator[TableSample]:
        asked = self._asked
        some = asked.samples.take(np.array(rows, np.int64))
        for place, found in enumerate(self._scaling.read(some, [asked.names[row] for row in rows])):
            if isinstance(found, Skipped):
                self._skipped.append(found)
                continue
            row, data, mask = rows[place], found.image, found.mask
            marked = row_digest(data, mask, asked.origins[row])
            self._require_own(asked.names[row], marked, self._digests[row])
            self._there.add(row)
            if row in self._damaged or self._digests[row] != marked:
                self._made += 1
                yield TableSample(
                    asked.names[row],
                    data,
                    int(some.labels[place]),
                    asked.classes[row],
                    asked.origins[row],
                    mask,
                    asked.about[row],
                )

    def _require_own(self, name: str, marked: bytes, digest: bytes) -> None:
        """Make sure that a row does not hold another data set's sample, whose name is the same by chance."""
        theirs = digest[_SHA256_BYTES + _ORIGIN_BYTES :]
        if theirs and theirs != _named(self._source) and digest[:_SHA256_BYTES] != marked[:_SHA256_BYTES]:
            raise SettingError(
                f"{self._table} holds another sample called {name}, which was put there from other data than "
                f"{self._source}: put this data into another table"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """Some samples of the source, and what their digests must say."""

    samples: Samples
    names: Sequence[str]
    classes: Sequence[str | None]
    origins: Sequence[bytes]
    about: Sequence[tuple[Any, ...]]

    @classmethod
    def of(
        cls, source: Dataset, rows: npt.NDArray[np.int64], about: Sequence[tuple[Any, ...]], side: int | None
    ) -> "_Asked":
        samples = source.samples.take(rows)
        classes = [source.classes[label] if label >= 0 else None for label in samples.labels.tolist()]
        place, more = _named(source.url), () if side is None else (f"side {side}",)
        origins = [_origin(samples, row, classes[row], (*about[row], *more)) + place for row in range(len(rows))]
        return cls(samples=samples, names=take_texts(source.names, rows), classes=classes, origins=origins, about=about)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, its mask too."""
        targets = self.samples.targets
        return self.samples.lengths if targets is None else self.samples.lengths + targets.lengths

    def is_there(self, row: int, digest: bytes) -> bool:
        """Whether a digest says that the row was made from the very version of the object that is listed."""
        targets = self.samples.targets
        has_versions = bool(self.samples.versions and self.samples.versions[row])
        if targets is not None and targets.lengths[row]:
            has_versions &= bool(targets.versions[row])
        return has_versions and digest[_SHA256_BYTES:] == self.origins[row]


def _named(url: str) -> bytes:
    """Stands for a data set in the digests of its rows."""
    return hashlib.blake2b(url.encode(), digest_size=_SOURCE_BYTES).digest()


def _origin(samples: Samples, row: int, class_name: str | None, about: tuple[Any, ...]) -> bytes:
    """Names the version and the place of a sample's bytes and of its mask, its class and its metadata."""
    version = samples.versions[row] if samples.versions else ""
    said = [
        samples.objects[row],
        version,
        str(samples.offsets[row]),
        str(samples.lengths[row]),
        str(samples.labels[row]),
        class_name or "",
    ]
    if (mask := samples.targets) is not None:
        said += [mask.objects[row], mask.versions[row], str(mask.offsets[row]), str(mask.lengths[row])]
    text = "\0".join([*said, *map(repr, about)])
    return hashlib.blake2b(text.encode(), digest_size=_ORIGIN_BYTES).digest()
