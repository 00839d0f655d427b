"""Finds labels that say another class of a sample than the one that counts, which are named and counted. Pure.

A sample's label may be said twice: by ``.cls`` and by its JSON, by a column and by a folder, by a list and by a folder.
One of them counts; the other is metadata, and where it differs, one of the two is wrong.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from frostline.datasets.formats.joining import partitions_of
from frostline.datasets.formats.labels import (
    KEY_FOLDERS,
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
from frostline.datasets.formats.tables import SAID

__all__ = (
    "contradicting_labels",
    "contradictions_in_shard",
    "contradictions_of_partitions",
    "contradictions_of_shards",
)

# Of Python or of Arrow.
_Labels = Iterable[Any]

_IN_JSON = "of .json against .cls, which counts"
_NAMED = 3
# Folders are held against numbers where so many numbers have one each, and such a share of the samples agrees.
_FEWEST, _NEARLY_ALL = 2, 0.8


def contradicting_labels(
    reason: str, names: _Labels, said: _Labels, others: _Labels, object: str = ""
) -> tuple[LeftOut, ...]:
    """The labels that say another class of a sample than the label that counts.

    Names are held against names, and numbers against numbers; a number stands for the name that most samples with that
    number have.

    Args:
        reason: reason for them, such as ``of .json against .cls, which counts``.
        names: name of each sample.
        said: labels that count, as ``labels.label_text`` gives them; null where a sample has none.
        others: labels that do not.
        object: object in which they lie; empty for those of several.
    """
    return _found(reason, names, said, others, object)


def contradictions_in_shard(shard: str, names: _Labels, said: _Labels, others: _Labels) -> tuple[LeftOut, ...]:
    """What JSON says beside ``.cls`` in a shard: names beside other names, and numbers beside other numbers.

    Args:
        shard: name of the shard.
        names: name of each sample.
        said: label of each.
        others: label that its JSON says beside it.
    """
    return _found(_IN_JSON, names, said, others, shard, of_two_kinds=False)


def contradictions_of_shards(tables: Sequence[pa.Table], shards: Sequence[str]) -> tuple[LeftOut, ...]:
    """What all shards show together: names in JSON beside the numbers of ``.cls``, and folders of keys.

    A folder of a key says another class where it is called as one, and no folder of it as the sample's own.

    Args:
        tables: samples of each shard.
        shards: names of the shards.
    """
    table = join_tables(tables)
    of_folders, names, said = "of folders against .cls or .json, which count", table["name"], table[SAID]
    found = (
        *contradicting_labels(of_folders, names, said, _folders(tables, shards)),
        *contradicting_labels(of_folders, names, said, _folders_of_numbers(tables, shards)),
        *contradictions_of_partitions(tables, shards),
    )
    about = {"label" if name == "meta_label" else name: table[name] for name in table.column_names if name not in TAKEN}
    # In a copy that Frostline made, the label is the one that was chosen for it, and others are its metadata.
    column = None if SOURCE in about else about.get(find_name([*about], LABEL_FIELDS) or "")
    if column is None or not (pa.types.is_string(column.type) or pa.types.is_integer(column.type)):
        return found
    others = column_labels(column, label_text)
    return (*_found(_IN_JSON, table["name"], table[SAID], others, of_two_kinds=True), *found)


def contradictions_of_partitions(tables: Sequence[pa.Table], files: Sequence[str]) -> tuple[LeftOut, ...]:
    """The labels that folders such as ``label=cat`` say beside other ones in the files, which count.

    Args:
        tables: samples of each file, as ``with_partitions`` gives them.
        files: the names.
    """
    said = [partitions_of(file) for file in files]
    field = find_name(sorted({name for found in said for name in found}), LABEL_FIELDS)
    there = [(table, text_label(found[field])) for table, found in zip(tables, said, strict=True) if field in found]
    if not there:
        return ()
    names, labels = (pa.concat_arrays([_array(table[name]) for table, _ in there]) for name in ("name", SAID))
    others = pa.concat_arrays([pa.repeat(pa.scalar(label, pa.string()), len(table)) for table, label in there])
    return contradicting_labels(f"of folders {field}=… against the files in them, which count", names, labels, others)


def _array(values: _Labels) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    return values.cast(pa.string()) if isinstance(values, pa.Array) else pa.array(values, pa.string())


def _folders(tables: Sequence[pa.Table], shards: Sequence[str]) -> pa.Array:
    """The first of two folders of each key that is called as a class; null where one is called as the sample's own."""
    own = [_array(column_labels(table[SAID], _name_said)) for table in tables]
    known = pa.chunked_array(own, pa.string()).unique().drop_null()
    found = list[pa.Array]()
    for table, shard, label in zip(tables, shards, own, strict=True):
        keys = pc.utf8_slice_codeunits(_array(table["name"]), len(shard) + 1)
        folders = pc.extract_regex(keys, KEY_FOLDERS)
        each = [pc.struct_field(folders, name) for name in ("first", "second")]
        there = [pc.if_else(pc.is_in(folder, value_set=known), folder, None) for folder in each]
        is_own = pc.or_(*(pc.fill_null(pc.equal(folder, label), False) for folder in each))
        found.append(pc.if_else(is_own, None, pc.coalesce(*there)))
    return _array(column_labels(pa.chunked_array(found, pa.string()), label_text))


