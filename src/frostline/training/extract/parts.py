"""The parts of an extraction, kept in a folder beside its file until all of them are there."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core import Skipped
from frostline.training.files import atomic_file, make_folder, write_text

__all__ = ("ExtractedPart", "Parts", "Ranges")

IdsAt = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]

_KEY = b"frostline.part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Which rows of the manifest make up each part.

    Attributes:
        rows: rows of the manifest.
        rows_per_part: rows of every part but perhaps the last.
    """

    rows: int
    rows_per_part: int

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return -(-self.rows // self.rows_per_part)

    def of(self, number: int) -> range:
        """The rows of a part."""
        start = number * self.rows_per_part
        return range(start, min(start + self.rows_per_part, self.rows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtractedPart:
    """A part that was found whole.

    Attributes:
        rows: in it.
        skipped: samples of its range that could not be read.
    """

    rows: int
    skipped: tuple[Skipped, ...]


class Parts:
    """The parts of one extraction, in a folder of their own.

    Args:
        out: the file that they will become.
        identity: dependencies of the features; parts of another extraction are removed.
        ids_at: gives the ids of rows of the manifest.
        ranges: which rows make up each part.

    Raises:
        SettingError: the folder cannot be written.
        OutOfSpace: the disk is full.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], ids_at: IdsAt, ranges: Ranges) -> None:
        self._folder = out.with_name(f".{out.name}.parts")
        self._ids_at = ids_at
        self._ranges = ranges
        whole = json.dumps({**identity, "rows_per_part": ranges.rows_per_part}, sort_keys=True)
        about = self._folder / "extraction.json"
        if not about.is_file() or about.read_text() != whole:
            self.remove()
            make_folder(self._folder)
            write_text(about, whole)

    def found(self) -> dict[int, ExtractedPart]:
        """The parts that are there and whole; every byte of them is checked."""
        parts = {number: self._checked(number) for number in range(self._ranges.parts) if self._path(number).is_file()}
        return {number: part for number, part in parts.items() if part is not None}

    def write(self, number: int, table: pa.Table, skipped: tuple[Skipped, ...]) -> None:
        """Put a part in its place, whole; raises as ``files.writing`` does."""
        about = json.dumps({"number": number, "skipped": [asdict(sample) for sample in skipped]})
        table = table.replace_schema_metadata({_KEY: about})
        with atomic_file(self._path(number)) as file:
            pq.write_table(table, file, write_page_checksum=True)

    def tables(self) -> Iterator[pa.Table]:
        """The parts in order, without what they say of themselves."""
        for number in range(self._ranges.parts):
            yield _read(self._path(number)).replace_schema_metadata(None)

    def ids(self) -> Iterator[npt.NDArray[np.int64]]:
        """The ids of the samples of each part."""
        for number in range(self._ranges.parts):
            yield pq.ParquetFile(self._path(number)).read(columns=["id"])["id"].to_numpy()

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        if self._folder.is_dir():
            shutil.rmtree(self._folder)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.parquet"

    def _checked(self, number: int) -> ExtractedPart | None:
        try:
            table = _read(self._path(number))
        except (pa.ArrowException, OSError):
            return None
        about = json.loads(table.schema.metadata[_KEY])
        skipped = tuple(Skipped(**record) for record in about["skipped"])
        expected = self._ids_at(np.array(self._ranges.of(number), np.int64))
        lost = np.array([sample.id for sample in skipped], np.int64)
        kept = expected[~np.isin(expected, lost)]
        is_whole = about["number"] == number and np.array_equal(table["id"].to_numpy(), kept)
        return ExtractedPart(rows=len(kept), skipped=skipped) if is_whole else None


def _read(path: Path) -> pa.Table:
    return pq.ParquetFile(path, page_checksum_verification=True).read()
