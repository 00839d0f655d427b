"""Puts the tables of single objects together by what their folders say, and has them again from an earlier listing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.base import COLUMNS, ListedSamples, in_json
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    OTHER_LABELS,
    SPLIT,
    class_labels,
    column_name,
    find_name,
    require_one_kind,
    text_label,
)
from frostline.datasets.formats.left_out import LeftOut
from frostline.datasets.formats.tables import SAID

__all__ = ("Parts", "known_parts", "omissions_in", "partitions_of", "with_partitions", "with_parts")

Parts = dict[tuple[str, str], pa.Table]
"""Tables of single objects, by name and etag."""


# What writers of partitions have for a value that is null.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")


def with_partitions(tables: Sequence[pa.Table], files: Sequence[str]) -> list[pa.Table]:
    """The tables of files with the columns that the names of their folders say, as in ``site=north/label=cat/``.

    A label is said so where the file itself says none. Values are whole numbers where those of all files are, and
    texts otherwise. A column of the same name in the file itself stays, as long as it holds anything else.

    Args:
        tables: table of each file, with labels as texts.
        files: the names.

    Raises:
        DataError: the columns of labels hold numbers in one file, and names in another.
    """
    said = [partitions_of(file) for file in files]
    names = sorted({name for found in said for name in found})
    label = find_name(names, LABEL_FIELDS)
    require_one_kind(
        (table[SAID], file) for table, file, found in zip(tables, files, said, strict=True) if label not in found
    )
    made = [_without_empty(table, [column_name(name) for name in names]) for table in tables]
    for name in names:
        values = [found.get(name) for found in said]
        are_whole = all(_WHOLE.fullmatch(value) for value in values if value is not None)
        kind = pa.int64() if are_whole and any(values) else pa.string()
        for place, value in enumerate(values):
            if name in said[place]:
                table = made[place]
                has_none = table[SAID].null_count == len(table) or table[SAID].unique().to_pylist() == [
                    text_label(value)
                ]
                if name == label and has_none:
                    made[place] = _with_constant(table, SAID, text_label(value), pa.string())
                else:
                    made[place] = _with_partition(table, column_name(name), value, kind)
    return made


def _without_empty(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """A table without those columns that hold nothing: what an earlier listing put there for the files of others."""
    return table.drop_columns([name for name in names if name in table.schema.names and _is_empty(table[name])])


def _is_empty(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count == len(column))


def partitions_of(file: str) -> dict[str, str | None]:
    """The columns that the folders of a file say, as ``site=north/``, with their values."""
    pairs = (part.partition("=") for part in file.split("/")[:-1])
    return {
        unquote(name): None if value == _NO_VALUE else unquote(value) for name, mark, value in pairs if mark and name
    }


def _with_partition(table: pa.Table, name: str, value: str | None, kind: pa.DataType) -> pa.Table:
    if name in table.schema.names:
        there = table[name].unique().to_pylist()
        if any(found is not None and str(found) != value for found in there):
            return table
        table = table.drop_columns([name])
    return _with_constant(table, name, value if value is None or kind != pa.int64() else int(value), kind)


def _with_constant(table: pa.Table, name: str, value: Any, kind: pa.DataType) -> pa.Table:
    column = pa.repeat(pa.scalar(value, kind), len(table))
    place = table.schema.get_field_index(name)
    return table.append_column(name, column) if place < 0 else table.set_column(place, name, column)


def known_parts(before: ListedSamples | None, object_of: Callable[[str], str] = str) -> Parts:
    """The rows of each object of an earlier listing, as they were before they were put together, by name and etag.

    Of objects whose rows cannot be had so there are none.

    Args:
        before: table made of that listing.
        object_of: the store's object that a sample's object lies in.
    """
    if before is None:
        return {}
    left = ["id", "label", *([SPLIT] if before.divided_by_names else [])]  # which the names of all files say anew
    left += [OTHER_LABELS] if OTHER_LABELS in before.table.schema.names else []
    table = _as_listed(before.table).append_column(SAID, _said_in(before)).drop_columns(left)
    filled = [name for name in table.schema.names if name != SAID and not _is_empty(table[name])]
    runs = pc.run_end_encode(table["object"].combine_chunks().cast(pa.string()))
    ends = runs.run_ends.to_pylist()
    parts = [table.slice(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]
    found = {(object_of(part["object"][0].as_py()), part["etag"][0].as_py()): part for part in parts}
    return {key: _alone(part, key[0], filled) for key, part in found.items() if key[0] not in before.read_again}


def _alone(part: pa.Table, file: str, filled: Sequence[str]) -> pa.Table:
    """The rows of a file without columns that others fill, and without what the names of its folders say."""
    said = partitions_of(file)
    part = _without_empty(part, filled)
    part = part.drop_columns([name for name in map(column_name, said) if name in part.schema.names])
    label = find_name(sorted(said), LABEL_FIELDS)
    is_said = label is not None and part[SAID].unique().to_pylist() == [text_label(said[label])]
    return _with_constant(part, SAID, None, pa.string()) if is_said else part


def with_parts(
    listed: ListedSamples, tables: Sequence[pa.Table], object_of: Callable[[str], str] = str
) -> ListedSamples:
    """A listing that says which of its objects the next one reads again: ``known_parts`` would give others.

    Args:
        listed: the listing.
        tables: table of each object, as it was read.
        object_of: see ``known_parts``.
    """
    kept = known_parts(listed, object_of)
    there = [(table, object_of(table["object"][0].as_py()), table["etag"][0].as_py()) for table in tables if len(table)]
    again = [name for table, name, etag in there if not _are_equal(kept.get((name, etag)), table)]
    return replace(listed, read_again=tuple(again))


def _are_equal(kept: pa.Table | None, table: pa.Table) -> bool:
    names = [*(name for name in table.schema.names if name != SAID), SAID]
    return kept is not None and kept.schema.names == names and all(kept[name].equals(table[name]) for name in names)


def omissions_in(before: ListedSamples | None, object: str) -> tuple[LeftOut, ...]:
    """What an earlier listing left out of an object."""
    return () if before is None else tuple(left for left in before.left_out if left.object == object)


def _said_in(before: ListedSamples) -> pa.Array:
    if OTHER_LABELS in before.table.schema.names:
        return in_json(before.table[OTHER_LABELS])
    said = class_labels(before.classes, are_names=before.has_named_classes)
    return pa.array(said, pa.string()).take(before.table["label"].combine_chunks())


def _as_listed(table: pa.Table) -> pa.Table:
    # Texts of a manifest that was mapped have wide offsets.
    fields = [
        field.with_type(COLUMNS.field(field.name).type) if field.name in COLUMNS.names else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))
