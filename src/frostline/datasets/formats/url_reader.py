"""Reads samples whose objects are URLs of their own: each must lie within one of the roots that may be read."""

import threading
from collections.abc import Iterable, Iterator

from frostline.datasets.formats.columns import ManifestColumns
from frostline.errors import BadRequest, SettingError
from frostline.stores.base.limits import NO_LIMITS, StoreLimits
from frostline.stores.base.protocols import Buffer, Versioned
from frostline.stores.base.urls import parse_url
from frostline.stores.open import is_within, normalise_url, open_store

__all__ = ("UrlReader", "folder_of", "place_of", "places_in")


def place_of(url: str) -> str:
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
            yield from (place_of(url) for url in columns.texts(name) if url)


def folder_of(url: str) -> str:
    """The root of what lies beside the object of a canonical URL."""
    path, mark, options = url.partition("?")
    return path.rpartition("/")[0] + mark + options


class UrlReader:
    """A ``Versioned`` whose objects are URLs. Safe for threads.

    Args:
        roots: canonical URLs; what lies in none of them is not read, and no name leads out of one.
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
