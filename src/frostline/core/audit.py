"""The audit log: who read which data, brought or changed what, and was refused, as lines of JSON in bounded space.

What is the same again is written once a minute with its sums, so that no flood of requests fills a disk.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from frostline.core.config import cache_folder
from frostline.core.files import append_line, make_private_folder
from frostline.core.units import printable

__all__ = ("AuditLog", "audit_file")

_LOG = logging.getLogger("frostline.audit")
_EVERY_S = 60.0
# Of different things in a minute; the rest are counted together.
_MAX_KINDS = 4096
_MAX_TEXT = 1024
_FILE_BYTES = 64 << 20
_OLDER = 4

_Key = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Sum:
    """What came since the last line of a kind."""

    times: int = 0
    samples: int = 0


class AuditLog:
    """Appends lines to a file for its user alone. Safe for threads; ``close`` writes what is left of the last minute.

    A line has ``time`` (ISO 8601, UTC), ``event``, what it is about, and how many ``times`` it happened since the last
    such line. A disk that is full loses lines, and the log of the process says so, with a count.

    Args:
        path: the file; one of 64 MiB is put aside, and four of these are kept. None writes nothing.
        clock: clock that returns seconds since 1970.

    Attributes:
        is_kept: True if anything is written.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self.is_kept = path is not None
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._sums: dict[_Key, _Sum] = {}
        self._since_s = clock()
        self._lost = 0
        self._said_at_s = -_EVERY_S

    def note(self, event: str, *, samples: int = 0, **about: object) -> None:
        """Note that something happened, which may happen often.

        Args:
            event: name of the event, such as ``read``.
            samples: samples that it is about.
            **about: the rest of what it is about, such as ``tenant`` and ``data``; empty texts are left out.
        """
        if self._path is None:
            return
        said = {"event": event, **{name: printable(str(value))[:_MAX_TEXT] for name, value in about.items() if value}}
        with self._lock:
            if self._clock() >= self._since_s + _EVERY_S:
                self._settle()
            key = tuple(sorted(said.items()))
            if key not in self._sums and len(self._sums) >= _MAX_KINDS:
                said = {"event": event, "others": "more kinds of events than are told apart"}
                key = tuple(sorted(said.items()))
            found = self._sums.get(key)
            if found is None:
                self._sums[key] = _Sum()
                self._write({**said, "times": 1, **({"samples": samples} if samples else {})})
            else:
                found.times += 1
                found.samples += samples

    def write_change(self, event: str, **about: object) -> None:
        """Write a line of its own about something that changed: values as JSON has them."""
        if self._path is not None:
            with self._lock:
                self._write({"event": event, **about})

    def close(self) -> None:
        """Write the sums that were not written yet. Calling it again does nothing."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        """Write what happened again since it was written last, and begin another minute."""
        for key, found in self._sums.items():
            if found.times:
                samples = {"samples": found.samples} if found.samples else {}
                self._write({**dict(key), "times": found.times, **samples})
        self._sums, self._since_s = {}, self._clock()

    def _write(self, value: dict[str, object]) -> None:
        assert self._path is not None
        line = {"time": datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds"), **value}
        try:
            make_private_folder(self._path.parent)
            self._put_aside(self._path)
            append_line(self._path, json.dumps(line, default=str).encode() + b"\n")
        except OSError as error:
            self._lost += 1
            if self._clock() >= self._said_at_s + _EVERY_S:
                self._said_at_s = self._clock()
                _LOG.error("the audit log %s cannot be written, %d lines are lost: %s", self._path, self._lost, error)

    @staticmethod
    def _put_aside(path: Path) -> None:
        """Begin another file where this one has its size; the oldest goes."""
        if not path.exists() or path.stat().st_size < _FILE_BYTES:
            return
        for number in range(_OLDER, 0, -1):
            newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
            if newer.exists():
                newer.replace(path.with_name(f"{path.name}.{number}"))


def audit_file(server: str, port: int) -> Path:
    """The file of a server where none is named, by its port: in the folder that its user has for Frostline.

    Args:
        server: kind of the server, such as ``node``.
        port: port on which it listens.
    """
    return cache_folder() / "audit" / f"{server}-{port}.jsonl"
