"""Lists of URLs with labels, as CSV or Parquet: samples are read wherever the URLs lead within the roots."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core import URLS
from frostline.core.errors import AccessDenied, BadRequest, DataError, EmptyDataset, ObjectNotFound, SettingError
from frostline.datasets.formats.base import (
    TARGET_COLUMNS,
    ListedSamples,
    ManifestColumns,
    digest_of,
)
from frostline.datasets.formats.contradictions import contradictions_of_partitions
from frostline.datasets.formats.finding import ObjectFinder
from frostline.datasets.formats.folders import (
    NO_MASK,
    Mask,
    Size,
    is_sample,
    known_sizes,
    size_at,
    target_columns,
)
from frostline.datasets.formats.joining import known_parts, omissions_in, with_partitions, with_parts
from frostline.datasets.formats.labels import (
    encode_labels,
    join_tables,
    with_splits,
)
from frostline.datasets.formats.left_out import ROWS, LeftOut, of_names
from frostline.datasets.formats.lists import (
    ListRows,
    is_list_of_samples,
    is_text_list,
    list_left_out,
    read_list,
    read_lists,
)
from frostline.datasets.formats.tables import (
    SAID,
    TableFile,
    finish_table,
    names_of_columns,
)
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
    "IMAGE_PATH",
    "MASK_PATH",
    "UrlLists",
    "UrlReader",
    "known_files",
    "locate_rows",
    "places_in",
    "with_known_files",
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


_RULE = "frostline url lists 14"
_QUERY = "what follows may be a secret, and addresses are kept; list them without it, or as %3F where a name has one"
_WEB = {"http": _QUERY, "https": _QUERY}
# Of these roots, a question mark begins options.
_PLACED = ("s3", "gs", "az", "memory")
_OF_PLACED = "no URL can name such an object of a bucket; rename it"
IMAGE_PATH, MASK_PATH = "/image", "/mask"
"""Columns of the table of one file until it is known what lies there: paths that stand in the place of an image or of a
mask, null where there is none."""
_HEADS_AT_ONCE = 32
_Key = tuple[str, str]
# Of one byte, so that whoever reads it is told that it is not there; that sample is then left out, named and counted.
_MISSING = Entry("", 1, "")


class UrlLists:
    """Files with a column of URLs, or of names relative to them or to the data, and one of labels or of masks' URLs.

    Where the data is one such file, names are relative to its folder; see ``ObjectFinder``.

    Objects that do not lie beside the lists are asked for their sizes and etags once; those that are not there stay
    samples, which are left out, named and counted when they are read. The digest is that of the lists and of the images
    beside them: of those elsewhere a change is noticed when they are read, and by whoever asks for them again. Lists
    that are Parquet files are only read where this format is named: other Parquet files hold the images themselves.
    Lists that are called ``train``, ``val``, ``test`` or the like are splits (``formats.split_names``).

    Args:
        files: column that says where samples are; by default the one that is called so, or has names of files. The
            format's name then has it behind a colon, and lists without it are left out, named and counted.
    """

    is_incremental = True

    def __init__(self, files: str | None = None) -> None:
        self.name = URLS if files is None else f"{URLS}:{files}"
        self._files = files

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: one file of CSV or of JSON lines is enough."""
        return any(map(is_text_list, entries))

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        rule = _RULE if self._files is None else f"{_RULE} {self._files}"
        return digest_of(rule, (entry for entry in entries if is_list_of_samples(entry) or is_sample(entry.object)))

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
        finder = _PathFinder(store, entries)
        passed: list[LeftOut] = []
        if self._files is None:
            rows = [read_list(store, entry, finder.names) for entry in lists]
        else:

            def pass_over(entry: Entry, why: str) -> None:
                passed.extend(list_left_out(entry, why))

            read = list(read_lists(store, lists, finder.names, pass_over, named=self._files))
            lists, rows = [entry for entry, _ in read], [rows for _, rows in read]
        made, lost = zip(*(_table(some, entry, finder) for some, entry in zip(rows, lists, strict=True)), strict=True)
        names = [entry.object for entry in lists]
        tables = with_partitions(made, names)
        table, is_divided = with_splits(join_tables(tables), names, list(map(len, tables)))
        if not len(table):
            raise EmptyDataset(f"the lists at {store.url} name no samples")
        urls = table["object"].to_pylist()
        _check_once(urls, store.url)
        masks = table[MASK_PATH].to_pylist() if MASK_PATH in table.schema.names else []
        found = _found([*urls, *filter(None, masks)], entries, store.url)
        _check_any_is_there(urls, found, finder.names.likely_object(urls[0], lists[0].object))
        table = _with_sizes(table, found)
        if any(masks):
            table = _with_masks(table.drop_columns([MASK_PATH]), masks, found, known_sizes(before), store.url)
        classes = {some.classes for some in rows if some.classes}
        said = encode_labels(table[SAID], classes.pop() if len(classes) == 1 else ())
        return ListedSamples(
            table=finish_table(table, said),
            classes=said.classes,
            digest=self.digest(entries),
            reading=URLS,
            divided_by_names=is_divided,
            has_named_classes=said.are_names,
            used=(*(entry.object for entry in lists), *(left.object for left in passed)),
            left_out=(
                *passed,
                *(left for some, more in zip(rows, lost, strict=True) for left in (*some.left_out, *more)),
                *contradictions_of_partitions(tables, names),
            ),
            named=names_of_columns(made, [some.named for some in rows]),
        )


