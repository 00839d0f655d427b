"""Objects of a web server, read by ranges over kept connections; a server that speaks WebDAV is listed too.

Asks one web server: connections that are kept, a limit of time, and redirects only within the root.
"""

import http.client
import ipaddress
import os
import re
import ssl
import urllib.request
import weakref
import xml.etree.ElementTree as ET
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import HTTPResponse
from typing import NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from frostline.core.errors import (
    AccessDenied,
    FrostlineError,
    ObjectNotFound,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.stores.errors import NOWHERE, error_of_status
from frostline.stores.protocols import TIMEOUT, UNREADABLE, Buffer, Dated, Entry, version_of_time
from frostline.stores.urls import Root, check_name, is_name, object_url

__all__ = (
    "WebClient",
    "WebStore",
    "hosts_alone",
    "path_of_redirect",
    "refuse_private_address",
)


_CONNECT_S = 5.0
_MAX_IDLE = 64
_MAX_REDIRECTS = 5
# What is read of a body that nobody wants, so that its connection can be used again.
_MAX_DISCARDED = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_STALE = (http.client.BadStatusLine, BrokenPipeError, ConnectionResetError)
# Hosts that had a public address when they were asked before.
_PUBLIC_HOSTS: set[str] = set()

_Connection = http.client.HTTPConnection


class WebClient:
    """Requests to the server of one root, as in ``WebStore``. Safe for threads and for forks, and travels by pickle."""

    def __init__(self, url: str, root: Root, timeout_s: float) -> None:
        self._url = url
        self._root = root
        self._timeout_s = timeout_s
        self._idle: deque[tuple[int, _Connection]] = deque()
        weakref.finalize(self, _close_all, self._idle)

    def __reduce__(self) -> tuple[type["WebClient"], tuple[str, Root, float]]:
        return WebClient, (self._url, self._root, self._timeout_s)

    @contextmanager
    def answer(
        self, method: str, name: str, headers: Mapping[str, str], body: bytes = b"", query: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        """The server's answer for an object of the root.

        Args:
            method: method of HTTP.
            name: name of the object, which is empty for the root itself.
            headers: headers of the request.
            body: body of the request.
            query: query, escaped, which no sentence repeats.

        Raises:
            StoreError: The server redirects out of the root, or cannot be trusted.
            StoreUnavailable: The server did not answer, or its answer broke off.
        """
        what = object_url(self._url, name) if name else self._url
        try:
            connection, response = self._followed(method, self._path(name, query), headers, body)
            try:
                yield response
            except BaseException:
                response.close()  # which has the socket of a connection that carries no other answer
                connection.close()
                raise
            self._keep(connection, response)
        except (OSError, http.client.HTTPException) as error:
            raise _error_of_connection(error, what) from error

    def _path(self, name: str, query: str) -> str:
        path = "/" + quote("/".join(part for part in (self._root.path, name) if part))
        return f"{path}?{query}" if query else path

    def _followed(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        for _ in range(_MAX_REDIRECTS + 1):
            connection, response = self._asked(method, path, headers, body)
            location = response.getheader("Location")
            if response.status not in _REDIRECTS or location is None:
                return connection, response
            self._keep(connection, response)
            path = path_of_redirect(self._url, self._root, path, location)
        raise StoreError(f"the server of {self._url} redirects more than {_MAX_REDIRECTS} times")

    def _asked(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        proxy = _proxy_of(self._root)
        target = f"http://{self._root.place}{path}" if proxy and self._root.scheme == "http" else path
        sent = {"Accept-Encoding": "identity", **headers}
        idle = self._idle_connection()
        if idle is not None:
            try:
                return idle, _exchange(idle, method, target, sent, body)
            except _STALE:
                idle.close()  # the server had closed it since it was used last
        connection = self._connect(proxy)
        return connection, _exchange(connection, method, target, sent, body)

    def _idle_connection(self) -> _Connection | None:
        try:
            pid, connection = self._idle.pop()
        except IndexError:
            return None
        if pid == os.getpid():
            return connection
        connection.close()
        _close_all(self._idle)  # a parent's, whose own process goes on using them
        return None

    def _keep(self, connection: _Connection, response: http.client.HTTPResponse) -> None:
        if not response.isclosed():
            response.read(_MAX_DISCARDED)
        if not response.isclosed() or response.will_close or len(self._idle) >= _MAX_IDLE:
            response.close()
            connection.close()
        else:
            self._idle.append((os.getpid(), connection))

    def _connect(self, proxy: str) -> _Connection:
        place = urlsplit(f"//{self._root.place}")
        host, port = place.hostname or "", place.port or _PORTS[self._root.scheme]
        first = urlsplit(proxy) if proxy else None
        address = (host, port) if first is None else (first.hostname or "", first.port or 80)
        timeout_s = min(_CONNECT_S, self._timeout_s)
        connection = (
            http.client.HTTPSConnection(*address, timeout=timeout_s, context=_tls())
            if self._root.scheme == "https"
            else _Connection(*address, timeout=timeout_s)
        )
        if first is not None and self._root.scheme == "https":
            connection.set_tunnel(host, port)
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            if first is None:
                refuse_private_address(self._url, host, connection.sock.getpeername()[0], _PUBLIC_HOSTS)
        except BaseException:
            connection.close()
            raise
        return connection


def path_of_redirect(url: str, root: Root, path: str, location: str) -> str:
    """The path and query that a redirect leads to, where that is within the root.

    Args:
        url: The canonical URL of the root.
        root: URL of the root, parsed.
        path: The path, escaped, whose answer was the redirect.
        location: location that the server names.

    Raises:
        StoreError: The redirect leads to another scheme, host or port, or out of the root's path.
    """
    try:
        found = urlsplit(urljoin(f"{root.scheme}://{root.place}{path}", location))
        place = (found.scheme, found.hostname, found.port or _PORTS.get(found.scheme))
    except ValueError:
        raise StoreError(f"the server of {url} redirects to something that is no URL") from None
    own = urlsplit(f"{root.scheme}://{root.place}")
    is_same = place == (own.scheme, own.hostname, own.port or _PORTS[own.scheme]) and "@" not in found.netloc
    inner = unquote(found.path, errors="surrogateescape")
    prefix = f"/{root.path}".rstrip("/")
    is_under = inner == prefix or inner.startswith(f"{prefix}/")
    odd = any(part in (".", "..") for part in inner.replace("\\", "/").split("/")) or not found.path.isprintable()
    if not is_same or not is_under or odd or not location.isascii():
        # Without its path and query, which may be a signature.
        where = f"{found.scheme}://{found.netloc.rpartition('@')[2]}"[:200]
        raise StoreError(
            f"the server of {url} redirects out of it, to {where!a}, which is not followed: "
            "name what lies there by its own URL"
        )
    return found.path + (f"?{found.query}" if found.query else "")


# Names of hosts, and no number that is an address in another way of writing.
_HOST = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z][a-z0-9_-]*")


def hosts_alone(*addresses: str) -> dict[str, str]:
    """Settings with which the driver of buckets asks the hosts of some addresses alone, wherever these redirect it.

    It follows redirects, and has no setting against that. But it asks other hosts through a proxy then, which is none.
    A proxy that the environment names stays in use, and decides itself.

    Args:
        addresses: addresses of servers, of which empty ones say nothing.

    Returns:
        No settings where a host is written so that the driver would not know it again.
    """
    hosts = {urlsplit(address).hostname or "" for address in addresses} - {""}
    if not hosts or urllib.request.getproxies() or not all(map(_is_plain, hosts)):
        return {}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(sorted(hosts))}


def _is_plain(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _HOST.fullmatch(host) is not None
    return True


def refuse_private_address(url: str, host: str, address: str, public_hosts: set[str]) -> None:
    """Refuse a private or link-local address of a host that had a public one before: its name was turned on us.

    Args:
        url: The canonical URL of the root, for the sentence.
        host: The host of the root.
        address: address that its name stands for now.
        public_hosts: Hosts that had a public address; this one is added where it has.

    Raises:
        StoreError: The address is not public, and the host's was.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_global:
        public_hosts.add(host)
    elif host in public_hosts:
        raise StoreError(f"the server of {url} had a public address and now says {address}, which is not asked")


def _close_all(idle: deque[tuple[int, _Connection]]) -> None:
    while idle:
        idle.pop()[1].close()


def _exchange(
    connection: _Connection, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> http.client.HTTPResponse:
    try:
        connection.request(method, target, body=body or None, headers=dict(headers))
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _error_of_connection(error: Exception, what: str) -> FrostlineError:
    if isinstance(error, TimeoutError):
        return StoreUnavailable(
            f"nothing came from the store for {what} within {TIMEOUT} (30 s unless set), or the job's deadline_s"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return StoreError(f"the certificate of the server of {what} is not trusted: {error.verify_message}")
    return StoreUnavailable(f"the store did not give {what}: no answer")


def _proxy_of(root: Root) -> str:
    # As everywhere: HTTP_PROXY, HTTPS_PROXY and NO_PROXY say.
    proxies = urllib.request.getproxies()
    if root.scheme not in proxies or urllib.request.proxy_bypass(root.place):
        return ""
    proxy = proxies[root.scheme]
    return proxy if "://" in proxy else f"http://{proxy}"


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


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
        root: URL of the root, parsed.
        timeout_s: The time that nothing may come before a request is given up.
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
        from frostline.stores.protocols import Entries

        return Entries.of(entry for entry, is_folder in self._listed(folder, "infinity") if not is_folder)

    def write(self, object: str, data: Buffer) -> NoReturn:  # noqa: ARG002
        """Refuse.

        Raises:
            AccessDenied: Every call raises it: a web server is only read.
        """
        raise AccessDenied(f"{self._url} is read alone: it takes no writes")

    def list_dated(self) -> Iterator[Dated]:
        """Refuse: nothing is pruned where nothing is removed.

        Raises:
            AccessDenied: Every call raises it: a web server is only read.
        """
        raise AccessDenied(f"{self._url} is read alone: nothing there is removed")

    def remove(self, object: str) -> NoReturn:  # noqa: ARG002
        """Refuse.

        Raises:
            AccessDenied: Every call raises it: a web server is only read.
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
            entries = _Entries(response)
            try:
                for _, element in ET.iterparse(entries):  # noqa: S314 (expat bounds what entities may grow to)
                    if element.tag == f"{_DAV}response":
                        if found := self._entry(element, folder):
                            yield found
                        element.clear()
                        entries.went_on()
            except (ET.ParseError, LookupError, ValueError) as error:  # the last two of encodings and of addresses
                raise StoreUnavailable(f"the listing of {self._url} broke off, or is no WebDAV") from error

    def _entry(self, element: ET.Element, folder: str) -> tuple[Entry, bool] | None:
        """What one answer of a listing says; None for the folder itself, and for what is not below it."""
        path = unquote(urlsplit(element.findtext(f"{_DAV}href", "")).path).removeprefix("/")
        if not path.startswith(self._prefix + folder):
            return None
        name = path[len(self._prefix) :]
        if name in ("", folder, folder.rstrip("/")):
            return None
        is_folder = element.find(f".//{_DAV}collection") is not None
        name = name.removesuffix("/") if is_folder else name
        said = {tag: element.findtext(f".//{_DAV}{tag}", "") for tag in ("getcontentlength", "getetag")}
        size = said["getcontentlength"].strip()
        if not is_name(name) or not (is_folder or _SIZE.fullmatch(size)):
            # A folder of such a name cannot be asked for either: it is named, and not looked into.
            shown = name.encode(errors="backslashreplace").decode().replace("\0", "\\0") or "/"
            return Entry(shown, UNREADABLE, ""), False
        changed = element.findtext(f".//{_DAV}getlastmodified", "")
        return Entry(name, int(size) if not is_folder else 0, _version_of(said["getetag"], changed)), is_folder


# Between two entries of a listing; what none ends would be kept, and read again, as it grows.
_MAX_ENTRY_BYTES = 1 << 20


class _Entries:
    """A listing that is read as long as its entries end.

    Args:
        response: the answer that has it.
    """

    def __init__(self, response: HTTPResponse) -> None:
        self._response = response
        self._bytes = 0

    def went_on(self) -> None:
        """An entry has ended."""
        self._bytes = 0

    def read(self, nbytes: int = -1, /) -> bytes:
        """The next bytes.

        Raises:
            ValueError: A single entry of the listing is longer than allowed.
        """
        found = self._response.read(nbytes)
        self._bytes += len(found)
        if self._bytes > _MAX_ENTRY_BYTES:
            raise ValueError("an entry has no end")
        return found


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
