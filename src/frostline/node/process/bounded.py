"""A process beside the node that gets its work as data, within a bound on memory that it cannot raise."""

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
    """A running process of ours. ``kill`` may be called from any thread, all else from one.

    Args:
        module: of ours, which Python runs: it reads a line of orders from stdin and says lines of JSON on stdout.
        orders: what it is told first, beside the files: plain values.
        files: open files that it gets, by the names of their numbers in the orders.
        memory_bytes: that it may have; an allocation beyond it fails.
        what: it is, for sentences.
        option: with which the node is given more memory for it.
        file_bytes: no file that it writes may be longer; None for any length.
        token: who it is to the node: that of whoever asked for it.
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
        # -P: the current folder is no place to import from. A session of its own: no Ctrl-C from the terminal.
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
        """Its process id."""
        return self._process.pid

    def processor_s(self) -> float:
        """Seconds of a core that it took so far; once it is gone, what was seen last."""
        with suppress(OSError):  # it just ended
            if self._process.returncode is None:  # else its number may be another's
                self._processor_s = time.clock_gettime(_clock_of(self._process.pid))
        return self._processor_s

    def line(self) -> bytes:
        """What it says next; nothing once it has ended.

        Raises:
            Refused: It ended without a last word of its own.
        """
        line: bytes = _pipe(self._process.stdout).readline(_LONGEST_LINE)
        if line.endswith(b"\n"):
            return line
        if line or self._process.wait() not in (_FINISHED, _SAID_WHY):
            raise Refused(self._epitaph())
        return b""

    @property
    def has_finished(self) -> bool:
        """It ended by itself, and left what it was asked for."""
        return self._process.poll() == _FINISHED

    def stop(self) -> None:
        """Ask it to end after the step that it is in."""
        self._tell(b"stop\n")

    def kill(self) -> None:
        """End it at once; a thread that waits in ``line`` is freed. Doing it again does nothing."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close what is left of a process that was killed."""
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                _pipe(pipe).close()

    def _bind(self, file_bytes: int | None) -> None:
        """Before it is told anything: no memory beyond the bound, no file larger than its, no dump of its memory."""
        bounds = {resource.RLIMIT_DATA: self._memory_bytes, resource.RLIMIT_CORE: 0}
        if file_bytes is not None:
            bounds[resource.RLIMIT_FSIZE] = file_bytes
        for kind, most in bounds.items():
            with suppress(ProcessLookupError):  # it is gone already, which the first line tells
                resource.prlimit(self._process.pid, kind, (most, most))

    def _tell(self, line: bytes) -> None:
        stdin = _pipe(self._process.stdin)
        with suppress(BrokenPipeError, ValueError):  # it has ended: the next line tells why
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
    """The clock of a process's processor time, as ``clock_getcpuclockid`` of the C library makes it on Linux."""
    return (~pid << 3) | 2


def _environment(token: str | None) -> dict[str, str]:
    """The node's own, with what a process of Frostline's own must know from its start; and who it is."""
    own = {name: value for name, value in os.environ.items() if name != _WHO}
    return {**ENVIRONMENT, **own, **({} if token is None else {_WHO: token})}


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
