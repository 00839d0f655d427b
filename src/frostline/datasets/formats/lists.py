"""Lists of samples as people write them, in CSV, JSON lines or Parquet, by themselves or beside folders of images."""

import csv as csv_text
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from frostline.core.declared import first_twice
from frostline.core.errors import DataError
from frostline.datasets.formats.base import (
    ListedSamples,
    column_at,
    column_paths,
    digest_of,
    is_list,
    label_column,
    nested_names,
    without_extension,
)
from frostline.datasets.formats.contradictions import contradicting_labels
from frostline.datasets.formats.finding import (
    ObjectFinder,
    decoded_text,
    file_column,
    first_rows,
    separator_of,
    unclosed_quote,
)
from frostline.datasets.formats.folders import MASK_FIELDS, ClassFolderFormat
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    OTHER_LABELS,
    SPLIT,
    URL_FIELDS,
    Labelled,
    check_column_names,
    column_labels,
    column_name,
    columns_of,
    encode_labels,
    find_name,
    is_split,
    label_text,
    names_by_path,
    refuse_labels,
    split_of,
    splits_of,
    text_label,
)
from frostline.datasets.formats.left_out import (
    COLUMNS_LEFT,
    NO_LABELS,
    OBJECTS_LEFT,
    ROWS,
    LeftOut,
    is_hidden,
    of_names,
)
from frostline.datasets.formats.ranges import is_parquet, list_columns, open_parquet, read_columns
from frostline.datasets.formats.tables import (
    features_of,
    is_label,
    is_scalar,
    names_of_columns,
    omissions_of_table,
    plain_column,
    texts_of_labels,
)
from frostline.stores.protocols import Entry, ObjectStore

__all__ = (
    "AnnotatedFolders",
    "ListRows",
    "is_list_of_samples",
    "is_text_list",
    "list_left_out",
    "read_list",
    "read_lists",
)

_MASK_FIELDS = (*MASK_FIELDS, "mask_url", "mask_file_name", "mask_path")
# What Excel writes above the names, and reads.
_SAYS_SEPARATOR = re.compile(r'(?i)"?sep=(?P<mark>[,;\t|])"?[ \t]*(?:\r\n|\n|\r)')
_QUOTED_LATER = re.compile(r'\s+".*"\s*$', re.DOTALL)
_FLOAT_OF_A_FILE = r"^\s*[0-9]+\.0*\s*$"
_NAMELESS = "\0"
# Rows are counted from 1, and the first is that of names.
_BELOW_NAMES = 2
_BLANK = r"^\s*"
# By the type that a column of text was given, what it would lose by it.
_LOST_BY = {
    pa.null(): r"\S",
    pa.int64(): _BLANK + "[-+]?0[0-9]",
    pa.float64(): _BLANK + r"[-+]?(?:0[0-9]|[0-9]{17,}\s*$)",
}
# Words that stand for no number.
_NO_NUMBERS = frozenset({"nan", "na", "n/a", "null", "none", "<na>"})
_LONGEST = 1 << 30
_JSON_LINES = (".jsonl", ".ndjson")
# Lists that belong to the images of folders whatever the folders are called, as Hugging Face calls them.
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Beside folders, what says where an image was once got from comes last.
_FILES_FIRST = (*(name for name in URL_FIELDS if "url" not in name), *(name for name in URL_FIELDS if "url" in name))
_MAX_REASON = 500
# Names of files that are missing for which one is looked for that may be meant.
_SHOWN = 3
# What folders of images and sounds are called that are no classes.
_NUMBERED = re.compile(
    r"(?i)^(?:patient|subject|sub|participant|person|case|study|scan|series|session|visit|slide|video|clip|sequence|seq|"
    r"part|chunk|batch|folder|dir)s?[-_ ]?[0-9]+$"
)
_OF_IMAGES = re.compile(
    r"(?i)^(?:.*[^a-z])?(?:images?|imgs?|jpe?gs?|pngs?|photos?|pictures?|audios?|sounds?|wavs?|data)(?:[^a-z].*)?$"
)


