"""Reads every sample of a data set once: which cannot be decoded, and which have the bytes of another."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import Samples, Skipped, Targets
from frostline.core.config import cache_folder
from frostline.core.declared import parse_json
from frostline.core.errors import ObjectNotFound, SampleError
from frostline.core.events import Observer, PhaseStarted, ProgressMade, SampleSkipped
from frostline.core.files import append_line, make_private_folder, warn_not_kept
from frostline.core.nouns import take_texts
from frostline.datasets.dataset import Dataset, reader_of, require_one_part, roots_of
from frostline.datasets.reading import Workers, open_samples
from frostline.preprocess import Applied
from frostline.preprocess.apply import check_readable, open_mask, unpack_record
from frostline.stores.protocols import Buffer

__all__ = ("CheckProgress", "Checked", "CheckedRows", "check")

_FORMAT = 1
_MAX_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRows:
    """Rows that were checked.

    Attributes:
        start: the first of them.
        stop: the first behind them.
        digests: the digests by row, of those whose bytes may be those of another.
        unreadable: samples that cannot be read or decoded, and why.
    """

    start: int
    stop: int
    digests: dict[int, bytes]
    unreadable: tuple[Skipped, ...]

    def to_line(self) -> bytes:
        """The line of the progress file for these rows."""
        value = {
            "schema": _FORMAT,
            "rows": [self.start, self.stop],
            "digests": {str(row): digest.hex() for row, digest in self.digests.items()},
            "unreadable": [asdict(skipped) for skipped in self.unreadable],
        }
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "CheckedRows":
        """The inverse of ``to_line``.

        Raises:
            ValueError: the line is no such record, was cut off, or has another schema.
        """
        value = parse_json(line)
        try:
            if value["schema"] != _FORMAT or value.keys() != {"schema", "rows", "digests", "unreadable"}:
                raise ValueError("a piece of another version's check")
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

    def read_previous(self) -> Iterator[CheckedRows]:
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
        try:
            make_private_folder(self._path.parent)
            append_line(self._path, piece.to_line())
        except OSError as error:
            warn_not_kept(self._path.parent, error)

    def remove(self) -> None:
        """Remove the file: the check is complete, and nothing is left to resume."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[bytes]:
        with suppress(OSError), self._path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                yield line


