"""Lists of URLs with labels, as CSV or Parquet: samples are read wherever the URLs lead within the roots.

Reads samples whose objects are URLs of their own: each must lie within one of the roots that may be read.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

import pyarrow as pa

from frostline.core import URLS
from frostline.core.errors import AccessDenied, BadRequest, DataError, EmptyDataset, ObjectNotFound, SettingError
from frostline.datasets.formats.base import (
    ListedSamples,
    ManifestColumns,
    digest_of,
)
from frostline.datasets.formats.folders import (
    NO_MASK,
    Mask,
    Size,
    is_sample,
    known_sizes,
    size_at,
    target_columns,
)
from frostline.datasets.formats.labels import (
    encode_labels,
    join_tables,
    with_splits,
)
from frostline.datasets.formats.lists import ListRows, ObjectFinder, is_list_of_samples, is_text_list, read_list
from frostline.datasets.formats.tables import SAID, finish_table
from frostline.stores.local import base_url
from frostline.stores.open import open_store
from frostline.stores.protocols import (
    NO_LIMITS,
    UNREADABLE,
    Buffer,
    Described,
    Entry,
    ObjectStore,
    StoreLimits,
    Versioned,
)
from frostline.stores.urls import is_within, normalise_url, object_url, parse_url

__all__ = (
    "UrlLists",
    "UrlReader",
    "locate_images",
    "places_in",
)


def _place_of(url: str) -> str:
    """The widest root that a URL lies in: all files of this machine, or its bucket, options and all.

    Raises:
        SettingError: Frostline cannot read this URL.
    """
    path, mark, options = normalise_url(url).partition("?")
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}{mark}{options}" if scheme != "file" else "file:///"


def places_in(columns: ManifestColumns) -> Iterator[str]:
    """The widest root of each object of a table of URLs, and of each mask."""
    for name in ("object", "target_object"):
        if name in columns.table.column_names:
            yield from (_place_of(url) for url in columns.texts(name) if url)


def _folder_of(url: str) -> str:
    """The root of what lies beside the object of a canonical URL."""
    path, mark, options = url.partition("?")
    return path.rpartition("/")[0] + mark + options


class UrlReader:
    """A ``Versioned`` whose objects are URLs. Safe for threads.

    Args:
        roots: the canonical URLs; what lies in none of them is not read, and no name leads out of one.
        limits: limits on the stores that may be read.
    """

    def __init__(self, roots: Iterable[str], limits: StoreLimits = NO_LIMITS) -> None:
        self._limits = limits
        self._roots = tuple(roots)
        self._lock = threading.Lock()
        self._open: dict[str, Versioned] = {}

    def check(self, object: str) -> None:
        """Do nothing if a URL may be read.

        Raises:
            BadRequest: the name lies in no root, or is no URL.
        """
        self._split(object)

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        root, name = self._split(object)
        with self._lock:
            if root not in self._open:
                self._open[root] = open_store(root, self._limits)
            store = self._open[root]
        return store.read_version(name, offset, length)

    def _split(self, object: str) -> tuple[str, str]:
        """The root in which a URL lies, and its name there."""
        try:
            root = next((root for root in self._roots if "://" in object and is_within(object, root)), None)
            inner, outer = parse_url(object), parse_url(root or object)
        except SettingError as error:
            raise BadRequest(f"samples.objects: {error}") from error
        if root is None or inner.path == outer.path:
            raise BadRequest(f"samples.objects: {object[:200]!a} does not lie within {', '.join(self._roots)}")
        return root, inner.path[len(outer.path) :].lstrip("/")


_AT_ONCE = 32
# A listing gives a thousand names a request, one request after another, while 32 objects are asked for at once.
_LISTED_FOR_EACH = 30
# Files are asked for at no cost, and web servers seldom list.
_NEVER_LISTED = ("file", "http", "https")


def _entries_of(urls: Iterable[str]) -> dict[str, Entry]:
    """What the objects of canonical URLs are, by URL; those that are not there are left out.

    Raises:
        DataNotFound: a bucket or folder that must be listed is not there.
        AccessDenied: a store refused.
        StoreError: a store failed.
    """
    by_place: defaultdict[str, list[str]] = defaultdict(list)
    for url in urls:
        by_place[_place_of(url)].append(url)
    found: dict[str, Entry] = {}
    for place, some in by_place.items():
        found |= _of_place(place, some)
    return found


def _of_place(place: str, urls: Sequence[str]) -> dict[str, Entry]:
    scheme, store = parse_url(place).scheme, open_store(place)
    if not isinstance(store, Described):
        return {url: entry for folder in _outer(urls) for url, entry in _listed(folder)}
    wanted = set(urls)
    found = {} if scheme in _NEVER_LISTED else _listed_where_many(wanted)
    rest = [url for url in urls if url not in found]
    if scheme == "file":
        return found | _described(rest, (_described_or_none(store, url) for url in rest))
    with ThreadPoolExecutor(_AT_ONCE, "frostline-describe") as threads:
        return found | _described(rest, threads.map(lambda url: _described_or_none(store, url), rest))


def _described(urls: Sequence[str], entries: Iterable[Entry | None]) -> dict[str, Entry]:
    return {url: entry for url, entry in zip(urls, entries, strict=True) if entry is not None}


def _described_or_none(store: Described, url: str) -> Entry | None:
    try:
        return store.describe(parse_url(url).path.lstrip("/"))
    except ObjectNotFound:
        return None


def _listed_where_many(wanted: set[str]) -> dict[str, Entry]:
    """What listings told before they became longer than asking for each object takes."""
    found: dict[str, Entry] = {}
    for folder, count in _outer(wanted).items():
        if count > _AT_ONCE:
            try:
                listed = islice(_listed(folder), _LISTED_FOR_EACH * count)
                found |= {url: entry for url, entry in listed if url in wanted}
            except AccessDenied:
                continue  # many may read what they may not list
    return found


def _listed(folder: str) -> Iterator[tuple[str, Entry]]:
    listed = (entry for entry in open_store(folder).list() if entry.size != UNREADABLE)
    return ((object_url(folder, entry.object), entry) for entry in listed)


def _outer(urls: Iterable[str]) -> Mapping[str, int]:
    """The folders of objects, without those that lie in another, and how many objects lie in each."""
    counts: defaultdict[str, int] = defaultdict(int)
    for url in urls:
        counts[_folder_of(url)] += 1
    outer: dict[str, int] = {}
    last = ""
    for folder in sorted(counts):
        last = last if last and is_within(folder, last) else folder
        outer[last] = outer.get(last, 0) + counts[folder]
    return outer


_RULE = "frostline url lists 7"
_QUERY = "what follows may be a secret, and addresses are kept; list them without it, or as %3F where a name has one"
_WEB = {"http": _QUERY, "https": _QUERY}
# Of these roots, a question mark begins options.
_PLACED = ("s3", "gs", "az", "memory")
_OF_PLACED = "no URL can name such an object of a bucket; rename it"
# What a column of masks' URLs is called here until it is known what lies there.
_MASK = "/mask"
_HEADS_AT_ONCE = 32
_Key = tuple[str, str]
# Of one byte, so that whoever reads it is told that it is not there; that sample is then left out, named and counted.
_MISSING = Entry("", 1, "")


class UrlLists:
    """Files with a column of URLs, or of names relative to the data's root, and one of labels, or of masks' URLs.

    Where the data is one such file, names are relative to its folder.

    Objects that do not lie beside the lists are asked for their sizes and etags once; those that are not there stay
    samples, which are left out, named and counted when they are read. The digest is that of the lists and of the images
    beside them: of those elsewhere a change is noticed when they are read, and by whoever asks for them again. Lists
    that are Parquet files are only read where this format is named: other Parquet files hold the images themselves.
    Lists that are called ``train``, ``val``, ``test`` or the like are splits (``formats.split_names``).
    """

    name = "urls"
    is_incremental = True

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one file of CSV or of JSON lines is enough."""
        return any(map(is_text_list, entries))

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, (entry for entry in entries if is_list_of_samples(entry) or is_sample(entry.object)))

    def find_current(self, urls: Iterable[str]) -> Mapping[str, Entry]:
        """See ``ExternalReferences.find_current``."""
        return _entries_of(urls)

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:
        """See ``Format.read``; lists are small, and what they lead to may have changed, so all is looked at again.

        Only the sizes of images that have masks are taken from before.
        """
        lists = sorted(filter(is_list_of_samples, entries))
        if not lists:
            raise EmptyDataset(f"{store.url} holds no list of URLs (such as labels.csv)")
        folder = base_url(store, store.url)
        finder = ObjectFinder(entries)
        rows = [read_list(store, entry) for entry in lists]
        tables = [_table(some, entry, folder, finder) for some, entry in zip(rows, lists, strict=True)]
        table, is_divided = with_splits(join_tables(tables), [entry.object for entry in lists], list(map(len, tables)))
        if not len(table):
            raise EmptyDataset(f"the lists at {store.url} name no samples")
        urls = table["object"].to_pylist()
        _check_once(urls, store.url)
        masks = table[_MASK].to_pylist() if _MASK in table.schema.names else []
        found = _found([*urls, *filter(None, masks)], entries, store.url)
        table = _with_sizes(table, found)
        if any(masks):
            table = _with_masks(table.drop_columns([_MASK]), masks, found, known_sizes(before), store.url)
        said = encode_labels(table[SAID])
        return ListedSamples(
            table=finish_table(table, said),
            classes=said.classes,
            digest=self.digest(entries),
            reading=URLS,
            divided_by_names=is_divided,
            has_named_classes=said.are_names,
            used=tuple(entry.object for entry in lists),
            left_out=tuple(left for some in rows for left in some.left_out),
        )


