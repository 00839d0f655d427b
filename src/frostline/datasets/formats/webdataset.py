"""WebDataset shards: samples are members of tars, read at their places; compressed tars are unpacked once.

Keeps plain copies of compressed tars in a cache folder: each is unpacked once, within bounds, and whole or not.
"""

import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import OBJECTS, UNPACKED
from frostline.core.config import cache_folder
from frostline.core.errors import BadRequest, DataError, EmptyDataset, ObjectNotFound
from frostline.core.files import lock, make_private_folder, open_private
from frostline.core.units import in_bytes
from frostline.datasets.formats.base import TARGET_COLUMNS, ListedSamples, digest_of, is_hidden_member
from frostline.datasets.formats.contradictions import contradictions_in_shard, contradictions_of_shards
from frostline.datasets.formats.folders import (
    IMAGE_SUFFIXES,
    KINDS,
    MASK_FIELDS,
    NO_MASK,
    Mask,
    size_at,
    target_columns,
)
from frostline.datasets.formats.joining import known_parts, with_partitions, with_parts
from frostline.datasets.formats.labels import (
    SOURCE,
    classes_in,
    columns_of,
    common_table,
    divided_by_keys,
    encode_labels,
    join_tables,
    label_field,
    label_text,
    named_columns,
    text_label,
    with_names,
    with_splits,
)
from frostline.datasets.formats.left_out import COLUMNS_LEFT, KEYS, LeftOut, is_hidden, of_names, sum_left_out
from frostline.datasets.formats.ranges import ObjectRanges
from frostline.datasets.formats.tables import SAID, finish_table, with_types
from frostline.stores.local import FolderStore, base_url, error_of_system
from frostline.stores.protocols import Buffer, Entry, ObjectStore, Versioned, is_other_version
from frostline.stores.urls import TAR_GZ

__all__ = (
    "CLASS_MEMBER",
    "TYPE_MEMBER",
    "CompressedTar",
    "CompressedTars",
    "Member",
    "TarCopies",
    "TarReader",
    "WebDataset",
    "members",
    "samples_of",
    "tar_reader",
)


_PIECE, _OF_GZIP = 4 << 20, 31
_FED = 64 << 10  # at once, of which all behind a member of gzip is copied
# gzip makes nothing smaller than a thousandth. A tar of texts of one byte, each with its header, is 150 times as large
# as its compressed file, so that what exceeds this was made to fill a disk.
_MAX_TIMES = 500
_ALWAYS_FITS = 16 << 20
# So much of the disk stays free for everybody else.
_SHARE_OF_FREE = 2
_IDLE_S = 7 * 86_400.0
# A copy that was opened, or written to, in that time is not removed for another.
_IN_USE_S = 60.0
_PARTIAL = ".partial-"


class CompressedTar(NamedTuple):
    """A compressed tar as it was listed: what samples in it have for their object.

    Attributes:
        file: name of the object.
        size: the compressed size in bytes.
        version: the etag; empty where the store has none.
    """

    file: str
    size: int
    version: str

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """The tar of an entry of a listing."""
        return cls(entry.object, entry.size, entry.etag)

    @classmethod
    def parse(cls, object: str) -> Self:
        """The inverse of ``str``.

        Raises:
            BadRequest: the name is not that of a compressed tar.
        """
        file, mark, rest = object.rpartition("#")
        size, _, version = rest.partition(".")
        if not mark or not size.isascii() or not size.isdigit() or len(size) > 18:
            raise BadRequest(f"samples.objects: {object[:200]!a} is no compressed tar")
        return cls(file, int(size), unquote(version))

    def __str__(self) -> str:
        return f"{self.file}#{self.size}.{quote(self.version, safe='')}"


