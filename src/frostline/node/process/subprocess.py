"""A process of ours as a child: it says in a line that it is ready, and ends when its stdin does."""

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
    """A running child: its pipes, and a thread that keeps the end of its stderr.

    Args:
        module: of ours, which Python runs.
        argument: of it.
        what: it is, for sentences.

    Attributes:
        process: that runs.
    """

    def __init__(self, module: str, argument: str, what: str = "the node") -> None:
        self._what = what
        # What the user says of OpenMP and of malloc comes before what we do.
        # -P: the current folder is no place to import from. A session of its own: no Ctrl-C from the terminal.
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
        """It is not there any more."""
        return self.process.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return b"".join(self._lines).decode(errors="replace").strip()

    def ready(self) -> dict[str, str]:
        """What it says once it listens; a child that does not come so far has ended.

        Raises:
            AddressInUse: What it would listen at is taken.
            SettingError: It cannot listen there, or does not understand what it was told.
            NodeUnreachable: It said nothing; the message holds the end of its stderr.
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
        self.stop()  # so that its last words are all there
        why = f":\n{self.last_words}" if self.last_words else f"; it ended with {self.process.returncode}"
        raise NodeUnreachable(f"{self._what} did not come up{why}")

    def stop(self) -> None:
        """Let it end what it does for a few seconds, and return when it is gone."""
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
