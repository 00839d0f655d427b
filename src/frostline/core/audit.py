"""The audit log: who read which data, brought or changed what, and was refused, as lines of JSON in bounded space.

What is the same again is written once a minute with its sums, so that no flood of requests fills a disk.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from frostline.core.config import cache_folder
from frostline.core.errors import SettingError
from frostline.core.files import append_line, make_private_file, make_private_folder, write_errors
from frostline.core.units import log_named, printable

__all__ = ("AuditLog", "audit_file")

_LOG = log_named("frostline.audit")
_EVERY_S = 60.0
# Of different things in a minute that are told apart for each tenant, and for all whom nobody knows; the rest of a
# tenant's are counted together, so that nobody hides what another did. Whoever has no token needs weeks to fill the
# files, and to push out what stands there of others; with as many as a tenant it would be a day.
_MAX_KINDS, _MAX_UNKNOWN = 1024, 64
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
    such line. A file that cannot be written, as on a full disk, loses lines. The log of the process says so, with a
    count, and so does the file once it can be written again, in a line of the event ``lost``.

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
        self._kinds: Counter[str] = Counter()
        self._since_s = clock()
        # Lines that were lost, of these such as were said in the process's log, and such as the file does not know of.
        self._lost = self._said = self._untold = 0
        self._said_at_s = -_EVERY_S
        self._why = ""

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
        tenant = said.get("tenant", "")
        most = _MAX_KINDS if tenant else _MAX_UNKNOWN
        with self._lock:
            if self._is_past(self._since_s):
                self._settle()
            if tuple(sorted(said.items())) not in self._sums and self._kinds[tenant] >= most:
                who = {"tenant": tenant} if tenant else {}
                said = {"event": event, **who, "others": "more kinds of events than are told apart"}
            key = tuple(sorted(said.items()))
            found = self._sums.get(key)
            if found is None:
                self._sums[key] = _Sum()
                self._kinds[tenant] += 1
                self._write([{**said, "times": 1, **({"samples": samples} if samples else {})}])
            else:
                found.times += 1
                found.samples += samples

    def write_change(self, event: str, **about: object) -> None:
        """Write a line of its own about something that changed: values as JSON has them."""
        if self._path is not None:
            with self._lock:
                self._write([{"event": event, **about}])

    def require(self) -> None:
        """Do nothing where lines can be written to the file, which is made where it is missing.

        Raises:
            SettingError: The file cannot be written, or is no regular file.
            OutOfSpace: The disk is full.
        """
        if self._path is not None:
            with write_errors(self._path):
                make_private_folder(self._path.parent)
                if not self._path.exists() or self._path.is_file():
                    make_private_file(self._path)
                    return
            raise SettingError(f"cannot write an audit log to {self._path}: it is no regular file")

    def close(self) -> None:
        """Write the sums that were not written yet, and say what was lost since. Calling it again does nothing."""
        with self._lock:
            self._settle()
            if self._lost > self._said:
                self._say_lost()

    def _settle(self) -> None:
        """Write what happened again since it was written last, and begin another minute."""
        again = [(dict(key), found) for key, found in self._sums.items() if found.times]
        self._write(
            [
                {**said, "times": found.times, **({"samples": found.samples} if found.samples else {})}
                for said, found in again
            ]
        )
        self._sums, self._since_s = {}, self._clock()
        self._kinds.clear()

    def _write(self, values: Sequence[dict[str, object]]) -> None:
        """Append a line for each value, all at once."""
        if not values or self._path is None:
            return
        told: list[dict[str, object]] = [{"event": "lost", "lines": self._untold}] if self._untold else []
        time = {"time": datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")}
        lines = "".join(f"{json.dumps({**time, **value}, default=str)}\n" for value in [*told, *values])
        try:
            make_private_folder(self._path.parent)
            self._put_aside(self._path)
            append_line(self._path, lines.encode(), may_be_link=True)
            self._untold = 0
        except OSError as error:
            self._lost += len(values)
            self._untold += len(values)
            self._why = str(error)
            if self._is_past(self._said_at_s):
                self._say_lost()

    def _say_lost(self) -> None:
        self._said, self._said_at_s = self._lost, self._clock()
        _LOG.error("the audit log %s cannot be written, %d lines are lost: %s", self._path, self._lost, self._why)

    def _is_past(self, since_s: float) -> bool:
        """Whether a minute has passed, or the clock was set back behind its beginning."""
        return not 0 <= self._clock() - since_s < _EVERY_S

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