class TarCopies:
    """Plain copies of compressed tars. Safe for threads and for several processes with the same folder.

    A copy that nobody opened for a week is removed when another tar is unpacked, and one of an older version of the
    same tar at once. They take a part of the disk together: where there is no room, those least recently opened go.

    Args:
        folder: the folder, made where it is missing, for its user alone.
        free_bytes: function that gives the free bytes on a folder's disk; of these and their own, copies take half.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._free_bytes = free_bytes
        self._clock = clock

    def path_of(self, store: Versioned, url: str, tar: CompressedTar) -> Path:
        """The copy of a tar, made now where there is none. Whoever comes meanwhile waits.

        Raises:
            DataError: The tar is damaged or cut off, larger than any tar of samples, or larger than the disk allows.
            ObjectNotFound: The tar was changed or removed since it was listed.
            OutOfSpace: the disk is full.
            StoreError: the store failed.
        """
        place = _digest(url, tar.file)
        path = self._folder / f"{place}-{_digest(str(tar.size), tar.version)}.tar"
        try:
            if _is_there(path):
                return path
            with self._alone(place):
                if not _is_there(path):
                    self._unpack(store, tar, path)
                    for older in {*self._folder.glob(f"{place}-*.tar")} - {path}:
                        older.unlink(missing_ok=True)
        except OSError as error:
            raise error_of_system(error, str(path)) from error
        return path

    @contextmanager
    def _alone(self, place: str) -> Iterator[None]:
        make_private_folder(self._folder)
        path = self._folder / f"{place}.lock"
        with open_private(path, "ab") as file:
            lock(file.fileno())
            try:
                yield
            finally:  # who waits for it sees the copy next; names of tars that are nowhere leave nothing
                path.unlink(missing_ok=True)

    def _unpack(self, store: Versioned, tar: CompressedTar, path: Path) -> None:
        part = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        largest = _MAX_TIMES * tar.size + _ALWAYS_FITS
        nbytes = 0
        try:
            with open_private(part, "xb") as file:
                room = self._room(part, 0)
                for piece in _plain(store, tar):
                    nbytes += len(piece)
                    if room < nbytes <= largest:
                        room = self._room(part, nbytes)
                    if nbytes > min(largest, room):
                        raise DataError(_too_large(tar, nbytes, room, self._folder))
                    file.write(piece)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _room(self, part: Path, nbytes: int) -> int:
        """Bytes that a copy under way may take, once others are gone that are idle for a week, or in its way."""
        found = dict[Path, os.stat_result]()
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process makes room too
                found[path] = path.stat()
        taken, now_s = sum(status.st_size for status in found.values()), self._clock()
        room = (self._free_bytes(self._folder) + taken) // _SHARE_OF_FREE - taken + found.pop(part).st_size
        for path, status in sorted(found.items(), key=lambda item: item[1].st_mtime):
            idle_s = now_s - status.st_mtime
            if idle_s > _IDLE_S or (idle_s > _IN_USE_S and room < nbytes):
                path.unlink(missing_ok=True)
                room += status.st_size
        return room


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:24]


def _is_there(path: Path) -> bool:
    """Whether a copy is there, which counts as use of it."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False


def _too_large(tar: CompressedTar, nbytes: int, max_bytes: int, folder: Path) -> str:
    if nbytes <= max_bytes:
        return (
            f"{tar.file} would unpack to more than {_MAX_TIMES} times its {in_bytes(tar.size)}, as no tar of samples "
            "does: unpack it yourself, to a plain tar, if it is right"
        )
    return (
        f"{tar.file} would unpack to more than {in_bytes(max_bytes)}, half of the free disk of {folder} beside its "
        "copies: set XDG_CACHE_HOME to a larger disk, or unpack it yourself, to a plain tar"
    )


def _plain(store: Versioned, tar: CompressedTar) -> Iterator[bytes]:
    """The bytes of the plain tar, one after another. Python's own reader takes a header of any length byte by byte."""
    file, inflate, left = io.BufferedReader(_Compressed(store, tar), _PIECE), zlib.decompressobj(_OF_GZIP), b""
    try:
        while data := left or file.read(_FED):
            left = b""
            if not inflate.eof or (data := data.lstrip(b"\0")):  # zeros may fill up what is behind a member
                inflate = zlib.decompressobj(_OF_GZIP) if inflate.eof else inflate
                yield inflate.decompress(data, _PIECE)
                left = inflate.unconsumed_tail or inflate.unused_data
        yield inflate.flush()
    except zlib.error as error:
        raise DataError(f"{tar.file} is not compressed by gzip, or damaged: make it again") from error
    if not inflate.eof:
        raise DataError(f"{tar.file} is cut off: make it again")


