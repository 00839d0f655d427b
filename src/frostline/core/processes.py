"""Starts Frostline's own modules as processes: within limits, told by lines on stdin, and ended with their children."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO

__all__ = ("Limits", "Worker", "answer_starter", "have_arrow_do_without_pandas", "without_keys")

_LAST_WORDS = 2000
# Variables that hold keys of stores and servers, or addresses that may have a password. What tells libraries how to
# compute has many names, and stays.
_KEYS = re.compile(
    r"(AWS|AZURE|GOOGLE|GCS|CLOUDSDK|KRB5).*"
    r"|.*(KEY|TOKEN(?!IZER)|SECRET|PASS|CREDENTIAL|SIGNATURE|AUTH|PROXY|CONNECTION_STRING).*"
    r"|.*_(URL|URI|DSN)",
    re.IGNORECASE,
)


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process that runs strangers' networks gets of an environment: all but what may be a key, or hold one."""
    return {name: value for name, value in environment.items() if not _KEYS.fullmatch(name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a process, which it cannot raise.

    Attributes:
        memory_bytes: maximum memory; an allocation beyond it fails, and no core is dumped. None for no limit.
        file_bytes: maximum size of a file that it writes; None for no limit.
        niceness: niceness added to this process's own, so that this process goes first.
    """

    memory_bytes: int | None = None
    file_bytes: int | None = None
    niceness: int = 0

    def set_for(self, pid: int) -> None:
        """Set them for a process; one that has ended already needs none."""
        with suppress(OSError):
            if self.niceness:
                os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + self.niceness)
            if self.memory_bytes is not None or self.file_bytes is not None:
                import resource  # which only Unix has

                no_core = None if self.memory_bytes is None else 0
                bounds = {"DATA": self.memory_bytes, "CORE": no_core, "FSIZE": self.file_bytes}
                for kind, maximum in bounds.items():
                    if maximum is not None:
                        resource.prlimit(pid, getattr(resource, f"RLIMIT_{kind}"), (maximum, maximum))
            if self.niceness:  # where sessions are scheduled as groups, only the group's counts between them
                Path(f"/proc/{pid}/autogroup").write_text(str(self.niceness), encoding="ascii")


class Worker(subprocess.Popen[bytes]):
    """A process that runs one of our modules. ``end`` may be called from any thread, all else from one thread.

    The folder in which this process runs is no place of modules there, and Ctrl-C in the terminal does not reach it.

    Args:
        module: module that Python runs.
        arguments: words of its command line, which every user of the machine may read.
        files: numbers of open files that it inherits.
        environment: variables of its environment; None for those of this process.
        limits: limits that it has before it is told anything.
        is_told: True if it reads lines from stdin.
        answers: True if it writes lines to stdout.
        stderr: file that takes what it writes to stderr, which is closed with it; by default that is lost.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        files: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        limits: Limits = Limits(),
        is_told: bool = False,
        answers: bool = False,
        stderr: IO[bytes] | int = DEVNULL,
    ) -> None:
        super().__init__(
            # -P keeps the current folder off the import path. A new session keeps Ctrl-C in the terminal away.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=PIPE if is_told else DEVNULL,
            stdout=PIPE if answers else DEVNULL,
            stderr=stderr,
            pass_fds=files,
            # A library in Rust that finds no memory while it prints its stack waits for itself, for good.
            env={**(os.environ if environment is None else environment), "RUST_BACKTRACE": "0"},
            start_new_session=True,
        )
        self._words = None if isinstance(stderr, int) else stderr
        limits.set_for(self.pid)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.poll() is not None

    def tell(self, line: str) -> None:
        """Write a line to its stdin; where it has ended, its next answer and its status say so."""
        assert self.stdin is not None, "is_told"
        with suppress(BrokenPipeError, ValueError):
            self.stdin.write(f"{line}\n".encode())
            self.stdin.flush()

    def answer_within(self, longest_s: float) -> bytes:
        """Read a line of its stdout up to the newline, the end, or the time; the next one begins behind that."""
        assert self.stdout is not None, "answers"
        line, until = b"", time.monotonic() + longest_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and selector.select(max(0.0, until - time.monotonic())):
                data = os.read(self.stdout.fileno(), 65_536)
                if not data:
                    break
                line += data
        return line

    def end(self) -> None:
        """Kill it and what it started, and return when it is gone; where it has ended, its number may be another's."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def last_words(self) -> str:
        """The end of what it wrote to its file of ``stderr``, once it has ended."""
        assert self._words is not None, "stderr"
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _LAST_WORDS))
        return self._words.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Close its pipes and its file, once it has ended."""
        for pipe in (self.stdin, self.stdout, self._words):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a line that it did not take
                    pipe.close()


def answer_starter(answer: Mapping[str, str]) -> None:
    """Write a line of JSON to stdout, which the process that started this one reads."""
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


class _NoPandas(MetaPathFinder):
    """Finds no pandas."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """See ``MetaPathFinder``."""
        if fullname == "pandas":
            raise ImportError(fullname)


def have_arrow_do_without_pandas() -> None:
    """Have pyarrow ask once, now, and in vain, whether there is pandas.

    Else it imports it, for a quarter of a second and 30 MB, as soon as it is given a list, to ask whether that is one
    of pandas' own. Whoever imports pandas, or asks a table for a frame, still gets it.
    """
    sys.meta_path.insert(0, finder := _NoPandas())
    try:
        import pyarrow as pa

        pa.array([])
    finally:
        sys.meta_path.remove(finder)
