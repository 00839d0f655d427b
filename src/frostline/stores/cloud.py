"""S3, Google Cloud Storage, Azure and memory as stores: where their servers and credentials are read from.

Credentials and addresses come from the variables that each ecosystem uses, of which the driver reads most by itself;
what it does not read is read here. Options of the URL go before them.

A store of objects behind obstore, and memory as one. obstore reads no listing in which one key is none of its paths
(``a//b``, ``..``, a control character): Arrow's file systems list such a folder, so that the key can be named, and
that of a container of Azure is asked for here.

obstore is imported when a store is first used: its threads do not survive a fork, so a process that only forks
workers must never have started them.
"""

import base64
import hmac
import math
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import formatdate, parsedate_to_datetime
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.config import environment
from frostline.core.errors import AccessDenied, ObjectNotFound, SettingError, StoreError, StoreUnavailable
from frostline.core.system import background
from frostline.stores.errors import OddName, error_of_driver, error_of_status
from frostline.stores.protocols import (
    PREFIX,
    UNREADABLE,
    Buffer,
    Dated,
    Driver,
    Entries,
    Entry,
    Waits,
    version_of_time,
)
from frostline.stores.retry import RetryingSections
from frostline.stores.urls import Root, check_name, parse_url
from frostline.stores.web import WebClient, WebStore, hosts_alone

if TYPE_CHECKING:
    from obstore import GetResult, ListResult, ObjectMeta
    from obstore.store import AzureStore, GCSStore, MemoryStore, RetryConfig, S3Credential, S3Store
    from obstore.store import ObjectStore as Client
    from pyarrow.fs import FileSystem

__all__ = (
    "DRIVER",
    "DriverStore",
    "azure_settings",
    "cloud_store",
    "google_settings",
    "list_azure",
    "list_by_arrow",
    "memory_store",
    "profile_of",
    "s3_settings",
    "signing_settings",
)


_LISTED_AT_ONCE = 1000
_LIST_RETRIES = 4


def _start() -> None:
    # Its threads start with the first call, whatever that is.
    with background():
        from obstore import put
        from obstore.store import MemoryStore

        put(MemoryStore(), "first", b"")


DRIVER = Driver(_start)
"""Of objects, whose threads serve all stores of a process."""