class _Compressed(io.RawIOBase):
    """The bytes of a compressed tar as they lie in its store. For one thread."""

    def __init__(self, store: Versioned, tar: CompressedTar) -> None:
        self._store = store
        self._tar = tar
        self._place = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        length = min(len(buffer), self._tar.size - self._place)
        if not length:
            return 0
        data, version = self._store.read_version(self._tar.file, self._place, length)
        if is_other_version(self._tar.version, version):
            raise ObjectNotFound(f"{self._tar.file} has changed since it was listed")
        buffer[:length] = data
        self._place += length
        return length


class TarReader:
    """A ``Versioned`` whose objects are compressed tars, read at places of the unpacked ones. Safe for threads.

    Args:
        store: store that holds the tars.
        url: address of the folder to which their names are relative.
        copies: copies that keep compressed archives unpacked.
    """

    def __init__(self, store: Versioned, url: str, copies: TarCopies) -> None:
        self._store = store
        self._url = url
        self._copies = copies
        self._open: dict[str, tuple[FolderStore, str]] = {}

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; the first read of a tar unpacks it, where no copy is there.

        Raises:
            ObjectNotFound: The tar was changed or removed since it was listed.
        """
        tar = CompressedTar.parse(object)
        try:
            return self._read(tar, object, offset, length), tar.version
        except ObjectNotFound:
            if self._open.pop(object, None) is None:
                raise
        # Its copy was there before, and has gone.
        return self._read(tar, object, offset, length), tar.version

    def entry_of(self, tar: CompressedTar) -> Entry:
        """The entry of a tar, of the size that it has unpacked; raises as ``TarCopies.path_of`` does."""
        size = self._copies.path_of(self._store, self._url, tar).stat().st_size
        return Entry(tar.file, size, tar.version)

    def within(self, tar: CompressedTar) -> Versioned:
        """The same reader under the name that the tar has in its store, as a listing knows it."""
        return _Named(self, str(tar))

    def _read(self, tar: CompressedTar, object: str, offset: int, length: int) -> Buffer:
        if (found := self._open.get(object)) is None:
            found = self._open[object] = self._opened(tar)
        folder, name = found
        return folder.read(name, offset, length)

    def _opened(self, tar: CompressedTar) -> tuple[FolderStore, str]:
        try:
            path = self._copies.path_of(self._store, self._url, tar)
        except DataError as error:  # what is wrong with it was said when it was listed
            raise ObjectNotFound(f"{error}; it may have changed since it was listed") from error
        return FolderStore(str(path.parent)), path.name


class _Named:
    """One object of a reader, whatever it is called."""

    def __init__(self, reader: TarReader, object: str) -> None:
        self._reader = reader
        self._object = object

    def read(self, object: str, offset: int, length: int) -> Buffer:
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:  # noqa: ARG002
        return self._reader.read_version(self._object, offset, length)


def tar_reader(store: ObjectStore) -> TarReader:
    """What reads samples in the compressed tars of a store, from copies in the user's cache folder."""
    return TarReader(store, base_url(store, store.url), TarCopies(cache_folder() / "unpacked"))


class Member(NamedTuple):
    """A file in a tar.

    Attributes:
        name: the name as it stands there, without a leading ``./``.
        offset: the place where its bytes start.
        size: number of rows.
        contents: the bytes, where they were asked for.
    """

    name: str
    offset: int
    size: int
    contents: bytes | None


