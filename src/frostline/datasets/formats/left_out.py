"""What of a data set is no sample: objects, rows and columns that are named and counted instead of dropped."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.errors import EmptyDataset
from frostline.core.events import Event, NodeLost, SamplesLeftOut
from frostline.core.units import log_named
from frostline.stores.protocols import UNREADABLE, Entries
from frostline.stores.urls import FILE_SUFFIXES

__all__ = (
    "COLUMNS_LEFT",
    "FOLDERS_LEFT",
    "KEYS",
    "LABELS_LEFT",
    "NO_LABELS",
    "OBJECTS_LEFT",
    "ROWS",
    "LeftOut",
    "are_hidden",
    "describe_left_out",
    "folders_left_out",
    "is_hidden",
    "json_of",
    "log_losses",
    "objects_left_out",
    "of_names",
    "read_left_out",
    "split_unreadable",
    "sum_left_out",
)

OBJECTS_LEFT, ROWS, KEYS, COLUMNS_LEFT, LABELS_LEFT, FOLDERS_LEFT = "object", "row", "key", "column", "label", "folder"
"""What can be left out."""

NO_LABELS = r"(?i)submission"
"""What lists are called that a contest asks for, whose labels are none."""

_NAMED = 3
_MAX_NAME = 200
_LOG = log_named("frostline")
# Frostline's own, beside the data.
_OWN = ".frostline/"
# Formats whose files are known by their suffix: where another format was taken, they may be what was meant.
_READ_BY = {".arrow": "arrow", ".parquet": "parquet", ".tar": "webdataset", ".tar.gz": "tar.gz", ".tgz": "tar.gz"}
# Lists that say labels of images, one a row.
_LISTS = (".csv", ".tsv", ".jsonl", ".ndjson")
# Boxes, outlines and points of images, by the tools that write them.
_ANNOTATIONS = {
    "COCO": (
        r"(?i)(^|/)((instances|person_keypoints|captions|stuff|panoptic)_[^/]*|[^/]*\.coco|annotations?)\.json$"
        r"|(^|/)annotations?/[^/]*\.json$"
    ),
    "YOLO": r"(?i)(^|/)labels/.*\.txt$",
    "Pascal VOC": r"(?i)(^|/)annotations?/.*\.xml$",
}
_AS_TARGETS = (
    ", such as boxes, which are not read: write them into a column of metadata.jsonl beside the images, or of Parquet, "
    "such as objects.bbox, and declare it by targets='objects.bbox' (--targets objects.bbox)"
)
# What starts with a dot, and folders that macOS, Windows, Synology's file servers and file systems keep beside what
# people put there: thumbnails, resources and what was deleted, under the names of the samples.
_HIDDEN = r"(?i)(^|/)(\.|(__macosx|@eadir|#recycle|\$recycle\.bin|system volume information|lost\+found)/)"
# The suffix of a name, as formats take it.
_SUFFIX = r"[^/](?P<suffix>(?:\.(?i:tar))?\.[^./]*)$"


class LeftOut(NamedTuple):
    """What is no sample for one reason.

    Attributes:
        what: kind of it, one of ``OBJECTS_LEFT``, ``ROWS``, ``KEYS``, ``COLUMNS_LEFT``, ``LABELS_LEFT`` and
            ``FOLDERS_LEFT``.
        reason: reason in a few words, such as ``without an image``.
        total: number of them.
        names: names of the first few.
        object: object in which rows or keys lie, or which was read and left out; empty for those that were not read.
    """

    what: str
    reason: str
    total: int
    names: tuple[str, ...]
    object: str = ""

    @property
    def is_label(self) -> bool:
        """Whether it is a label of a sample that has another one, which counts where none is named."""
        return self.what == LABELS_LEFT

    def __str__(self) -> str:
        more = ", …" if self.total > len(self.names) else ""
        plural = "" if self.total == 1 else "s"
        return f"{self.total:,} {self.what}{plural} {self.reason} ({', '.join(self.names)}{more})"


def is_hidden(name: str) -> bool:
    """Whether an object is none of a format: a part of its name starts with a dot, or a system keeps it in a folder."""
    return re.search(_HIDDEN, name) is not None


def are_hidden(names: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """``is_hidden`` of each name, in one look at all of them."""
    return pc.match_substring_regex(names, _HIDDEN)


def of_names(what: str, reason: str, names: Sequence[str], object: str = "") -> tuple[LeftOut, ...]:
    """What is left out by these names; nothing where there are none."""
    shown = tuple(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in names[:_NAMED])
    return (LeftOut(what, reason, len(names), shown, object),) if len(names) else ()


def sum_left_out(found: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """What is left out of all objects together, by kind and reason."""
    sums: dict[tuple[str, str], LeftOut] = {}
    for left in found:
        known = sums.get((left.what, left.reason), LeftOut(left.what, left.reason, 0, ()))
        # Every file of a table has the same columns.
        total = max(known.total, left.total) if left.what == COLUMNS_LEFT else known.total + left.total
        names = tuple(dict.fromkeys((*known.names, *left.names)))[:_NAMED]
        sums[left.what, left.reason] = LeftOut(left.what, left.reason, total, names)
    return tuple(sums.values())


def describe_left_out(url: str, found: Sequence[LeftOut]) -> SamplesLeftOut | None:
    """One line about what is left out of a data set; None where nothing is.

    Args:
        url: address of the data, for the line.
        found: parts that are left out, as ``sum_left_out`` gives them.
    """
    if not found:
        return None
    count = sum(left.total for left in found if left.what not in (COLUMNS_LEFT, LABELS_LEFT, FOLDERS_LEFT))
    return SamplesLeftOut(count=count, reason=f"left out of {url}: {'; '.join(map(str, found))}")


def log_losses(event: Event) -> None:
    """Log what is left out, and nodes that were lost, as warnings: so such events end where nobody observes."""
    if isinstance(event, SamplesLeftOut):
        _LOG.warning("%s", event.reason)
    elif isinstance(event, NodeLost):
        _LOG.warning("node %s", event.sentence)


def read_left_out(values: Any) -> tuple[LeftOut, ...]:
    """The inverse of JSON's list of what is left out.

    Raises:
        ValueError: The JSON is no such list.
    """
    try:
        found = tuple(
            LeftOut(str(what), str(reason), int(total), tuple(map(str, names)), str(object))
            for what, reason, total, names, object in values
        )
    except TypeError as error:
        raise ValueError("this is no list of what is left out") from error
    if any(left.total < 1 or len(left.names) > _NAMED for left in found):
        raise ValueError("this is no list of what is left out")
    return found


def split_unreadable(entries: Entries, url: str) -> tuple[Entries, tuple[LeftOut, ...]]:
    """The entries of a listing that can be read, and what is left out for it cannot be.

    Args:
        entries: listing, in any order.
        url: address of the data, for the sentence.

    Raises:
        EmptyDataset: No entry can be read, though there are some.
    """
    is_odd = pc.equal(entries.table["size"], UNREADABLE)
    if not pc.any(is_odd).as_py():
        return entries, ()
    objects = entries.table["object"].combine_chunks()
    is_left = _mask(pc.and_not(is_odd, pc.starts_with(entries.table["object"], _OWN)))
    left = _named("that cannot be read by that name", objects, is_left)
    if left and left[0].total == len(entries):
        raise EmptyDataset(f"{url} holds nothing but {left[0]}")
    return entries.where(pc.invert(is_odd)), left


def objects_left_out(
    entries: Entries, samples: Sequence[pa.ChunkedArray], used: Iterable[str], format: str, suffixes: Iterable[str]
) -> tuple[LeftOut, ...]:
    """The objects of a listing that a format made no samples of, and did not read for them.

    Args:
        entries: listing, in any order.
        samples: columns of the names of objects that samples, or masks, lie in.
        used: names of other objects that belong to the format.
        format: name of the format, for the reasons.
        suffixes: suffixes of samples.
    """
    objects = entries.table["object"]
    is_left = pc.invert(pc.starts_with(objects, _OWN))
    for column in (*samples, pa.chunked_array([list(used)], pa.string())):
        is_left = pc.and_not(is_left, pc.is_in(objects, value_set=column.cast(objects.type)))
    left = entries.where(is_left)
    return tuple(_by_reason(left.table["object"].combine_chunks(), format, sorted(suffixes))) if len(left) else ()


def _by_reason(objects: pa.Array, format: str, of_samples: Sequence[str]) -> Iterator[LeftOut]:
    suffixes = pc.utf8_lower(pc.fill_null(pc.struct_field(pc.extract_regex(objects, _SUFFIX), "suffix"), ""))
    hidden = _mask(are_hidden(objects))
    is_sample = _mask(pc.is_in(suffixes, value_set=pa.array(of_samples)))
    is_table = _mask(pc.is_in(suffixes, value_set=pa.array(FILE_SUFFIXES))) & ~hidden
    yield from _named("with a hidden name", objects, hidden)
    is_loose = ~_mask(pc.match_substring(objects, "/"))
    is_beside = is_sample & ~hidden
    if format == "folders":
        yield from _named("in no class folder", objects, is_beside & is_loose)
        is_beside &= ~is_loose
    is_beside |= is_table  # which another format reads
    for suffix, other in _READ_BY.items():
        of_other = is_table & _mask(pc.equal(suffixes, suffix)) & (format != other)
        yield from _named(f"that the format {format} does not use, and --format {other} reads", objects, of_other)
        is_beside &= ~of_other
    if format == "folders":
        of_list = is_table & _mask(pc.is_in(suffixes, value_set=pa.array(_LISTS)))
        of_list &= ~_mask(pc.match_substring_regex(objects, f"{NO_LABELS}[^/]*$"))
        reason = "that the format folders does not use where folders are classes, and --file-column COLUMN reads"
        yield from _named(reason, objects, of_list)
        is_beside &= ~of_list
    yield from _named(f"that the format {format} does not use", objects, is_beside)
    others = ~hidden & ~is_sample & ~is_table
    for kind, pattern in _ANNOTATIONS.items():
        of_kind = others & _mask(pc.match_substring_regex(objects, pattern))
        yield from _named(f"with annotations of {kind}{_AS_TARGETS}", objects, of_kind)
        others &= ~of_kind
    for suffix in sorted(set(suffixes.filter(pa.array(others)).to_pylist())):
        of_suffix = others & _mask(pc.equal(suffixes, suffix))
        reason = f"with the suffix {suffix}, which is not read" if suffix else "without a suffix"
        yield from _named(reason, objects, of_suffix)


def folders_left_out(folders: Iterable[str]) -> tuple[LeftOut, ...]:
    """The empty folders beside those of classes, of which nobody can tell whether one should have been a class."""
    shown = [name if name.isprintable() else ascii(name) for name in folders if not is_hidden(f"{name}x")]
    return of_names(FOLDERS_LEFT, "without any file, which is no class", shown)


def _mask(column: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)


def _named(reason: str, objects: pa.Array, mask: npt.NDArray[np.bool_]) -> tuple[LeftOut, ...]:
    rows = np.flatnonzero(mask)
    # Printable, for they end in one line for a person.
    names = [name if name.isprintable() else ascii(name) for name in objects.take(pa.array(rows[:_NAMED])).to_pylist()]
    return (of_names(OBJECTS_LEFT, reason, names)[0]._replace(total=len(rows)),) if len(rows) else ()


def json_of(found: Iterable[LeftOut]) -> list[Mapping[str, Any]]:
    """What is left out as plain values, for people and programs."""
    return [{name: value for name, value in left._asdict().items() if name != "object"} for left in found]