def _check_any_is_there(urls: Sequence[str], found: Mapping[str, Entry], likely: str = "") -> None:
    if not any(url in found for url in urls):
        meant = f" ({likely} is there)" if likely else ""
        others = (
            f", and so are all {len(urls) - 1} others" if len(urls) > 2 else ", and so is the other" * (len(urls) > 1)
        )
        raise DataError(
            f"{urls[0]} is listed and missing{meant}{others}: mend the list, or put it beside the files that it names"
        )


def _with_sizes(table: pa.Table, found: Mapping[str, Entry]) -> pa.Table:
    """A table of URLs with the sizes and versions of their objects; those that are not there stay samples."""
    there = [found.get(url, _MISSING) for url in table["object"].to_pylist()]
    table = table.append_column("length", pa.array([entry.size for entry in there], pa.int64()))
    return table.append_column("etag", pa.array([entry.etag for entry in there], pa.string()))


class _PathFinder:
    """Finds what lists, and rows of tables, mean by URLs and by paths.

    Args:
        store: store that was listed.
        entries: the listing.
    """

    def __init__(self, store: ObjectStore, entries: Sequence[Entry]) -> None:
        self._folder = base_url(store, store.url)
        self._entries = entries
        self.names = ObjectFinder(entries, store.url)

    def urls_of(self, written: str, file: str) -> list[str]:
        """The canonical URLs that a name or a path in a file may mean: one where that is clear.

        Raises:
            DataError: The name is no URL that can be read.
        """
        if _is_whole(written):
            return [_canonical(written, self._folder, file)]
        names = self.names.objects_of(written, file)
        if not names:
            names = [written if "/" in written else self.names.folder_of(file) + written]
        return [_canonical(name, self._folder, file) for name in names]

    def entries_of(self, written: str, file: str) -> list[Entry]:
        """The images and sounds of the listing that it may mean."""
        if not _is_whole(written):
            names = self.names.objects_of(written, file)
            return [self._by_name[name] for name in names if name in self._by_name]
        with suppress(DataError):
            found = self._by_url.get(_canonical(written, self._folder, file))
            return [] if found is None else [found]
        return []

    @cached_property
    def _by_name(self) -> Mapping[str, Entry]:
        return {entry.object: entry for entry in self._entries if is_sample(entry.object)}

    @cached_property
    def _by_url(self) -> Mapping[str, Entry]:
        return {object_url(self._folder, name): entry for name, entry in self._by_name.items()}


def _is_whole(written: str) -> bool:
    return "://" in written or written.startswith("/")