def members(store: Versioned, shard: Entry, contents_of: tuple[str, ...], others: list[str]) -> Iterator[Member]:
    """The plain files of a tar, in its order; folders are passed over.

    Names may be long in GNU's or in PAX's way, and hold any characters that UTF-8 has.

    Args:
        store: store that holds the tar.
        shard: the entry in the store's listing.
        contents_of: endings of the names whose contents are wanted.
        others: function that takes the names of links, pipes and devices, which hold nothing to read.

    Raises:
        DataError: the tar is cut off, damaged, compressed, or has changed since it was listed.
        StoreError: the store failed.
    """
    ranges = ObjectRanges(store, shard)
    with _said(shard.object), tarfile.TarFile(fileobj=cast(IO[bytes], ranges), encoding="utf-8") as tar:
        for info in tar:
            if not info.isreg():
                others += [] if info.isdir() else [info.name]
                continue
            if info.issparse():
                raise DataError(f"{info.name!a} in {shard.object} is a sparse file: pack the shard without --sparse")
            wanted = info.name.lower().endswith(contents_of)
            contents = ranges.at(info.offset_data, info.size) if wanted else None
            yield Member(_checked(info.name.removeprefix("./"), shard.object), info.offset_data, info.size, contents)
        # The module stops at whatever it cannot read as if that were the end.
        end = ranges.at(tar.offset, tarfile.BLOCKSIZE)
        if len(end) < tarfile.BLOCKSIZE or any(end):
            raise DataError(_cut_off(shard.object))


@contextmanager
def _said(shard: str) -> Iterator[None]:
    try:
        yield
    except tarfile.ReadError as error:
        if "unexpected end of data" in str(error):
            raise DataError(_cut_off(shard)) from error
        raise DataError(f"{shard} is no plain tar (compressed ones cannot be read at an offset), or damaged") from error
    except (tarfile.TarError, ValueError) as error:  # of numbers that are none, in the head of a sparse file
        raise DataError(f"{shard} is damaged: make it again or take it away") from error


def _cut_off(shard: str) -> str:
    return f"{shard} is cut off or damaged: what follows its last whole member is no end of a tar; make it again"


def _checked(name: str, shard: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name!a} in {shard} cannot be written in UTF-8: rename it") from error
    return name


_RULE = "frostline webdataset 14"
# Shards indexed at once: each waits for its store most of the time.
_THREADS = 16
# Kinds of members of keys that have no sample.
_KINDS_SHOWN = 8


CLASS_MEMBER = "__classes__"
"""The member of a shard that holds the table of classes: the readers of others pass over such names."""

TYPE_MEMBER = "__types__"
"""The member that holds the types of columns which JSON has not, as a schema of Arrow."""


class _Shard(NamedTuple):
    """What was read of a shard.

    Attributes:
        table: the samples.
        classes: table of classes that it declares; empty where it declares none.
        left_out: keys without a sample.
    """

    table: pa.Table
    classes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]


class ShardSample(NamedTuple):
    """A sample of a shard.

    Attributes:
        name: the shard's and the member's.
        offset: offset of the image's member in bytes.
        length: length of the image in bytes.
        said: the label, as ``label_text`` gives it; None where nothing says one.
        about: the fields of its JSON.
        mask: the member that is its mask; None where there is none.
        other: label that its JSON says beside ``.cls``, which counts.
    """

    name: str
    offset: int
    length: int
    said: str | None
    about: dict[str, Any]
    mask: Member | None = None
    other: str | None = None


class WebDataset:
    """Tars of ``key.jpg``, ``key.cls`` and ``key.json``; what is before the first dot of a member's name is its key.

    The image may also be called ``key.image.jpg``, and the only others of their kind ``key.label.cls`` and
    ``key.meta.json``. A member such as ``key.mask.png`` or ``key.seg.npy`` is its mask.
    Where a key has no image, its sound is the sample.

    A label is what ``.cls`` says, else a field of the JSON, else the first folder of the key; numbers or names. A field
    ``label`` that is null says that there is none. A member ``__classes__`` is a table of all classes: their names in
    the order of their numbers, as JSON. The other scalar fields of the JSON become columns, and so do its lists. Shards
    whose names or folders say ``train``, ``val``, ``test`` or the like are splits (``formats.split_names``).
    """

    name = "webdataset"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one tar is enough."""
        return any(_is_shard(entry) for entry in entries)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, filter(_is_shard, entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; of shards that are new or have changed, the headers are read.

        Where images have masks, their heads are read too: a mask must be as large as its image.
        """
        shards = sorted(filter(_is_shard, entries))
        if not shards:
            raise EmptyDataset(f"{store.url} holds no WebDataset shards (such as train-000000.tar)")
        return _listed(store, shards, partial(_shard, store, _known(before)), self.digest(entries))


