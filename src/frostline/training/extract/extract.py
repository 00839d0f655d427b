"""Bulk extraction: the features of every sample of a data set, in the manifest's order, to one file."""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from frostline.core import REFERENCE, SampleTable, Skipped
from frostline.core.features import widened
from frostline.core.samples import taken
from frostline.datasets import Dataset
from frostline.engines.base.runner import as_array
from frostline.errors import DataError, ModelError
from frostline.events import Counted, Observer, PhaseStarted
from frostline.loaders import Batch
from frostline.training.extract.feature_files import Contents, check_suffix, tensor_column, write_features
from frostline.training.files import make_folder, write_text, writing
from frostline.training.settings import ExtractSettings
from frostline.training.setup import Setup, measured_first, set_up
from frostline.training.start import StartedJob

__all__ = ("Extracted", "ExtractedPart", "Parts", "Ranges", "extract")

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
        with writing(self._path(number)) as file:
            pq.write_table(table, file, write_page_checksum=True)

    def tables(self) -> Iterator[pa.Table]:
        """The parts in order, without what they say of themselves."""
        for number in range(self._ranges.parts):
            yield _read(self._path(number)).replace_schema_metadata(None)

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


_ROWS = 256
# Rows whose ids are looked up at once.
_AHEAD = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What an extraction did.

    Attributes:
        out: the file.
        samples: rows in it.
        taken_up: rows that were there from a run that had been broken off.
        shape: shape of one sample's features.
        dtype: dtype of the features.
        seconds: in all, up to the file's last byte.
        setup_s: seconds of these before the first request.
        wire_bytes: store side to trainer, bodies and headers.
        engine: engine that ran the frozen part at the nodes.
        engine_error: its largest relative error against the reference, on the samples that it was tried on; 0 for the
            reference itself. ``codec_error`` comes on top of it.
        codec_error: the largest relative error that a codec made in any sample; 0 where nothing was lost.
        skipped: samples that could not be read; they have no row.
    """

    out: str
    samples: int
    taken_up: int
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    setup_s: float
    wire_bytes: int
    engine: str
    engine_error: float
    codec_error: float
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shape": list(self.shape), "skipped": [asdict(sample) for sample in self.skipped]}


def extract(
    settings: ExtractSettings, observe: Observer, *, begun: StartedJob | None = None, began_at: float | None = None
) -> Extracted:
    """Write the features of every readable sample; the file appears when it is whole.

    Parts are kept beside it meanwhile, and a run that was broken off is taken up where it was: the same call goes on.
    With several nodes the work is spread over them, and where one dies another takes over.

    Args:
        settings: settings of the extraction.
        observe: told what happens.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: since when ``seconds`` counts, as ``time.perf_counter`` does; now by default.

    Raises:
        UserError: what the user can put right, a full disk among it.
        Unavailable: every node stayed away for longer than the loader's ``retry_for_s``.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    check_suffix(settings.out)
    make_folder(settings.out.parent)
    # One engine and one plan for the whole file: a run that is taken up again must find the same.
    with set_up(measured_first(settings.job), observe, begun=begun) as setup:
        setup_s = time.perf_counter() - began_at
        work = _Work(settings, setup)
        found = work.parts.found()
        observe(PhaseStarted(name="extracting"))
        done = {**found, **work.make(found, observe)}
        contents = Contents(
            rows=sum(part.rows for part in done.values()),
            shape=work.shape,
            dtype=work.dtype,
            classes=setup.data.classes,
        )
        if not contents.rows:
            raise DataError(f"none of the {len(setup.data)} samples of {setup.data.url} can be read")
        observe(PhaseStarted(name="joining the parts"))
        write_features(settings.out, work.parts.tables(), contents)
        work.parts.remove()
        statistics = setup.job.statistics()
        return Extracted(
            out=str(settings.out),
            samples=contents.rows,
            taken_up=sum(part.rows for part in found.values()),
            shape=contents.shape,
            dtype=contents.dtype,
            seconds=time.perf_counter() - began_at,
            setup_s=setup_s,
            wire_bytes=statistics.wire_bytes,
            engine=work.engine,
            engine_error=work.engine_error,
            codec_error=statistics.codec_error,
            skipped=tuple(sample for number in sorted(done) for sample in done[number].skipped),
        )


_HANDED_OUT = {"bfloat16": "float32"}
"""What tables hold, which have no bfloat16 as NumPy has none."""


