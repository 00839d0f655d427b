"""Starts a node in a process of its own, and leaves none behind."""

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
    """A node that runs as a child of this process and ends with it, however it ends. A context manager.

    Args:
        roots: URLs under which it serves data.
        settings: what it may use.
        host: where it listens.
        port: where it listens; 0 for a free one, which it keeps when it is started again.
    """

    def __init__(self, roots: tuple[str, ...], settings: NodeSettings, host: str, port: int) -> None:
        self._wanted: dict[str, Any] = {"roots": list(roots), "settings": asdict(settings), "host": host, "port": port}
        self._url = ""
        self._child: Child | None = None
        self._launched: Child | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens; stays the same when it is started again."""
        return self._url

    @property
    def pid(self) -> int:
        """Its process id; 0 where it is not running."""
        child = self._child
        return 0 if child is None or child.has_ended else child.process.pid

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return "" if self._child is None else self._child.last_words

    def launch(self) -> None:
        """Start it and wait for nothing; ``start`` waits until it takes requests."""
        with self._lock:
            self._launched = self._new()

    def start(self) -> None:
        """Start it, where it was not launched, and wait until it takes requests.

        Raises:
            AddressInUse: Its port is taken.
            SettingError: It cannot listen there, or does not understand a root.
            NodeUnreachable: It did not come up; the message holds the end of its stderr.
        """
        with self._lock:
            self._start()

    def restart_if_dead(self) -> bool:
        """Start it again at the same address where it has died; True where it had. Safe from several threads."""
        with self._lock:
            if self._child is None or not self._child.has_ended:
                return False
            self._child.stop()
            self._start()
            return True

    def stop(self) -> None:
        """Let it end its answers for a few seconds, and return when it is gone. Calling it again does nothing."""
        with self._lock:
            child, self._child = self._child, None
            launched, self._launched = self._launched, None
            if launched is not None:
                launched.process.kill()  # it has served nobody yet, and may not listen to its stdin either
            for one in (child, launched):
                if one is not None:
                    one.stop()

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

    It ends when it is stopped, and also when this process dies, even by SIGKILL. Ctrl-C in the terminal does not
    reach it: this process decides when it stops.

    Args:
        roots: URLs under which it serves data.
        settings: what it may use.
        host: where it listens.
        port: where it listens; 0 for a free one.

    Raises:
        AddressInUse: The port is taken.
        SettingError: It cannot listen there, or does not understand a root.
        NodeUnreachable: It did not come up; the message holds the end of its stderr.
    """
    node = NodeProcess(roots, settings, host, port)
    node.start()
    return node
