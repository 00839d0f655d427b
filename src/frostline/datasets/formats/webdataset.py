"""WebDataset shards: samples are members of tars that share a key, read at their places so that order is free."""

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import OBJECTS, UNPACKED
from frostline.datasets.archives.copies import CompressedTar
from frostline.datasets.archives.reader import TarReader, tar_reader
from frostline.datasets.formats.base import TARGET_COLUMNS, ListedSamples, digest_of, is_hidden
from frostline.datasets.formats.folders import IMAGE_SUFFIXES, KINDS
from frostline.datasets.formats.labels import LABEL_FIELDS, SOURCE, columns_of, joined, labelled, said_by
from frostline.datasets.formats.ranges import ObjectRanges
from frostline.datasets.formats.split_names import with_splits
from frostline.datasets.formats.tables import SAID, Parts, finished, known_parts
from frostline.datasets.formats.targets import MASK_FIELDS, NO_MASK, Mask, size_at, target_columns
from frostline.errors import DataError, EmptyDataset
from frostline.stores.base.protocols import Entry, ObjectStore, Versioned
from frostline.stores.base.urls import TAR_GZ

__all__ = ("CompressedTars", "Member", "WebDataset", "members", "samples_of")


class Member(NamedTuple):
    """A file in a tar.

    Attributes:
        name: as it stands there, without a leading ``./``.
        offset: where its bytes start.
        size: how many they are.
        contents: its bytes, where they were asked for.
    """

    name: str
    offset: int
    size: int
    contents: bytes | None


def members(store: Versioned, shard: Entry, contents_of: tuple[str, ...]) -> Iterator[Member]:
    """The plain files of a tar, in its order; links and folders are passed over.

    Names may be long in GNU's or in PAX's way, and hold any characters that UTF-8 has.

    Args:
        store: store that holds the tar.
        shard: its entry in the store's listing.
        contents_of: endings of the names whose contents are wanted.

    Raises:
        DataError: the tar is cut off, damaged, compressed, or has changed since it was listed.
        StoreError: the store failed.
    """
    ranges = ObjectRanges(store, shard)
    with _said(shard.object), tarfile.TarFile(fileobj=cast(IO[bytes], ranges), encoding="utf-8") as tar:
        for info in tar:
            if not info.isreg():
                continue
            if info.issparse():
                raise DataError(f"{info.name!a} in {shard.object} is a sparse file: pack the shard without --sparse")
            wanted = info.name.lower().endswith(contents_of)
            contents = ranges.at(info.offset_data, info.size) if wanted else None
            yield Member(_checked(info.name.removeprefix("./"), shard.object), info.offset_data, info.size, contents)
        # The module stops at whatever it cannot read as if that were the end.
        if not _is_end(ranges.at(tar.offset, tarfile.BLOCKSIZE)):
            raise DataError(_cut_off(shard.object))


@contextmanager
def _said(shard: str) -> Iterator[None]:
    try:
        yield
    except tarfile.ReadError as error:
        if "unexpected end of data" in str(error):
            raise DataError(_cut_off(shard)) from error
        raise DataError(f"{shard} is no plain tar (compressed ones have no places to read at), or damaged") from error
    except tarfile.TarError as error:
        raise DataError(f"{shard} is damaged: make it again or take it away") from error


def _cut_off(shard: str) -> str:
    return f"{shard} is cut off or damaged: what follows its last whole member is no end of a tar; make it again"


def _is_end(block: bytes) -> bool:
    return len(block) == tarfile.BLOCKSIZE and not any(block)


def _checked(name: str, shard: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name!a} in {shard} cannot be written in UTF-8: rename it") from error
    return name


_RULE = "frostline webdataset 6"
# Shards indexed at once: each waits for its store most of the time.
_THREADS = 16


class ShardSample(NamedTuple):
    """A sample of a shard.

    Attributes:
        name: the shard's and the member's.
        offset: offset of the image's member in bytes.
        length: length of the image in bytes.
        said: its label, as text; None where nothing says one.
        about: the fields of its JSON.
        mask: the member that is its mask; None where there is none.
    """

    name: str
    offset: int
    length: int
    said: str | None
    about: dict[str, Any]
    mask: Member | None = None