# More than cores, so that a store some milliseconds away is hidden.
_THREADS = 16
_AT_ONCE = 256
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a check that read every sample.

    Attributes:
        samples: number of samples that were read.
        unreadable: samples that cannot be read or decoded, or whose masks cannot, and why.
        duplicates: groups of names of samples whose bytes are the same, the largest group first.
        seconds: duration of the check.
    """

    samples: int
    unreadable: tuple[Skipped, ...]
    duplicates: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def surplus(self) -> int:
        """Samples that have the bytes of one before them."""
        return sum(len(group) - 1 for group in self.duplicates)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "surplus": self.surplus}


def check(data: Dataset, on_event: Observer, *, progress: Path | None = None) -> Checked:
    """Read and decode every sample, several at a time.

    Only samples of equal size can have equal bytes, so only those are hashed. Memory is that of the images in work, and
    of some 100 bytes for each that is hashed. What was found is kept until the check is whole, so that one that was
    broken off is taken up on the same machine; not where the store tells no versions, for nobody knows then whether
    samples are still those that were checked.

    Args:
        data: all of it, or the part that matters.
        on_event: function that is called with progress, and of every sample that cannot be read.
        progress: folder for what is kept; by default one in the user's cache folder.

    Raises:
        SettingError: samples have several parts.
        StoreError: the store failed; run it again, it goes on.
    """
    require_one_part(data)
    started = time.perf_counter()
    on_event(PhaseStarted(name="checking the samples"))
    kept = CheckProgress((progress or cache_folder() / "checks") / f"{data.digest}.jsonl")
    work = _Check(data)
    with ExitStack() as stack:
        threads: Workers[Skipped | bytes | None] = Workers(reader_of(data, maximum=_THREADS), _THREADS, stack)
        for piece in kept.read_previous() if work.is_versioned else ():
            work.take(piece, on_event)
        while work.done < len(data):
            piece = work.next_piece(threads)
            if work.is_versioned:
                kept.add(piece)
            work.take(piece, on_event)
    kept.remove()
    return Checked(
        samples=len(data),
        unreadable=tuple(work.unreadable),
        duplicates=work.duplicates(),
        seconds=time.perf_counter() - started,
    )


class _Check:
    """What is known of one data set while it is read."""

    def __init__(self, data: Dataset) -> None:
        self.done = 0
        self.unreadable: list[Skipped] = []
        self._rows_by_digest: dict[bytes, list[int]] = defaultdict(list)
        self._data = data
        self._applied: Applied | None = data.manifest.applied
        self._masks = open_samples(data.url, data.manifest.reading, roots=roots_of(data))
        sizes, counts = np.unique(data.samples.lengths, return_counts=True)
        self._shared = sizes[counts > 1]

    @property
    def is_versioned(self) -> bool:
        """Whether the store tells versions: all or none of its objects have one."""
        versions = self._data.samples.versions
        return bool(len(versions)) and bool(versions[0])

    def take(self, piece: CheckedRows, on_event: Observer) -> None:
        """Take in what was found, now or by an earlier run."""
        for row, digest in piece.digests.items():
            self._rows_by_digest[digest].append(row)
        for sample in piece.unreadable:
            self.unreadable.append(sample)
            on_event(SampleSkipped(id=sample.id, object=sample.object, reason=sample.reason))
        self.done = piece.stop
        on_event(ProgressMade(done=self.done, total=len(self._data)))

    def next_piece(self, threads: "Workers[Skipped | bytes | None]") -> CheckedRows:
        """Read some hundred samples more."""
        rows = np.arange(self.done, min(self.done + _AT_ONCE, len(self._data)), dtype=np.int64)
        samples, names = self._data.samples.take(rows), list(take_texts(self._data.names, rows))
        found = threads.map(samples, names, partial(self._one, samples, names, self._may_have_twins(samples)))
        return CheckedRows(
            start=self.done,
            stop=self.done + len(rows),
            digests={
                row: digest for row, digest in zip(rows.tolist(), found, strict=True) if isinstance(digest, bytes)
            },
            unreadable=tuple(skipped for skipped in found if isinstance(skipped, Skipped)),
        )

    def duplicates(self) -> tuple[tuple[str, ...], ...]:
        """Names of samples with the same bytes."""
        groups = [rows for rows in self._rows_by_digest.values() if len(rows) > 1]
        groups.sort(key=lambda rows: (-len(rows), rows))
        return tuple(tuple(take_texts(self._data.names, np.array(rows, np.int64))) for rows in groups)

    def _may_have_twins(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """Which of them have the size of another."""
        places = np.searchsorted(self._shared, samples.lengths)
        if not len(self._shared):
            return np.zeros(len(samples), np.bool_)
        found: npt.NDArray[np.bool_] = self._shared[np.minimum(places, len(self._shared) - 1)] == samples.lengths
        return found

    def _one(
        self,
        samples: Samples,
        names: Sequence[str],
        is_hashed: npt.NDArray[np.bool_],
        row: int,
        data: Buffer | Skipped,
    ) -> Skipped | bytes | None:
        """Why a sample cannot be read; or the digest of its bytes, where that is wanted."""
        if isinstance(data, Skipped):
            return data
        try:
            if self._applied is None:
                check_readable(data)
            else:
                unpack_record(self._applied.stored, data)
            if samples.targets is not None:
                self._check_mask(samples.targets, row)
        except SampleError as error:
            return Skipped(id=int(samples.ids[row]), object=names[row], reason=str(error))
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() if is_hashed[row] else None

    def _check_mask(self, targets: Targets, row: int) -> None:
        name, nbytes = targets.objects[row], int(targets.lengths[row])
        if not nbytes:
            raise SampleError("it has no mask")
        try:
            encoded = self._masks.read(name, int(targets.offsets[row]), nbytes)
            size = int(targets.widths[row]), int(targets.heights[row])
            open_mask(encoded, size=size, is_turned=self._data.manifest.is_turned)
        except (ObjectNotFound, SampleError) as error:
            raise SampleError(f"{name}: {error}") from error