class ListRows(NamedTuple):
    """What a list says of its samples.

    Attributes:
        files: URL or name of each, as it is written there.
        said: labels, as ``labels.encode_labels`` takes them; None where no column has some.
        masks: URL or name of each sample's mask; empty where the list has none.
        about: metadata columns: all other columns of the list.
        left_out: rows that name no sample.
        classes: names that the numbers of its labels stood for, in their order; empty where they are none.
        named: names that the numbers of other columns stand for, by the column.
    """

    files: list[str]
    said: pa.Array | None
    masks: list[str | None]
    about: Mapping[str, pa.Array]
    left_out: tuple[LeftOut, ...]
    classes: tuple[str, ...] = ()
    named: Mapping[str, tuple[str, ...]] = {}


def is_text_list(entry: Entry) -> bool:
    """Whether an object may be a list by its name: CSV or JSON lines, and not hidden."""
    return entry.object.lower().endswith((".csv", ".tsv", *_JSON_LINES)) and not is_hidden(entry.object)


_NAME_IT = "; name the one that does: --file-column COLUMN (in Python file_column='COLUMN')"
_HEADLESS = "; its first line must name the columns, so write file_name,label or such above the first sample"


def is_list_of_samples(entry: Entry) -> bool:
    """Whether an object may be a list by its name: one of text, or a Parquet file."""
    return is_text_list(entry) or is_parquet(entry)


def read_list(
    store: ObjectStore,
    entry: Entry,
    finder: ObjectFinder,
    *,
    fields: Sequence[str] = URL_FIELDS,
    named: str | None = None,
) -> ListRows:
    """What a list says.

    Columns are matched as people do, whatever their case and however words in their names are put together. Where none
    is named, the column that says where samples are is one of ``fields``, or one whose values are names of objects.

    Args:
        store: store that holds the list.
        entry: the entry in the listing.
        finder: finder of the objects that the list means.
        fields: columns that may say where samples are; the first that leads to an object does, else the first.
        named: column that says where samples are; None where the user named none.

    Raises:
        DataError: The file is no list, two columns have one name, or no column says where samples are.
        StoreError: the store failed.
    """
    rows = _rows_of(store, entry, named)
    table, said = rows.table, rows.label
    names = table.column_names
    mask = find_name(names, _MASK_FIELDS)
    if named is None:
        file = file_column(table, entry.object, finder, fields, left=(said, mask))
    elif (file := find_name(names, (named,))) is None:
        raise DataError(f"{entry.object} has no column {named!r}; its columns are {', '.join(names)[:200]}")
    files = None if file is None else _whole(plain_column(table[file]))
    if files is None or files.type not in (pa.string(), pa.int64(), pa.null()):
        if named is not None:
            raise DataError(f"{entry.object} has no paths, URLs or ids in its column {named!r}")
        raise DataError(
            f"{entry.object} has no column that says where each sample is: {' or '.join(URL_FIELDS)}; its columns are "
            f"{', '.join(names)[:200]}{_HEADLESS if any('.' in name for name in names) else _NAME_IT}"
        )
    files = pc.utf8_trim_whitespace(files.cast(pa.string()))
    is_there = pc.not_equal(pc.fill_null(files, ""), "")
    lost = [f"{entry.object}/{row}" for row, there in enumerate(is_there.to_pylist()) if not there]
    table, files = table.filter(is_there), files.filter(is_there)
    check_column_names(entry.object, (name for name in table.column_names if name not in (file, mask, said)))
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
        left_out=(*rows.left_out, *of_names(ROWS, "without a name of a sample", lost, entry.object)),
        classes=rows.classes,
        named={column_name(path): names for path, names in rows.named.items() if names},
    )