def _with_sizes(table: pa.Table, found: Mapping[str, Entry]) -> pa.Table:
    """A table of URLs with the sizes and versions of their objects; those that are not there stay samples."""
    urls = table["object"].to_pylist()
    if not any(url in found for url in urls):
        raise DataError(f"{urls[0]} is listed and not there, nor are {len(urls) - 1} others: mend the list")
    there = [found.get(url, _MISSING) for url in urls]
    table = table.append_column("length", pa.array([entry.size for entry in there], pa.int64()))
    return table.append_column("etag", pa.array([entry.etag for entry in there], pa.string()))


def locate_images(table: pa.Table, file: str, store: ObjectStore, entries: Sequence[Entry]) -> pa.Table:
    """Rows of a file that name images elsewhere: with the canonical URLs of these, their sizes and versions.

    Args:
        table: rows of the file, with names of objects as lists have them, and neither sizes nor versions.
        file: name of the file, for the sentences.
        store: store that was listed.
        entries: the listing.

    Raises:
        DataError: a name is none that can be read, or not one of the objects is there.
        StoreError: a store failed.
    """
    folder = base_url(store, store.url)
    urls = [_canonical(name, folder, file) for name in table["object"].to_pylist()]
    table = table.set_column(table.schema.get_field_index("object"), "object", pa.array(urls, pa.string()))
    return _with_sizes(table, _found(list(dict.fromkeys(urls)), entries, store.url))


