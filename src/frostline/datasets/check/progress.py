"""Keeps what a check has found so far beside the manifests of this machine, so that it can be taken up again."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from frostline.core import Skipped
from frostline.private import make_private_folder, open_private

__all__ = ("CheckProgress", "CheckedRows")

_MAX_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """Rows that were checked.

    Attributes:
        start: the first of them.
        stop: the first behind them.
        digests: by row, of those whose bytes may be those of another.
        unreadable: those that cannot be read or decoded, and why.
    """

    start: int
    stop: int
    digests: dict[int, bytes]
    unreadable: tuple[Skipped, ...]

    def to_line(self) -> bytes:
        """The line of the progress file for these rows."""
        value = {
            "rows": [self.start, self.stop],
            "digests": {str(row): digest.hex() for row, digest in self.digests.items()},
            "unreadable": [asdict(skipped) for skipped in self.unreadable],
        }
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "CheckedRows":
        """The inverse of ``to_line``.

        Raises:
            ValueError: the line is no such record, or was cut off.
        """
        value = json.loads(line)
        try:
            start, stop = value["rows"]
            digests = {int(row): bytes.fromhex(digest) for row, digest in value["digests"].items()}
            unreadable = tuple(Skipped(**skipped) for skipped in value["unreadable"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not a piece of a check") from error
        return cls(start=start, stop=stop, digests=digests, unreadable=unreadable)


class CheckProgress:
    """The pieces of one check, a line each, in the order in which they were checked.

    Where they cannot be written they are not kept, and a check that is broken off begins anew.

    Args:
        path: location of the file; the file and its folder are made when needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = b"\n"  # ends a line that was cut off

    def found(self) -> Iterator[CheckedRows]:
        """What an earlier run left: pieces from the first row on, each where the one before it stops."""
        done = 0
        for line in self._lines():
            # A line that a kill cut off was done again by the next run.
            with suppress(ValueError):
                piece = CheckedRows.from_line(line)
                if piece.start == done:  # two runs at once each say what they did
                    done = piece.stop
                    yield piece

    def add(self, piece: CheckedRows) -> None:
        """Keep a piece."""
        with suppress(OSError):
            make_private_folder(self._path.parent)
            with open_private(self._path, "ab") as file:
                file.write(self._before + piece.to_line())
            self._before = b""

    def remove(self) -> None:
        """Remove the file: the check is complete, and nothing is left to resume."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[bytes]:
        with suppress(OSError), self._path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                yield line