class DriverStore:
    """A store behind obstore. Safe for threads; its client is made on first use, by the process that uses it.

    Args:
        url: the canonical, of the root.
        connect: function that makes the client that tries a request again so often. It is called in the process that
            uses it, and must travel by pickle.
        prefix: prefix of the root's objects within the client's place.
        lister: function that lists the client's objects under a prefix by their names as they are, where the driver has
            no path for one; None where nothing does. It too must travel by pickle.
        escape: mark in names as the driver lists them that may stand for another; empty where none does. With one, the
            lister also takes a ``delimiter``, at which names of folders end.
    """

    def __init__(
        self,
        url: str,
        connect: Callable[[int], "Client"],
        prefix: str,
        lister: Callable[..., Iterable[Entry]] | None = None,
        escape: str = "",
    ) -> None:
        self._url = url
        self._connect = connect
        self._lister = lister
        self._escape = escape
        self._prefix = f"{prefix}/" if prefix else ""
        # Reads and writes are tried again by whoever asks, who must know how often a store refuses; a listing is not
        # taken up where it ended, so the driver does it.
        self._clients: dict[int, Client] = {}

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
        with self._driven(name) as client:
            from obstore import get

            found = get(client, self._prefix + name, options={"range": (offset, offset + length)})
            data = self._bounded(found, length)
        if len(data) != length:
            raise ObjectNotFound(f"{name} gave {len(data)} of {length} bytes: it has changed")
        return data, _version(found.meta)

    def describe(self, object: str) -> Entry:
        """See ``Described.describe``."""
        name = check_name(object)
        with self._driven(name) as client:
            from obstore import head

            found = head(client, self._prefix + name)
        return Entry(name, found["size"], _version(found))

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        return iter(self.list_section(""))

    def sections(self) -> tuple[Sequence[Entry], tuple[str, ...]]:
        """See ``Sectioned.sections``."""
        try:
            found = self._at_root()
        except OddName as odd:
            return self._by_name("", odd), ()
        skipped = len(self._prefix)
        entries = [self._entry(item, "") for item in found["objects"]]
        folders = tuple(f"{prefix.rstrip('/')[skipped:]}/" for prefix in found["common_prefixes"] if prefix)
        if "" in found["common_prefixes"]:  # to the driver /a.jpg is a.jpg, and read as that it is not there
            named = self._by_name("", OddName(f"{self._url} holds objects whose names begin with a slash: rename them"))
            if len(named.filter_prefix("/")):
                return named, ()
            entries.append(Entry("/", UNREADABLE, ""))  # as Arrow takes it for the same in Google's buckets
        if self._may_be_escaped(pa.chunked_array([[entry.object for entry in entries], folders], pa.string())):
            with suppress(OddName):
                named = self._by_name("", OddName(self._url), delimiter="/")
                folders = tuple(entry.object for entry in named if entry.object.endswith("/"))
                return [entry for entry in named if not entry.object.endswith("/")], folders
        return entries, folders

    def list_section(self, folder: str) -> Sequence[Entry]:
        """See ``Sectioned.list_section``."""
        if folder and _ODD.search(folder[:-1]):  # the driver has no path of the folder
            return self._by_name(folder, OddName(f"{self._url} holds a folder {folder!a}, a name that cannot be read"))
        try:
            found = Entries.of(self._entry(item, folder) for item in self._objects(folder))
        except OddName as odd:
            return self._by_name(folder, odd)
        if self._may_be_escaped(found.table["object"]):
            with suppress(OddName):  # where others cannot be asked, nearly all names are what the driver lists
                return self._by_name(folder, OddName(self._url))
        found = self._without_slashes(found)
        # Of Azure the driver leaves the marker of a folder out; where nothing else is there, it is what was listed.
        return found if len(found) or not folder else Entries.of([Entry(folder, UNREADABLE, "")])

    def list_dated(self) -> Iterator[Dated]:
        """See ``Prunable.list_dated``."""
        skipped = len(self._prefix)
        for item in self._objects(""):
            yield Dated(item["path"][skipped:], item["size"], item["last_modified"].timestamp())

    def remove(self, object: str) -> None:
        """See ``Prunable.remove``."""
        name = check_name(object)
        with suppress(ObjectNotFound), self._driven(name) as client:
            from obstore import delete

            delete(client, self._prefix + name)

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``."""
        name = check_name(object)
        with self._driven(name) as client:
            from obstore import put

            put(client, self._prefix + name, data)

    def _bounded(self, found: "GetResult", length: int) -> bytes:
        """The bytes of an answer, which may go on without an end: the driver itself keeps all that comes."""
        pieces, left = list[bytes](), length
        for piece in found.stream(min_chunk_size=length):
            left -= len(piece)
            if left < 0:
                raise StoreError(f"the server of {self._url} gives other ranges than it is asked for")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _at_root(self) -> "ListResult[Sequence[ObjectMeta]]":
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list_with_delimiter

            return list_with_delimiter(client, self._prefix or None)

    def _may_be_escaped(self, names: pa.ChunkedArray) -> bool:
        return bool(self._escape) and pc.any(pc.match_substring(names, self._escape)).as_py() is True

    def _entry(self, item: "ObjectMeta", folder: str) -> Entry:
        name = item["path"][len(self._prefix) :]
        if len(name) < len(folder) or not name:  # a folder's own marker, whose slash the driver takes away
            return Entry(folder or "/", UNREADABLE, "")
        return Entry(name, item["size"], _version(item))

    def _objects(self, folder: str) -> "Iterator[ObjectMeta]":
        with self._driven("", _LIST_RETRIES) as client:
            from obstore import list as list_objects

            for chunk in list_objects(client, prefix=self._prefix + folder or None, chunk_size=_LISTED_AT_ONCE):
                yield from chunk

    def _by_name(self, folder: str, odd: OddName, **asked: str) -> Entries:
        """A listing in which a key is none of the driver's paths."""
        if self._lister is None:
            raise odd
        from pyarrow import ArrowException

        try:
            found = list(self._lister(self._prefix + folder, **asked))
        except (ImportError, ArrowException, OSError, ValueError, AccessDenied, SettingError) as error:
            raise odd from error  # which names the key; what others lack, the driver had
        skipped = len(self._prefix)
        if odd.name and not any(_ODD.search(entry.object, skipped) for entry in found):
            found.append(Entry(odd.name, UNREADABLE, ""))  # Arrow takes a//, the one that it is about, for a folder
        names = (entry.object[skipped:] for entry in found)
        listed = Entries.of(
            Entry(name or "/", UNREADABLE if _ODD.search(name) else entry.size, entry.etag)
            for name, entry in zip(names, found, strict=True)
        )
        return self._without_slashes(listed)

    def _without_slashes(self, found: Entries) -> Entries:
        """A listing in which keys that end in a slash, which the driver takes away, are named and cannot be read.

        One is seen where it is empty, where other keys lie beneath it, and where another key is called as it is without
        the slash. Another one is asked for in vain, by whoever reads it.
        """
        names, sizes = found.table["object"], found.table["size"]
        folders = _folders_of(names)
        is_seen = pc.or_(pc.equal(sizes, 0), pc.is_in(names, value_set=pa.array(sorted(folders), names.type)))
        if len(pc.unique(names)) < len(names):
            counts = names.value_counts()
            twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
            is_seen = pc.or_(is_seen, pc.is_in(names, value_set=twice))
        is_seen = pc.and_not(is_seen, pc.equal(sizes, UNREADABLE))
        if not pc.any(is_seen).as_py():
            return found
        by_name: dict[str, list[Entry]] = {}
        for entry in found.where(is_seen):
            by_name.setdefault(entry.object, []).append(entry)
        settled = [entry for some in by_name.values() for entry in self._settled(some, folders)]
        return Entries.concatenate([found.where(pc.invert(is_seen)), Entries.of(settled)])

    def _settled(self, listed: Sequence[Entry], folders: Collection[str]) -> Sequence[Entry]:
        """The object of a name, and the key with a slash behind that name, of entries that are listed by it."""
        name = listed[0].object
        marker = Entry(f"{name}/", UNREADABLE, "")
        is_marker = len(listed) == 1 and not listed[0].size and name in folders
        if is_marker and not PurePosixPath(name).suffix:
            return [marker]  # as consoles make one for each folder, which takes no request then
        try:
            there = self.describe(name)
        except ObjectNotFound:
            return [marker]
        except AccessDenied:  # many may list what they may not ask for
            return [listed[0]]
        return [there, marker] if len(listed) > 1 else [there]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    def __getstate__(self) -> dict[str, object]:
        # A client cannot travel to another process; the next one makes its own.
        return {**self.__dict__, "_clients": {}}

    @contextmanager
    def _driven(self, name: str, retries: int = 0) -> Iterator["Client"]:
        DRIVER.use(self._url)
        from obstore.exceptions import BaseError

        try:
            if retries not in self._clients:
                self._clients[retries] = self._connect(retries)
            yield self._clients[retries]
        except (BaseError, OSError, ValueError) as error:
            raise error_of_driver(error, self._url, name) from error


