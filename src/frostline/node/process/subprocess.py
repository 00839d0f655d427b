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
from typing import IO

from frostline.engines.machine.allocator import ENVIRONMENT
from frostline.errors import AddressInUse, NodeUnreachable, SettingError, UserError

__all__ = ("Child",)

_ERRORS: dict[str, type[UserError]] = {"AddressInUse": AddressInUse, "SettingError": SettingError}
_START_S = 60.0
_STOP_S = 15.0
_KEPT_LINES = 40
_LONGEST_LINE = 2000


class Child:
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
