"""A process beside the node with a memory limit that it cannot raise; it gets its work as data."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from frostline.batching import readable_bytes
from frostline.engines.machine.allocator import ENVIRONMENT
from frostline.errors import Refused

__all__ = ("BoundedProcess",)

_FINISHED, _SAID_WHY = 0, 3
_LONGEST_LINE = 1 << 20
_LAST_WORDS = 2000
_WHO = "FROSTLINE_TOKEN"


class BoundedProcess:
    """A running process of Frostline. ``kill`` may be called from any thread, everything else from one thread.

    Args:
        module: module that Python runs; it reads a line of orders from stdin and writes lines of JSON to stdout.
        orders: plain values that it reads first.
        files: open files that it inherits, by the names of their descriptors in the orders.
        memory_bytes: memory limit; an allocation beyond it fails.
        what: name of the process in messages.
        option: option of the node that raises the limit, for messages.
        file_bytes: maximum size of a file that it writes; None for no limit.
        token: token with which it asks the node, that of the tenant that asked for it.
    """

    def __init__(
        self,
        module: str,
        orders: Mapping[str, Any],
        files: Mapping[str, IO[bytes]],
        *,
        memory_bytes: int,
        what: str,
        option: str,
        file_bytes: int | None = None,
        token: str | None = None,
    ) -> None:
        numbers = {name: file.fileno() for name, file in files.items()}
        self._memory_bytes = memory_bytes
        self._what = what
        self._option = option
        self._processor_s = 0.0
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        # -P keeps the current folder off the import path. A new session keeps Ctrl-C in the terminal away.
        self._process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            pass_fds=tuple(numbers.values()),
            env=_environment(token),
            start_new_session=True,
        )
        self._bind(file_bytes)
        self._tell(json.dumps({**orders, **numbers, "memory_bytes": memory_bytes}).encode() + b"\n")

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def processor_s(self) -> float:
        """The core seconds that it used so far; once it has ended, the last known value."""
        with suppress(OSError):  # it may just have ended
            if self._process.returncode is None:  # otherwise its process id may have been reused
                self._processor_s = time.clock_gettime(_clock_of(self._process.pid))
        return self._processor_s

    def line(self) -> bytes:
        """The next line of its output; empty once it has ended.

        Raises:
            Refused: if it ended without a final line of its own.
        """
        line: bytes = _pipe(self._process.stdout).readline(_LONGEST_LINE)
        if line.endswith(b"\n"):
            return line
        if line or self._process.wait() not in (_FINISHED, _SAID_WHY):
            raise Refused(self._epitaph())
        return b""

    @property
    def has_finished(self) -> bool:
        """Whether it ended by itself and left its result."""
        return self._process.poll() == _FINISHED

    def stop(self) -> None:
        """Ask it to end after its current step."""
        self._tell(b"stop\n")

    def kill(self) -> None:
        """Kill it; a thread that waits in ``line`` returns. Calling it again does nothing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes of a killed process."""
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                _pipe(pipe).close()

    def _bind(self, file_bytes: int | None) -> None:
        """Limit its memory and its files, and forbid core dumps, before it gets its orders."""
        bounds = {resource.RLIMIT_DATA: self._memory_bytes, resource.RLIMIT_CORE: 0}
        if file_bytes is not None:
            bounds[resource.RLIMIT_FSIZE] = file_bytes
        for kind, maximum in bounds.items():
            with suppress(ProcessLookupError):  # it has ended already, which ``line`` reports
                resource.prlimit(self._process.pid, kind, (maximum, maximum))

    def _tell(self, line: bytes) -> None:
        stdin = _pipe(self._process.stdin)
        with suppress(BrokenPipeError, ValueError):  # it has ended, which the next ``line`` reports
            stdin.write(line)
            stdin.flush()

    def _epitaph(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_WORDS))
        words = self._stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"code {self._process.returncode}"
        if self._process.returncode < 0:
            how = f"signal {-self._process.returncode}"
        bound = f"it may have {readable_bytes(self._memory_bytes)} ({self._option})"
        return f"{self._what} ended with {how}; {bound}{f': {words}' if words else ''}"


def _clock_of(pid: int) -> int:
    """The clock id of a process's processor time, as ``clock_getcpuclockid`` of the C library makes it on Linux."""
    return (~pid << 3) | 2


def _environment(token: str | None) -> dict[str, str]:
    """The node's own environment, the variables that every process of Frostline needs at its start, and the token."""
    own = {name: value for name, value in os.environ.items() if name != _WHO}
    return {**ENVIRONMENT, **own, **({} if token is None else {_WHO: token})}


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