def _whole(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Numbers of files that were written as ``1.0``, as they are as soon as one is missing, as whole numbers."""
    if pa.types.is_floating(column.type):
        with suppress(pa.ArrowInvalid):
            return column.cast(pa.int64())
    if pa.types.is_string(column.type) and _all_match(column, _FLOAT_OF_A_FILE):
        return pc.replace_substring_regex(column, r"\.0*\s*$", "")
    return column


def _all_match(column: pa.ChunkedArray, pattern: str) -> bool:
    """Whether all texts of a column that are not blank match a pattern."""
    there = column.filter(pc.not_equal(pc.utf8_trim_whitespace(pc.fill_null(column, "")), ""))
    return len(there) > 0 and bool(pc.all(pc.match_substring_regex(there, pattern)).as_py())


class _Rows(NamedTuple):
    """The rows of a list as columns.

    Attributes:
        table: columns by the names that they have in the list; labels come as ``labels.encode_labels`` takes them.
        label: name of the column of labels; None where there is none.
        left_out: rows and columns that are not among them.
        classes: names that the numbers of labels stood for; empty where they are none.
        named: names that the numbers of other columns stand for, by the column.
    """

    table: pa.Table
    label: str | None
    left_out: tuple[LeftOut, ...] = ()
    classes: tuple[str, ...] = ()
    named: Mapping[str, tuple[str, ...]] = {}


def _rows_of(store: ObjectStore, entry: Entry, named: str | None) -> _Rows:
    if is_parquet(entry):
        return _of_parquet(store, entry)
    if entry.size > _LONGEST:
        raise DataError(f"{entry.object} is longer than a list of text is read: write it as Parquet")
    text = decoded_text(bytes(store.read(entry.object, 0, entry.size)))
    if text is None:
        raise DataError(
            f"{entry.object} is in an encoding that it does not say, neither UTF-8 nor that of Windows for western "
            "languages: save it as UTF-8, as by iconv -f BIG5 -t UTF-8"
        )
    return _of_json(entry, text) if entry.object.lower().endswith(_JSON_LINES) else _of_csv(entry, text, named)


def _of_csv(entry: Entry, text: str, named: str | None) -> _Rows:
    text = text.lstrip("\r\n")
    if (said := _SAYS_SEPARATOR.match(text)) is not None:
        text = text[said.end() :]
    separator = said["mark"] if said is not None else separator_of(text)
    has_spaces = any(_QUOTED_LATER.match(field) for row in first_rows(text, separator) for field in row)
    if opened := unclosed_quote(text, separator, has_spaces=has_spaces):
        raise DataError(
            f"{entry.object} has a quote that nothing closes, so that every row from there on is one value: close the "
            f"one in {opened!r}, or write it twice, within quotes"
        )
    if has_spaces:
        text = _without_spaces(text, separator)
    names = [name.strip() for name in next(iter(first_rows(text, separator)), [])]
    _check_names(entry, list(filter(None, names)))
    columns = [name or f"{_NAMELESS}{place}" for place, name in enumerate(names)]
    label = find_name(names, LABEL_FIELDS)
    likely = {name for field in URL_FIELDS if (name := find_name(names, (field,))) is not None}
    texts = likely | {find_name(names, some) for some in (_MASK_FIELDS, (named or "",))} | {label}
    data = pa.py_buffer(text.encode("utf-8", "replace"))
    # Files, masks and labels stay as they are written; other columns get the type that all their values have.
    table, odd = _parsed(entry, data, separator, columns, [name for name in columns if name in texts])
    table = _as_written(table, entry, data, separator, columns)
    table = _without_blanks(table)
    table = _with_index(table)
    nameless = [name for name in table.column_names if name.startswith(_NAMELESS)]
    lost = [f"{entry.object}/{columns.index(name) + 1}" for name in nameless if not _is_blank(table[name])]
    table = _with_said(table.drop_columns(nameless), label, text_label)
    left = of_names(COLUMNS_LEFT, "without a name", lost, entry.object)
    return _Rows(_without_no_numbers(table, label), label, (*_odd_rows(entry, odd), *left))


def _with_index(table: pa.Table) -> pa.Table:
    """A table whose first column, which has no name, is called ``index`` where it has texts, as pandas calls it.

    They may be names of files, also without suffix. Numbers are those of rows.
    """
    names = table.column_names
    is_text = pa.types.is_string(table.schema.types[0]) and not _is_blank(table.column(0))
    if "index" in names or not names[0].startswith(_NAMELESS) or not is_text:
        return table
    return table.rename_columns(["index", *names[1:]])


def _odd_rows(entry: Entry, numbers: Sequence[int]) -> tuple[LeftOut, ...]:
    names = [f"{entry.object}/{number}" for number in numbers]
    return of_names(ROWS, "with more or fewer fields than the row of names", names, entry.object)


def _without_spaces(text: str, separator: str) -> str:
    """The same rows without the spaces between a separator and a quote, for which the quote would be a letter."""
    out = io.StringIO(newline="")
    try:
        rows = csv_text.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        csv_text.writer(out, delimiter=separator).writerows(rows)
    except csv_text.Error:
        return text
    return out.getvalue()


def _parsed(
    entry: Entry,
    data: pa.Buffer,
    separator: str,
    columns: Sequence[str],
    texts: Sequence[str],
    only: Sequence[str] = (),
) -> tuple[pa.Table, list[int]]:
    """The rows below that of names, and the numbers of those that have more or fewer fields, from 0.

    Args:
        entry: entry of the list.
        data: text in UTF-8.
        separator: mark between two fields.
        columns: names of all columns.
        texts: names of the columns that are texts whatever stands in them.
        only: names of the columns that are read; all by default.
    """
    odd: list[tuple[int, str]] = []

    def note(row: csv.InvalidRow) -> str:
        odd.append((row.number, f"{row.actual_columns} fields for {row.expected_columns} names: {row.text}"))
        return "skip"

    kinds = dict.fromkeys(texts, pa.string())
    try:
        table = csv.read_csv(
            data,
            read_options=csv.ReadOptions(use_threads=False, column_names=columns, skip_rows_after_names=1),
            parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=note),
            convert_options=csv.ConvertOptions(column_types=kinds, strings_can_be_null=False, include_columns=only),
        )
    except pa.ArrowException as error:
        odd[:0] = [(0, str(error))]
        table = None
    if table is None or (odd and not len(table)):
        words = " ".join(odd[0][1].split())[:150]
        raise DataError(f"{entry.object} is no CSV file with a line of names on top: {words}")
    return table, [number - _BELOW_NAMES for number, _ in odd]


def _as_written(table: pa.Table, entry: Entry, data: pa.Buffer, separator: str, columns: Sequence[str]) -> pa.Table:
    """A table with those columns as texts of which a number, or nothing at all, does not say what is written there.

    Such are ``007``, whole numbers with more digits than a number keeps, and ``NA`` where nothing else stands.
    """
    doubtful = {field.name: _LOST_BY[field.type] for field in table.schema if field.type in _LOST_BY}
    if not doubtful or not len(table):
        return table
    raw, _ = _parsed(entry, data, separator, columns, list(doubtful), list(doubtful))
    for name, pattern in doubtful.items():
        if pc.any(pc.match_substring_regex(raw[name], pattern)).as_py():
            table = table.set_column(table.schema.get_field_index(name), name, raw[name])
    return table


def _without_no_numbers(table: pa.Table, label: str | None) -> pa.Table:
    """Labels that are numbers but for words such as ``NaN``, which then stand for none, as in other columns."""
    if label is None:
        return table
    said = table[label].unique().drop_null().to_pylist()
    words = [text for text in said if text.startswith('"')]
    if not words or len(words) == len(said) or not all(json.loads(text).casefold() in _NO_NUMBERS for text in words):
        return table
    none = pc.is_in(table[label], value_set=pa.array(words))
    column = pc.if_else(none, pa.scalar(None, pa.string()), table[label])
    return table.set_column(table.schema.get_field_index(label), label, column)


def _is_blank(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count == len(column))


def _without_blanks(table: pa.Table) -> pa.Table:
    """Texts that are empty as null; a text such as NA stays one."""
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            column = table.column(place)
            blank = pa.scalar(None, pa.string())
            table = table.set_column(place, field.name, pc.if_else(pc.equal(column, ""), blank, column))
    return table


def _of_json(entry: Entry, text: str) -> _Rows:
    rows: list[dict[str, Any]] = []
    odd = []
    for number, line in enumerate(text.split("\n")):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number + 1} of {entry.object} is no JSON") from error
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            odd.append(f"{entry.object}/{number}")
    if odd and not rows:
        raise DataError(f"{entry.object} has no object of JSON in any line: write each row as one, in its own line")
    # The fields of an object that is called as labels are stay metadata, of which one may be named as the label.
    can_be = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict))
    label = find_name(list(can_be), LABEL_FIELDS)
    about = [{name: value for name, value in row.items() if name != label or isinstance(value, dict)} for row in rows]
    columns, left = columns_of(about, entry.object)
    if label is not None:
        said = [None if isinstance(value := row.get(label), dict) else label_text(value) for row in rows]
        columns[label] = pa.array(said, pa.string())
    lost = of_names(ROWS, "that are no objects of JSON", odd, entry.object)
    return _Rows(pa.table(columns), label, (*lost, *left))


def _of_parquet(store: ObjectStore, entry: Entry) -> _Rows:
    with open_parquet(store, entry.object, entry.size) as (parquet, source):
        schema = parquet.schema_arrow
        _check_names(entry, schema.names)
        label = find_name(schema.names, LABEL_FIELDS)
        kind = None if label is None else schema.field(label).type
        if kind is not None and (pa.types.is_temporal(kind) or pa.types.is_struct(kind)):
            label = kind = None  # which says when, or has fields that are metadata
        if kind is not None and not (is_label(kind) or is_list(kind) or pa.types.is_null(kind)):
            raise refuse_labels(entry.object, str(label), kind)
        nested = nested_names(schema)
        scalars = [path for path, kind in column_paths(schema) if is_scalar(kind)]
        read = read_columns(source, parquet.metadata, entry.object, scalars)
        lists = list_columns(source, parquet.metadata, entry.object, nested)
        columns = {path: without_extension(column_at(read, path)) for path in scalars} | lists
        others = [path for path, _ in column_paths(schema) if path not in (*scalars, *nested)]
        left = omissions_of_table(entry.object, others, [path for path in nested if path not in lists])
        named = names_by_path(features_of(schema))
        classes = named.pop(label or "", ())
        if label is not None and label in columns and label not in lists:
            columns[label] = texts_of_labels(entry.object, columns[label], classes)
        elif classes:
            named[OTHER_LABELS], classes = classes, ()
        table = _with_said(pa.table(columns), label if label in lists else None, text_label)
        return _Rows(table, label, left, classes, named)


def _check_names(entry: Entry, names: Sequence[str]) -> None:
    twice = first_twice(names)
    if twice is not None:
        raise DataError(f"{entry.object} has two columns called {twice!r}: give each its own name")


def _with_said(table: pa.Table, label: str | None, said: Callable[[Any], str | None]) -> pa.Table:
    if label is None or label not in table.column_names:
        return table
    return table.set_column(table.schema.get_field_index(label), label, column_labels(table[label], said))


class AnnotatedFolders(ClassFolderFormat):
    """Class folders, with lists beside them: ``labels.csv`` beside ``images``, and ``metadata.jsonl`` anywhere.

    Where folders say no classes, as a single one does and those called ``images`` or ``train``, lists of images give
    the labels; an image that stands in none has none. Their other columns are metadata. Lists called ``metadata`` give
    metadata beside classes too. What lists name is found by its path, or by its name alone, also without its suffix,
    within the folder of the list where that holds images.

    Args:
        files: column of the lists that says which file each row is about; by default the one that is called so, or has
            names of files. The format's name then has it behind a colon.
    """

    def __init__(self, files: str | None = None) -> None:
        self.name = ClassFolderFormat.name if files is None else f"{ClassFolderFormat.name}:{files}"
        self._files = files

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        lists = list(filter(self._may_annotate, entries))
        digest = super().digest(entries)
        rule = _RULE if self._files is None else f"{_RULE} {self._files}"
        return digest_of(f"{rule} {digest}", lists) if lists else digest

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; lists are read."""
        found = super().read(store, entries, before)
        lists = sorted(filter(self._may_annotate, entries))
        if self._files is None and not lists:
            return found
        says_classes = self._files is None and _are_classes(found.classes)
        if says_classes:
            lists = [entry for entry in lists if entry.object.rpartition("/")[2].lower() in _METADATA]
        notes = _Notes(found, ObjectFinder(entries, store.url), takes_labels=not says_classes)
        for entry, rows in read_lists(
            store, lists, notes.finder, notes.pass_over, fields=_FILES_FIRST, named=self._files
        ):
            notes.add(entry, rows)
        if self._files is not None and not notes.has_rows:
            raise DataError(f"no row names an image by its column {self._files!r}: {notes.why}")
        return notes.applied()

    def _may_annotate(self, entry: Entry) -> bool:
        is_named = self._files is not None and is_parquet(entry)
        return _may_annotate(entry) or (is_named and not is_hidden(entry.object))


_RULE = "frostline annotated folders 9"


def list_left_out(entry: Entry, why: str) -> tuple[LeftOut, ...]:
    """What is said of a list that says nothing of the samples."""
    reason = f"that says nothing of the samples: {why}"[:_MAX_REASON]
    return of_names(OBJECTS_LEFT, reason, [entry.object], entry.object)


def read_lists(
    store: ObjectStore,
    lists: Sequence[Entry],
    finder: ObjectFinder,
    pass_over: Callable[[Entry, str], None],
    *,
    fields: Sequence[str] = URL_FIELDS,
    named: str | None = None,
) -> Iterator[tuple[Entry, ListRows]]:
    """What those lists say that can be read, one after another; the others are passed over.

    Args:
        store: store that holds the lists.
        lists: entries of the listing.
        finder: finder of the objects that the lists mean.
        pass_over: function that is called with each other list, and why it says nothing.
        fields: see ``read_list``.
        named: see ``read_list``; one list at least has to have it.

    Raises:
        DataError: No list has the column that is named.
        StoreError: the store failed.
    """
    is_found = False
    why = f"{store.url} has no list with a column {named!r}: none of CSV, TSV, JSON lines or Parquet is there"
    for entry in lists:
        try:
            rows = read_list(store, entry, finder, fields=fields, named=named)
        except DataError as error:
            pass_over(entry, str(error))
            why = str(error)
        else:
            is_found = True
            yield entry, rows
    if named is not None and not is_found:
        raise DataError(why)


def _may_annotate(entry: Entry) -> bool:
    # Of Parquet files, what a command wrote beside the images is none: the data would be another with each.
    name = entry.object.rpartition("/")[2]
    may_be = is_text_list(entry) or (is_parquet(entry) and name.lower() in _METADATA)
    return may_be and not re.search(NO_LABELS, name)


def _are_classes(folders: Sequence[str]) -> bool:
    return len(folders) > 1 and not all(map(_is_no_class, folders))


def _is_no_class(folder: str) -> bool:
    is_other = is_split(folder) or _OF_IMAGES.match(folder) or _NUMBERED.match(folder)
    return bool(is_other) or any(map(is_split, re.split(r"[^a-zA-Z]+", folder)))


class _Notes:
    """What lists say of the images of folders, one list after another.

    Args:
        found: samples of the folders.
        finder: finder of the objects that lists mean.
        takes_labels: the labels of lists are those of the samples, and not metadata.
    """

    def __init__(self, found: ListedSamples, finder: ObjectFinder, *, takes_labels: bool) -> None:
        self.why = ""
        self._found = found
        self.finder = finder
        self._takes_labels = takes_labels
        self._place = {name: row for row, name in enumerate(found.table["object"].to_pylist())}
        self._columns: dict[str, pa.Array] = {}
        self._said: list[str | None] | None = None
        self._classes: set[tuple[str, ...]] = set()
        self._named: list[tuple[pa.Table, Mapping[str, tuple[str, ...]]]] = []
        self._unclear: set[int] = set()
        self._lists: dict[str, list[int | None]] = {}
        self._passed_over: list[str] = []
        self._left: list[LeftOut] = []

    @property
    def has_rows(self) -> bool:
        """A list named one of these images."""
        return bool(self._lists)

    def pass_over(self, entry: Entry, why: str) -> None:
        """Name a list that says nothing of these images."""
        self.why = f"{entry.object}: {why}"
        self._passed_over.append(entry.object)
        self._left += list_left_out(entry, why)

    def add(self, entry: Entry, rows: ListRows) -> None:
        """Take what the rows of a list say."""
        objects = (self.finder.objects_of(file, entry.object) for file in rows.files)
        named = [[row for name in some if (row := self._place.get(name)) is not None] for some in objects]
        if SPLIT in self._found.table.schema.names:
            named = [self._in_split(some, split_of(entry.object)) for some in named]
        if not any(named):
            why = f"its rows name none, as {self._with_likely(rows.files[0], entry)!a}" if named else "it has no rows"
            self.pass_over(entry, why)
            return
        meant = [some[0] if len(some) == 1 else None for some in named]
        self._lists[entry.object] = meant
        self._classes |= {rows.classes} - {()}
        self._named.append((pa.table(dict(rows.about)), rows.named))
        at: list[int | None] = [None] * len(self._place)
        for number, row in reversed(list(enumerate(meant))):
            if row is not None:
                at[row] = number
        for name, column in rows.about.items():
            _add(self._columns, name, column.take(pa.array(at, pa.int64())))
        unclear: set[int] = set()
        if rows.said is not None and self._takes_labels:
            unclear = self._label(rows.said.to_pylist(), meant)
        elif rows.said is not None:
            texts = column_labels(rows.said, lambda label: json.loads(label) if label and label[0] == '"' else label)
            _add(self._columns, "meta_label", texts.take(pa.array(at, pa.int64())))
            reason, classes = f"of {entry.object} against the folders, which count", list(map(self._class_of, meant))
            self._left += contradicting_labels(reason, rows.files, classes, rows.said, entry.object)
        self._left += _lost(entry, rows, named, unclear, self._with_likely)

    def _class_of(self, row: int | None) -> str | None:
        """The class that the folder of an image says, as a label."""
        return None if row is None else label_text(self._folders[row])

    @cached_property
    def _folders(self) -> list[str | None]:
        names = pa.array(self._found.classes, pa.string())
        return list(names.take(self._found.table["label"].combine_chunks()).to_pylist())

    def _with_likely(self, written: str, entry: Entry) -> str:
        """A name that leads nowhere, with the file that is probably meant."""
        likely = self.finder.likely_object(written, entry.object)
        return f"{written}, but {likely} is there" if likely in self._place else written

    def _in_split(self, rows: list[int], split: str | None) -> list[int]:
        """Of several images those of the split that a list is called as: ``train.csv`` means ``train/1.png``."""
        if len(rows) < 2 or split is None:
            return rows
        return [row for row in rows if self._splits[row] == split] or rows

    @cached_property
    def _splits(self) -> list[str | None]:
        return list(self._found.table[SPLIT].to_pylist())

    def _label(self, said: Sequence[str | None], meant: Sequence[int | None]) -> set[int]:
        """Take labels; returns the numbers of the rows that give an image another one than a row before them."""
        known = self._said = self._said or [None] * len(self._place)
        others: set[int] = set()
        for number, row in enumerate(meant):
            if row is not None and said[number] is not None:
                known[row] = known[row] or said[number]
                if known[row] != said[number]:
                    others.add(number)
                    self._unclear.add(row)
        return others

    def applied(self) -> ListedSamples:
        """The samples with what was said of them; one to which two labels were given has none."""
        said = None
        if self._said is not None:
            said = pa.array(
                [None if row in self._unclear else text for row, text in enumerate(self._said)], pa.string()
            )
        elif self._takes_labels and self._lists and all(map(_is_no_class, self._found.classes)):
            said = pa.nulls(len(self._place), pa.string())
        found = self._divided()
        if said is not None and _are_classes(self._found.classes):
            others = list(map(label_text, self._folders))
            self._left += contradicting_labels("of folders against lists, which count", [*self._place], said, others)
        used = (*self._lists, *self._passed_over)
        names = next(iter(self._classes)) if len(self._classes) == 1 else ()
        labels = None if said is None else encode_labels(said, names)
        named = names_of_columns([table for table, _ in self._named], [some for _, some in self._named])
        found = replace(found, named=named)
        return _with_columns(found, self._columns, labels, used, tuple(self._left))

    def _divided(self) -> ListedSamples:
        """The samples in the splits that the names of lists say, as ``train.csv`` beside ``test.csv``."""
        splits = splits_of([*self._lists])
        if splits is None or SPLIT in (*self._found.table.schema.names, *self._columns):
            return self._found
        each: list[str | None] = [None] * len(self._place)
        for name, meant in self._lists.items():
            split, others = splits.get(name), 0
            for row in meant:
                if row is not None and split is not None:
                    each[row] = each[row] or split
                    others += each[row] != split
            lost = [name] * others
            self._left += of_names(ROWS, f"of {name} that put an image into another split", lost, name)
        table = self._found.table.append_column(SPLIT, pa.array(each, pa.string()))
        return replace(self._found, table=table, divided_by_names=True)


def _lost(
    entry: Entry,
    rows: ListRows,
    named: Sequence[Sequence[int]],
    unclear: set[int],
    with_likely: Callable[[str, Entry], str],
) -> tuple[LeftOut, ...]:
    """The rows of a list that name no image, several, or one that a row before them names."""
    seen: set[int] = set()
    others, again = "give an image another label", "name an image again"
    lost: dict[str, list[str]] = {"name no image here": [], "name several images": [], again: [], others: []}
    for number, (file, some) in enumerate(zip(rows.files, named, strict=True)):
        if not some:
            none = lost["name no image here"]
            none.append(with_likely(file, entry) if len(none) < _SHOWN else file)
        elif len(some) > 1:
            lost["name several images"].append(file)
        elif number in unclear:
            lost[others].append(file)
        elif some[0] in seen:
            lost[again].append(file)
        seen.update(some if len(some) == 1 else ())
    reasons = ((f"of {entry.object} that {what}", files) for what, files in lost.items())
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
    labels: Labelled | None,
    used: tuple[str, ...],
    left_out: tuple[LeftOut, ...],
) -> ListedSamples:
    table, classes = found.table, found.classes
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