class CompressedTars:
    """The same shards, compressed as a whole: ``.tar.gz`` or ``.tgz``.

    Nothing in them has a place to read at, so that each is unpacked once, into the user's cache folder of the machine
    that reads it. Where plain tars lie beside them, those are the data.
    """

    name = "tar.gz"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one is enough."""
        return any(_is_compressed(entry) for entry in entries)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(f"{_RULE} tar.gz", filter(_is_compressed, entries))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; shards that are new or have changed are unpacked."""
        shards = sorted(filter(_is_compressed, entries))
        if not shards:
            raise EmptyDataset(f"{store.url} holds no compressed shards (such as train-000000.tar.gz)")
        read = partial(_compressed_shard, tar_reader(store), _known(before, _file_of))
        return _listed(store, shards, read, self.digest(entries), UNPACKED, _file_of)


def _file_of(object: str) -> str:
    return CompressedTar.parse(object).file


def _listed(
    store: ObjectStore,
    shards: Sequence[Entry],
    read: Callable[[ThreadPoolExecutor, Entry], _Shard],
    digest: str,
    reading: str = OBJECTS,
    file_of: Callable[[str], str] = str,
) -> ListedSamples:
    """The samples of all shards, of which several are looked into at once."""
    with ThreadPoolExecutor(_THREADS, "frostline-index") as threads, ThreadPoolExecutor(_THREADS) as heads:
        found = list(threads.map(partial(read, heads), shards))
    names = [shard.object for shard in shards]
    classes, declared = common_table(shard.classes for shard in found)
    tables = [with_names(shard.table, SAID, shard.classes or classes) for shard in found]
    tables, splits = divided_by_keys(with_partitions(tables, names), names, SAID)
    table, is_divided = with_splits(join_tables(tables), names, list(map(len, tables)))
    if not len(table):
        left = "".join(f"; {lost}" for lost in sum_left_out(left for shard in found for left in shard.left_out))
        raise EmptyDataset(f"the {len(shards)} tars at {store.url} hold no images or sounds{left}")
    said = encode_labels(table[SAID], classes)
    listed = ListedSamples(
        table=finish_table(table, said),
        classes=said.classes,
        digest=digest,
        reading=reading,
        divided_by_names=is_divided or splits,
        has_named_classes=said.are_names,
        declared=declared if said.classes == classes or not declared else "some",
        used=tuple(shard.object for shard in shards),
        left_out=(*(left for shard in found for left in shard.left_out), *contradictions_of_shards(tables, names)),
    )
    return with_parts(listed, [shard.table for shard in found], file_of)


def samples_of(shard: str, found: Iterable[Member]) -> list[ShardSample]:
    """Group the members of a shard by their keys.

    Raises:
        DataError: two members have one name, or a label or JSON makes no sense.
    """
    groups = _groups(shard, found)
    return [one for key, group in groups.items() if (one := _sample(shard, key, group)) is not None]


def _left_out(shard: str, found: Iterable[Member], others: Sequence[str]) -> tuple[LeftOut, ...]:
    """The keys of a shard without an image or a sound, links, hidden members, and kinds of members beside samples."""
    groups = _groups(shard, found)
    lost = [key for key, group in groups.items() if _encoded(shard, key, group) is None]
    kinds = ", ".join(sorted({f".{kind}" for key in lost for kind in groups[key]})[:_KINDS_SHOWN])
    hidden = {member.name for member in found if is_hidden_member(member.name)} - {CLASS_MEMBER, TYPE_MEMBER}
    unread = {kind for key, group in groups.items() for kind in _unread_kinds(shard, key, group)}
    return (
        *of_names(KEYS, f"with neither an image nor a sound, but {kinds}", [f"{shard}/{key}" for key in lost], shard),
        *of_names(KEYS, "with a hidden name", sorted(f"{shard}/{name}" for name in hidden), shard),
        *of_names(KEYS, "that are links, pipes or devices", [f"{shard}/{name}" for name in others], shard),
        *of_names(COLUMNS_LEFT, "of members that are not read", sorted(unread), shard),
    )


