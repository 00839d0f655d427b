"""Puts a data set's samples into a table over CQL: in bounded memory, verified, and taken up again after a kill."""

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Skipped
from frostline.core.samples import taken
from frostline.datasets.access import refreshed_here, require_one_part
from frostline.datasets.copy.layout import divided
from frostline.datasets.copy.metadata import Metadata, say_what_is_left
from frostline.datasets.copy.scaling import Scaling, check_side
from frostline.datasets.dataset import Dataset
from frostline.datasets.manifest.changes import refusing
from frostline.errors import SettingError, TooManySkipped
from frostline.events import Observer, PhaseStarted, ProgressMade, SampleSkipped
from frostline.stores.cql.row_writer import TableSample, seal_of
from frostline.stores.cql.store import CqlStore
from frostline.stores.open import open_store

__all__ = ("Put", "put_into_table")

# Asked about at once whether they are there: a round trip's worth of answers of some bytes.
_ROWS_AT_ONCE = 1024
# Read at once, and held until they are put.
_BYTES_AT_ONCE = 16 << 20
# A seal is the SHA-256 of the data, then what the data was read from, then the data set.
_SHA256_BYTES, _ORIGIN_BYTES, _SOURCE_BYTES = 32, 16, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """The result of writing samples into a table.

    Attributes:
        url: address of the table.
        samples: number of samples in the table now, each read back.
        made: those that were put now; the others were there from before.
        nbytes: size of their data in bytes.
        seconds: duration of this run.
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
        return {**asdict(self), "skipped": [asdict(skipped) for skipped in self.skipped]}


def put_into_table(
    source: Dataset,
    destination: str,
    *,
    shorter_side: int | None = None,
    workers: int = 16,
    skip_allowance: float = 0.01,
    verify: bool = False,
    observe: Observer,
) -> Put:
    """Put every sample with its name, label, mask, size and metadata into a table, which is made where it is missing.

    A sample's key follows from its name, so none is there twice, however often this is run. A table takes several data
    sets as long as no two of their samples have one name and other bytes. Each is read back, and then
    its row is sealed with the SHA-256 of its bytes and with what they were read from. Samples whose seal says that they
    are there are not read again; where the source has no versions they are read, and not put again. Names and order
    are those of the source: training on the table is training on the source. Columns that the table lacks are added;
    where this user may not do that, which metadata stays behind is said before it begins.

    Args:
        source: samples in any format; of a ready format, the pixels become PNGs, which decode to them.
        destination: ``cql://user@host/keyspace/table``.
        shorter_side: pixels to which images and masks are scaled down and encoded again; None leaves their bytes as
            they are.
        workers: samples read, and scaled, at once.
        skip_allowance: share of the samples that may be unreadable.
        verify: read the data and the masks of rows that are there already too, and put those again whose SHA-256 is
            not that of their seal.
        observe: told what happens.

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
    source = refreshed_here(source)
    observe = refusing(source.source.changed, observe)
    started = time.perf_counter()
    metadata = Metadata(source)
    free = dict(zip(metadata.kinds, store.free_names(tuple(metadata.kinds), has_masks=source.has_targets), strict=True))
    kinds = {free[name]: kind for name, kind in metadata.kinds.items()}
    lacking = store.create(kinds, has_masks=source.has_targets)
    behind = [name for name, called in free.items() if called in lacking]
    say_what_is_left(source, observe, [*metadata.nested, *behind])
    observe(PhaseStarted(name="putting samples into a table"))
    metadata = metadata.without(behind)
    max_skipped = math.ceil(skip_allowance * len(source))
    with ExitStack() as stack:
        scaling = Scaling(source, shorter_side, workers, stack)
        reader = _Reader(source, metadata, scaling, store, max_skipped, observe, verify=verify)
        store.put_many(reader.missing(), columns=[free[name] for name in metadata.kinds])
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

    def __init__(
        self,
        source: Dataset,
        metadata: Metadata,
        scaling: Scaling,
        table: CqlStore,
        max_skipped: int,
        observe: Observer,
        *,
        verify: bool,
    ) -> None:
        self._source = source
        self._metadata = metadata
        self._table = table
        self._scaling = scaling
        self._max_skipped = max_skipped
        self._observe = observe
        self._verify = verify
        self.samples = 0
        self.made = 0
        self.nbytes = 0
        self.skipped: list[Skipped] = []

    def missing(self) -> Iterator[TableSample]:
        total = len(self._source)
        for start in range(0, total, _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, total), dtype=np.int64)
            about = self._metadata.rows(start, start + len(rows))
            asked = _Asked.of(self._source, rows, about, self._scaling.side)
            seals = self._table.seals(asked.names)
            damaged = frozenset(self._table.damaged(asked.names, seals) if self._verify else ())
            unsure = [row for row in range(len(rows)) if row in damaged or not asked.is_there(row, seals[row])]
            self._count(asked, set(range(len(rows))) - set(unsure))
            self._observe(ProgressMade(done=start + len(rows) - len(unsure), total=total))
            lengths = asked.lengths[unsure]
            for some in divided(lengths, max_bytes=_BYTES_AT_ONCE, max_rows=_ROWS_AT_ONCE):
                yield from self._read(asked, unsure[some.start : some.stop], seals, damaged)
                self._observe(ProgressMade(done=start + len(rows) - len(unsure) + some.stop, total=total))

    def _count(self, asked: "_Asked", rows: set[int]) -> None:
        self.samples += len(rows)
        self.nbytes += int(asked.samples.lengths[list(rows)].sum())

    def _read(
        self, asked: "_Asked", rows: Sequence[int], seals: Sequence[bytes], damaged: Collection[int]
    ) -> Iterator[TableSample]:
        some = asked.samples.take(np.array(rows, np.int64))
        for place, found in enumerate(self._scaling.read(some, [asked.names[row] for row in rows])):
            if isinstance(found, Skipped):
                self._skip(found)
                continue
            row, data, mask = rows[place], found.image, found.mask
            sealed = seal_of(data, mask, asked.origins[row])
            self._require_own(asked.names[row], sealed, seals[row])
            self._count(asked, {row})
            if row in damaged or seals[row] != sealed:
                self.made += 1
                yield TableSample(
                    asked.names[row],
                    data,
                    int(some.labels[place]),
                    asked.classes[row],
                    asked.origins[row],
                    mask,
                    asked.about[row],
                )

    def _require_own(self, name: str, sealed: bytes, seal: bytes) -> None:
        """Make sure that a row does not hold another data set's sample, whose name is the same by chance."""
        theirs = seal[_SHA256_BYTES + _ORIGIN_BYTES :]
        if theirs and theirs != _named(self._source.url) and seal[:_SHA256_BYTES] != sealed[:_SHA256_BYTES]:
            raise SettingError(
                f"{self._table.url} holds another sample called {name}, which was put there from other data than "
                f"{self._source.url}: put this data into another table"
            )

    def _skip(self, skipped: Skipped) -> None:
        self.skipped.append(skipped)
        self._observe(
            SampleSkipped(id=skipped.id, object=skipped.object, reason=skipped.reason, changed=skipped.changed)
        )
        if len(self.skipped) > self._max_skipped:
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
    about: Sequence[tuple[Any, ...]]

    @classmethod
    def of(
        cls, source: Dataset, rows: npt.NDArray[np.int64], about: Sequence[tuple[Any, ...]], side: int | None
    ) -> "_Asked":
        samples = source.samples.take(rows)
        classes = [source.classes[label] if label >= 0 else None for label in samples.labels.tolist()]
        place, more = _named(source.url), () if side is None else (f"side {side}",)
        origins = [_origin(samples, row, classes[row], (*about[row], *more)) + place for row in range(len(rows))]
        return cls(samples=samples, names=taken(source.names, rows), classes=classes, origins=origins, about=about)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample, its mask too."""
        targets = self.samples.targets
        return self.samples.lengths if targets is None else self.samples.lengths + targets.lengths

    def is_there(self, row: int, seal: bytes) -> bool:
        """Whether a seal says that the row was made from the very version of the object that is listed."""
        targets = self.samples.targets
        has_versions = bool(self.samples.versions and self.samples.versions[row])
        if targets is not None and targets.lengths[row]:
            has_versions &= bool(targets.versions[row])
        return has_versions and seal[_SHA256_BYTES:] == self.origins[row]


def _named(url: str) -> bytes:
    """Stands for a data set in the seals of its rows."""
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
