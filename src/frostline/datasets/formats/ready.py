"""The ready format: decoded pixels as records in large objects, their masks, and the tables that name them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import Samples, Skipped
from frostline.core.declared import parse_json, refuse_unknown_fields
from frostline.core.errors import DataError, EmptyDataset
from frostline.core.files import checked_text, read_checked
from frostline.datasets.formats.base import COLUMNS, ListedSamples, digest_of, is_named, label_column, label_numbers
from frostline.datasets.formats.folders import NO_MASK, Mask, target_columns
from frostline.preprocess import Applied
from frostline.preprocess.apply import record_bytes, record_stride
from frostline.stores.protocols import Entry, ObjectStore

__all__ = (
    "FOLDERS",
    "LAYOUT",
    "TABLE",
    "Layout",
    "MaskLocations",
    "ReadyFormat",
    "ReadyPart",
    "ReadyTable",
    "masks_beside",
    "object_name",
    "part_name",
    "table_file",
)


_OFFSET, _LENGTH = "target_offset", "target_length"
_MASK_COLUMNS = (_OFFSET, _LENGTH)
"""Columns in the tables of a ready format with masks; no metadata has these names."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskLocations:
    """Columns of equal length, one row a sample.

    Attributes:
        offsets: ``int64[n]``, where a mask starts in the object that belongs to the sample's record.
        lengths: ``int64[n]``, bytes of it; 0 where the sample has none.
    """

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, encoded: Sequence[bytes]) -> Self:
        """Masks one behind the other; empty where a sample has none."""
        lengths = np.array([len(mask) for mask in encoded], np.int64)
        return cls(offsets=np.cumsum(lengths) - lengths, lengths=lengths)

    @classmethod
    def in_table(cls, table: pa.Table) -> Self | None:
        """What ``columns`` made; None where the table has none."""
        if _OFFSET not in table.schema.names:
            return None
        offsets, lengths = (np.asarray(table[name].to_numpy(), np.int64) for name in _MASK_COLUMNS)
        return cls(offsets=offsets, lengths=lengths)

    @property
    def nbytes(self) -> int:
        """Size of all masks in bytes."""
        return int(self.lengths.sum())

    @property
    def columns(self) -> Mapping[str, pa.Array]:
        """``_MASK_COLUMNS``."""
        return {_OFFSET: pa.array(self.offsets), _LENGTH: pa.array(self.lengths)}


_FOLDER = ".frostline/ready"
_PARTS = f"{_FOLDER}/parts"
_PIXELS, _MASKS = "pixels", "masks"
FOLDERS = (_FOLDER, _PARTS, _PIXELS, _MASKS)
"""All that it writes to."""
LAYOUT = f"{_FOLDER}/layout.json"
"""Written first: what is being made."""
TABLE = f"{_FOLDER}/samples.parquet"
"""Written last: where it is, the format is whole."""

