"""What a format of data is: one protocol, and the table that it makes of a store's listing."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from frostline.core import OBJECTS, READINGS
from frostline.errors import DataError
from frostline.preprocess import Applied
from frostline.stores.base.listing import Entries
from frostline.stores.base.protocols import Entry, ObjectStore

__all__ = (
    "COLUMNS",
    "TARGET_COLUMNS",
    "Format",
    "ListedSamples",
    "Widespread",
    "digest_of",
    "is_hidden",
    "is_named",
    "stable_ids",
)

COLUMNS = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "object": pa.string(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "label": pa.int64(),
        "etag": pa.string(),
    }
)
"""The columns that every table of samples starts with; what follows them is metadata."""

TARGET_COLUMNS = pa.schema(
    {
        "target_object": pa.string(),
        "target_offset": pa.int64(),
        "target_length": pa.int64(),
        "target_etag": pa.string(),
        "target_width": pa.int64(),
        "target_height": pa.int64(),
    }
)
"""The columns that follow, without nulls, where samples have masks: where each one is, and the size of its image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListedSamples:
    """The samples of a listing.

    Attributes:
        table: ``COLUMNS`` in their order, none of them with nulls, then any metadata columns. The rows' order follows
            from the listing alone, and is that of objects and offsets, so that reading all of it is reading on. Ids are
            ``stable_ids`` of the names, labels are -1 where there is none, etags are those of the samples' objects.
        classes: names, by label.
        digest: result of the format's ``digest`` for this listing.
        reading: how the bytes at the samples' addresses are found.
        applied: preprocessing done before the images were kept; None where they are encoded.
        kept_at: name of the object that holds the table already; empty where it is to be kept as a manifest.
        divided_by_names: the column ``split`` was made of the names of folders or files, and is not the data's own.
    """

    table: pa.Table
    classes: tuple[str, ...]
    digest: str
    reading: str = OBJECTS
    applied: Applied | None = None
    kept_at: str = ""
    divided_by_names: bool = False

    def __post_init__(self) -> None:
        if self.table.schema.remove_metadata().names[: len(COLUMNS)] != COLUMNS.names:
            raise ValueError(f"a table of samples starts with {COLUMNS.names}, not {self.table.schema.names}")
        if self.reading not in READINGS:
            raise ValueError(f"there is no reading {self.reading!r}")


class Format(Protocol):
    """One way in which data lies in a store. Deciding what is mine is pure; only ``read`` asks the store."""

    @property
    def name(self) -> str:
        """What users call it: ``Dataset(url, format=name)``."""

    @property
    def is_incremental(self) -> bool:
        """``read`` takes rows from an earlier listing; where it does not, none is opened for it."""

    def claims(self, entries: Sequence[Entry]) -> bool:
        """Whether a listing looks like this format.

        It may be columns (``stores.base.listing``), which a format that has many objects looks at as a whole.
        """

    def digest(self, entries: Sequence[Entry]) -> str:
        """SHA-256 that names what ``read`` would give, from names, sizes and etags alone, in any order.

        An unchanged listing finds its manifest by it, and nothing is read again. That of no entries names the rule by
        which ``read`` makes rows, and an earlier listing of another rule is not asked for rows.
        """

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """Make the table of a listing's samples.

        Args:
            store: store that was listed.
            entries: its listing.
            before: table that this format made of an earlier listing; rows of objects with their old name and etag, if
                that is not empty, are taken from it, and those objects are not read. Its texts may have wide offsets.

        Raises:
            EmptyDataset: the listing has no sample.
            DataError: the data cannot be used as it is; the sentence names the object.
            StoreError: the store failed.
        """


@runtime_checkable
class Widespread(Format, Protocol):
    """A format whose samples may lie elsewhere than in the place that is listed: their objects are URLs."""

    def found_now(self, urls: Iterable[str]) -> Mapping[str, Entry]:
        """What objects elsewhere are now, by their URLs; those that are not there are left out.

        Raises:
            StoreError: a store failed.
        """


def digest_of(rule: str, entries: Iterable[Entry]) -> str:
    """SHA-256 of a format's rule and of the entries that belong to it, in any order.

    Args:
        rule: names the format and the version of what it makes: another table of the same entries needs another rule.
        entries: objects of the listing; their names, sizes and etags count.
    """
    return Entries.of(entries).digest(rule)


def is_named(entries: Sequence[Entry], name: str) -> bool:
    """Whether an object of that name is listed."""
    return Entries.of(entries).has(name)


def is_hidden(name: str) -> bool:
    """Whether a part of an object's name starts with a dot: such objects belong to no format but Frostline's own."""
    return name.startswith(".") or "/." in name


_AT_ONCE = 1 << 13


def stable_ids(names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Ids from names alone, so that a sample keeps its id whatever is added, taken away or moved to another store.

    Returns:
        ``int64[n]``, not negative: 63 bits of the BLAKE2b of each name.

    Raises:
        DataError: two names have one id, which happens once in some hundred million data sets of 100,000 names.
    """
    digests, rest = bytearray(), iter(names)
    while some := list(islice(rest, _AT_ONCE)):
        digests += b"".join([hashlib.blake2b(name.encode(), digest_size=8).digest() for name in some])
    ids: npt.NDArray[np.int64] = (np.frombuffer(digests, "<u8") >> np.uint64(1)).view(np.int64)
    in_order = np.sort(ids)
    if (in_order[1:] == in_order[:-1]).any():
        order = np.argsort(ids, kind="stable")
        first = int(np.flatnonzero(np.diff(ids[order]) == 0)[0])
        one, other = (names[row] for row in order[first : first + 2].tolist())
        raise DataError(f"{one!r} and {other!r} have the same 63-bit id: rename one of them")
    return ids
