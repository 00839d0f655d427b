"""Starts a node in a process of its own, and leaves none behind."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import urlsplit

from frostline.config import NodeSettings
from frostline.engines.allocator import ENVIRONMENT
from frostline.errors import AddressInUse, NodeUnreachable, SettingError, UserError

__all__ = ("NodeProcess", "start_node")

_START_S = 60.0
_STOP_S = 15.0
_KEPT_LINES = 40
_LONGEST_LINE = 2000
_ERRORS: dict[str, type[UserError]] = {"AddressInUse": AddressInUse, "SettingError": SettingError}


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
        self._child: _Child | None = None
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

    def start(self) -> None:
        """Start it and wait until it takes requests.

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
            if child is not None:
                child.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        child = _Child(json.dumps(self._wanted))
        try:
            said = child.first_line(_START_S)
        except BaseException:
            child.stop()
            raise
        if "url" not in said:
            child.stop()
            raise _ERRORS.get(said.get("error", ""), SettingError)(said.get("message", "the node did not start"))
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


class _Child:
    """A running node: its pipes, and a thread that keeps the end of its stderr."""

    def __init__(self, argument: str) -> None:
        # What the user says of OpenMP and of malloc comes before what we do.
        # -P: the current folder is no place to import from. A session of its own: no Ctrl-C from the terminal.
        self.process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [sys.executable, "-P", "-m", "frostline.node", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,
        )
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, name="frostline-node-stderr", daemon=True)
        self._listener.start()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        return b"".join(self._lines).decode(errors="replace").strip()

    def first_line(self, timeout_s: float) -> dict[str, str]:
        """The line in which it says where it listens."""
        line = _line_within(_pipe(self.process.stdout), timeout_s)
        if line.endswith(b"\n"):
            said: dict[str, str] = json.loads(line)
            return said
        self.stop()
        why = f":\n{self.last_words}" if self.last_words else f"; it ended with {self.process.returncode}"
        raise NodeUnreachable(f"the node did not come up{why}")

    def stop(self) -> None:
        # The end of its stdin is what tells it to stop.
        with contextlib.suppress(BrokenPipeError):
            _pipe(self.process.stdin).close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        _pipe(self.process.stdout).close()
        _pipe(self.process.stderr).close()

    def _listen(self) -> None:
        stderr = _pipe(self.process.stderr)
        while line := stderr.readline(_LONGEST_LINE):
            self._lines.append(line)


def _line_within(pipe: IO[bytes], timeout_s: float) -> bytes:
    """What comes up to the first newline, or to the end, or in that time."""
    line = b""
    until = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
            data = os.read(pipe.fileno(), 65_536)
            if not data:
                break
            line += data
    return line


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
