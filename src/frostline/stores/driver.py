"""S3 and memory as stores of objects, through obstore; the one place that knows its exceptions.

obstore is imported when a store is first used: its threads do not survive a fork, so a process that only
forks workers must never have started them.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, cast

from frostline.errors import (
    AccessDenied,
    BadRequest,
    DataNotFound,
    FrostlineError,
    ObjectNotFound,
    OutOfSpace,
    SettingError,
    StoreError,
    StoreUnavailable,
)
from frostline.stores.faces import Buffer, Entry
from frostline.stores.urls import check_name

if TYPE_CHECKING:
    from obstore.store import MemoryStore, S3Config, S3Store
    from obstore.store import ObjectStore as Client

__all__ = ("DriverStore", "error_of_driver", "memory_store", "s3_store")

_LISTED_AT_ONCE = 1000
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_CREDENTIALS = "no credentials for the store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_PLAIN_HTTP = "the store's address cannot be used: plain http needs AWS_ALLOW_HTTP=true beside AWS_ENDPOINT_URL"


class DriverStore:
    """A store behind obstore. Safe for threads; its client is made on first use, by the process that uses it."""

    def __init__(self, url: str, connect: Callable[[], "Client"], prefix: str) -> None:
        self._url = url
        self._connect = connect
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: Client | None = None

    @property
    def url(self) -> str:
        """The canonical URL of the root."""
        return self._url

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``; the bytes are the driver's own, not copied."""
        name = check_name(object)
        if length == 0:
            return b""
        with self._driven(name) as client:
            from obstore import get_range

            data = memoryview(get_range(client, self._prefix + name, start=offset, length=length))
        if len(data) != length:
            raise ObjectNotFound(f"{name} gave {len(data)} of {length} bytes: it has changed")
        return data

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``."""
        name = check_name(object)
        if length == 0:
            return b"", ""
        with self._driven(name) as client:
            from obstore import get

            found = get(client, self._prefix + name, options={"range": (offset, offset + length)})
            data = memoryview(found.bytes())
        if len(data) != length:
            raise ObjectNotFound(f"{name} gave {len(data)} of {length} bytes: it has changed")
        return data, found.meta["e_tag"] or ""

    def list(self) -> Iterator[Entry]:
        """See ``Listable.list``."""
        with self._driven("") as client:
            from obstore import list as list_objects

            skipped = len(self._prefix)
            for chunk in list_objects(client, prefix=self._prefix or None, chunk_size=_LISTED_AT_ONCE):
                for found in chunk:
                    yield Entry(found["path"][skipped:], found["size"], found["e_tag"] or "")

    def write(self, object: str, data: Buffer) -> None:
        """See ``Writable.write``."""
        name = check_name(object)
        with self._driven(name) as client:
            from obstore import put

            put(client, self._prefix + name, data)

    def __getstate__(self) -> dict[str, object]:
        # A client cannot travel to another process; the next one makes its own.
        return {**self.__dict__, "_client": None}

    @contextmanager
    def _driven(self, name: str) -> Iterator["Client"]:
        if _driven_by() != os.getpid():
            raise StoreError(
                f"{self._url} cannot be read here: this process was forked from one that had used such a store; "
                "start workers with 'spawn' or 'forkserver'"
            )
        from obstore.exceptions import BaseError

        try:
            if self._client is None:
                self._client = self._connect()
            yield self._client
        except (BaseError, OSError, ValueError) as error:
            raise error_of_driver(error, self._url, name) from error


def memory_store(url: str, place: str, path: str) -> DriverStore:
    """Objects in this process's memory; every store of the same place shares them."""
    return DriverStore(url, partial(_memory, place), path)


def s3_store(url: str, bucket: str, prefix: str) -> DriverStore:
    """Objects of a bucket; endpoint and credentials from the usual ``AWS_*`` variables."""
    return DriverStore(url, partial(_bucket, bucket), prefix)


def error_of_driver(error: Exception, url: str, name: str) -> FrostlineError:
    """What an exception of obstore means for an object, or for the root where ``name`` is empty.

    The sentence is Frostline's own: the driver's may hold addresses with credentials.
    """
    what = f"{url}/{name}" if name else url
    made = _by_kind(type(error).__name__, what, name)
    return made if made is not None else _by_text(str(error), what, name)


def _by_kind(kind: str, what: str, name: str) -> FrostlineError | None:
    match kind:
        case "FileNotFoundError" | "NotFoundError":
            return _absent(what, name)
        case "PermissionDeniedError" | "UnauthenticatedError" | "PermissionError":
            return AccessDenied(f"the store refused access to {what}: check its credentials and their rights")
        case "InvalidPathError" | "ValueError" | "UnicodeEncodeError":
            return BadRequest(f"the store cannot name an object of {what}")
        case "UnknownConfigurationKeyError":
            return SettingError(f"a setting of the store of {what} is unknown to its driver")
        case "NotSupportedError" | "AlreadyExistsError" | "PreconditionError" | "NotModifiedError":
            return StoreError(f"the store will not do this with {what} ({kind})")
        case _:
            return None


def _by_text(text: str, what: str, name: str) -> FrostlineError:
    # obstore has one class for everything else; the answer's status tells them apart.
    if "169.254." in text or "CredentialsProvider" in text:
        return AccessDenied(_NO_CREDENTIALS)
    if "Invalid range:" in text:
        return ObjectNotFound(f"{what} ends before the bytes that were asked for: it has changed")
    if "builder error" in text:
        return SettingError(_PLAIN_HTTP)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else 0
    code = _CODE.search(text)
    said = f" ({status} {code.group(1)})" if code else f" ({status})" if status else ""
    match status:
        case 404:
            return _absent(what, name)
        case 401 | 403:
            return AccessDenied(f"the store refused access to {what}: check its credentials and their rights{said}")
        case 416:
            return ObjectNotFound(f"{what} ends before the bytes that were asked for: it has changed")
        case 507:
            return OutOfSpace(f"the store is full: {what} was not written")
        case 301 | 400:
            return StoreError(
                f"the store did not accept the request for {what}{said}: check AWS_REGION and its address"
            )
        case _:
            return StoreUnavailable(f"the store did not give {what}{said or ': no answer'}")


def _absent(what: str, name: str) -> FrostlineError:
    return ObjectNotFound(f"there is no object {what}") if name else DataNotFound(f"there is nothing at {what}")


@cache
def _driven_by() -> int:
    # The process that started the driver's threads; a forked child remembers its parent here.
    return os.getpid()


@cache
def _memory(place: str) -> "MemoryStore":  # noqa: ARG001 (the key of the cache: one memory a name)
    from obstore.store import MemoryStore

    return MemoryStore()


def _bucket(bucket: str) -> "S3Store":
    from obstore.store import S3Store

    # Short tries: whoever asks decides how long it is worth trying, and must be able to say so.
    return S3Store(
        bucket,
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=20)},
        # Not as client_options: those put aside what AWS_ALLOW_HTTP and its like say.
        config=cast("S3Config", {"connect_timeout": "5s", "timeout": "60s"}),
    )