def _unread_kinds(shard: str, key: str, group: dict[str, Member]) -> Iterator[str]:
    """The kinds of those members of a sample of which nothing is taken."""
    if (encoded := _encoded(shard, key, group)) is None:
        return
    used = (encoded, _called(group, "cls"), _called(group, "json"), _mask(shard, key, group))
    yield from (f".{kind}" for kind, member in group.items() if member not in used)
    if (about := used[2]) is not None and not (about.contents or b"").lstrip(b" \t\r\n\xef\xbb\xbf").startswith(b"{"):
        yield ".json without an object"


def _groups(shard: str, found: Iterable[Member]) -> dict[str, dict[str, Member]]:
    groups: dict[str, dict[str, Member]] = {}
    for member in found:
        key, kind = _split(member.name)
        if is_hidden_member(member.name):
            continue
        if groups.setdefault(key, {}).setdefault(kind, member) is not member:
            raise DataError(f"{shard} holds {member.name!r} twice: make it again")
    return groups


def _sample(shard: str, key: str, group: dict[str, Member]) -> ShardSample | None:
    found = _encoded(shard, key, group)
    if found is None:
        return None
    said_beside, description = _called(group, "cls"), _called(group, "json")
    about = _json(shard, description) if description else {}
    # A copy that Frostline made has the number of the class for others, and its name in the JSON.
    named = label_field(about)
    field = None if said_beside and SOURCE not in about else named
    other = None if named is None or field else label_text(about[named])
    said = _label(shard, key, said_beside, about, field)
    # What says the label is no metadata, else a copy of a copy would have it as a column.
    about = {name: value for name, value in about.items() if name != field}
    return ShardSample(f"{shard}/{found.name}", found.offset, found.size, said, about, _mask(shard, key, group), other)


def _encoded(shard: str, key: str, group: dict[str, Member]) -> Member | None:
    """The image, ``key.jpg``, else the only other that is no mask, such as ``key.image.jpg``; else the next kind."""
    members = (_of_a_kind(shard, key, group, suffixes) for suffixes in KINDS)
    return next(filter(None, members), None)


def _of_a_kind(shard: str, key: str, group: dict[str, Member], suffixes: frozenset[str]) -> Member | None:
    if (plain := next((member for kind, member in group.items() if f".{kind}" in suffixes), None)) is not None:
        return plain
    named = {kind: member for kind, member in group.items() if f".{kind.rpartition('.')[2]}" in suffixes}
    found = [member for kind, member in named.items() if not any(_is_mask(kind, field) for field in MASK_FIELDS)]
    if len(found) > 1:
        raise DataError(f"{found[0].name!r} and {found[1].name!r} in {shard} would both be the sample of {key!r}")
    return next(iter(found), None)


def _called(group: dict[str, Member], suffix: str) -> Member | None:
    """The member ``key.cls``, else the only one such as ``key.label.cls``."""
    longer = [member for kind, member in group.items() if kind.endswith(f".{suffix}")]
    return group.get(suffix) or (longer[0] if len(longer) == 1 else None)


def _mask(shard: str, key: str, group: dict[str, Member]) -> Member | None:
    for field in MASK_FIELDS:
        found = [member for kind, member in group.items() if _is_mask(kind, field)]
        if len(found) > 1:
            raise DataError(f"{found[0].name!r} and {found[1].name!r} in {shard} would both be the mask of {key!r}")
        if found:
            return found[0]
    return None


def _is_mask(kind: str, field: str) -> bool:
    name, _, suffix = kind.rpartition(".")
    return name.rpartition(".")[2] == field and f".{suffix}" in IMAGE_SUFFIXES


def _label(shard: str, key: str, beside: Member | None, about: dict[str, Any], field: str | None) -> str | None:
    try:
        if field is not None:
            return label_text(about[field], is_exact=SOURCE in about)
        if beside is not None:
            return text_label((beside.contents or b"").decode("utf-8-sig"))
    except DataError as error:
        raise DataError(f"the label of {key!r} in {shard}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the label of {key!r} in {shard} is no name and no whole number") from error
    folder, slash, _ = key.partition("/")
    return label_text(folder) if slash else None


