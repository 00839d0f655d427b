"""Starts an I/O service in a process of its own, and leaves none behind."""

import json
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from frostline.config import IoSettings, LoaderSettings
from frostline.io_service.addresses import unnamed
from frostline.io_service.client.transport import IoTransport
from frostline.io_service.upstream import Upstream
from frostline.node.process.subprocess import Subprocess

__all__ = ("IoProcess", "start_io")


class IoProcess:
    """An I/O service that runs as a child of this process and ends with it, however it ends. A context manager.

    Args:
        upstream: node that it asks.
        settings: bounds of the service.
        url: where it listens; by default at a name that no file has, so that nothing stays behind.
    """

    def __init__(self, upstream: Upstream, settings: IoSettings, url: str | None = None) -> None:
        self.url = url or unnamed()
        self._wanted: dict[str, Any] = {"url": self.url, "upstream": asdict(upstream), "settings": asdict(settings)}
        self._child: Subprocess | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 where it is not running."""
        child = self._child
        return 0 if child is None or child.has_ended else child.process.pid

    def transport(self, settings: LoaderSettings | None = None) -> IoTransport:
        """A way to it, which can be pickled and used after a fork; the caller closes it."""
        return IoTransport(self.url, settings)

    def start(self) -> None:
        """Start it and wait until it takes requests; again at the same address where it has died.

        Raises:
            AddressInUse: Another one listens there.
            SettingError: It cannot listen there, or does not understand an address or a root.
            NodeUnreachable: It did not come up; the message holds the end of its stderr.
        """
        self.stop()
        child = Subprocess("frostline.io_service", json.dumps(self._wanted), "the I/O service")
        child.ready()
        self._child = child

    def stop(self) -> None:
        """Return when it is gone. Calling it again does nothing."""
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_io(upstream: Upstream, settings: IoSettings | None = None, url: str | None = None) -> IoProcess:
    """Start an I/O service in a process of its own and wait until it takes requests.

    It ends when it is stopped, and also when this process dies, even by SIGKILL. Ctrl-C in the terminal does not reach
    it: this process decides when it stops.

    Args:
        upstream: node that it asks, such as ``Upstream(roots=roots_of(data))``.
        settings: bounds of the service.
        url: where it listens; by default at a name that no file has.

    Raises:
        AddressInUse: Another one listens there.
        SettingError: It cannot listen there, or does not understand an address or a root.
        NodeUnreachable: It did not come up; the message holds the end of its stderr.
    """
    service = IoProcess(upstream, settings or IoSettings(), url)
    service.start()
    return service
