"""What formats whose objects hold many samples share: tables of single objects, made into the table of all."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import COLUMNS, ListedSamples, stable_ids
from frostline.datasets.formats.labels import OTHER_LABELS, Labelled
from frostline.datasets.formats.lists import in_json
from frostline.datasets.formats.split_names import SPLIT
from frostline.datasets.formats.targets import filled
from frostline.stores.base.listing import Names

__all__ = ("SAID", "Parts", "finished", "known_parts", "plain")

SAID = "said"
"""The column of tables of single objects that holds labels as texts, until all of them are known."""

Parts = dict[tuple[str, str], pa.Table]
"""Tables of single objects, by name and etag."""


def finished(table: pa.Table, said: Labelled) -> pa.Table:
    """The table of all samples, with ids and labels in the place of what was said; labels of other kinds beside."""
    ids = stable_ids(Names(table["name"]))
    table = filled(table)
    about = [name for name in table.schema.names if name not in COLUMNS.names and name != SAID]
    table = table.append_column("id", pa.array(ids)).append_column("label", pa.array(said.labels))
    table = table.select([*COLUMNS.names, *about])
    return table if said.other is None else table.append_column(OTHER_LABELS, said.other)


def known_parts(before: ListedSamples | None, object_of: Callable[[str], str] = str) -> Parts:
    """The rows of each object of an earlier listing, as they were before they were put together, by name and etag.

    Args:
        before: table made of that listing.
        object_of: the store's object that a sample's object lies in.
    """
    if before is None:
        return {}
    left = ["id", "label", *([SPLIT] if before.divided_by_names else [])]  # which the names of all files say anew
    left += [OTHER_LABELS] if OTHER_LABELS in before.table.schema.names else []
    table = _as_listed(before.table).append_column(SAID, _said_in(before)).drop_columns(left)
    runs = pc.run_end_encode(table["object"].combine_chunks().cast(pa.string()))
    ends = runs.run_ends.to_pylist()
    parts = [table.slice(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    return {(object_of(part["object"][0].as_py()), part["etag"][0].as_py()): part for part in parts}


def _said_in(before: ListedSamples) -> pa.Array:
    if OTHER_LABELS in before.table.schema.names:
        return in_json(before.table[OTHER_LABELS])
    said: list[Any] = [None if label < 0 else before.classes[label] for label in before.table["label"].to_pylist()]
    return pa.array(said, pa.string())


def _as_listed(table: pa.Table) -> pa.Table:
    # Texts of a manifest that was mapped have wide offsets.
    fields = [
        field.with_type(COLUMNS.field(field.name).type) if field.name in COLUMNS.names else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column in one of four types, so that those of several files go together."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.bool_())
    if pa.types.is_integer(kind):
        return column.cast(pa.int64(), safe=kind != pa.uint64())
    return column.cast(pa.float64() if pa.types.is_floating(kind) else pa.string())