def _folders_of_numbers(tables: Sequence[pa.Table], shards: Sequence[str]) -> pa.Array:
    """The first of two folders of each key that names the samples' numbers; null where neither does.

    A folder does where there are as many of them as numbers, each is that of most samples with another number, and
    those are nearly all: folders of cameras or days are none of classes.
    """
    said = _array(column_labels(join_tables(tables)[SAID], _number_said))
    named = zip(tables, shards, strict=True)
    keys = [pc.utf8_slice_codeunits(_array(table["name"]), len(shard) + 1) for table, shard in named]
    folders = pc.extract_regex(_array(pa.chunked_array(keys, pa.string())), KEY_FOLDERS)
    for which in ("first", "second"):
        folder = pc.struct_field(folders, which)
        both = pa.table([said, folder], names=["number", "name"]).drop_null()
        pairs = both.group_by(["number", "name"]).aggregate([([], "count_all")]).to_pylist()
        if _name_numbers([(pair["number"], pair["name"], pair["count_all"]) for pair in pairs]):
            return _array(column_labels(folder, label_text))
    return pa.nulls(len(said), pa.string())


def _name_numbers(pairs: Sequence[tuple[str, str, int]]) -> bool:
    """Whether folders are names of numbers: one each, but for a few samples."""
    most = {number: name for number, name, _ in sorted(pairs, key=lambda pair: pair[2])}
    names = {name for _, name, _ in pairs}
    if len(most) < _FEWEST or "" in names or len(most) != len(names) or {*most.values()} != names:
        return False
    agree = sum(times for number, name, times in pairs if most[number] == name)
    return agree >= _NEARLY_ALL * sum(times for _, _, times in pairs)


def _number_said(label: str | None) -> str | None:
    return None if label is None or not _is_number(label) else _in_digits(label)


def _name_said(label: str | None) -> str | None:
    return None if label is None or _is_number(label) else class_name(label)


def _found(
    reason: str, names: _Labels, said: _Labels, others: _Labels, object: str = "", *, of_two_kinds: bool | None = None
) -> tuple[LeftOut, ...]:
    """The contradictions among labels of one kind, among those of two, or both: each pair is looked at once."""
    columns = [_array(said), _array(others)]
    both = (
        pa.table(columns, names=["said", "other"])
        .drop_null()
        .group_by(["said", "other"])
        .aggregate([([], "count_all")])
    )
    pairs = [(row["said"], row["other"], row["count_all"]) for row in both.to_pylist()]
    names_of = _usual_names(pairs)
    odd = [
        f"{counted}\0{other}"
        for counted, other, _ in pairs
        if of_two_kinds in (None, _are_of_two_kinds(counted, other)) and _are_apart(counted, other, names_of)
    ]
    if not odd:
        return ()
    is_odd = pc.fill_null(pc.is_in(pc.binary_join_element_wise(*columns, "\0"), value_set=pa.array(odd)), False)
    first = [column.filter(is_odd)[:_NAMED].to_pylist() for column in (_array(names), *columns)]
    shown = [
        f"{name}: {class_name(other)}, not {class_name(counted)}" for name, counted, other in zip(*first, strict=True)
    ]
    return (of_names(LABELS_LEFT, reason, shown, object)[0]._replace(total=pc.sum(is_odd).as_py()),)


def _is_number(label: str) -> bool:
    return class_name(label) == label


def _are_of_two_kinds(counted: str, other: str) -> bool:
    return _is_number(counted) != _is_number(other)


def _usual_names(pairs: Sequence[tuple[str, str, int]]) -> dict[str, str]:
    """The name that most samples with a number have, by the number."""
    count = Counter[tuple[str, str]]()
    for counted, other, times in pairs:
        if _are_of_two_kinds(counted, other):
            count[_number_first(counted, other)] += times
    return dict(reversed([pair for pair, _ in count.most_common()]))


def _number_first(counted: str, other: str) -> tuple[str, str]:
    number, name = (counted, other) if _is_number(counted) else (other, counted)
    return _in_digits(number) or number, class_name(name)


def _in_digits(label: str) -> str | None:
    """The digits of a number of a class, also of one such as 1.0; the name of a name; None where it says no class."""
    number = class_number(label)
    return str(number) if number is not None else None if _is_number(label) else class_name(label)


def _are_apart(counted: str, other: str, usual: Mapping[str, str]) -> bool:
    first, second = _in_digits(counted), _in_digits(other)
    if None in (first, second) or first == second:
        return False
    if not _are_of_two_kinds(counted, other):
        return True
    number, name = _number_first(counted, other)
    return usual[number] != name