def memory_store(url: str, place: str, path: str) -> DriverStore:
    """Objects in this process's memory; every store of the same place shares them."""
    return DriverStore(url, partial(_memory_client, place), path)


def _version(found: "ObjectMeta") -> str:
    # Azure writes it with quotes beside the bytes and without them in listings.
    etag = (found["e_tag"] or "").strip('"')
    # Web servers need not have one. Where they give no time either, the driver says that of 1970.
    return etag or version_of_time(found["last_modified"].timestamp())


def _folders_of(names: pa.ChunkedArray) -> set[str]:
    """The folders, at any depth, in which objects of these names lie."""
    found: set[str] = set()
    rest = set(pc.unique(pc.replace_substring_regex(names, r"/?[^/]*/*$", "")).to_pylist())
    while rest := rest - found - {""}:
        found |= rest
        rest = {folder.rpartition("/")[0] for folder in rest}
    return found


# What the driver's paths hold none of.
_ODD = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\x00-\x1f\x7f]")


def _memory_client(place: str, retries: int) -> "MemoryStore":  # noqa: ARG001 (memory never fails)
    return _memory(place)


@cache
def _memory(place: str) -> "MemoryStore":  # noqa: ARG001 (the key of the cache: one memory a name)
    from obstore.store import MemoryStore

    return MemoryStore()


