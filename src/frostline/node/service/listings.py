"""Runs listings for clients: one per tenant at a time, each in a process that ends with its client."""

import math
import os
import tempfile
import threading
from contextlib import suppress
from typing import IO

from frostline.config import NodeSettings
from frostline.core import URLS
from frostline.datasets.formats.base import Widespread
from frostline.datasets.formats.known import format_named
from frostline.errors import BadRequest, Forbidden, Overloaded, Refused, SettingError, Unavailable
from frostline.node.process.bounded import BoundedProcess
from frostline.node.request.validation import Stores
from frostline.node.scheduling.tenants import Account
from frostline.wire.listings import ListingRequest

__all__ = ("Listing", "Listings")

# Started by name: the listing code and its memory stay out of the node's own process.
_MODULE = "frostline.datasets.manifest.listing_process"
_RETRY_AFTER_S = 2.0
_PIECE = 256 << 10
# Niceness added to a listing, so that serving goes first.
_NICENESS = 5


class Listing:
    """A running listing. ``close`` may be called from any thread and repeatedly, everything else from one thread.

    Args:
        process: process that lists.
        file: file to which it writes the manifest.
    """

    def __init__(self, process: BoundedProcess, file: IO[bytes]) -> None:
        self._process = process
        self._file = file
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False

    def line(self) -> bytes:
        """The next line of its output; empty at the end.

        Raises:
            Refused: if it ended without a final line.
            Unavailable: if it was closed.
        """
        with self._turn:
            self._check()
            try:
                return self._process.line()
            except Refused:
                self._check()
                raise

    def piece(self, place: int) -> bytes:
        """Some bytes of the manifest, or of the splits behind it, from ``place`` on; empty at the end.

        Raises:
            Unavailable: if it was closed.
        """
        with self._turn:
            self._check()
            return os.pread(self._file.fileno(), _PIECE, place)

    def close(self) -> None:
        """Kill the process if it runs, and close the files."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._process.kill()
        with self._turn:  # a thread that waited for a line has returned now
            self._process.close()
            self._file.close()

    def _check(self) -> None:
        if self._is_closed:
            raise Unavailable("the listing was cancelled: its client has gone, or the node is stopping")


class Listings:
    """The listings of a node. Safe for threads.

    Args:
        settings: settings of the node, with the limits of a listing.
        stores: stores that the node serves.
    """

    def __init__(self, settings: NodeSettings, stores: Stores) -> None:
        self._settings = settings
        self._stores = stores
        self._lock = threading.Lock()
        self._running: dict[str, Listing] = {}
        self._is_closed = False

    def begin(self, request: ListingRequest, account: Account) -> Listing:
        """Start to list a data set.

        Raises:
            BadRequest: if the node does not serve the data to that account, or cannot list it.
            Forbidden: if its format may lead to other hosts.
            Overloaded: if the account has a listing under way.
            Unavailable: if the node is stopping.
        """
        url, folders = self._stores.listed(request.data, account.settings.roots)
        _check(url, request)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the node is stopping")
            if account.name in self._running:
                raise Overloaded(
                    f"the node already lists data for {account.name}: list one data set after the other",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._running[account.name] = listing = self._started(url, folders, request)
        return listing

    def end(self, listing: Listing) -> None:
        """Close a listing, so that its tenant may begin another one. Calling it again does nothing."""
        listing.close()
        with self._lock:
            self._running = {name: other for name, other in self._running.items() if other is not listing}

    def close(self) -> None:
        """End all listings. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            running = list(self._running.values())
        for listing in running:
            listing.close()

    def _started(self, url: str, folders: tuple[str, ...] | None, request: ListingRequest) -> Listing:
        settings = self._settings
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the listing closes it); it has no name, so nothing stays behind
        orders = {
            "data": url,
            "format": request.format,
            "relist": request.relist,
            "refuses_changes": request.changed == "refuse",
            "folders": folders,
            "deadline_s": None if settings.store_deadline_s == math.inf else settings.store_deadline_s,
            "known": list(request.known),
            "max_samples": settings.max_listed,
            "max_bytes": settings.max_manifest_bytes,
        }
        try:
            process = BoundedProcess(
                _MODULE,
                orders,
                {"out": file},
                memory_bytes=settings.listing_memory_bytes,
                what="the listing",
                option="--listing-memory",
            )
        except OSError as error:
            file.close()
            raise Unavailable(f"the node cannot start a listing: {error.strerror or error}") from error
        with suppress(OSError):  # the process may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        return Listing(process, file)


def _check(url: str, request: ListingRequest) -> None:
    if url.startswith("memory:"):
        raise BadRequest(f"{url} lies in the memory of the node's process, which the node does not list")
    try:
        format = None if request.format is None else format_named(request.format)
    except SettingError as error:
        raise BadRequest(str(error)) from error
    if format is not None and isinstance(format, Widespread):
        raise Forbidden(
            f"a node does not list data of the format {URLS}, which may lead to other hosts: list it with your own "
            "credentials (--list-locally; in Python Dataset without near=)"
        )
