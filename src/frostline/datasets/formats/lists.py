"""Lists of samples as people write them, in CSV, JSON lines or Parquet, by themselves or beside folders of images.

Finds the object of a listing that a list means, by its path, by what is left of it, or by its name without a suffix.
"""

import codecs
import json
import posixpath
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from frostline.core.errors import DataError
from frostline.datasets.formats.base import (
    ListedSamples,
    digest_of,
    is_hidden,
    is_list,
    label_column,
    nested_names,
)
from frostline.datasets.formats.folders import MASK_FIELDS, ClassFolderFormat, is_sample
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    OTHER_LABELS,
    URL_FIELDS,
    column_labels,
    column_name,
    columns_of,
    encode_labels,
    find_name,
    is_split,
    label_text,
    refuse_labels,
    text_label,
)
from frostline.datasets.formats.left_out import ROWS, LeftOut, of_names
from frostline.datasets.formats.ranges import is_parquet, list_columns, open_parquet, read_columns
from frostline.datasets.formats.tables import is_label, is_scalar, plain_column
from frostline.stores.protocols import Entry, ObjectStore

__all__ = ("AnnotatedFolders", "ListRows", "ObjectFinder", "is_list_of_samples", "is_text_list", "read_list")

_MASK_FIELDS = (*MASK_FIELDS, "mask_url", "mask_file_name", "mask_path")
_SEPARATORS = ",;\t|"
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_LONGEST = 1 << 30
# Lists that belong to the images of folders whatever the folders are called, as Hugging Face calls them.
_METADATA = ("metadata.csv", "metadata.jsonl")
# Lists of what a contest asks for, whose labels are none.
_NO_LABELS = re.compile(r"(?i)submission")
# What folders of images are called that are no classes.
_OF_IMAGES = re.compile(r"(?i)^(?:.*[^a-z])?(?:images?|imgs?|jpe?gs?|pngs?|photos?|pictures?|data)(?:[^a-z].*)?$")


class ListRows(NamedTuple):
    """What a list says of its samples.

    Attributes:
        files: URL or name of each, as it is written there.
        said: labels, as ``labels.encode_labels`` takes them; None where no column has some.
        masks: URL or name of each sample's mask; empty where the list has none.
        about: metadata columns: all other columns of the list.
        left_out: rows that name no sample.
    """

    files: list[str]
    said: pa.Array | None
    masks: list[str | None]
    about: Mapping[str, pa.Array]
    left_out: tuple[LeftOut, ...]


def is_text_list(entry: Entry) -> bool:
    """Whether an object may be a list by its name: CSV or JSON lines, and not hidden."""
    return entry.object.lower().endswith((".csv", ".jsonl")) and not is_hidden(entry.object)


_HEADLESS = "; its first line must name the columns, so write file_name,label or such above the first sample"


def is_list_of_samples(entry: Entry) -> bool:
    """Whether an object may be a list by its name: one of text, or a Parquet file."""
    return is_text_list(entry) or is_parquet(entry)


def read_list(store: ObjectStore, entry: Entry) -> ListRows:
    """What a list says.

    Columns are matched as people do, whatever their case and however words in their names are put together.

    Args:
        store: store that holds the list.
        entry: the entry in the listing.

    Raises:
        DataError: it is no list, two columns have one name, or no column says where samples are.
        StoreError: the store failed.
    """
    table, said = _table(store, entry)
    names = table.column_names
    file, mask = find_name(names, URL_FIELDS), find_name(names, _MASK_FIELDS)
    if file is None or plain_column(table[file]).type not in (pa.string(), pa.int64(), pa.null()):
        raise DataError(
            f"{entry.object} has no column that says where each sample is: {' or '.join(URL_FIELDS)}; its columns are "
            f"{', '.join(names)[:200]}{_HEADLESS if any('.' in name for name in names) else ''}"
        )
    files = pc.utf8_trim_whitespace(plain_column(table[file]).cast(pa.string()))
    is_there = pc.not_equal(pc.fill_null(files, ""), "")
    lost = [f"{entry.object}/{row}" for row, there in enumerate(is_there.to_pylist()) if not there]
    table, files = table.filter(is_there), files.filter(is_there)
    about = {
        column_name(field.name): plain_column(table[field.name]).combine_chunks()
        for field in table.schema
        if is_scalar(field.type) and field.name not in (file, mask, said)
    }
    return ListRows(
        files=files.to_pylist(),
        said=None if said is None else table[said].combine_chunks(),
        masks=[] if mask is None else plain_column(table[mask]).cast(pa.string()).to_pylist(),
        about=about,
        left_out=of_names(ROWS, "without a name of a sample", lost, entry.object),
    )


