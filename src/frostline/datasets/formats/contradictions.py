"""Finds labels that say another class of a sample than the one that counts, which are named and counted. Pure.

A sample's label may be said twice: by ``.cls`` and by its JSON, by a column and by a folder, by a list and by a folder.
One of them counts; the other is metadata, and where it differs, one of the two is wrong.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    SOURCE,
    TAKEN,
    class_name,
    class_number,
    column_labels,
    find_name,
    join_tables,
    label_text,
    text_label,
)
from frostline.datasets.formats.left_out import LABELS_LEFT, LeftOut, of_names
from frostline.datasets.formats.tables import SAID, partitions_of

__all__ = (
    "TwoLabels",
    "contradicting_labels",
    "contradictions_in_shard",
    "contradictions_of_partitions",
    "contradictions_of_shards",
)

TwoLabels = tuple[str, str | None, str | None]
"""Name of a sample, the label that counts, and another one, as ``labels.label_text`` gives them; None for none."""

_IN_JSON = "of .json against .cls, which counts"


def contradicting_labels(reason: str, rows: Iterable[TwoLabels], object: str = "") -> tuple[LeftOut, ...]:
    """The labels that say another class of a sample than the label that counts.

    Names are held against names, and numbers against numbers; a number stands for the name that most samples with that
    number have.

    Args:
        reason: reason for them, such as ``of .json against .cls, which counts``.
        rows: samples with their labels.
        object: object in which they lie; empty for those of several.
    """
    said = ((name, one and _class_said(one), other and _class_said(other)) for name, one, other in rows)
    both = [(name, one, other) for name, one, other in said if one and other]
    count = Counter(_number_first(one, other) for _, one, other in both if _are_of_two_kinds(one, other))
    usual = dict(reversed([pair for pair, _ in count.most_common()]))
    apart = [
        f"{name}: {class_name(other)}, not {class_name(one)}"
        for name, one, other in both
        if class_name(one) != class_name(other) and not _is_usual(one, other, usual)
    ]
    return of_names(LABELS_LEFT, reason, apart, object)


def _class_said(label: str) -> str | None:
    """A label with numbers such as 1.0 in their digits; None where it says no class, as lists and fractions do."""
    number = class_number(label)
    return str(number) if number is not None else None if _is_number(label) else label


def _is_number(label: str) -> bool:
    return class_name(label) == label


def _are_of_two_kinds(one: str, other: str) -> bool:
    return _is_number(one) != _is_number(other)


def _number_first(one: str, other: str) -> tuple[str, str]:
    return (one, other) if _is_number(one) else (other, one)


def _is_usual(one: str, other: str, usual: Mapping[str, str]) -> bool:
    number, name = _number_first(one, other)
    return _are_of_two_kinds(one, other) and usual[number] == name


def contradictions_in_shard(shard: str, rows: Iterable[TwoLabels]) -> tuple[LeftOut, ...]:
    """What JSON says beside ``.cls`` in a shard: names beside other names, and numbers beside other numbers.

    Args:
        shard: name of the shard.
        rows: samples with their labels.
    """
    return contradicting_labels(_IN_JSON, (row for row in rows if not _of_two_kinds(row)), shard)


def _of_two_kinds(row: TwoLabels) -> bool:
    _, one, other = row
    return bool(one and other and _are_of_two_kinds(one, other))


def contradictions_of_shards(tables: Sequence[pa.Table], shards: Sequence[str]) -> tuple[LeftOut, ...]:
    """What all shards show together: names in JSON beside the numbers of ``.cls``, and folders of keys.

    A folder of a key says another class where it is called as one, and no folder of it as the sample's own.

    Args:
        tables: samples of each shard.
        shards: names of the shards.
    """
    table = join_tables(tables)
    names, labels = table["name"].to_pylist(), table[SAID].to_pylist()
    starts = [len(shard) + 1 for shard, one in zip(shards, tables, strict=True) for _ in range(len(one))]
    folders = zip(names, labels, _folders(names, starts, labels), strict=True)
    found = (
        *contradicting_labels("of folders against .cls or .json, which count", folders),
        *contradictions_of_partitions(tables, shards),
    )
    about = {"label" if name == "meta_label" else name: table[name] for name in table.column_names if name not in TAKEN}
    # In a copy that Frostline made, the label is the one that was chosen for it, and others are its metadata.
    column = None if SOURCE in about else about.get(find_name([*about], LABEL_FIELDS) or "")
    if column is None or not (pa.types.is_string(column.type) or pa.types.is_integer(column.type)):
        return found
    rows = zip(names, labels, column_labels(column, label_text).to_pylist(), strict=True)
    return (*contradicting_labels(_IN_JSON, filter(_of_two_kinds, rows)), *found)


def contradictions_of_partitions(tables: Sequence[pa.Table], files: Sequence[str]) -> tuple[LeftOut, ...]:
    """The labels that folders such as ``label=cat`` say beside other ones in the files, which count.

    Args:
        tables: samples of each file, as ``with_partitions`` gives them.
        files: the names.
    """
    said = [partitions_of(file) for file in files]
    field = find_name(sorted({name for found in said for name in found}), LABEL_FIELDS)
    rows = (
        (name, one, text_label(found[field]))
        for table, found in zip(tables, said, strict=True)
        if field in found
        for name, one in zip(table["name"].to_pylist(), table[SAID].to_pylist(), strict=True)
    )
    return contradicting_labels(f"of folders {field}=… against the files in them, which count", rows)


def _folders(names: Sequence[str], starts: Sequence[int], labels: Sequence[str | None]) -> Iterator[str | None]:
    """The first of two folders of each key that is called as a class; None where one is called as the sample's own."""
    known = {*labels}
    for name, start, label in zip(names, starts, labels, strict=True):
        folders = [label_text(folder) for folder in name[start:].split("/")[:-1][:2]]
        there = [folder for folder in folders if folder in known]
        yield there[0] if there and label not in there else None