_OTHER_WAYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
# The other profiles of that file are only used where they are named.
_DEFAULT = re.compile(r"^\[\s*(?:profile\s+)?default\s*\]", re.MULTILINE)
_ASKED_AGAIN_AFTER = timedelta(minutes=5)


def profile_of(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """The profile to read; None where credentials come without one, as AWS's own tools decide.

    A URL's ``profile`` goes before everything, then come keys and roles of the environment, ``AWS_PROFILE``, and the
    profile ``default`` of the user's files of credentials and of settings.
    """
    if "profile" in options:
        return options["profile"]
    if any(name in environment for name in _OTHER_WAYS) or environment.get("AWS_SKIP_SIGNATURE") == "true":
        return None
    if "AWS_PROFILE" in environment:
        return environment["AWS_PROFILE"]
    file = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    said = Path(environment.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    is_there = file.is_file() or (said.is_file() and _DEFAULT.search(said.read_text(errors="replace")) is not None)
    return "default" if is_there and find_spec("botocore") else None


def signing_settings(
    profile: str, config: Mapping[str, str], environment: Mapping[str, str]
) -> "tuple[dict[str, str], Callable[[], S3Credential]]":
    """The driver's settings with what a profile says of server and region, and what gives its credentials.

    Raises:
        SettingError: there is no such profile, or botocore is not installed.
        AccessDenied: the profile gives no credentials.
    """
    if not find_spec("botocore"):
        raise SettingError("AWS profiles are read by botocore: pip install 'frostline[aws]'")
    with _translated(profile):
        from botocore.session import Session

        session = Session(profile=profile)
        credentials = session.get_credentials()
        told = _told(session, environment)
        if credentials is not None:
            credentials.get_frozen_credentials()
    if credentials is None:
        raise AccessDenied(f"the AWS profile {profile} holds no credentials")
    return {**told, **config}, _provider(profile, credentials)


def _told(session: Any, environment: Mapping[str, str]) -> dict[str, str]:
    about: Mapping[str, Any] = session.get_scoped_config()
    services: Mapping[str, Any] = session.full_config.get("services", {}).get(about.get("services", ""), {})
    address = services.get("s3", {}).get("endpoint_url") or about.get("endpoint_url")
    told = {}
    if address and not {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"} & environment.keys():
        told["endpoint"] = str(address)
        told |= {"allow_http": "true"} if told["endpoint"].startswith("http://") else {}
    if about.get("region") and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        told["region"] = str(about["region"])
    return told


def _provider(profile: str, credentials: Any) -> "Callable[[], S3Credential]":
    def credential() -> "S3Credential":
        # The driver asks for them again before that time; botocore renews those that end.
        with _translated(profile):
            frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _ASKED_AGAIN_AFTER,
        }

    return credential


@contextmanager
def _translated(profile: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ProfileNotFound

    try:
        yield
    except ProfileNotFound as error:
        raise SettingError(f"there is no AWS profile {profile}: `aws configure list-profiles` shows them") from error
    except BotoCoreError as error:
        # Its sentence may hold what stands in the files.
        raise AccessDenied(f"the AWS profile {profile} gave no credentials ({type(error).__name__})") from error


_CONNECT_S = 5.0
_PLAIN = {"allow_http": "true"}
_CONNECTION_STRING = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_key",
    "UseDevelopmentStorage": "use_emulator",
}
# Of other services and of copies that are not asked, and what addresses are made of.
_BESIDE = ("DefaultEndpointsProtocol", "EndpointSuffix", "BlobSecondaryEndpoint")
_OF_OTHERS = ("Queue", "Table", "File")


def cloud_store(
    url: str,
    root: Root,
    *,
    deadline_s: float = math.inf,
    retry_for_s: float | None = None,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> RetryingSections:
    """The objects of a bucket, a container or a web server. Nothing is looked at until it is used.

    Args:
        url: the canonical.
        root: URL of the root, parsed.
        deadline_s: the time that it may be silent, or be tried again, where the environment does not say less.
        retry_for_s: the time that a call may be refused before its caller is told; None for what the environment says.
        now: clock.
        wait: function that lets time pass.
    """
    waits = Waits.of(environment(PREFIX)).within(deadline_s)
    retry_for_s = waits.retry_for_s if retry_for_s is None else retry_for_s
    # Redirects are judged where the web is read; the driver follows them wherever they lead.
    is_web = root.scheme in ("http", "https")
    # Arrow ends the process where a container of Azure holds such a name (26.0). Azure escapes what XML cannot hold,
    # and the driver does not look for that.
    lister, escape = (list_azure, "%") if root.scheme == "az" else (list_by_arrow, "")
    store = (
        WebStore(url, root, waits.timeout_s)
        if is_web
        else DriverStore(
            url,
            partial(_client, root, waits.timeout_s),
            root.path,
            partial(lister, root, waits.timeout_s),
            escape,
        )
    )
    return RetryingSections(store, retry_for_s=retry_for_s, requests_per_s=waits.requests_per_s, now=now, wait=wait)


def s3_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG001
    """What the driver is told beside what it reads from ``AWS_*`` by itself, profiles aside."""
    told = {name: options[name] for name in ("endpoint", "region") if name in options}
    if "endpoint" in options:
        # It goes before the address of the environment, also before the one for S3 alone.
        told["aws_endpoint_url_s3"] = options["endpoint"]
    return {**told, **_plain(options.get("endpoint", "")), **_anonymous(options)}


def google_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver is told beside what it reads from ``GOOGLE_*`` by itself."""
    address = options.get("endpoint", "") or _emulator(environment.get("STORAGE_EMULATOR_HOST", ""))
    told = {"base_url": address} if address else {}
    return {**told, **_plain(address), **_anonymous(options)}


def azure_settings(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What the driver is told beside what it reads from ``AZURE_*`` by itself.

    Raises:
        SettingError: ``AZURE_STORAGE_CONNECTION_STRING`` is none.
    """
    told = _connection(environment.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    told |= {"account_name": options["account"]} if "account" in options else {}
    told |= {"endpoint": options["endpoint"]} if "endpoint" in options else {}
    return {**told, **_plain(told.get("endpoint", "")), **_anonymous(options)}


def _connection(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(";") if part]
    if any(not mark for _, mark, _ in pairs):
        raise SettingError("AZURE_STORAGE_CONNECTION_STRING is written name=value;name=value")
    given = {name: value for name, _, value in pairs}
    unknown = [
        name for name in given if name not in (*_CONNECTION_STRING, *_BESIDE) and not name.startswith(_OF_OTHERS)
    ]
    if unknown:
        raise SettingError(f"AZURE_STORAGE_CONNECTION_STRING says {unknown[0][:40]!a}, which Frostline does not know")
    told = {ours: given[theirs] for theirs, ours in _CONNECTION_STRING.items() if theirs in given}
    if "sas_key" in told:
        told["sas_key"] = told["sas_key"].removeprefix("?")
    if "EndpointSuffix" in given and "AccountName" in given:
        protocol = given.get("DefaultEndpointsProtocol", "https")
        told.setdefault("endpoint", f"{protocol}://{given['AccountName']}.blob.{given['EndpointSuffix']}")
    return told


def _emulator(host: str) -> str:
    return host if not host or "://" in host else f"http://{host}"


def _plain(address: str) -> dict[str, str]:
    # Whoever writes the address out with http:// means it.
    return _PLAIN if address.startswith("http://") else {}


def _anonymous(options: Mapping[str, str]) -> dict[str, str]:
    return {"skip_signature": "true"} if "anonymous" in options else {}


def _tries(retries: int) -> "RetryConfig":
    # Short tries: whoever asks decides how long it is worth trying, and must be able to say so.
    return {"max_retries": retries, "retry_timeout": timedelta(seconds=20)}


def _times(timeout_s: float) -> dict[str, str]:
    # Not as the driver's client options: those put aside what AWS_ALLOW_HTTP and its like say. The limit for a whole
    # answer is one that nothing reaches, as there is none: what counts is that bytes keep coming.
    connect_ms, read_ms = (f"{round(1000 * seconds)}ms" for seconds in (min(_CONNECT_S, timeout_s), timeout_s))
    return {"connect_timeout": connect_ms, "read_timeout": read_ms, "timeout": "365days"}


_S3_ADDRESSES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _client(root: Root, timeout_s: float, retries: int) -> "Client":
    match root.scheme:
        case "s3":
            return _s3(root, retries, _times(timeout_s))
        case "gs":
            return _google(root, retries, _times(timeout_s))
        case _:
            return _azure(root, retries, _times(timeout_s))


def _s3(root: Root, retries: int, times: dict[str, str]) -> "S3Store":
    from obstore.store import S3Store

    options, said = dict(root.options), environment("AWS_")
    config: dict[str, Any] = {**times, **s3_settings(options, said)}
    profile = None if "anonymous" in options else profile_of(options, said)
    addresses = [said.get(name, "") for name in _S3_ADDRESSES]
    if profile is None:
        # Else other servers are asked for keys.
        if "skip_signature" in config or said.keys() & {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"}:
            config |= hosts_alone(config.get("endpoint", ""), *addresses)
        return S3Store(root.place, retry_config=_tries(retries), config=config)  # type: ignore[arg-type]
    config, credentials = signing_settings(profile, config, said)
    config |= hosts_alone(config.get("endpoint", ""), *addresses)
    return S3Store(root.place, retry_config=_tries(retries), config=config, credential_provider=credentials)  # type: ignore[arg-type]


def _google(root: Root, retries: int, times: dict[str, str]) -> "GCSStore":
    from obstore.store import GCSStore

    settings: Any = {**times, **google_settings(dict(root.options), environment("STORAGE_"))}
    if "skip_signature" in settings:
        settings |= hosts_alone(settings.get("base_url", ""))
    return GCSStore(root.place, retry_config=_tries(retries), config=settings)


def _azure(root: Root, retries: int, times: dict[str, str]) -> "AzureStore":
    from obstore.store import AzureStore

    settings: Any = {**times, **azure_settings(dict(root.options), environment("AZURE_"))}
    told = _azure_told(root)
    if told.keys() & {"account_key", "sas_key", "bearer_token", "skip_signature"}:
        settings |= hosts_alone(told.get("endpoint", ""))
    return AzureStore(root.place, retry_config=_tries(retries), config=settings)


def list_by_arrow(root: Root, timeout_s: float, prefix: str) -> Iterator[Entry]:
    """The objects of a bucket under a prefix, as in ``list_azure``. There are no etags: versions are those of times."""
    from pyarrow.fs import FileSelector, FileType

    files = (_arrow_s3 if root.scheme == "s3" else _arrow_google)(root, timeout_s)
    selected = FileSelector(f"{root.place}/{prefix}".rstrip("/"), recursive=True)
    for info in files.get_file_info(selected):
        if info.type == FileType.File:
            changed_s = info.mtime.timestamp() if info.mtime else 0
            yield Entry(info.path[len(root.place) + 1 :], int(info.size), version_of_time(changed_s))


# The region for which alone Arrow's client follows no redirects. It signs as for us-east-1, which most servers take.
_NO_REDIRECTS = "aws-global"


def _arrow_s3(root: Root, timeout_s: float) -> "FileSystem":
    from pyarrow.fs import S3FileSystem

    options, said = dict(root.options), environment("AWS_")
    config = s3_settings(options, said)
    profile = None if "anonymous" in options else profile_of(options, said)
    keys: dict[str, Any] = {}
    if profile is not None:
        config, credentials = signing_settings(profile, config, said)
        given = credentials()
        keys = {"access_key": given["access_key_id"], "secret_key": given["secret_access_key"]}
        keys |= {"session_token": given["token"]} if given["token"] else {}
    addresses = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = config.get("endpoint") or next((said[name] for name in addresses if said.get(name)), "")
    region = config.get("region") or said.get("AWS_REGION") or said.get("AWS_DEFAULT_REGION") or "us-east-1"
    return S3FileSystem(
        anonymous="anonymous" in options or said.get("AWS_SKIP_SIGNATURE") == "true",
        region=_NO_REDIRECTS if endpoint else region,
        force_virtual_addressing=said.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST") == "true",
        request_timeout=timeout_s,
        connect_timeout=min(_CONNECT_S, timeout_s),
        **_addressed(endpoint, "endpoint_override"),
        **keys,
    )


def _arrow_google(root: Root, timeout_s: float) -> "FileSystem":
    from pyarrow.fs import GcsFileSystem

    options, token = dict(root.options), environment("GOOGLE_").get("GOOGLE_BEARER_TOKEN")
    address = google_settings(options, environment("STORAGE_")).get("base_url", "")
    keys: dict[str, Any] = {}
    if token is not None:
        keys = {"access_token": token, "credential_token_expiration": datetime.now(UTC) + _ASKED_AGAIN_AFTER}
    return GcsFileSystem(
        anonymous="anonymous" in options,
        retry_time_limit=timedelta(seconds=timeout_s),
        **_addressed(address, "endpoint_override"),
        **keys,
    )


def _addressed(address: str, name: str) -> dict[str, Any]:
    scheme, mark, host = address.partition("://")
    return {"scheme": scheme, name: host.rstrip("/")} if mark else {}


_AZURE_VERSION = "2023-11-03"
# The driver's settings by their shortest names, with their variables.
_AZURE_VARIABLES = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "account_key": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY"),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "sas_key": ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
    "skip_signature": ("AZURE_SKIP_SIGNATURE",),
    "bearer_token": ("AZURE_STORAGE_TOKEN",),
}


# A page has at most 5,000 names of 1,024 characters, which escapes make longer.
_MAX_PAGE_BYTES = 64 << 20


def _azure_told(root: Root) -> dict[str, str]:
    """All that the driver is told, with what it reads by itself."""
    said = environment("AZURE_")
    told = azure_settings(dict(root.options), said)
    for name, variables in _AZURE_VARIABLES.items():
        found = next((said[variable] for variable in variables if said.get(variable)), "")
        told = {name: found, **told} if found else told
    return told


def list_azure(root: Root, timeout_s: float, prefix: str, delimiter: str = "") -> Iterator[Entry]:
    """The blobs of a container under a prefix, by their names as they are.

    Args:
        root: container.
        timeout_s: time that nothing may come before a request is given up.
        prefix: prefix of their names.
        delimiter: mark at which names of folders end; empty where the blobs in folders are listed.

    Raises:
        AccessDenied: the credentials are none that a request can be signed with here.
        StoreUnavailable: the service did not answer.
    """
    told = _azure_told(root)
    endpoint = told.get("endpoint") or f"https://{told.get('account_name', '')}.blob.core.windows.net"
    place = parse_url(endpoint)
    client, marker, is_first = WebClient(endpoint, place, timeout_s), "", True
    path = "/".join(part for part in (place.path, root.place) if part)
    while marker or is_first:
        asked = {"restype": "container", "comp": "list", "delimiter": delimiter, "prefix": prefix, "marker": marker}
        asked = {name: value for name, value in asked.items() if value}
        signed, headers = _signed_for_azure(told, f"/{quote(path)}", asked)
        with client.answer("GET", root.place, headers, query=urlencode(signed, quote_via=quote)) as response:
            if response.status != 200:
                raise error_of_status(response.status, str(response.status), endpoint, "")
            page = response.read(_MAX_PAGE_BYTES + 1)
        try:
            listing = ET.fromstring(page[:_MAX_PAGE_BYTES])  # noqa: S314 (expat bounds what entities may grow to)
        except (ET.ParseError, LookupError) as error:
            raise StoreUnavailable(f"a page of the listing of the container {root.place} broke off") from error
        yield from (_blob(found) for found in listing.iterfind("Blobs/*"))
        before, marker, is_first = marker, listing.findtext("NextMarker") or "", False
        if marker and marker == before:
            raise StoreUnavailable(f"the listing of the container {root.place} has no end: a page names itself as next")


def _blob(blob: ET.Element) -> Entry:
    name = blob.find("Name")
    text = "" if name is None else name.text or ""
    if name is not None and name.get("Encoded") == "true":
        text = unquote(text)
    if blob.tag == "BlobPrefix":
        return Entry(text, UNREADABLE, "")
    changed = blob.findtext("Properties/Last-Modified", "")
    version = blob.findtext("Properties/Etag", "").strip('"') or version_of_time(
        parsedate_to_datetime(changed).timestamp()
    )
    if blob.findtext("Properties/ResourceType") == "directory":
        return Entry(f"{text}/", UNREADABLE, "")
    return Entry(text, int(blob.findtext("Properties/Content-Length", "0")), version)


def _signed_for_azure(
    told: Mapping[str, str], path: str, asked: Mapping[str, str]
) -> tuple[Mapping[str, str], dict[str, str]]:
    """The query and the headers of a request, signed with what the driver would take first."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _AZURE_VERSION}
    if told.get("skip_signature", "").lower() in ("true", "1"):
        return asked, headers
    if "bearer_token" in told:
        return asked, {**headers, "Authorization": f"Bearer {told['bearer_token']}"}
    if "account_key" in told:
        resource = [f"/{told['account_name']}{path}", *(f"{name}:{asked[name]}" for name in sorted(asked))]
        lines = ["GET", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items()), *resource]
        made = hmac.digest(base64.b64decode(told["account_key"]), "\n".join(lines).encode(), "sha256")
        shared = f"SharedKey {told['account_name']}:{base64.b64encode(made).decode()}"
        return asked, {**headers, "Authorization": shared}
    if "sas_key" in told:
        # A plus is one, as to the driver: people paste signatures escaped and not.
        pairs = (pair.partition("=") for pair in unquote(told["sas_key"].removeprefix("?")).split("&"))
        return {**asked, **{name: value for name, _, value in pairs}}, headers
    raise AccessDenied("such a listing takes an account's key, a SAS or a token")