_NO_SAMPLE = "without a sample"
# By how many objects a path may mean: of the images, and of the masks.
_IMAGES_LOST = ("with the path of an image that is not here", "with the path of several images")
_MASKS_LOST = ("with the path of a mask that is not here", "with the path of several masks")


def known_files(
    before: ListedSamples | None, is_file: Callable[[str], bool], object_of: Callable[[str], str] = str
) -> dict[tuple[str, str], tuple[pa.Table, tuple[LeftOut, ...]]]:
    """The rows of those files of an earlier listing that need no other object, and what was left out of them.

    Args:
        before: table made of that listing.
        is_file: function that returns True if the object of a sample or mask lies in a file of the format.
        object_of: function that gives a file's name, from that of its entry.
    """
    if before is None or not _lie_in_files(before.table, is_file):
        return {}
    known = {key: (part, omissions_in(before, key[0])) for key, part in known_parts(before, object_of).items()}
    paths = {*_IMAGES_LOST, *_MASKS_LOST}
    return {key: found for key, found in known.items() if paths.isdisjoint(left.reason for left in found[1])}


def with_known_files(
    listed: ListedSamples, files: Sequence[TableFile], is_file: Callable[[str], bool], object_of: Callable[[str], str]
) -> ListedSamples:
    """A listing that says of which files ``known_files`` gives other rows than they have, so that they are read again.

    Args:
        listed: the listing.
        files: files that it was made of.
        is_file: see ``known_files``.
        object_of: see ``known_files``.
    """
    is_known = listed.reading != URLS and _lie_in_files(listed.table, is_file)
    return with_parts(listed, [file.table for file in files], object_of) if is_known else listed


def _lie_in_files(table: pa.Table, is_file: Callable[[str], bool]) -> bool:
    """Whether rows lie one behind the other in files of the format, and so do masks."""
    names = [name for name in ("object", "target_object") if name in table.schema.names]
    return all(is_file(name) for column in names for name in pc.unique(table[column]).to_pylist() if name)


def locate_rows(
    files: Sequence[TableFile],
    found: Sequence[Entry],
    store: ObjectStore,
    entries: Sequence[Entry],
    name_of: Callable[[Entry], str],
    before: ListedSamples | None = None,
) -> tuple[list[TableFile], bool]:
    """Files with the images and masks whose paths their rows say, and whether all of them are URLs, as those of lists.

    Where no file holds images or masks, paths may lead anywhere; else those that lie with the data are read. Rows whose
    image or mask is not found are left out, named and counted.

    Args:
        files: one table a file, with ``IMAGE_PATH`` and ``MASK_PATH`` where rows say paths; the length of a sample is
            null where the file does not hold it.
        found: the entry of each file.
        store: store that was listed.
        entries: the listing.
        name_of: function that gives what a sample's object is called where it is the whole of an entry.
        before: table made of an earlier listing.

    Raises:
        DataError: No object elsewhere exists.
        StoreError: a store failed.
    """
    says_paths = any(_paths(file.table, name) for file in files for name in (IMAGE_PATH, MASK_PATH))
    finder = _PathFinder(store, entries if says_paths else ())
    pairs = zip(files, found, strict=True)
    if any(map(_holds_any, files)) or not any(_paths(file.table, IMAGE_PATH) for file in files):
        return [_with_beside(file, entry.object, finder, store, name_of) for file, entry in pairs], False
    placed = [_with_urls(file, entry.object, finder) for file, entry in pairs]
    urls = [url for file in placed for url in file.table["object"].to_pylist()]
    masks = [url for file in placed for url in _paths(file.table, MASK_PATH)]
    there = _found(list(dict.fromkeys(filter(None, [*urls, *masks]))), entries, store.url)
    if urls:
        _check_any_is_there(urls, there)
    sizes = known_sizes(before)
    return [file._replace(table=_elsewhere(file, there, sizes, store.url)) for file in placed], True


