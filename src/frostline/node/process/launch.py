"""Starts a node in a process that ends with this one."""

import json
import threading
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from frostline.config import NodeSettings
from frostline.node.process.subprocess import Child

__all__ = ("NodeProcess", "start_node")


class NodeProcess:
    """A node in a child process, which ends with this process, however this ends. A context manager.

    Args:
        roots: URLs under which it serves data.
        settings: settings of the node.
        host: address on which it listens.
        port: port on which it listens; 0 for a free one, which it keeps when it is started again.
    """

    def __init__(self, roots: tuple[str, ...], settings: NodeSettings, host: str, port: int) -> None:
        self._wanted: dict[str, Any] = {"roots": list(roots), "settings": asdict(settings), "host": host, "port": port}
        self._url = ""
        self._child: Child | None = None
        self._launched: Child | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL at which it listens; it stays the same after a restart."""
        return self._url

    @property
    def pid(self) -> int:
        """The process id; 0 if it is not running."""
        child = self._child
        return 0 if child is None or child.has_ended else child.process.pid

    @property
    def last_words(self) -> str:
        """The last lines that it wrote to stderr."""
        return "" if self._child is None else self._child.last_words

    def launch(self) -> None:
        """Start the process without waiting; ``start`` waits until it takes requests."""
        with self._lock:
            self._launched = self._new()

    def start(self) -> None:
        """Start the process, if it was not launched, and wait until it takes requests.

        Raises:
            AddressInUse: if its port is taken.
            SettingError: if it cannot listen there, or a root is not valid.
            NodeUnreachable: if it did not start; the message holds the end of its stderr.
        """
        with self._lock:
            self._start()

    def restart_if_dead(self) -> bool:
        """Start the node again at the same address if it has died, and say whether it had. Safe for threads."""
        with self._lock:
            if self._child is None or not self._child.has_ended:
                return False
            self._child.stop()
            self._start()
            return True

    def stop(self) -> None:
        """Give its answers a few seconds to end, and return when it has ended. Calling it again does nothing."""
        with self._lock:
            child, self._child = self._child, None
            launched, self._launched = self._launched, None
            if launched is not None:
                launched.process.kill()  # it has served nobody yet, and may not read its stdin yet
            for process in (child, launched):
                if process is not None:
                    process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _new(self) -> Child:
        return Child("frostline.node", json.dumps(self._wanted))

    def _start(self) -> None:
        child, self._launched = self._launched or self._new(), None
        said = child.ready()
        self._child = child
        self._url = said["url"]
        self._wanted["port"] = urlsplit(self._url).port


def start_node(roots: tuple[str, ...], settings: NodeSettings, host: str = "127.0.0.1", port: int = 0) -> NodeProcess:
    """Start a node in a process of its own and wait until it takes requests.

    The node ends when it is stopped, and also when this process dies, even by SIGKILL. Ctrl-C in the terminal does not
    reach it: this process decides when it stops.

    Args:
        roots: URLs under which it serves data.
        settings: settings of the node.
        host: address on which it listens.
        port: port on which it listens; 0 for a free one.

    Raises:
        AddressInUse: if the port is taken.
        SettingError: if it cannot listen there, or a root is not valid.
        NodeUnreachable: if it did not start; the message holds the end of its stderr.
    """
    node = NodeProcess(roots, settings, host, port)
    node.start()
    return node
