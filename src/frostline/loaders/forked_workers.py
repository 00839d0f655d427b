"""Serves workers that are forked from this process, where their own store clients would hang, from its node."""

import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from frostline.core.config import IoSettings, LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.stores.open import survives_fork
from frostline.transport import Transport

if TYPE_CHECKING:  # of Linux, where it is imported when it is needed
    from frostline.io_service.service import IoService

__all__ = ("ForkedWorkers", "serve_forked")

_MIB = 1 << 20


def serve_forked(
    nodes: Sequence[str],
    transport: Transport,
    data: Dataset,
    settings: LoaderSettings,
    node: NodeSettings,
    stack: ExitStack,
) -> "ForkedWorkers | None":
    """What serves a job's forked workers; None where they need nobody, or the system has no I/O service.

    Args:
        nodes: nodes of the job; none where its node is in this process.
        transport: the way to that one.
        data: data that it reads.
        settings: the way that the job asks.
        node: settings of the node in this process.
        stack: stack that ends the service when it is closed.
    """
    if nodes or sys.platform != "linux":
        return None
    found = ForkedWorkers(transport, data, settings, node.shared_cache)
    stack.callback(found.close)
    return found


class ForkedWorkers:
    """An I/O service in this process, for the processes that are forked from it (decision 58). Safe for threads.

    Object stores and Cassandra are reached by drivers whose threads a forked process lacks and cannot start anew. Where
    this process has used one, its forks ask the node that lives here. The service starts just before the first such
    fork, listens at a name that the forked processes alone know, answers this user alone, and lives as long as the job.

    Args:
        transport: the way to the node of this process.
        data: data that it reads.
        settings: the way that the job asks.
        shared_cache: URL under which the node keeps features for others; None keeps none.
    """

    def __init__(
        self, transport: Transport, data: Dataset, settings: LoaderSettings, shared_cache: str | None = None
    ) -> None:
        self._transport = transport
        self._data = data
        self._shared_cache = shared_cache
        nbytes = max(settings.window_bytes, _MIB)  # all of it for what is under way: nothing is kept
        self._settings = IoSettings(memory_bytes=nbytes, window_bytes=nbytes)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._service = ExitStack()
        self._url = ""
        self._io: IoService | None = None
        self._is_closed = False
        _ALL.add(self)

    @property
    def nodes(self) -> Sequence[str]:
        """Whom a forked process asks; nobody in this process, and in none that can read by itself."""
        return (self._url,) if self._url and os.getpid() != self._process else ()

    def open(self) -> None:
        """This process is about to fork."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not (self._url or self._is_closed or all(map(survives_fork, self._places))):
                # Where the system gives no socket, workers say what else would do.
                with suppress(OSError, SettingError):
                    self._url = self._service.enter_context(self._serving())

    def reset_after_fork(self) -> None:
        """This process was forked from the one that serves, whose connections end with that one alone."""
        if self._io is not None:
            self._io.reset_after_fork()

    def close(self) -> None:
        """End the service, in the process that has it. Calling it again does nothing."""
        if os.getpid() == self._process:
            with self._lock:
                self._is_closed, self._url = True, ""
                self._service.close()

    @cached_property
    def _places(self) -> Sequence[str]:
        return (*roots_of(self._data), *([self._shared_cache] if self._shared_cache else ()))

    @contextmanager
    def _serving(self) -> Iterator[str]:
        from frostline.io_service.service import IoService
        from frostline.io_service.start import listen_at, unnamed_address

        url = unnamed_address()
        with (
            listen_at(url) as listening,
            IoService(self._transport, self._settings, listening, _FORKING) as self._io,
        ):
            yield url


# Those of this process, and of the ones that it was forked from.
_ALL: weakref.WeakSet[ForkedWorkers] = weakref.WeakSet()
# Held while this process forks, and while a service accepts: a child would keep open what nobody had counted yet.
_FORKING = threading.Lock()


def _before() -> None:
    try:
        for workers in list(_ALL):
            workers.open()
    finally:
        _FORKING.acquire()


def _after_in_child() -> None:
    _FORKING.release()
    for workers in list(_ALL):
        workers.reset_after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before, after_in_parent=_FORKING.release, after_in_child=_after_in_child)
