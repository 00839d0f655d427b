"""Tables over CQL: rows are samples, with labels and metadata from a table's columns."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.errors import DataError, EmptyDataset
from frostline.datasets.formats.base import COLUMNS, ListedSamples, digest_of, is_named, label_column, stable_ids
from frostline.datasets.formats.folders import NO_MASK, Mask, Size, known_sizes, target_columns
from frostline.datasets.formats.labels import OTHER_LABELS, column_name, encode_labels, label_text
from frostline.datasets.formats.left_out import ROWS, LeftOut, of_names
from frostline.preprocess.images import size_of
from frostline.stores.protocols import LABELS, MASKS, Entry, ObjectStore, Tabular
from frostline.stores.urls import is_name

__all__ = ("CqlTables",)

_RULE = "frostline cql 6"
# No column of a table of CQL is called so.
_OBJECT, _NAME = "/object", "/name"

_NO_SIZE = (0, 0)
# What a row of a Parquet file is called.
_NUMBERED = r"^(?P<start>(?:.*/)?)(?P<number>[0-9]{1,18})$"
_DIGITS = 18


class CqlTables:
    """Rows that have both data and a label's row are samples.

    Classes are whole numbers, or names in their order. A sample is called what its column of names says, or as its key.
    Rows stand in the order of their names, and where those end in a number, in the order of these numbers.
    Where the column of labels is a blob it holds masks, and samples need no class beside them.
    """

    name = "cql"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: the store says that there are labels."""
        return is_named(entries, LABELS)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, entries)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``. Reads data only for lengths that no column says, or for masks and sizes."""
        if not isinstance(store, Tabular):
            raise DataError(f"{store.url} is no table: the format cql is that of cql://host/keyspace/table")
        there = {entry.object: entry for entry in entries if entry.object != LABELS}
        masks = {name.removeprefix(MASKS): there.pop(name) for name in [*there] if name.startswith(MASKS)}
        label = store.label_column
        rows, left = _samples(store, store.url, label, there, has_masks=bool(masks))
        objects = rows[_OBJECT].to_pylist()
        said = rows[label].to_pylist() if label in rows.schema.names else [None] * len(objects)
        labels = encode_labels([label_text(value) for value in said])
        measured = _measured(store, [there[name] for name in objects], masks, before)
        table = pa.table(
            [
                pa.array(stable_ids(rows[_NAME].to_pylist())),
                rows[_NAME],
                rows[_OBJECT],
                pa.array(np.zeros(len(objects), np.int64)),
                pa.array([sample.length for sample in measured], pa.int64()),
                label_column(labels.labels),
                pa.array([there[name].etag for name in objects], pa.string()),
            ],
            schema=COLUMNS,
        )
        for field in rows.schema.names[2:]:
            if field not in (label, store.name_column):
                table = table.append_column(column_name(field), rows[field])
        if labels.other is not None:
            table = table.append_column(OTHER_LABELS, labels.other)
        if masks:
            found = target_columns([sample.mask for sample in measured], [sample.size for sample in measured])
            for name, column in found.items():
                table = table.append_column(name, column)
        # One whose data went away while it was measured is gone from the next listing too.
        return ListedSamples(
            table=table.filter(pc.greater_equal(table["length"], 0)),
            classes=labels.classes,
            digest=self.digest(entries),
            has_named_classes=labels.are_names,
            left_out=left,
        )


def _samples(
    store: Tabular, url: str, label: str, there: Mapping[str, Entry], *, has_masks: bool
) -> tuple[pa.Table, tuple[LeftOut, ...]]:
    """The rows whose data is there: objects, names, and all columns beside; in the order of their names.

    Beside them those that are no samples: without data, or without a row in the table of labels.
    """
    rows = store.rows()
    columns = rows.schema.names[1:]
    if label not in columns and not has_masks:
        raise DataError(
            f"{url} has no labels: there is no column {label!a} of names or whole numbers, only "
            f"{', '.join(columns) or 'none'}; name one with the option label, or another table with meta"
        )
    if not columns:
        rows = pa.table([pa.array(list(there), pa.string())], rows.schema.names)
    keys = rows.column(0).to_pylist()
    without_data = [key for key in keys if key not in there and is_name(key)]  # those of other names were listed
    left = of_names(ROWS, "without data", without_data)
    left += of_names(ROWS, "without a row of labels", sorted(there.keys() - set(keys)))
    rows = rows.filter(pc.is_in(rows.column(0), value_set=pa.array(list(there), pa.string())))
    if not len(rows):
        raise EmptyDataset(f"{url} holds no row that has both data and a label: {len(there)} rows have data")
    names = rows.column(0)
    if store.name_column in columns and rows.schema.field(store.name_column).type == pa.string():
        names = pc.coalesce(rows[store.name_column], names)
    rows = pa.table([rows.column(0), names, *rows.columns[1:]], [_OBJECT, _NAME, *columns])
    return _once(rows.take(_order(names)), url), left


def _order(names: pa.ChunkedArray) -> pa.Array:
    """The rows in the order of their names; a number at the end, as rows of a file have, counts by its value."""
    found = pc.extract_regex(names, _NUMBERED)
    numbers = pc.utf8_lpad(pc.struct_field(found, "number"), _DIGITS, "0")
    padded = pc.coalesce(pc.binary_join_element_wise(pc.struct_field(found, "start"), numbers, ""), names)
    return pc.sort_indices(
        pa.table([padded, names], ["padded", "name"]), [("padded", "ascending"), ("name", "ascending")]
    )


def _once(rows: pa.Table, url: str) -> pa.Table:
    for place, what in enumerate(("key", "name")):
        counts = pc.value_counts(rows.column(place).combine_chunks())
        twice = counts.filter(pc.greater(counts.field("counts"), 1))
        if len(twice):
            raise DataError(f"the {what} {twice[0]['values'].as_py()!a} stands in more than one row of {url}")
    return rows


class _Measured(NamedTuple):
    """What reading a row, or the manifest before, tells of it: -1 and zeros where nobody knows."""

    length: int
    mask: Mask
    size: Size


def _measured(
    store: Tabular, entries: Sequence[Entry], masks: Mapping[str, Entry], before: ListedSamples | None
) -> list[_Measured]:
    """Lengths of data and masks, and the sizes of the images that have some: what is not known is read once."""
    lengths, sizes, of_masks = _lengths(before), known_sizes(before), _lengths(before, "target_")
    found = [
        _Measured(
            length=entry.size if entry.size >= 0 else lengths.get((entry.object, entry.etag), -1),
            mask=_mask(masks.get(entry.object), of_masks),
            size=sizes.get((entry.object, entry.etag), _NO_SIZE),
        )
        for entry in entries
    ]
    read = [
        row for row, sample in enumerate(found) if sample.length < 0 or (sample.mask.object and sample.size == _NO_SIZE)
    ]
    for place, data in store.contents([entries[row].object for row in read]) if read else ():
        row = read[place]
        size = size_of(data) if found[row].mask.object and data is not None else _NO_SIZE
        found[row] = found[row]._replace(length=-1 if data is None else len(data), size=size)
    read = [row for row, sample in enumerate(found) if sample.mask.length < 0]
    for place, data in store.contents([found[row].mask.object for row in read]) if read else ():
        row = read[place]
        found[row] = found[row]._replace(mask=found[row].mask._replace(length=0 if data is None else len(data)))
    return found


def _mask(entry: Entry | None, lengths: Mapping[tuple[str, str], int]) -> Mask:
    if entry is None:
        return NO_MASK
    return Mask(entry.object, 0, lengths.get((entry.object, entry.etag), -1), entry.etag)


def _lengths(before: ListedSamples | None, of: str = "") -> dict[tuple[str, str], int]:
    if before is None or f"{of}object" not in before.table.schema.names:
        return {}
    objects, etags, lengths = (before.table[f"{of}{name}"].to_pylist() for name in ("object", "etag", "length"))
    return dict(zip(zip(objects, etags, strict=True), lengths, strict=True))
