"""Finds sizes and versions of the objects that URLs name: asks for each, or lists where that takes less."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from frostline.datasets.formats.url_reader import folder_of, place_of
from frostline.errors import AccessDenied, ObjectNotFound
from frostline.stores.base.protocols import Described, Entry
from frostline.stores.base.urls import parse_url
from frostline.stores.open import is_within, object_url, open_store

__all__ = ("entries_of",)

_AT_ONCE = 32
# A listing gives a thousand names a request, one request after another, while 32 objects are asked for at once.
_LISTED_FOR_EACH = 30
# Files are asked for at no cost, and web servers seldom list.
_NEVER_LISTED = ("file", "http", "https")


def entries_of(urls: Iterable[str]) -> dict[str, Entry]:
    """What the objects of canonical URLs are, by URL; those that are not there are left out.

    Raises:
        DataNotFound: a bucket or folder that must be listed is not there.
        AccessDenied: a store refused.
        StoreError: a store failed.
    """
    by_place: defaultdict[str, list[str]] = defaultdict(list)
    for url in urls:
        by_place[place_of(url)].append(url)
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
    return ((object_url(folder, entry.object), entry) for entry in open_store(folder).list())


def _outer(urls: Iterable[str]) -> Mapping[str, int]:
    """The folders of objects, without those that lie in another, and how many objects lie in each."""
    counts: defaultdict[str, int] = defaultdict(int)
    for url in urls:
        counts[folder_of(url)] += 1
    outer: dict[str, int] = {}
    last = ""
    for folder in sorted(counts):
        last = last if last and is_within(folder, last) else folder
        outer[last] = outer.get(last, 0) + counts[folder]
    return outer
