"""Tables over CQL: rows are samples, with labels and metadata from a table's columns."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.forms.faces import COLUMNS, Listed, digest_of, is_named
from frostline.datasets.forms.labels import classified, said_by
from frostline.datasets.forms.metadata import column_name
from frostline.datasets.ids import stable_ids
from frostline.errors import DataError, EmptyDataset
from frostline.stores.faces import LABELS, Entry, ObjectStore, Tabular

__all__ = ("CqlTables",)

_RULE = "frostline cql 1"
# No column of a table of CQL is called so.
_OBJECT, _NAME = "/object", "/name"


class CqlTables:
    """Rows that have both data and a label's row are samples.

    Classes are whole numbers, or names in their order. A sample is called what its column of names says, or as its key.
    """

    name = "cql"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Form.claims``: the store says that there are labels."""
        return is_named(entries, LABELS)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Form.digest``."""
        return digest_of(_RULE, entries)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: Listed | None = None) -> Listed:
        """See ``Form.read``. Data is read only to know its length, where no column says it."""
        if not isinstance(store, Tabular):
            raise DataError(f"{store.url} is no table: the form cql is that of cql://host/keyspace/table")
        there = {entry.object: entry for entry in entries if entry.object != LABELS}
        rows = _labelled(store, store.url, there)
        objects = rows[_OBJECT].to_pylist()
        labels, classes = classified([said_by(label) for label in rows[store.label_column].to_pylist()])
        table = pa.table(
            [
                pa.array(stable_ids(rows[_NAME].to_pylist())),
                rows[_NAME],
                rows[_OBJECT],
                pa.array(np.zeros(len(objects), np.int64)),
                pa.array(_lengths(store, [there[name] for name in objects], before), pa.int64()),
                pa.array(labels),
                pa.array([there[name].etag for name in objects], pa.string()),
            ],
            schema=COLUMNS,
        )
        for field in rows.schema.names[2:]:
            if field not in (store.label_column, store.name_column):
                table = table.append_column(column_name(field), rows[field])
        # One whose data went away while it was measured is gone from the next listing too.
        return Listed(
            table=table.filter(pc.greater_equal(table["length"], 0)), classes=classes, digest=self.digest(entries)
        )


def _labelled(store: Tabular, url: str, there: dict[str, Entry]) -> pa.Table:
    """The rows whose data is there: objects, names, and all columns beside; in the order of their names."""
    rows = store.rows()
    columns = rows.schema.names[1:]
    if store.label_column not in columns:
        raise DataError(
            f"{url} has no labels: there is no column {store.label_column!a} of names or whole numbers, only "
            f"{', '.join(columns) or 'none'}; name one with the option label, or another table with meta"
        )
    rows = rows.filter(pc.is_in(rows.column(0), value_set=pa.array(list(there), pa.string())))
    if not len(rows):
        raise EmptyDataset(f"{url} holds no row that has both data and a label: {len(there)} rows have data")
    names = rows.column(0)
    if store.name_column in columns and rows.schema.field(store.name_column).type == pa.string():
        names = pc.coalesce(rows[store.name_column], names)
    rows = pa.table([rows.column(0), names, *rows.columns[1:]], [_OBJECT, _NAME, *columns])
    return _once(rows.take(pc.sort_indices(names)), url)


def _once(rows: pa.Table, url: str) -> pa.Table:
    for place, what in enumerate(("key", "name")):
        counts = pc.value_counts(rows.column(place).combine_chunks())
        twice = counts.filter(pc.greater(counts.field("counts"), 1))
        if len(twice):
            raise DataError(f"the {what} {twice[0]['values'].as_py()!a} stands in more than one row of {url}")
    return rows


def _lengths(store: Tabular, entries: Sequence[Entry], before: Listed | None) -> list[int]:
    known = _known(before)
    lengths = [entry.size if entry.size >= 0 else known.get((entry.object, entry.etag), -1) for entry in entries]
    missing = [row for row, length in enumerate(lengths) if length < 0]
    for row, size in zip(
        missing, store.sizes([entries[row].object for row in missing]) if missing else (), strict=True
    ):
        lengths[row] = size
    return lengths


def _known(before: Listed | None) -> dict[tuple[str, str], int]:
    if before is None:
        return {}
    objects, etags, lengths = (before.table[name].to_pylist() for name in ("object", "etag", "length"))
    return dict(zip(zip(objects, etags, strict=True), lengths, strict=True))