_FORMAT = 2
_SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "object": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "label": pa.int64(),
        "name": pa.string(),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What goes where; the same for the same source and steps, so that work can be taken up again.

    Attributes:
        source: digest of the data set that the format is made of.
        applied: preprocessing of the images.
        samples: the number of samples, one record each, in the order of the source.
        records_per_object: number of records of every object; the last may have fewer.
        columns: names of the metadata columns that go with them.
        has_masks: True if they have masks, which lie beside the records, as large as the pixels.
    """

    source: str
    applied: Applied
    samples: int
    records_per_object: int
    columns: tuple[str, ...] = ()
    has_masks: bool = False

    @classmethod
    def of(
        cls,
        source: str,
        samples: int,
        applied: Applied,
        *,
        object_bytes: int,
        columns: Sequence[str] = (),
        has_masks: bool = False,
    ) -> "Layout":
        """Objects as large as they can be within ``object_bytes``, but of one record at least."""
        return cls(
            source=source,
            applied=applied,
            samples=samples,
            records_per_object=max(1, object_bytes // record_stride(applied.stored)),
            columns=tuple(columns),
            has_masks=has_masks,
        )

    @property
    def objects(self) -> int:
        """How many objects hold the records."""
        return -(-self.samples // self.records_per_object)

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def rows(self, number: int) -> range:
        """The source's rows whose records lie in an object."""
        start = number * self.records_per_object
        return range(start, min(start + self.records_per_object, self.samples))

    def size(self, number: int) -> int:
        """Bytes of an object; a sample that could not be read leaves its place empty."""
        return len(self.rows(number)) * record_stride(self.applied.stored)

    def offset(self, row: int) -> int:
        """Where a row's record starts in its object."""
        return row % self.records_per_object * record_stride(self.applied.stored)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {
            "format": _FORMAT,
            "source": self.source,
            "applied": self.applied.to_json(),
            "samples": self.samples,
            "records_per_object": self.records_per_object,
            # Only where there are any, so that formats without them are what they were.
            **({"columns": list(self.columns)} if self.columns else {}),
            **({"has_masks": True} if self.has_masks else {}),
        }

    @classmethod
    def from_json(cls, data: bytes | memoryview) -> "Layout":
        """Read the text of ``to_json``.

        Raises:
            DataError: the text is damaged, or of another version.
        """
        try:
            value = parse_json(bytes(data))
            if value.pop("format") != _FORMAT:
                raise DataError("a ready format of another version: make it again")
            names = [field.name for field in fields(cls)]
            refuse_unknown_fields(value, names, "the layout of a ready format", DataError)
            columns = tuple(map(str, value.pop("columns", ())))
            return cls(**{**value, "applied": Applied.from_json(value["applied"]), "columns": columns})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the layout of a ready format is damaged ({error}): make it again in an empty place"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyPart:
    """The records of one object.

    Attributes:
        layout: digest of the layout.
        number: index of the object.
        sha256: SHA-256 of the object.
        samples: samples with a record in the object.
        names: names of the images that the records were made from.
        about: the metadata columns, by name.
        skipped: samples that could not be read.
        masks: the places of the masks in the object beside it; None where the layout has none.
        masks_sha256: SHA-256 of the object with the masks, empty where there is none.
    """

    layout: str
    number: int
    sha256: str
    samples: Samples
    names: Sequence[str]
    skipped: tuple[Skipped, ...]
    about: Mapping[str, pa.ChunkedArray] = field(default_factory=dict)
    masks: MaskLocations | None = None
    masks_sha256: str = ""

    @classmethod
    def from_samples(
        cls,
        layout: Layout,
        number: int,
        *,
        sha256: str,
        source: Samples,
        names: Sequence[str],
        skipped: tuple[Skipped, ...],
        about: Mapping[str, pa.ChunkedArray] | None = None,
        masks: Sequence[bytes] | None = None,
    ) -> "ReadyPart":
        """The records of an object that was just made from these samples, the rows of the source that belong to it.

        ``masks`` are those of the samples that were not skipped, empty where one has none.
        """
        lost = {sample.id for sample in skipped}
        rows = layout.rows(number)
        places = np.flatnonzero([id_ not in lost for id_ in source.ids.tolist()])
        kept = [rows[place] for place in places.tolist()]
        length = record_bytes(layout.applied.stored)
        samples = Samples(
            ids=source.ids[places],
            objects=[object_name(number)] * len(kept),
            offsets=np.array([layout.offset(row) for row in kept], np.int64),
            lengths=np.full(len(kept), length, np.int64),
            labels=source.labels[places],
        )
        return cls(
            layout=layout.digest,
            number=number,
            sha256=sha256,
            samples=samples,
            names=[names[place] for place in places.tolist()],
            skipped=skipped,
            about={name: column.take(pa.array(places)) for name, column in (about or {}).items()},
            masks=None if masks is None else MaskLocations.of(masks),
            masks_sha256=hashlib.sha256(b"".join(masks)).hexdigest() if masks and any(masks) else "",
        )

    def to_file(self) -> bytes:
        """The part as a small Parquet table."""
        about = {
            "layout": self.layout,
            "number": self.number,
            "sha256": self.sha256,
            "skipped": [asdict(sample) for sample in self.skipped],
            **({"masks_sha256": self.masks_sha256} if self.masks is not None else {}),
        }
        return _file(self.table, {"frostline.part": checked_text(about)})

    @property
    def table(self) -> pa.Table:
        """Samples, names, places of masks and metadata as columns."""
        beside = {} if self.masks is None else self.masks.columns
        return _table(self.samples, self.names, {**beside, **self.about})

    @classmethod
    def from_file(cls, data: bytes | memoryview, layout: Layout, number: int) -> "ReadyPart | None":
        """The part of that object; None where the file is damaged or another's."""
        table = _parsed(data, "frostline.part")
        if table is None:
            return None
        about = _about(table, "frostline.part")
        if (about["layout"], about["number"]) != (layout.digest, number):
            return None
        samples, names = _columns(table)
        skipped = tuple(Skipped(**fields) for fields in about["skipped"])
        return cls(
            layout=about["layout"],
            number=number,
            sha256=about["sha256"],
            samples=samples,
            names=names,
            skipped=skipped,
            about=_further(table),
            masks=MaskLocations.in_table(table),
            masks_sha256=about.get("masks_sha256", ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyTable:
    """All samples of a ready format that is whole.

    Attributes:
        digest: SHA-256 of the layout and of every object.
        layout: layout of the records in objects.
        classes: names, by label.
        samples: table with a row for each sample, in the order of the source.
        names: names of the images that the records were made from.
        about: the metadata columns, by name.
        masks: the places of the masks, each in the object ``masks_beside`` that of its sample; None where there are
            none.
    """

    digest: str
    layout: Layout
    classes: tuple[str, ...]
    samples: Samples
    names: tuple[str, ...]
    about: Mapping[str, pa.ChunkedArray]
    masks: MaskLocations | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each object, by name."""
        sizes = {object_name(number): self.layout.size(number) for number in range(self.layout.objects)}
        if self.masks is not None:
            for name, length in zip(self.samples.objects, self.masks.lengths.tolist(), strict=True):
                if length:
                    sizes[masks_beside(name)] = sizes.get(masks_beside(name), 0) + length
        return sizes

    @classmethod
    def from_file(cls, data: bytes | memoryview) -> "ReadyTable":
        """Read the text of ``table_file``.

        Raises:
            DataError: the file is damaged, or of another version.
        """
        table = _parsed(data, "frostline.ready")
        if table is None:
            raise DataError("the table of a ready format is damaged: run frostline ingest again")
        about = _about(table, "frostline.ready")
        samples, names = _columns(table)
        return cls(
            digest=about["digest"],
            layout=Layout.from_json(json.dumps(about["layout"]).encode()),
            classes=tuple(about["classes"]),
            samples=samples,
            names=tuple(names),
            about=_further(table),
            masks=MaskLocations.in_table(table),
        )


def table_file(layout: Layout, parts: Sequence[ReadyPart], classes: Sequence[str]) -> tuple[str, bytes]:
    """The digest of a ready format and its table as a Parquet file, from all of its parts in order."""
    masks = (part.masks_sha256 for part in parts if layout.has_masks)
    content = "\0".join((layout.digest, *(part.sha256 for part in parts), *masks))
    digest = hashlib.sha256(content.encode()).hexdigest()
    about = {
        "digest": digest,
        "layout": layout.to_json(),
        "classes": list(classes),
        "objects": [part.sha256 for part in parts],
    }
    table = pa.concat_tables([part.table for part in parts], promote_options="permissive")
    return digest, _file(table, {"frostline.ready": checked_text(about)})


def _is_part_of_format(name: str) -> bool:
    """Whether an object holds records or their masks, or is the table of them."""
    return name == TABLE or name.startswith((f"{_PIXELS}/", f"{_MASKS}/"))


def object_name(number: int) -> str:
    """Name of the object with that number."""
    return f"{_PIXELS}/{number:06}.ready"


def masks_beside(name: str) -> str:
    """Name of the object with the masks of those whose records lie in that object."""
    return f"{_MASKS}/{name.removeprefix(f'{_PIXELS}/')}"


def part_name(number: int) -> str:
    """Name of the table of what is in that object; written when the object is in its place."""
    return f"{_PARTS}/{number:06}.parquet"


def _table(samples: Samples, names: Sequence[str], about: Mapping[str, pa.ChunkedArray | pa.Array]) -> pa.Table:
    labels = label_column(samples.labels)
    columns = [samples.ids, samples.objects, samples.offsets, samples.lengths, labels, names]
    own = [pa.array(column, kind) for column, kind in zip(columns, _SCHEMA.types, strict=True)]
    return pa.table([*own, *about.values()], [*_SCHEMA.names, *about])


def _further(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {name: table[name] for name in table.schema.names[len(_SCHEMA) :] if name not in _MASK_COLUMNS}


def _columns(table: pa.Table) -> tuple[Samples, list[str]]:
    samples = Samples(
        ids=_numbers(table, "id"),
        objects=table["object"].to_pylist(),
        offsets=_numbers(table, "offset"),
        lengths=_numbers(table, "length"),
        labels=label_numbers(table["label"]),
    )
    return samples, table["name"].to_pylist()


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), np.int64)


def _file(table: pa.Table, about: dict[str, str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(about), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _parsed(data: bytes | memoryview, kind: str) -> pa.Table | None:
    # One thread: Arrow's pool would not survive a fork of the process.
    try:
        table = pq.ParquetFile(pa.py_buffer(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError):
        return None
    own = pa.schema(list(table.schema)[: len(_SCHEMA)])
    return table if own.equals(_SCHEMA) and _about(table, kind) else None


def _about(table: pa.Table, kind: str) -> dict[str, Any]:
    return read_checked((table.schema.metadata or {}).get(kind.encode(), b""))


_RULE = "frostline ready 2"


class ReadyFormat:
    """What ``ingest`` made: its table is read each time, and no manifest is kept beside it."""

    name = "ready"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: the file that is written first is enough, so an unfinished format is refused."""
        return is_named(entries, LAYOUT)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, (entry for entry in entries if _is_part_of_format(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:  # noqa: ARG002
        """See ``Format.read``; names are those of the images that the records were made from.

        A sample's image is what is kept of it, so that its mask has that size too.
        """
        there = {entry.object: entry for entry in entries}
        if LAYOUT not in there:
            raise EmptyDataset(f"{store.url} holds no ready format: frostline ingest makes one")
        if TABLE not in there:
            raise DataError(
                f"the ready format at {store.url} is not whole: run frostline ingest again, it goes on where it was"
            )
        ready = ReadyTable.from_file(store.read(TABLE, 0, there[TABLE].size))
        _check_whole(ready, there, store.url)
        return ListedSamples(
            table=_manifest_table(ready, there),
            classes=ready.classes,
            digest=self.digest(entries),
            applied=ready.layout.applied,
            kept_at=TABLE,
            has_named_classes=True,
        )


def _check_whole(ready: ReadyTable, there: dict[str, Entry], url: str) -> None:
    lost = [name for name, size in ready.sizes.items() if name not in there or there[name].size != size]
    if lost:
        raise DataError(f"{lost[0]} of the ready format at {url} is gone or cut off: run frostline ingest again")


def _manifest_table(ready: ReadyTable, there: dict[str, Entry]) -> pa.Table:
    samples = ready.samples
    columns = [
        pa.array(samples.ids),
        pa.array(ready.names, pa.string()),
        pa.array(samples.objects, pa.string()),
        pa.array(samples.offsets),
        pa.array(samples.lengths),
        label_column(samples.labels),
        pa.array([there[name].etag for name in samples.objects], pa.string()),
    ]
    table = pa.table(columns, schema=COLUMNS)
    for name, column in {**ready.about, **_targets(ready, there)}.items():
        table = table.append_column(name, column)
    return table


def _targets(ready: ReadyTable, there: dict[str, Entry]) -> dict[str, pa.Array]:
    """``TARGET_COLUMNS``, where it has masks."""
    if ready.masks is None:
        return {}
    side = ready.layout.applied.stored.side
    places = zip(ready.samples.objects, ready.masks.offsets.tolist(), ready.masks.lengths.tolist(), strict=True)
    masks = [
        Mask(masks_beside(object), offset, length, there[masks_beside(object)].etag) if length else NO_MASK
        for object, offset, length in places
    ]
    return target_columns(masks, [(side, side)] * len(masks))
