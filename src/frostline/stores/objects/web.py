"""Objects of a web server, read by ranges; a server that speaks WebDAV is listed too."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from frostline.errors import (
    AccessDenied,
    BadRequest,
    DataError,
    ObjectNotFound,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.stores.base.protocols import Buffer, Dated, Entry, version_of_time
from frostline.stores.base.urls import Root, check_name
from frostline.stores.objects.obstore_errors import error_of_status
from frostline.stores.objects.web_client import WebClient

__all__ = ("WebStore",)

# No more digits than a file's size can have.
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]{1,18}|\*)")
_SIZE = re.compile(r"[0-9]{1,18}")
# A server that says more is asked again all the same: whoever waits has a deadline of their own.
_MAX_RETRY_AFTER_S = 10.0
_DAV = "{DAV:}"
_ASKED = (
    b'<?xml version="1.0"?><propfind xmlns="DAV:"><prop>'
    b"<resourcetype/><getcontentlength/><getetag/><getlastmodified/></prop></propfind>"
)


class WebStore:
    """A web server that is read alone. Redirects are followed within the root. Safe for threads and forks.

    Args:
        url: The canonical URL of the root.
        root: The same taken apart.
        timeout_s: How long nothing may come before a request is given up.
    """

    def __init__(self, url: str, root: Root, timeout_s: float) -> None:
        self._url = url
        self._prefix = f"{root.path}/" if root.path else ""
        self._client = WebClient(url, root, timeout_s)

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
        return self._url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self.read_version(object, offset, length)[0]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        name = check_name(object)
        if length == 0:
            return b"", ""
        wanted = {"Range": f"bytes={offset}-{offset + length - 1}"}
        with self._client.answer("GET", name, wanted) as response:
            if response.status == 200:
                raise StoreError(f"the server of {self._url} gives whole objects only: it must answer for ranges")
            self._check(response, name, 206)
            # Looked at before anything is made for it: nobody has a range that a file does not.
            found = _RANGE.fullmatch(response.getheader("Content-Range") or "")
            if found is None or int(found[1]) != offset:
                raise StoreError(f"the server of {self._url} gives other ranges than it is asked for")
            if int(found[2]) < offset + length - 1:
                raise ObjectNotFound(f"{name} ends before byte {offset + length}: it has changed")
            return _exactly(response, name, length), _version(response.headers)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        name = check_name(object)
        with self._client.answer("HEAD", name, {}) as response:
            self._check(response, name, 200)
            size = response.getheader("Content-Length") or ""
            if not _SIZE.fullmatch(size):
                raise StoreError(f"the server of {self._url} does not say how long {name} is")
            return Entry(name, int(size), _version(response.headers))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        return (entry for entry, is_folder in self._listed("", "infinity") if not is_folder)

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``."""
        listed = [*self._listed("", "1")]
        folders = tuple(f"{entry.object}/" for entry, is_folder in listed if is_folder)
        return [entry for entry, is_folder in listed if not is_folder], folders

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``."""
        from frostline.stores.base.listing import Entries

        return Entries.of(entry for entry, is_folder in self._listed(folder, "infinity") if not is_folder)

    def write(self, object: str, data: Buffer) -> NoReturn:  # noqa: ARG002
        """Refuse.

        Raises:
            AccessDenied: Always: a web server is read alone.
        """
        raise AccessDenied(f"{self._url} is read alone: it takes no writes")

    def list_dated(self) -> Iterator[Dated]:
        """Refuse: nothing is pruned where nothing is removed.

        Raises:
            AccessDenied: Always.
        """
        raise AccessDenied(f"{self._url} is read alone: nothing there is removed")

    def remove(self, object: str) -> NoReturn:  # noqa: ARG002
        """Refuse.

        Raises:
            AccessDenied: Always: a web server is read alone.
        """
        raise AccessDenied(f"{self._url} is read alone: nothing there is removed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def _check(self, response: HTTPResponse, name: str, wanted: int) -> None:
        if response.status == wanted:
            return
        said = (response.getheader("Retry-After") or "").strip()
        error = error_of_status(response.status, str(response.status), self._url, name)
        if isinstance(error, StoreThrottled) and _SIZE.fullmatch(said):
            error = StoreThrottled(str(error), retry_after_s=min(float(said), _MAX_RETRY_AFTER_S))
        raise error

    def _listed(self, folder: str, depth: str) -> Iterator[tuple[Entry, bool]]:
        asked = {"Depth": depth, "Content-Type": "application/xml"}
        with self._client.answer("PROPFIND", folder, asked, _ASKED) as response:
            self._check(response, "", 207)
            try:
                for _, element in ET.iterparse(response):  # noqa: S314 (expat bounds what entities may grow to)
                    if element.tag == f"{_DAV}response":
                        if found := self._entry(element, folder):
                            yield found
                        element.clear()
            except (ET.ParseError, LookupError, ValueError) as error:  # the last two of encodings and of addresses
                raise StoreUnavailable(f"the listing of {self._url} broke off, or is no WebDAV") from error

    def _entry(self, element: ET.Element, folder: str) -> tuple[Entry, bool] | None:
        """What one answer of a listing says; None for the folder itself, and for what is not below it."""
        path = unquote(urlsplit(element.findtext(f"{_DAV}href", "")).path).lstrip("/")
        if not path.startswith(self._prefix + folder):
            return None
        name = path[len(self._prefix) :].rstrip("/")
        if not name or name == folder.rstrip("/"):
            return None
        try:
            check_name(name)
        except BadRequest as error:
            raise DataError(f"the server of {self._url} lists {name[:200]!a}, a name that cannot be read") from error
        is_folder = element.find(f".//{_DAV}collection") is not None
        said = {tag: element.findtext(f".//{_DAV}{tag}", "") for tag in ("getcontentlength", "getetag")}
        size = said["getcontentlength"].strip()
        if not is_folder and not _SIZE.fullmatch(size):
            raise DataError(f"the server of {self._url} does not say how long {name!a} is")
        changed = element.findtext(f".//{_DAV}getlastmodified", "")
        return Entry(name, int(size) if not is_folder else 0, _version_of(said["getetag"], changed)), is_folder


def _exactly(response: HTTPResponse, name: str, length: int) -> memoryview:
    view, filled = memoryview(bytearray(length)), 0
    while filled < length:
        count = response.readinto(view[filled:])
        if not count:
            raise StoreUnavailable(f"{name} gave {filled} of {length} bytes")
        filled += count
    return view.toreadonly()


def _version(headers: Message) -> str:
    return _version_of(headers.get("ETag") or "", headers.get("Last-Modified") or "")


def _version_of(etag: str, changed: str) -> str:
    if etag.strip('"'):
        return etag.strip('"')
    try:
        return version_of_time(parsedate_to_datetime(changed).timestamp())
    except (ValueError, OverflowError):
        return ""