def _paths(table: pa.Table, name: str) -> list[str | None]:
    """The paths in a column; empty where no row says one."""
    paths = table[name].to_pylist() if name in table.schema.names else []
    return paths if any(paths) else []


def _holds_any(file: TableFile) -> bool:
    table = file.table
    masks = table["target_length"] if "target_length" in table.schema.names else pa.chunked_array([[0]])
    return bool(pc.any(pc.is_valid(table["length"])).as_py() or pc.any(pc.greater(masks, 0)).as_py())


class _Rows:
    """The columns of a file's table that say where samples and masks are, as lists to be changed."""

    def __init__(self, file: TableFile) -> None:
        self._file = file
        table = file.table
        self.names: list[str] = table["name"].to_pylist()
        self.images = _paths(table, IMAGE_PATH) or [None] * len(table)
        self.masks = _paths(table, MASK_PATH) or [None] * len(table)
        fields = ("object", "offset", "length", "etag", *TARGET_COLUMNS.names)
        self.columns = {name: table[name].to_pylist() for name in fields if name in table.schema.names}
        self.lost: dict[str, list[int]] = defaultdict(list)

    def put(self, row: int, values: Mapping[str, object]) -> None:
        """Set the values of a row."""
        for name, value in values.items():
            self.columns[name][row] = value

    def lose(self, row: int, reason: str) -> None:
        """Leave a row out."""
        self.lost[reason].append(row)

    def file(self, object: str) -> TableFile:
        """The file with these columns, without the rows that are left out."""
        table = self._file.table
        table = table.drop_columns([name for name in (IMAGE_PATH, MASK_PATH) if name in table.schema.names])
        for name, values in self.columns.items():
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, pa.array(values, table.schema.field(place).type))
        lost = {row for rows in self.lost.values() for row in rows}
        kept = pa.array([row not in lost for row in range(len(self.names))], pa.bool_())
        left = [
            part
            for reason, rows in sorted(self.lost.items(), key=lambda pair: pair[0] != _NO_SAMPLE)
            for part in of_names(ROWS, reason, [self.names[row] for row in rows], object)
        ]
        return self._file._replace(table=table.filter(kept), left_out=(*left, *self._file.left_out))


def _with_beside(
    file: TableFile, object: str, finder: _PathFinder, store: ObjectStore, name_of: Callable[[Entry], str]
) -> TableFile:
    """A file with the images and masks that lie with the data."""
    rows, beside = _Rows(file), dict[int, Entry]()
    for row, length in enumerate(rows.columns["length"]):
        image, mask = rows.images[row], rows.masks[row]
        images = finder.entries_of(image, object) if image else []
        masks = finder.entries_of(mask, object) if mask else []
        if length is None and len(images) != 1:
            rows.lose(row, _IMAGES_LOST[len(images) > 1] if image else _NO_SAMPLE)
        elif mask and len(masks) != 1:
            rows.lose(row, _MASKS_LOST[len(masks) > 1])
        else:
            if length is None:
                [entry] = images
                rows.put(row, {"object": name_of(entry), "offset": 0, "length": entry.size, "etag": entry.etag})
                beside[row] = entry
            if masks:
                rows.put(row, _target(Mask(name_of(masks[0]), 0, masks[0].size, masks[0].etag)))
    lengths = rows.columns.get("target_length", [])
    measured = {row: entry for row, entry in beside.items() if row < len(lengths) and lengths[row]}
    with ThreadPoolExecutor(_HEADS_AT_ONCE, "frostline-index") as threads:
        sizes = threads.map(
            lambda entry: size_at(store, entry.object, 0, entry.size, is_turned=file.is_turned), measured.values()
        )
        for row, (width, height) in zip(measured, sizes, strict=True):
            rows.put(row, {"target_width": width, "target_height": height})
    return rows.file(object)


def _target(mask: Mask) -> dict[str, object]:
    return {f"target_{name}": value for name, value in mask._asdict().items()}


