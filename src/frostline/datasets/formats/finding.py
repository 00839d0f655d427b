"""Finds what lists of samples mean: their text, the column that says which file each row is about, and its objects.

An object is found by its path, by what is left of it, or by its name without a suffix.
"""

import codecs
import csv
import io
import posixpath
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from urllib.parse import unquote

import pyarrow as pa

from frostline.datasets.formats.base import is_text
from frostline.datasets.formats.folders import is_sample
from frostline.datasets.formats.labels import find_name
from frostline.datasets.formats.left_out import is_hidden
from frostline.stores.protocols import Entry

__all__ = (
    "ObjectFinder",
    "are_files",
    "decoded_text",
    "file_column",
    "first_rows",
    "first_values",
    "separator_of",
    "unclosed_quote",
)

_ABSOLUTE = re.compile(r"[\\/]|[A-Za-z]:[\\/]|[A-Za-z][A-Za-z0-9+.-]*://")
_VALUES_LOOKED_AT = 64
_SEPARATORS = ",;\t|"
# Rows that tell which separator a list has.
_LOOKED_AT = 6
_BEGINNING = 1 << 20
_SHOWN = 60
_LINE_END = re.compile(r"\r\n|\r|\n")
_BEYOND_ASCII = re.compile(rb"[A-Za-z\x80-\xff]*[\x80-\xff][A-Za-z\x80-\xff]*")
_ASCII = bytes(range(128))
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# What columns of numbers are called that are names of files without suffix.
_OF_IDS = re.compile(r"(?i)(^|[^a-z])(ids?|names?|keys?|images?|imgs?|files?|photos?|index)([^a-z]|$)")