def _table(rows: ListRows, entry: Entry, folder: str, finder: ObjectFinder) -> pa.Table:
    """The samples of a list; labels come as ``labels.encode_labels`` takes them."""

    def url_of(name: str) -> str:
        is_relative = "://" not in name and not name.startswith("/")
        return _canonical((finder.object_of(name, entry.object) if is_relative else None) or name, folder, entry.object)

    urls = [url_of(name) for name in rows.files]
    return pa.table(
        {
            "name": pa.array(urls, pa.string()),
            "object": pa.array(urls, pa.string()),
            "offset": pa.array([0] * len(urls), pa.int64()),
            SAID: pa.nulls(len(urls), pa.string()) if rows.said is None else rows.said,
            **rows.about,
            **({_MASK: [mask and url_of(mask) for mask in rows.masks]} if any(rows.masks) else {}),
        }
    )


def _with_masks(
    table: pa.Table, urls: Sequence[str | None], found: Mapping[str, Entry], known: Mapping[_Key, Size], root: str
) -> pa.Table:
    """The table with the columns of masks; heads of images whose size is not known are read."""
    images = list(zip(table["object"].to_pylist(), table["length"].to_pylist(), table["etag"].to_pylist(), strict=True))
    reader = UrlReader(dict.fromkeys([root, *(_place_of(image) for image, _, _ in images)]))

    def size(row: int) -> Size:
        image, length, etag = images[row]
        if not urls[row] or image not in found:
            return 0, 0
        with suppress(ObjectNotFound):  # reading it will say so too
            return known.get((image, etag)) or size_at(reader, image, 0, length)
        return 0, 0

    with ThreadPoolExecutor(_HEADS_AT_ONCE, "frostline-index") as threads:
        sizes = list(threads.map(size, range(len(images))))
    there = [found.get(url, _MISSING) if url else None for url in urls]
    masks = [
        Mask(url or "", 0, entry.size, entry.etag) if entry else NO_MASK for url, entry in zip(urls, there, strict=True)
    ]
    for name, column in target_columns(masks, sizes).items():
        table = table.append_column(name, column)
    return table


def _canonical(url: str, root: str, name: str) -> str:
    shown = url.partition("?")[0][:100]
    scheme, is_url, _ = url.partition("://")
    if "?" in url and (scheme in _WEB if is_url else parse_url(root).scheme in _PLACED):
        raise DataError(f"{name} lists {shown!a} with a question mark behind it: {_WEB.get(scheme, _OF_PLACED)}")
    try:
        return normalise_url(url if is_url or url.startswith("/") else object_url(root, url.removeprefix("./")))
    except SettingError as error:
        raise DataError(f"{name} lists {shown!r}: {error}") from error


def _check_once(urls: Sequence[str], root: str) -> None:
    url, times = Counter(urls).most_common(1)[0]
    if times > 1:
        raise DataError(f"the lists at {root} name {url} {times} times: a sample stands there once")


def _found(urls: Sequence[str], entries: Sequence[Entry], root: str) -> dict[str, Entry]:
    """What each object is, by URL, from the listing that was made where it lies there; the others are asked for."""
    beside = {url for url in urls if is_within(url, root)}
    found = {object_url(root, entry.object): entry for entry in entries} if beside else {}
    return {url: found[url] for url in beside if url in found} | _entries_of([url for url in urls if url not in beside])