def _table(store: ObjectStore, entry: Entry) -> tuple[pa.Table, str | None]:
    """The columns of a list, and the name of that with labels, which come as ``labels.encode_labels`` takes them."""
    if is_parquet(entry):
        return _of_parquet(store, entry)
    if entry.size > _LONGEST:
        raise DataError(f"{entry.object} is longer than a list of text is read: write it as Parquet")
    data = bytes(store.read(entry.object, 0, entry.size))
    return _of_json(entry, data) if entry.object.lower().endswith(".jsonl") else _of_csv(entry, data)


def _text_of(data: bytes) -> str:
    """The text of a file in the encoding that it begins as, in UTF-8, or as Windows writes western languages."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _separator_of(line: str) -> str:
    """The separator that stands most often in the line of names, outside of quotes."""
    bare = re.sub(r'"[^"]*"', "", line)
    return max(_SEPARATORS, key=lambda mark: (bare.count(mark), -_SEPARATORS.index(mark)))


def _of_csv(entry: Entry, data: bytes) -> tuple[pa.Table, str | None]:
    text = _text_of(data)
    separator = _separator_of(text.lstrip("\r\n").partition("\n")[0])
    head = next(iter(re.split(r"\r\n|\n|\r", text.lstrip("\r\n"))), "")
    names = [name.strip().strip('"') for name in head.split(separator)]
    fields = (find_name(names, some) for some in (URL_FIELDS, _MASK_FIELDS))
    label = find_name(names, LABEL_FIELDS)
    texts = {*filter(None, fields), *([label] if label is not None else [])}
    # Files, masks and labels stay as they are written; other columns get the type that all their values have.
    kinds = {raw: pa.string() for raw in (name.strip('"') for name in head.split(separator)) if raw.strip() in texts}
    options = csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
    try:
        table = csv.read_csv(
            pa.py_buffer(text.encode()),
            read_options=csv.ReadOptions(use_threads=False),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=options,
        )
    except pa.ArrowException as error:
        words = " ".join(str(error).split())[:150]
        raise DataError(f"{entry.object} is no CSV file with a line of names on top: {words}") from error
    table = table.rename_columns([name.strip() for name in table.column_names])
    _check_names(entry, table.column_names)
    return _with_said(_without_blanks(table), label, text_label), label


def _without_blanks(table: pa.Table) -> pa.Table:
    """Texts that are empty as null; a text such as NA stays one."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(place)
            blank = pa.scalar(None, pa.string())
            table = table.set_column(place, field.name, pc.if_else(pc.equal(column, ""), blank, column))
    return table