class ObjectFinder:
    """Finds the objects that lists mean, among those of a listing.

    A list in a folder that holds images or sounds, at any depth, means those within it; where its own folder holds
    none, as ``annotations`` beside ``images`` does, those within the nearest folder around it that does. Letters with
    marks are the same in both of Unicode's normal forms: a Mac writes the names of files in another one than a list.

    Where nothing is called as a list says, capitals and small letters are the same, as they are to Windows.

    Args:
        entries: listing.
        url: URL of the root, whose own name may stand in front of paths.
        has_case: capitals and small letters differ.
    """

    def __init__(self, entries: Sequence[Entry], url: str = "", *, has_case: bool = True) -> None:
        self._made_from, self._has_case = (entries, url), has_case
        self._root = self._key(unquote(url.partition("?")[0].rstrip("/").rpartition("/")[2]))
        names = [entry.object for entry in entries if not is_hidden(entry.object)]
        self._objects: dict[str, list[str]] = {}
        self._by_base: dict[str, list[str]] = {}
        self._folders: set[str] = set()
        for name in names:
            self._objects.setdefault(self._key(name), []).append(name)
        for name in filter(is_sample, names):
            folder, _, base = name.rpartition("/")
            for key in {self._key(base), self._key(base.rpartition(".")[0])}:
                self._by_base.setdefault(key, []).append(self._key(name))
            while folder and folder not in self._folders:
                self._folders.add(folder)
                folder = folder.rpartition("/")[0]
        self._outermost = {self._key(folder.partition("/")[0]) for folder in self._folders}

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
                the root, or the end of such a path, all of them also without the suffix. Of an absolute path, which
                leads elsewhere, as much of its end counts as is there; of one that begins with folders around the root,
                what is left without these.
            file: name of the list.
        """
        found = self._found(self._key(written), file)
        if not found and "\\" in written:  # as Windows writes paths
            found = self._found(self._key(written).replace("\\", "/"), file)
        if not found and (parts := _outside(self._key(written))):
            tails = (self._found("/".join(parts[first:]), file) for first in range(len(parts)))
            found = next(filter(None, tails), [])
        if not found:
            found = self._below_root(self._key(written).replace("\\", "/"), file)
        if not found and self._has_case:
            return self._without_case.objects_of(written, file)
        objects = [name for composed in found for name in self._objects[composed]]
        if len(objects) > len(found):  # names that look alike: the one that is written so
            objects = [name for name in objects if written in name] or objects
        return objects

    def likely_object(self, written: str, file: str) -> str:
        """The only object that is called as a name that leads nowhere but for its suffix and case; empty without one.

        Args:
            written: name as it is written in the list.
            file: name of the list.
        """
        stem = posixpath.basename(written.replace("\\", "/")).rpartition(".")[0]
        found = self._without_case.objects_of(stem, file) if stem else []
        return found[0] if len(found) == 1 else ""

    @cached_property
    def _without_case(self) -> "ObjectFinder":
        return ObjectFinder(*self._made_from, has_case=False)

    def _key(self, name: str) -> str:
        return _composed(name) if self._has_case else _composed(name).casefold()

    def _below_root(self, written: str, file: str) -> list[str]:
        """What a path means that begins above the root: what is left is there, and names a folder or stands in ours."""
        parts = posixpath.normpath(written).split("/")
        for first in range(1, len(parts)):
            if parts[0] in self._outermost:  # which is here, and has no such file
                return []
            if first < len(parts) - 1 or parts[first - 1] == self._root:
                left = "/".join(parts[first:])
                if found := self._exactly(left, file) or self._exactly(left, file, self._without_suffix):
                    return found
        return []

    def _exactly(self, name: str, file: str, among: Mapping[str, list[str]] | None = None) -> list[str]:
        folders = (posixpath.dirname(self._key(file)), self._key(self.folder_of(file)))
        places = (posixpath.normpath(posixpath.join(folder, name)) for folder in folders)
        if among is None:
            return [place for place in dict.fromkeys(places) if place in self._objects][:1]
        return next((among[place] for place in places if place in among), [])

    @cached_property
    def _without_suffix(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in {known for some in self._by_base.values() for known in some}:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found

    def _found(self, written: str, file: str) -> list[str]:
        folder, name = self._key(self.folder_of(file)), posixpath.normpath(written)
        if likely := self._exactly(name, file):
            return likely
        known = self._by_base.get(name.rpartition("/")[2], ())
        inside = [other for other in known if other.startswith(folder) and _ends_with(other, name)]
        if not inside:
            stems = [other for other in known if other.startswith(folder)]
            inside = [other for other in stems if _ends_with(other.rpartition(".")[0], name)]
        # Without a folder in it, a name means nothing outside of that of its list.
        named = [name] if "/" in name and name in self._objects else []
        return list(dict.fromkeys([*named, *inside]))


def _outside(written: str) -> list[str]:
    """The parts of an absolute path, as of the machine that a list was written on; none of another one."""
    return _composed(written).replace("\\", "/").split("/")[1:] if _ABSOLUTE.match(written) else []


def _composed(name: str) -> str:
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def _ends_with(known: str, name: str) -> bool:
    return known == name or known.endswith(f"/{name}")


def file_column(
    table: pa.Table, file: str, finder: ObjectFinder, fields: Sequence[str], left: Sequence[str | None]
) -> str | None:
    """The column that says where samples are: by its name, or by its values, whatever it is called; None for none.

    Of columns that are called so, one that leads to no object stands behind others that do, as numbers of rows called
    ``id`` do behind names of files. A file without a line of names has no such column: its first row would be taken for
    that.
    """
    names: list[str] = [name for name in table.column_names if name not in left]
    called = [name for field in fields if (name := find_name(names, (field,))) is not None]
    first = find_name(names, fields)
    called = called if first is None else [first, *called]
    if not any(map(is_sample, table.column_names)):
        called += [name for name in names if are_files(first_values(table, name))]
    found = (name for name in dict.fromkeys(called) if any(_are_there(first_values(table, name), file, finder)))
    ids = (name for name in names if _are_ids(table, name, file, finder))
    return next(found, None) or next(ids, None) or next(iter(called), None)


def first_values(table: pa.Table, name: str) -> list[str]:
    """The first values of a column of texts or whole numbers, as texts; none of another one, and none for null."""
    kind = table[name].type
    if not (is_text(kind) or pa.types.is_integer(kind)):
        return []
    return [str(value).strip() for value in table[name].slice(0, _VALUES_LOOKED_AT).drop_null().to_pylist()]


def are_files(values: Sequence[str]) -> bool:
    """Whether texts, one at least, are names of images or sounds."""
    return bool(values) and all(map(is_sample, values))


def _are_there(values: Sequence[str], file: str, finder: ObjectFinder) -> list[bool]:
    return ["://" in value or bool(finder.objects_of(value, file)) for value in values]


def _are_ids(table: pa.Table, name: str, file: str, finder: ObjectFinder) -> bool:
    """Whether different values of a column are names of objects, most of those that are looked at, without suffix."""
    values = first_values(table, name)
    if len({*values}) < max(2, len(values)) or (all(map(str.isdigit, values)) and not _OF_IDS.search(name)):
        return False
    return 2 * sum(_are_there(values, file, finder)) > len(values)


def decoded_text(data: bytes) -> str | None:
    """The text of a file in the encoding that it begins as, in UTF-8, or as Windows writes western languages.

    None where it is in another one: in western words most letters are those of ASCII, in words of Big5, GBK, Shift JIS
    and Cyrillic alphabets few bytes are.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace")
    if 0 in data[:2]:  # as no other encoding begins
        return data.decode("utf-16-be" if data[0] == 0 else "utf-16-le", "replace")
    try:
        return data.decode()
    except UnicodeDecodeError:
        words = b"".join(word for word in _BEYOND_ASCII.findall(data) if len(word) > 1)
        is_western = 2 * len(words.translate(None, _ASCII)) <= len(words)
        return data.decode("cp1252", "replace") if is_western else None