def _with_urls(file: TableFile, object: str, finder: _PathFinder) -> TableFile:
    """A file with the canonical URLs of images and masks, whose sizes are not known yet."""
    rows, masks = _Rows(file), list[str | None]()
    for row, (image, mask) in enumerate(zip(rows.images, rows.masks, strict=True)):
        images = _urls(finder, image, object)
        of_mask = _urls(finder, mask, object)
        masks.append(of_mask[0] if len(of_mask) == 1 else None)
        if len(images) != 1:
            rows.lose(row, _IMAGES_LOST[len(images) > 1] if image else _NO_SAMPLE)
        elif mask and len(of_mask) != 1:
            rows.lose(row, _MASKS_LOST[len(of_mask) > 1])
        else:
            rows.put(row, {"object": images[0], "offset": 0})
    placed = rows.file(object)
    if any(masks):
        kept = dict(zip(rows.names, masks, strict=True))
        column = pa.array([kept[name] for name in placed.table["name"].to_pylist()], pa.string())
        placed = placed._replace(table=placed.table.append_column(MASK_PATH, column))
    return placed


def _urls(finder: _PathFinder, written: str | None, file: str) -> list[str]:
    with suppress(DataError):
        return finder.urls_of(written, file) if written else []
    return []


def _elsewhere(file: TableFile, there: Mapping[str, Entry], sizes: Mapping[_Key, Size], root: str) -> pa.Table:
    masks = _paths(file.table, MASK_PATH)
    dropped = {"length", "etag", MASK_PATH, *TARGET_COLUMNS.names}
    table = file.table.drop_columns([name for name in file.table.schema.names if name in dropped])
    table = _with_sizes(table, there)
    return _with_masks(table, masks, there, sizes, root, is_turned=file.is_turned) if masks else table


def _table(rows: ListRows, entry: Entry, finder: _PathFinder) -> tuple[pa.Table, tuple[LeftOut, ...]]:
    """Samples of a list, with labels as ``labels.encode_labels`` takes them, and the rows that mean several objects."""
    found = [finder.urls_of(name, entry.object) for name in rows.files]
    masks = [finder.urls_of(mask, entry.object) if mask else [] for mask in rows.masks] or [[]] * len(found)
    urls = [some[0] for some in found]
    table = pa.table(
        {
            "name": pa.array(urls, pa.string()),
            "object": pa.array(urls, pa.string()),
            "offset": pa.array([0] * len(urls), pa.int64()),
            SAID: pa.nulls(len(urls), pa.string()) if rows.said is None else rows.said,
            **rows.about,
            **({MASK_PATH: pa.array([mask[0] if mask else None for mask in masks], pa.string())} if any(masks) else {}),
        }
    )
    several = [len(some) > 1 for some in found]
    of_masks = [len(some) > 1 and not others for some, others in zip(masks, several, strict=True)]
    lost = (
        of_names(ROWS, reason, [name for name, is_lost in zip(rows.files, some, strict=True) if is_lost], entry.object)
        for reason, some in ((_IMAGES_LOST[1], several), (_MASKS_LOST[1], of_masks))
    )
    kept = pa.array([not (image or mask) for image, mask in zip(several, of_masks, strict=True)], pa.bool_())
    return table.filter(kept), tuple(left for some in lost for left in some)


def _with_masks(
    table: pa.Table,
    urls: Sequence[str | None],
    found: Mapping[str, Entry],
    known: Mapping[_Key, Size],
    root: str,
    *,
    is_turned: bool = False,
) -> pa.Table:
    """The table with the columns of masks; heads of images whose size is not known are read."""
    images = list(zip(table["object"].to_pylist(), table["length"].to_pylist(), table["etag"].to_pylist(), strict=True))
    reader = UrlReader(dict.fromkeys([root, *(_place_of(image) for image, _, _ in images)]))

    def size(row: int) -> Size:
        image, length, etag = images[row]
        if not urls[row] or image not in found:
            return 0, 0
        with suppress(ObjectNotFound):  # reading it will say so too
            return known.get((image, etag)) or size_at(reader, image, 0, length, is_turned=is_turned)
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