def _json(shard: str, member: Member) -> dict[str, Any]:
    try:
        about = json.loads(member.contents or b"")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{member.name!r} in {shard} is no JSON") from error
    return about if isinstance(about, dict) else {}


def _split(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return f"{folder}{slash}{key}", kind.lower()


def _known(before: ListedSamples | None, object_of: Callable[[str], str] = str) -> dict[tuple[str, str], _Shard]:
    """What was read of shards before, by their names and etags."""
    if before is None or before.declared == "some":  # nobody knows any more which of them declares a table of classes
        return {}
    classes = before.classes if before.declared else ()
    return {
        (name, etag): _Shard(part, classes, tuple(left for left in before.left_out if left.object == name))
        for (name, etag), part in known_parts(before, object_of).items()
    }


def _shard(
    store: Versioned, known: Mapping[tuple[str, str], _Shard], heads: ThreadPoolExecutor, shard: Entry
) -> _Shard:
    if shard.etag and (shard.object, shard.etag) in known:
        return known[shard.object, shard.etag]
    others: list[str] = []
    found = list(members(store, shard, (".cls", ".json", CLASS_MEMBER, TYPE_MEMBER), others))
    said = {member.name: member.contents or b"" for member in found if member.name in (CLASS_MEMBER, TYPE_MEMBER)}
    samples = samples_of(shard.object, found)
    columns, left = columns_of([sample.about for sample in samples], shard.object)
    table = with_types(_table(store, heads, shard, samples, columns), said.get(TYPE_MEMBER, b""))
    classes = classes_in(said.get(CLASS_MEMBER, b""))
    table = with_names(table, SAID, classes)
    beside = [sample.other for sample in samples]
    apart = contradictions_in_shard(shard.object, table["name"], table[SAID], beside)
    return _Shard(table, classes, (*_left_out(shard.object, found, others), *left, *apart))


def _table(
    store: Versioned,
    heads: ThreadPoolExecutor,
    shard: Entry,
    samples: Sequence[ShardSample],
    columns: Mapping[str, pa.Array],
) -> pa.Table:
    return pa.table(
        {
            "name": pa.array([sample.name for sample in samples], pa.string()),
            "object": pa.array([shard.object] * len(samples), pa.string()),
            "offset": pa.array([sample.offset for sample in samples], pa.int64()),
            "length": pa.array([sample.length for sample in samples], pa.int64()),
            "etag": pa.array([shard.etag] * len(samples), pa.string()),
            SAID: pa.array([sample.said for sample in samples], pa.string()),
            **named_columns(columns),
            **_targets(store, heads, shard, samples),
        }
    )


def _compressed_shard(
    reader: TarReader, known: Mapping[tuple[str, str], _Shard], heads: ThreadPoolExecutor, shard: Entry
) -> _Shard:
    if shard.etag and (shard.object, shard.etag) in known:
        return known[shard.object, shard.etag]
    tar = CompressedTar.of(shard)
    found = _shard(reader.within(tar), {}, heads, reader.entry_of(tar))
    table = found.table
    for column in {"object", TARGET_COLUMNS.names[0]}.intersection(table.schema.names):
        place = table.schema.get_field_index(column)
        table = table.set_column(place, column, pc.if_else(pc.not_equal(table[column], ""), str(tar), ""))
    return found._replace(table=table)


def _targets(
    store: Versioned, heads: ThreadPoolExecutor, shard: Entry, samples: Sequence[ShardSample]
) -> dict[str, pa.Array]:
    """The columns of masks, where one sample of a shard has one."""
    if not any(sample.mask for sample in samples):
        return {}
    masks = [
        Mask(shard.object, sample.mask.offset, sample.mask.size, shard.etag) if sample.mask else NO_MASK
        for sample in samples
    ]
    found = heads.map(
        lambda sample: size_at(store, shard.object, sample.offset, sample.length) if sample.mask else (0, 0), samples
    )
    return target_columns(masks, list(found))


def _is_compressed(entry: Entry) -> bool:
    return entry.object.lower().endswith(TAR_GZ) and not is_hidden(entry.object)


def _is_shard(entry: Entry) -> bool:
    return entry.object.lower().endswith(".tar") and not is_hidden(entry.object)