class _Work:
    """The parts of one extraction, and the job that makes those that are missing.

    Raises:
        ModelError: several tensors cross the frost line.
    """

    def __init__(self, settings: ExtractSettings, setup: Setup) -> None:
        line = setup.job.frost_line
        if len(line.tensors) != 1:
            raise ModelError("extraction writes one tensor a sample, and several cross this frost line")
        self.shape, self.dtype = line.shapes[0], _HANDED_OUT.get(line.dtypes[0], line.dtypes[0])
        self._setup = setup
        self._store = None if setup.job.situation is None else setup.job.situation.store
        self._ranges = Ranges(
            rows=len(setup.data), rows_per_part=max(1, settings.part_bytes // max(1, line.bytes_per_sample))
        )
        identity = {
            "data": setup.data.digest,
            "features": setup.job.features_digest,
            "accuracy": settings.job.accuracy,
            "engine": self.engine,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        self.parts = Parts(settings.out, identity, setup.data.samples.ids_at, self._ranges)

    @property
    def engine(self) -> str:
        """That runs the frozen part at the nodes; the same from the first request to the last."""
        return REFERENCE if self._store is None else self._store.engine

    @property
    def engine_error(self) -> float:
        """Its error against the reference."""
        return 0.0 if self._store is None else self._store.engine_error

    def make(self, found: Mapping[int, ExtractedPart], observe: Observer) -> dict[int, ExtractedPart]:
        """Make the parts that are missing, one after another, from one pass over their rows."""
        missing = [number for number in range(self._ranges.parts) if number not in found]
        made: dict[int, ExtractedPart] = {}
        if missing:
            for number, pieces in groupby(self._pieces(missing, observe), key=attrgetter("number")):
                made[number] = self._write(number, list(pieces))
        # Those of which not one sample could be read came with no piece.
        return {number: made.get(number) or self._write(number, []) for number in missing}

    def _pieces(self, missing: Sequence[int], observe: Observer) -> Iterator["_Piece"]:
        """What arrives, in the manifest's order, cut where a part ends."""
        data = self._setup.data
        is_missing = np.zeros(len(data), np.bool_)
        for number in missing:
            is_missing[self._ranges.of(number).start : self._ranges.of(number).stop] = True
        done = len(data) - int(np.count_nonzero(is_missing))
        rows = _RowsOf(data.samples, (self._ranges.of(number) for number in missing))
        for batch in self._setup.job.loader(_ROWS, data=data.take(is_missing), targets=False):
            here = rows.of(batch.ids.tolist())
            numbers = here // self._ranges.rows_per_part
            for number in np.unique(numbers).tolist():
                yield _Piece(number=number, rows=here[numbers == number], features=_features(batch)[numbers == number])
            done += len(here)
            observe(Counted(done=done, total=len(data)))

    def _write(self, number: int, pieces: Sequence["_Piece"]) -> ExtractedPart:
        """Keep a part; samples of its range that no piece has were skipped."""
        data = self._setup.data
        expected = np.array(self._ranges.of(number), np.int64)
        rows = np.concatenate([np.zeros(0, np.int64), *(piece.rows for piece in pieces)])
        lost = set(data.samples.ids_at(np.setdiff1d(expected, rows)).tolist())
        skipped = tuple(sample for sample in self._setup.job.statistics().skipped if sample.id in lost)
        empty = np.zeros((0, *self.shape), self.dtype)
        features = np.concatenate([empty, *(piece.features for piece in pieces)])
        self.parts.write(number, _table(data, rows, features), skipped)
        return ExtractedPart(rows=len(rows), skipped=skipped)


class _RowsOf:
    """Finds the rows of samples that come in about their order: ids are looked up a little ahead of what came."""

    def __init__(self, samples: SampleTable, ranges: Iterable[range]) -> None:
        self._samples = samples
        self._ahead = (some[start : start + _AHEAD] for some in ranges for start in range(0, len(some), _AHEAD))
        # What was not readable stays in here: few, or the job had ended.
        self._expected: dict[int, int] = {}

    def of(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        while not all(id in self._expected for id in ids):
            rows = next(self._ahead)
            found = self._samples.ids_at(np.array(rows, np.int64))
            self._expected.update(zip(found.tolist(), rows, strict=True))
        return np.array([self._expected.pop(id) for id in ids], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Rows of the manifest, all of one part, and their features."""

    number: int
    rows: npt.NDArray[np.int64]
    features: npt.NDArray[Any]


def _features(batch: Batch) -> npt.NDArray[Any]:
    assert isinstance(batch.features, torch.Tensor)
    features: npt.NDArray[Any] = widened(as_array(batch.features))
    return features


def _table(data: Dataset, rows: npt.NDArray[np.int64], features: npt.NDArray[Any]) -> pa.Table:
    labels = data.samples.labels_at(rows)
    return pa.table(
        {
            "id": pa.array(data.samples.ids_at(rows)),
            "object": pa.array(taken(data.names, rows), pa.string()),
            "label": pa.array(labels),
            "class": pa.array([data.classes[label] for label in labels.tolist()], pa.string()),
            "features": tensor_column(features),
        }
    )