class WebDataset:
    """Tars of ``key.jpg``, ``key.cls`` and ``key.json``; what is before the first dot of a member's name is its key.

    The image may also be called ``key.image.jpg``, and the only others of their kind ``key.label.cls`` and
    ``key.meta.json``. A member such as ``key.mask.png`` or ``key.seg.npy`` is its mask.
    Where a key has no image, its sound is the sample.

    A label is what ``.cls`` says, else a field of the JSON, else the first folder of the key; numbers or names. A field
    ``label`` that is null says that there is none. The other scalar fields of the JSON become columns, and
    so do its lists. Shards whose names or folders say ``train``, ``val``, ``test`` or the like are splits
    (``formats.split_names``).
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
        return _listed(store, shards, partial(_table, store, known_parts(before)), self.digest(entries))


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
        known = known_parts(before, lambda object: CompressedTar.parse(object).file)
        table_of = partial(_compressed_table, tar_reader(store), known)
        return _listed(store, shards, table_of, self.digest(entries), UNPACKED)


def _listed(
    store: ObjectStore,
    shards: Sequence[Entry],
    table_of: Callable[[ThreadPoolExecutor, Entry], pa.Table],
    digest: str,
    reading: str = OBJECTS,
) -> ListedSamples:
    """The samples of all shards, of which several are looked into at once."""
    with ThreadPoolExecutor(_THREADS, "frostline-index") as threads, ThreadPoolExecutor(_THREADS) as heads:
        tables = list(threads.map(partial(table_of, heads), shards))
    table, is_divided = with_splits(joined(tables), [shard.object for shard in shards], list(map(len, tables)))
    if not len(table):
        raise EmptyDataset(f"the {len(shards)} tars at {store.url} hold no images or sounds")
    said = labelled(table[SAID].to_pylist())
    return ListedSamples(
        table=finished(table, said),
        classes=said.classes,
        digest=digest,
        reading=reading,
        divided_by_names=is_divided,
    )


def samples_of(shard: str, found: Iterable[Member]) -> list[ShardSample]:
    """Group the members of a shard by their keys.

    Raises:
        DataError: two members have one name, or a label or JSON makes no sense.
    """
    groups: dict[str, dict[str, Member]] = {}
    for member in found:
        key, kind = _split(member.name)
        if is_hidden(member.name) or key.startswith("__"):
            continue
        if groups.setdefault(key, {}).setdefault(kind, member) is not member:
            raise DataError(f"{shard} holds {member.name!r} twice: make it again")
    return [one for key, group in groups.items() if (one := _sample(shard, key, group)) is not None]


def _sample(shard: str, key: str, group: dict[str, Member]) -> ShardSample | None:
    found = _encoded(shard, key, group)
    if found is None:
        return None
    said_beside, description = _called(group, "cls"), _called(group, "json")
    about = _json(shard, description) if description else {}
    # A copy that Frostline made has the number of the class for others, and its name in the JSON.
    field = None if said_beside and SOURCE not in about else _label_field(about)
    said = _label(shard, key, said_beside, about, field)
    # What says the label is no metadata, else a copy of a copy would have it as a column.
    about = {name: value for name, value in about.items() if name != field}
    return ShardSample(f"{shard}/{found.name}", found.offset, found.size, said, about, _mask(shard, key, group))


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


def _label_field(about: dict[str, Any]) -> str | None:
    names = [name for name in LABEL_FIELDS if about.get(name) is not None]
    return "label" if "label" in about else next(iter(names), None)


def _label(shard: str, key: str, beside: Member | None, about: dict[str, Any], field: str | None) -> str | None:
    try:
        if field is not None:
            return said_by(about[field])
        if beside is not None:
            return said_by((beside.contents or b"").decode())
    except DataError as error:
        raise DataError(f"the label of {key!r} in {shard}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the label of {key!r} in {shard} is no name and no whole number") from error
    folder, slash, _ = key.partition("/")
    return folder if slash else None


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


def _table(store: Versioned, known: Parts, heads: ThreadPoolExecutor, shard: Entry) -> pa.Table:
    if shard.etag and (shard.object, shard.etag) in known:
        return known[shard.object, shard.etag]
    samples = samples_of(shard.object, members(store, shard, (".cls", ".json")))
    return pa.table(
        {
            "name": pa.array([sample.name for sample in samples], pa.string()),
            "object": pa.array([shard.object] * len(samples), pa.string()),
            "offset": pa.array([sample.offset for sample in samples], pa.int64()),
            "length": pa.array([sample.length for sample in samples], pa.int64()),
            "etag": pa.array([shard.etag] * len(samples), pa.string()),
            SAID: pa.array([sample.said for sample in samples], pa.string()),
            **columns_of([sample.about for sample in samples]),
            **_targets(store, heads, shard, samples),
        }
    )


def _compressed_table(reader: TarReader, known: Parts, heads: ThreadPoolExecutor, shard: Entry) -> pa.Table:
    if shard.etag and (shard.object, shard.etag) in known:
        return known[shard.object, shard.etag]
    tar = CompressedTar.of(shard)
    table = _table(reader.within(tar), {}, heads, reader.entry_of(tar))
    for column in {"object", TARGET_COLUMNS.names[0]}.intersection(table.schema.names):
        place = table.schema.get_field_index(column)
        named = pc.if_else(pc.not_equal(table[column], ""), str(tar), "")
        table = table.set_column(place, column, named)
    return table


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
