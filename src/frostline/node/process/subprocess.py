"""Runs a Frostline module as a child process, which reports in one line that it is ready and ends with its stdin."""

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
from frostline.engines.machine.allocator import ENVIRONMENT
from frostline.errors import AddressInUse, NodeUnreachable, SettingError, UserError

__all__ = ("NodeProcess", "Subprocess", "start_node")

_ERRORS: dict[str, type[UserError]] = {"AddressInUse": AddressInUse, "SettingError": SettingError}
# Which runs a node with all that is served beside it.
_NODE = "frostline.control.embedded"
_START_S = 60.0
_STOP_S = 15.0
_KEPT_LINES = 40
_LONGEST_LINE = 2000


class Subprocess:
    """A running child process, and a thread that keeps the end of its stderr.

    Args:
        module: module that Python runs.
        argument: command-line argument of the module.
        what: name of the process in messages.

    Attributes:
        process: running process.
    """

    def __init__(self, module: str, argument: str, what: str = "the node") -> None:
        self._what = what
        # The user's own environment variables for OpenMP and malloc take precedence over ours.
        # -P keeps the current folder off the import path. A new session keeps Ctrl-C in the terminal away.
        self.process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**ENVIRONMENT, **os.environ},
            start_new_session=True,
        )
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, name="frostline-child-stderr", daemon=True)
        self._listener.start()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        """The last lines that it wrote to stderr."""
        return b"".join(self._lines).decode(errors="replace").strip()

    def ready(self) -> dict[str, str]:
        """Wait for the line that it writes once it listens; a child that fails to do so is stopped.

        Raises:
            AddressInUse: if its address is taken.
            SettingError: if it cannot listen there, or its argument is not valid.
            NodeUnreachable: if it wrote nothing; the message holds the end of its stderr.
        """
        try:
            said = self._first_line()
        except BaseException:
            self.stop()
            raise
        if "url" not in said:
            self.stop()
            raise _ERRORS.get(said.get("error", ""), SettingError)(said.get("message", f"{self._what} did not start"))
        return said

    def _first_line(self) -> dict[str, str]:
        line = _line_within(_pipe(self.process.stdout), _START_S)
        if line.endswith(b"\n"):
            said: dict[str, str] = json.loads(line)
            return said
        self.stop()  # so that all of its stderr has been read
        why = f":\n{self.last_words}" if self.last_words else f"; it ended with {self.process.returncode}"
        raise NodeUnreachable(f"{self._what} did not start{why}")

    def stop(self) -> None:
        """Give it a few seconds to end, then kill it, and return when it has ended."""
        # The child stops when its stdin ends.
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
    """Read up to the first newline, the end, or the timeout."""
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


class NodeProcess:
    """A node in a child process, which ends with this process, however this ends. A context manager.

    Args:
        roots: URLs under which it serves data.
        settings: settings of the node.
        host: address on which it listens.
        port: port on which it listens; 0 for a free one, which it keeps when it is started again.
        control: address of the control plane that it keeps to; None takes that of ``FROSTLINE_CONTROL``, and ``"none"``
            none. Its token there is that of ``FROSTLINE_TOKEN``.
        reports: whether it keeps to a control plane at all; the node that a job starts for itself does not.
    """

    def __init__(
        self,
        roots: tuple[str, ...],
        settings: NodeSettings,
        host: str,
        port: int,
        *,
        control: str | None = None,
        reports: bool = True,
    ) -> None:
        self._wanted: dict[str, Any] = {
            "roots": list(roots),
            "settings": asdict(settings),
            "host": host,
            "port": port,
            "control": control,
            "reports": reports,
        }
        self._url = ""
        self._child: Subprocess | None = None
        self._launched: Subprocess | None = None
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

    def wait(self) -> None:
        """Wait until the process has ended; at once if it does not run."""
        child = self._child
        if child is not None:
            child.process.wait()

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

    def _new(self) -> Subprocess:
        return Subprocess(_NODE, json.dumps(self._wanted))

    def _start(self) -> None:
        child, self._launched = self._launched or self._new(), None
        said = child.ready()
        self._child = child
        self._url = said["url"]
        self._wanted["port"] = urlsplit(self._url).port


def start_node(
    roots: tuple[str, ...],
    settings: NodeSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    control: str | None = None,
) -> NodeProcess:
    """Start a node in a process of its own and wait until it takes requests.

    The node ends when it is stopped, and also when this process dies, even by SIGKILL. Ctrl-C in the terminal does not
    reach it: this process decides when it stops.

    Args:
        roots: URLs under which it serves data.
        settings: settings of the node.
        host: address on which it listens.
        port: port on which it listens; 0 for a free one.
        control: as of ``NodeProcess``.

    Raises:
        AddressInUse: if the port is taken.
        SettingError: if it cannot listen there, or a root is not valid.
        NodeUnreachable: if it did not start; the message holds the end of its stderr.
    """
    node = NodeProcess(roots, settings, host, port, control=control)
    node.start()
    return node