def _of_json(entry: Entry, data: bytes) -> tuple[pa.Table, str | None]:
    rows = []
    for number, line in enumerate(_text_of(data).splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {entry.object} is no JSON") from error
        if isinstance(row, dict):
            rows.append(row)
    label = find_name(list(dict.fromkeys(name for row in rows for name in row)), LABEL_FIELDS)
    said = [label_text(row.get(label)) if label is not None else None for row in rows]
    found = columns_of([{name: value for name, value in row.items() if name != label} for row in rows])
    table = pa.table({name.removeprefix("meta_"): column for name, column in found.items()})
    return (table if label is None else table.append_column(label, pa.array(said, pa.string()))), label


def _of_parquet(store: ObjectStore, entry: Entry) -> tuple[pa.Table, str | None]:
    with open_parquet(store, entry.object, entry.size) as (parquet, source):
        schema = parquet.schema_arrow
        _check_names(entry, schema.names)
        label = find_name(schema.names, LABEL_FIELDS)
        kind = None if label is None else schema.field(label).type
        if kind is not None and pa.types.is_temporal(kind):
            label = kind = None  # which says when, and is metadata
        if kind is not None and not (is_label(kind) or is_list(kind) or pa.types.is_null(kind)):
            raise refuse_labels(entry.object, str(label), kind)
        wanted = [field.name for field in schema if is_scalar(field.type)]
        table = read_columns(source, parquet.metadata, entry.object, wanted)
        lists = list_columns(source, parquet.metadata, entry.object, nested_names(schema))
        table = table.select([name for name in table.column_names if name not in lists])
        for name, column in lists.items():
            table = table.append_column(name, column)
        return _with_said(table, label, text_label if label in lists else label_text), label


def _check_names(entry: Entry, names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{entry.object} has two columns called {twice!r}: give each its own name")


def _with_said(table: pa.Table, label: str | None, said: Callable[[Any], str | None]) -> pa.Table:
    if label is None or label not in table.column_names:
        return table
    return table.set_column(table.schema.get_field_index(label), label, column_labels(table[label], said))


class ObjectFinder:
    """Finds the objects that lists mean, among those of a listing.

    A list in a folder that holds images or sounds, at any depth, means those within it; where its own folder holds
    none, as ``annotations`` beside ``images`` does, those within the nearest folder around it that does. Letters with
    marks are the same in both of Unicode's normal forms: a Mac writes the names of files in another one than a list.

    Args:
        entries: listing.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        names = [entry.object for entry in entries if not is_hidden(entry.object)]
        self._objects: dict[str, list[str]] = {}
        self._by_base: dict[str, list[str]] = {}
        self._folders: set[str] = set()
        for name in names:
            self._objects.setdefault(_composed(name), []).append(name)
        for name in filter(is_sample, names):
            folder, _, base = name.rpartition("/")
            for key in {_composed(base), _composed(base.rpartition(".")[0])}:
                self._by_base.setdefault(key, []).append(_composed(name))
            while folder and folder not in self._folders:
                self._folders.add(folder)
                folder = folder.rpartition("/")[0]

    def folder_of(self, file: str) -> str:
        """The folder whose images and sounds a list means, with its slash; empty for the root."""
        folder = file.rpartition("/")[0]
        while folder and folder not in self._folders:
            folder = folder.rpartition("/")[0]
        return f"{folder}/" if folder else ""

    def objects_of(self, written: str, file: str) -> list[str]:
        """The objects that a name in a list may mean: one where that is clear.

        Args:
            written: name as it is written in the list: a path relative to the list, to the folder of its images or to
                the root, or the end of such a path, all of them also without the suffix.
            file: name of the list.
        """
        found = self._found(_composed(written), file)
        if not found and "\\" in written:  # as Windows writes paths
            found = self._found(_composed(written).replace("\\", "/"), file)
        objects = [name for composed in found for name in self._objects[composed]]
        if len(objects) > len(found):  # names that look alike: the one that is written so
            objects = [name for name in objects if written in name] or objects
        return objects

    def _found(self, written: str, file: str) -> list[str]:
        folder, name = _composed(self.folder_of(file)), posixpath.normpath(written)
        for likely in (posixpath.normpath(posixpath.join(_composed(posixpath.dirname(file)), name)), folder + name):
            if likely in self._objects:
                return [likely]
        known = self._by_base.get(name.rpartition("/")[2], ())
        inside = [other for other in known if other.startswith(folder) and _ends_with(other, name)]
        if not inside:
            stems = [other for other in known if other.startswith(folder)]
            inside = [other for other in stems if _ends_with(other.rpartition(".")[0], name)]
        # Without a folder in it, a name means nothing outside of that of its list.
        named = [name] if "/" in name and name in self._objects else []
        return list(dict.fromkeys([*named, *inside]))


def _composed(name: str) -> str:
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _ends_with(known: str, name: str) -> bool:
    return known == name or known.endswith(f"/{name}")


class AnnotatedFolders(ClassFolderFormat):
    """Class folders, with lists beside them: ``labels.csv`` beside ``images``, and ``metadata.jsonl`` anywhere.

    Where folders say no classes, as a single one does and those called ``images`` or ``train``, lists of images give
    the labels; an image that stands in none has none. Their other columns are metadata. Lists called ``metadata`` give
    metadata beside classes too. What lists name is found by its path, or by its name alone, also without its suffix,
    within the folder of the list where that holds images.
    """

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        lists = list(filter(_may_annotate, entries))
        digest = super().digest(entries)
        return digest_of(f"{_RULE} {digest}", lists) if lists else digest

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; lists are read."""
        found = super().read(store, entries, before)
        lists = sorted(filter(_may_annotate, entries))
        if not lists:
            return found
        says_classes = not (len(found.classes) == 1 or all(map(_is_no_class, found.classes)))
        if says_classes:
            lists = [entry for entry in lists if entry.object.rpartition("/")[2].lower() in _METADATA]
        return _annotated(found, store, entries, lists, takes_labels=not says_classes)


_RULE = "frostline annotated folders 3"


def _may_annotate(entry: Entry) -> bool:
    return is_text_list(entry) and not _NO_LABELS.search(entry.object.rpartition("/")[2])


def _is_no_class(folder: str) -> bool:
    return (
        is_split(folder) or _OF_IMAGES.match(folder) is not None or any(map(is_split, re.split(r"[^a-zA-Z]+", folder)))
    )


def _annotated(
    found: ListedSamples, store: ObjectStore, entries: Sequence[Entry], lists: Sequence[Entry], *, takes_labels: bool
) -> ListedSamples:
    """The samples of folders with what lists say of them."""
    finder, objects = ObjectFinder(entries), found.table["object"].to_pylist()
    place = {name: row for row, name in enumerate(objects)}
    columns: dict[str, pa.Array] = {}
    said: pa.Array | None = None
    used: list[str] = []
    left: list[LeftOut] = []
    for entry in lists:
        try:
            rows = read_list(store, entry)
        except DataError:
            continue  # it is a list of something else, and is named as left out
        named = [[row for name in finder.objects_of(file, entry.object) if (row := place.get(name)) is not None]
                 for file in rows.files]  # fmt: skip
        if not any(named):
            continue
        used.append(entry.object)
        left += _lost(entry, rows, named)
        meant = [some[0] if len(some) == 1 else None for some in named]
        at: list[int | None] = [None] * len(objects)
        for number, row in reversed(list(enumerate(meant))):
            if row is not None:
                at[row] = number
        for name, column in rows.about.items():
            _add(columns, name, column.take(pa.array(at, pa.int64())))
        if rows.said is not None and takes_labels:
            new = rows.said.take(pa.array(at, pa.int64()))
            said = new if said is None else pc.coalesce(said, new)
        elif rows.said is not None:
            texts = column_labels(rows.said, lambda label: json.loads(label) if label and label[0] == '"' else label)
            _add(columns, "meta_label", texts.take(pa.array(at, pa.int64())))
    return _with_columns(found, columns, said, tuple(used), tuple(left))


def _lost(entry: Entry, rows: ListRows, named: Sequence[Sequence[int]]) -> tuple[LeftOut, ...]:
    """The rows of a list that name no image, several, or one that a row before them names."""
    seen: set[int] = set()
    lost: dict[str, list[str]] = {"no image here": [], "several images": [], "an image again": []}
    for file, some in zip(rows.files, named, strict=True):
        if len(some) != 1:
            lost["several images" if some else "no image here"].append(file)
        elif some[0] in seen:
            lost["an image again"].append(file)
        seen.update(some if len(some) == 1 else ())
    reasons = ((f"of {entry.object} that name {what}", files) for what, files in lost.items())
    return (
        *rows.left_out,
        *(left for reason, files in reasons for left in of_names(ROWS, reason, files, entry.object)),
    )


def _add(columns: dict[str, pa.Array], name: str, column: pa.Array) -> None:
    """A column beside others, or what another list says of other images in the same one."""
    there = columns.get(name)
    if there is None or pa.types.is_null(there.type):
        columns[name] = column
    elif there.type == column.type:
        columns[name] = pc.coalesce(there, column)
    elif not pa.types.is_null(column.type):
        columns[name] = pc.coalesce(there.cast(pa.string()), column.cast(pa.string()))


def _with_columns(
    found: ListedSamples,
    columns: Mapping[str, pa.Array],
    said: pa.Array | None,
    used: tuple[str, ...],
    left_out: tuple[LeftOut, ...],
) -> ListedSamples:
    table, classes = found.table, found.classes
    labels = None if said is None else encode_labels(said)
    if labels is not None:
        classes = labels.classes
        table = table.set_column(table.schema.get_field_index("label"), "label", label_column(labels.labels))
    for name, column in columns.items():
        if name not in table.schema.names:
            table = table.append_column(name, column)
    if labels is not None and labels.other is not None:
        table = table.append_column(OTHER_LABELS, labels.other)
    return replace(
        found,
        table=table,
        classes=classes,
        used=(*found.used, *used),
        left_out=(*found.left_out, *left_out),
        has_named_classes=found.has_named_classes if labels is None else labels.are_names,
    )