def first_rows(text: str, separator: str) -> list[list[str]]:
    """The first rows of CSV, as far as they are no longer than rows are."""
    rows: list[list[str]] = []
    with suppress(csv.Error):  # a field is too long
        lines = csv.reader(io.StringIO(text[:_BEGINNING], newline=""), delimiter=separator)
        for row in islice(lines, _LOOKED_AT):
            rows.append(row)  # noqa: PERF402 -- those before an error stay
    is_cut = len(text) > _BEGINNING and len(rows) < _LOOKED_AT
    return rows[:-1] if is_cut and len(rows) > 1 else rows


def separator_of(text: str) -> str:
    """The separator by which the first rows have as many fields as the row of names, several; else the commonest."""

    def fit(separator: str) -> tuple[bool, int, int]:
        lengths = [len(row) for row in first_rows(text, separator) if row] or [0]
        return len({*lengths}) == 1 and lengths[0] > 1, lengths[0], -_SEPARATORS.index(separator)

    return max(_SEPARATORS, key=fit)


def unclosed_quote(text: str, separator: str, *, has_spaces: bool) -> str:
    """The beginning of the row of CSV whose quote is never closed, which swallows all rows behind it; empty for none.

    Args:
        text: CSV with its row of names.
        separator: mark between two fields.
        has_spaces: spaces may stand between a separator and a quote.
    """
    if text.count('"') % 2 == 0:
        return ""
    end, is_whole = "end", False
    rows = csv.reader(io.StringIO(f"{text}\n{end}", newline=""), delimiter=separator, skipinitialspace=has_spaces)
    begins = behind = 0
    try:
        for row in rows:
            begins, behind, is_whole = behind, rows.line_num, row == [end]
    except csv.Error:  # what is swallowed is too long for a field
        begins, is_whole = behind, False
    return "" if is_whole else _LINE_END.split(text)[begins][:_SHOWN]
