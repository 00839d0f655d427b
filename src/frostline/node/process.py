"""Runs child processes: Frostline's modules, and work beside the node under a memory limit that it cannot raise."""

import json
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from subprocess import PIPE, TimeoutExpired
from typing import IO, Any, Self
from urllib.parse import urlsplit

from frostline.batching import readable_bytes
from frostline.core.config import NodeSettings
from frostline.core.errors import AddressInUse, NodeUnreachable, Refused, SettingError, UserError
from frostline.core.processes import Limits, Worker, without_keys
from frostline.core.system import STARTED
from frostline.engines.machine import ENVIRONMENT

__all__ = (
    "BoundedProcess",
    "NodeProcess",
    "Subprocess",
    "start_node",
)


_ERRORS: dict[str, type[UserError]] = {"AddressInUse": AddressInUse, "SettingError": SettingError}
_START_S = 60.0
_STOP_S = 15.0
_KEPT_LINES = 40
_LONGEST_LINE = 2000


_FRAME = re.compile(r'  File ".*", line [0-9]+')


class Subprocess(Worker):
    """A running child process that says in a line when it is ready and ends with its stdin.

    A thread keeps the end of its stderr.

    Args:
        module: module that Python runs.
        argument: first line that it reads from stdin.
        what: name of the process in messages.
    """

    def __init__(self, module: str, argument: str, what: str = "the node") -> None:
        self._what = what
        # The user's own environment variables for OpenMP and malloc take precedence over ours.
        super().__init__(module, environment={**ENVIRONMENT, **os.environ}, is_told=True, answers=True, stderr=PIPE)
        self.tell(argument)
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, name="frostline-child-stderr", daemon=True)
        self._listener.start()

    def last_words(self) -> str:
        """The last lines that it wrote to stderr."""
        return b"".join(self._lines).decode(errors="replace").strip()

    def wait_ready(self) -> dict[str, str]:
        """Wait for the line that it writes once it listens; a child that fails to do so is stopped.

        Raises:
            AddressInUse: The child's address is taken.
            SettingError: The child cannot listen there, or its argument is not valid.
            NodeUnreachable: The child wrote nothing; the message holds the end of its stderr.
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
        line = self.answer_within(_START_S)
        if line.endswith(b"\n"):
            said: dict[str, str] = json.loads(line)
            return said
        self.stop()  # so that all of its stderr has been read
        lines = self.last_words().splitlines()
        if any(_FRAME.match(line) for line in lines):  # of a stack, the error alone is for people
            lines = [line for line in lines if line[:1].strip()][-1:]
        words = " / ".join(line.strip() for line in lines)
        why = f": {words}" if words else f"; it ended with {self.returncode}"
        raise NodeUnreachable(f"{self._what} did not start{why}")

    def stop(self) -> None:
        """Give it a few seconds to end, then kill it, and return when it has ended."""
        assert self.stdin is not None
        assert self.stderr is not None
        with suppress(BrokenPipeError):
            self.stdin.close()
        with suppress(TimeoutExpired):
            self.wait(_STOP_S)
        self.end()
        self._listener.join()
        self.close()
        self.stderr.close()

    def _listen(self) -> None:
        assert self.stderr is not None
        while line := self.stderr.readline(_LONGEST_LINE):
            self._lines.append(line)


class NodeProcess:
    """A node in a child process, which ends with this process, however this ends. A context manager.

    Args:
        roots: URLs under which it serves data.
        settings: settings of the node.
        host: address on which it listens.
        port: port on which it listens; 0 for a free one, which it keeps when it is started again.
        control: address of the control plane that it keeps to; None takes that of ``FROSTLINE_CONTROL``, and ``"none"``
            none. Its token there is that of ``FROSTLINE_TOKEN``.
        reports: True if it keeps to a control plane at all; the node that a job starts for itself does not.
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
        return 0 if child is None or child.has_ended else child.pid

    def launch(self) -> None:
        """Start the process without waiting; ``start`` waits until it takes requests."""
        with self._lock:
            self._launched = self._new()

    def start(self) -> None:
        """Start the process, if it was not launched, and wait until it takes requests.

        Raises:
            AddressInUse: The node's port is taken.
            SettingError: The node cannot listen there, or a root is not valid.
            NodeUnreachable: The node did not start; the message holds the end of its stderr.
        """
        with self._lock:
            self._start()

    def wait(self) -> None:
        """Wait until the process has ended; at once if it does not run."""
        child = self._child
        if child is not None:
            child.wait()

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
                launched.kill()  # it has served nobody yet, and may not read its stdin yet
            for process in (child, launched):
                if process is not None:
                    process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _new(self) -> Subprocess:
        return Subprocess(STARTED["node"], json.dumps(self._wanted))

    def _start(self) -> None:
        child, self._launched = self._launched or self._new(), None
        said = child.wait_ready()
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

    Its arguments are those of ``NodeProcess``, and it raises what ``NodeProcess.start`` raises.
    """
    node = NodeProcess(roots, settings, host, port, control=control)
    node.start()
    return node


_FINISHED, _SAID_WHY = 0, 3
_MAX_ANSWER_LINE = 1 << 20
_WHO = "FROSTLINE_TOKEN"


class BoundedProcess(Worker):
    """A running process of Frostline. ``end`` may be called from any thread, everything else from one thread.

    Args:
        module: module that Python runs; it reads a line of orders from stdin and writes lines of JSON to stdout.
        files: open files that it inherits, by the names of their descriptors in the orders.
        limits: limits of the process, that of memory among them.
        what: name of the process in messages.
        option: option of the node that raises the limit, for messages.
        token: token with which it asks the node, that of the tenant that asked for it.
        reads_stores: True if it reads stores that may ask for the keys that the node has in its environment.
    """

    def __init__(
        self,
        module: str,
        files: Mapping[str, IO[bytes]],
        *,
        limits: Limits,
        what: str,
        option: str,
        token: str | None = None,
        reads_stores: bool = False,
    ) -> None:
        assert limits.memory_bytes is not None
        self._limits = limits
        self._numbers = {name: file.fileno() for name, file in files.items()}
        self._what = what
        self._bound = f"it may have {readable_bytes(limits.memory_bytes)} ({option})"
        self._processor_s = 0.0
        super().__init__(
            module,
            files=tuple(self._numbers.values()),
            environment=_environment(token, has_keys=reads_stores),
            limits=limits,
            is_told=True,
            answers=True,
            stderr=tempfile.TemporaryFile(),  # noqa: SIM115 (closed with the process)
        )

    def begin(self, orders: Mapping[str, Any], *, niceness: int = 0) -> None:
        """Tell it what to do: plain values, which it reads first.

        Args:
            orders: values by name; its files and its limit of memory are added.
            niceness: niceness added to it for that, beside what its limits say.
        """
        if niceness:
            Limits(niceness=niceness).set_for(self.pid)
        self.tell(json.dumps({**orders, **self._numbers, "memory_bytes": self._limits.memory_bytes}))

    def processor_s(self) -> float:
        """The core seconds that it used so far; once it has ended, the last known value."""
        with suppress(OSError):  # it may just have ended
            if self.returncode is None:  # otherwise its process id may have been reused
                self._processor_s = time.clock_gettime(_clock_of(self.pid))
        return self._processor_s

    def line(self) -> bytes:
        """The next line of its output; empty once it has ended.

        Raises:
            Refused: The process ended without a final line of its own.
        """
        assert self.stdout is not None
        line: bytes = self.stdout.readline(_MAX_ANSWER_LINE)
        if line.endswith(b"\n"):
            return line
        if line or self.wait() not in (_FINISHED, _SAID_WHY):
            raise Refused(self._epitaph())
        return b""

    @property
    def has_finished(self) -> bool:
        """Whether it ended by itself and left its result."""
        return self.poll() == _FINISHED

    def stop(self) -> None:
        """Ask it to end after its current step."""
        self.tell("stop")

    def _epitaph(self) -> str:
        words = self.last_words().rpartition("\n")[2]
        how = f"code {self.returncode}"
        if self.returncode < 0:
            how = f"signal {-self.returncode}"
        return f"{self._what} ended with {how}; {self._bound}{f': {words}' if words else ''}"


def _clock_of(pid: int) -> int:
    """The clock id of a process's processor time, as ``clock_getcpuclockid`` of the C library makes it on Linux."""
    return (~pid << 3) | 2


def _environment(token: str | None, *, has_keys: bool) -> dict[str, str]:
    """The node's own environment, the variables that every process of Frostline needs at its start, and the token."""
    own = {name: value for name, value in os.environ.items() if name != _WHO}
    return {**ENVIRONMENT, **(own if has_keys else without_keys(own)), **({} if token is None else {_WHO: token})}
