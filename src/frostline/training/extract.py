"""Bulk extraction: the features of every sample of a data set to one file, in parts kept until all are there."""

import bisect
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from frostline.core import REFERENCE, Samples, SampleTable, Skipped
from frostline.core.declared import parse_json
from frostline.core.errors import DataError, ModelError, SettingError, TooManySkipped
from frostline.core.events import Observer, PhaseStarted, ProgressMade, SetupWarning
from frostline.core.files import with_schema, without_schema
from frostline.core.nouns import finite_rows, take_texts, widen_bfloat16
from frostline.datasets import Dataset
from frostline.datasets.formats.base import label_column
from frostline.datasets.formats.left_out import LeftOut, json_of
from frostline.datasets.manifest import rows_of_ids
from frostline.engines.graph_runner import as_array
from frostline.loaders import Batch
from frostline.training.feature_files import LANCE, Contents, check_suffix, lance_reader, tensor_column, write_features
from frostline.training.run_config import atomic_file, make_folder, write_text
from frostline.training.settings import ExtractSettings
from frostline.training.setup import Setup, measure_first, set_up
from frostline.training.start import StartedJob

__all__ = (
    "Extracted",
    "ExtractedPart",
    "Parts",
    "Previous",
    "Ranges",
    "extract",
    "keys_of",
)


IdsAt = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]

_KEY = b"frostline.part"
_FORMAT = 2


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
        rows: the rows in it.
        skipped: samples of its range that could not be read.
        nonfinite: ids of the samples whose features have Inf or NaN.
    """

    rows: int
    skipped: tuple[Skipped, ...]
    nonfinite: tuple[int, ...]


class Parts:
    """The parts of one extraction, in a folder of their own.

    Args:
        out: the file that they will become.
        identity: dependencies of the features; parts of another extraction are removed.
        ids_at: function that gives the ids of rows of the manifest.
        ranges: the rows that make up each part.

    Attributes:
        has_replaced: parts of another extraction, which had been broken off, were removed.

    Raises:
        SettingError: the folder cannot be written.
        OutOfSpace: the disk is full.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], ids_at: IdsAt, ranges: Ranges) -> None:
        self._folder = out.with_name(f".{out.name}.parts")
        self._ids_at = ids_at
        self._ranges = ranges
        whole = json.dumps({**identity, "rows_per_part": ranges.rows_per_part, "schema": _FORMAT}, sort_keys=True)
        about, self.has_replaced = self._folder / "extraction.json", False
        if not about.is_file() or about.read_text() != whole:
            self.has_replaced = any(self._folder.glob("*.parquet"))
            self.remove()
            make_folder(self._folder)
            write_text(about, whole)

    def find_parts(self) -> dict[int, ExtractedPart]:
        """The parts that are there and whole; every byte of them is checked."""
        parts = {number: self._checked(number) for number in range(self._ranges.parts) if self._path(number).is_file()}
        return {number: part for number, part in parts.items() if part is not None}

    def write(self, number: int, table: pa.Table, part: ExtractedPart) -> None:
        """Put a part in its place, whole; raises as ``files.writing`` does."""
        skipped = [asdict(sample) for sample in part.skipped]
        about = json.dumps({"number": number, "skipped": skipped, "nonfinite": part.nonfinite})
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
        about = parse_json(table.schema.metadata[_KEY])
        skipped = tuple(Skipped(**record) for record in about["skipped"])
        expected = self._ids_at(np.array(self._ranges.of(number), np.int64))
        lost = np.array([sample.id for sample in skipped], np.int64)
        kept = expected[~np.isin(expected, lost)]
        is_whole = about["number"] == number and np.array_equal(table["id"].to_numpy(), kept)
        part = ExtractedPart(rows=len(kept), skipped=skipped, nonfinite=tuple(about["nonfinite"]))
        return part if is_whole else None


def _read(path: Path) -> pa.Table:
    return pq.ParquetFile(path, page_checksum_verification=True).read()


FeaturesOf = Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]

_ABOUT = b"frostline.extraction"
_UNKNOWN = np.uint64(0)


class Previous:
    """The result of an earlier extraction, as far as it is whole and of the same network.

    Args:
        ids: ``int64[n]``, ids of its samples in the file's order.
        keys: ``uint64[n]``, see ``keys_of``.
        features_of: function that gives the features of rows of the file.
    """

    def __init__(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64], features_of: FeaturesOf) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]
        self._keys = keys[self._order]
        self.features_of = features_of

    @classmethod
    def read(cls, out: Path, identity: Mapping[str, Any]) -> "Previous":
        """What lies at ``out``; with no rows where it is missing, damaged, or of another network or engine.

        Args:
            out: file of an extraction.
            identity: dependencies of the features, beside the samples.
        """
        try:
            state = pq.ParquetFile(_place(out), page_checksum_verification=True).read(use_threads=False)
            said = parse_json(state.schema.metadata[_ABOUT])
            about = without_schema(said, _FORMAT, _place(out), ("identity", "sha256"))
            if about["identity"] == _plain(identity) and about["sha256"] == _sha256(out):
                return cls(state["id"].to_numpy(), state["key"].to_numpy(), _reader(out))
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, SettingError):
            pass  # all is computed, and both are written anew
        return cls(np.zeros(0, np.int64), np.zeros(0, np.uint64), lambda _: np.zeros(0))

    def rows_of(self, ids: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The row of the file that has each sample as it is now; -1 where it is new or has changed."""
        rows = np.full(len(ids), -1, np.int64)
        if not len(self._ids):
            return rows
        places = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        is_same = (self._ids[places] == ids) & (self._keys[places] == keys) & (keys != _UNKNOWN)
        rows[is_same] = self._order[places[is_same]]
        return rows


def keys_of(samples: Samples) -> npt.NDArray[np.uint64]:
    """A number for the place and the version of each sample, ``uint64[n]``; 0 where its store tells no version."""
    columns = (samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), samples.versions)
    keys = np.zeros(len(samples), np.uint64)
    for row, (object, offset, length, version) in enumerate(zip(*columns, strict=True)):
        if version:
            text = f"{object}\0{offset}\0{length}\0{version}".encode(errors="surrogateescape")
            keys[row] = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return keys


def _keep_state(out: Path, identity: Mapping[str, Any], ids: Iterable[npt.NDArray[np.int64]], keys: Any) -> None:
    """Keep beside a finished file which samples it has, and in which versions.

    Args:
        out: the file.
        identity: dependencies of the features, beside the samples.
        ids: ids of its samples, in order, some at a time.
        keys: the keys, the same.

    Raises:
        OutOfSpace: the disk is full.
        SettingError: the folder cannot be written.
    """
    columns = {"id": np.concatenate([*ids]), "key": np.concatenate([*keys])}
    about = json.dumps(with_schema({"identity": _plain(identity), "sha256": _sha256(out)}, _FORMAT))
    with atomic_file(_place(out)) as file:
        pq.write_table(pa.table(columns, metadata={_ABOUT: about}), file, write_page_checksum=True)


def _place(out: Path) -> Path:
    return out.with_name(f".{out.name}.state")


def _plain(identity: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(identity))


def _sha256(path: Path) -> str:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        names = [f"{file.relative_to(path)} {_sha256(file)}" for file in files]
        return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reader(out: Path) -> FeaturesOf:
    if out.suffix == LANCE:
        return lance_reader(out)
    return _safetensors_reader(out) if out.suffix == ".safetensors" else _ParquetReader(out).at


def _safetensors_reader(out: Path) -> FeaturesOf:
    from safetensors import safe_open

    def at(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        with safe_open(out, "numpy") as file:
            features = file.get_slice("features")
            return np.concatenate([features[row : row + 1] for row in rows.tolist()])

    return at


class _ParquetReader:
    """Reads features of single rows, a row group at a time, of which the last is held."""

    def __init__(self, out: Path) -> None:
        self._file = pq.ParquetFile(out)
        groups = range(self._file.metadata.num_row_groups)
        self._ends = [*accumulate(self._file.metadata.row_group(group).num_rows for group in groups)]
        self._held: tuple[int, npt.NDArray[Any]] = (-1, np.zeros(0))

    def at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.stack([self._row(row) for row in rows.tolist()])

    def _row(self, row: int) -> npt.NDArray[Any]:
        group = bisect.bisect_right(self._ends, row)
        if self._held[0] != group:
            column = self._file.read_row_group(group, columns=["features"], use_threads=False)["features"]
            self._held = (group, column.combine_chunks().to_numpy_ndarray())
        features: npt.NDArray[Any] = self._held[1][row - (self._ends[group - 1] if group else 0)]
        return features


_ROWS = 256
# Rows whose ids are looked up at once.
_AHEAD = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What an extraction did.

    Attributes:
        out: the file.
        samples: rows in it.
        computed: rows of samples that were computed now.
        kept: rows copied from the file that was there before, whose samples have not changed.
        taken_up: rows that were there from a run that had been broken off.
        shape: shape of one sample's features.
        dtype: dtype of the features.
        seconds: the seconds in all, up to the file's last byte.
        setup_s: seconds of these before the first request.
        wire_bytes: store side to trainer, bodies and headers.
        engine: engine that ran the frozen part at the nodes.
        engine_error: the largest relative error against the reference, on the samples that it was tried on; 0 for the
            reference itself. ``codec_error`` comes on top of it.
        codec_error: the largest relative error that a codec made in any sample; 0 where nothing was lost.
        skipped: samples that could not be read; they have no row.
        left_out: parts of the data that are no samples, and have no row.
        nonfinite: rows with Inf or NaN, whichever process computed them.
        first_nonfinite: the first row with Inf or NaN, in words; empty if there is none.
    """

    out: str
    samples: int
    computed: int
    kept: int
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
    left_out: tuple[LeftOut, ...]
    nonfinite: int
    first_nonfinite: str

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        skipped = [asdict(sample) for sample in self.skipped]
        return {**asdict(self), "shape": list(self.shape), "skipped": skipped, "left_out": json_of(self.left_out)}


def extract(
    settings: ExtractSettings, on_event: Observer, *, begun: StartedJob | None = None, began_at: float | None = None
) -> Extracted:
    """Write the features of every readable sample; the file appears when it is whole.

    Parts are kept beside it meanwhile, and a run that was broken off is taken up where it was: the same call goes on.
    Where the file is there from before, of the same network and engine, samples that did not change are copied from it.
    With several nodes the work is spread over them, and where one dies another takes over.

    Args:
        settings: settings of the extraction.
        on_event: function that is called with each event.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: the time since when ``seconds`` counts, as ``time.perf_counter`` does; now by default.

    Raises:
        UserError: The user can mend what is wrong: data, network, node, settings or a full disk.
        Unavailable: every node stayed away for longer than the loader's ``retry_for_s``.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    check_suffix(settings.out)
    make_folder(settings.out.parent)
    # One engine and one plan for the whole file: a run that is taken up again must find the same.
    with set_up(measure_first(settings.job), on_event, begun=begun) as setup:
        setup_s = time.perf_counter() - began_at
        work = _Work(settings, setup)
        if work.parts.has_replaced:
            reason = (
                f"an extraction into {settings.out} had been broken off, of other samples, by another network or with "
                "other options: its parts are removed, and all is computed"
            )
            on_event(SetupWarning(reason=reason))
        found = work.parts_found()
        on_event(PhaseStarted(name="extracting"))
        done = {**found, **(work.make_on_ray if settings.on_ray else work.make)(found, on_event)}
        contents = Contents(
            rows=sum(part.rows for part in done.values()),
            shape=work.shape,
            dtype=work.dtype,
            classes=setup.data.classes,
        )
        if not contents.rows:
            raise DataError(f"none of the {len(setup.data)} samples of {setup.data.url} can be read")
        on_event(PhaseStarted(name="joining the parts"))
        write_features(settings.out, work.parts.tables(), contents)
        work.keep_state(done)
        work.parts.remove()
        statistics = setup.job.statistics()
        return Extracted(
            out=str(settings.out),
            samples=contents.rows,
            computed=sum(part.rows for number, part in done.items() if number not in found) - work.kept,
            kept=work.kept,
            taken_up=sum(part.rows for part in found.values()),
            shape=contents.shape,
            dtype=contents.dtype,
            seconds=time.perf_counter() - began_at,
            setup_s=setup_s,
            wire_bytes=statistics.wire_bytes + work.wire_bytes,
            engine=work.engine,
            engine_error=work.engine_error,
            codec_error=max(statistics.codec_error, work.codec_error),
            skipped=tuple(sample for number in sorted(done) for sample in done[number].skipped),
            left_out=setup.whole.manifest.left_out,
            nonfinite=sum(len(part.nonfinite) for part in done.values()),
            first_nonfinite=work.first_nonfinite(done),
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
        self._identity = {
            "features": setup.job.features_digest,
            "accuracy": settings.job.accuracy,
            "engine": self.engine,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }
        self._out = settings.out
        self._allows_nonfinite = settings.job.loader.allow_nonfinite
        self._line = f"{line.name}, in {line.dtypes[0]}"
        self._max_skipped = settings.job.loader.max_skipped(len(setup.data))
        self._previous = Previous.read(settings.out, self._identity)
        self.kept = self.wire_bytes = 0
        self.codec_error = 0.0
        identity = {**self._identity, "data": setup.data.digest}
        self.parts = Parts(settings.out, identity, setup.data.samples.ids_at, self._ranges)

    @property
    def engine(self) -> str:
        """That runs the frozen part at the nodes; the same from the first request to the last."""
        return REFERENCE if self._store is None else self._store.engine

    @property
    def engine_error(self) -> float:
        """Its error against the reference."""
        return 0.0 if self._store is None else self._store.engine_error

    def parts_found(self) -> dict[int, ExtractedPart]:
        """The parts that an earlier run left; one with rows that are not finite is made anew where none may be."""
        parts = self.parts.find_parts()
        return {number: part for number, part in parts.items() if self._allows_nonfinite or not part.nonfinite}

    def first_nonfinite(self, done: Mapping[int, ExtractedPart]) -> str:
        """The first row that is not finite, in words; empty where all are."""
        ids = (id for number in sorted(done) for id in done[number].nonfinite)
        id = next(ids, None)
        if id is None:
            return ""
        data = self._setup.data
        name = take_texts(data.names, rows_of_ids(data.samples.ids, np.array([id], np.int64)))[0]
        return f"the frozen layers gave Inf or NaN for sample {name} (id {id}) at {self._line} by {self.engine}"

    def make(self, found: Mapping[int, ExtractedPart], on_event: Observer) -> dict[int, ExtractedPart]:
        """Make the parts that are missing, one after another, from one pass over their rows."""
        missing = [number for number in range(self._ranges.parts) if number not in found]
        made: dict[int, ExtractedPart] = {}
        if missing:
            for number, pieces in groupby(self._pieces(missing, on_event), key=attrgetter("number")):
                made[number] = self._write(number, list(pieces))
        # Those of which not one sample could be read came with no piece.
        return {number: made.get(number) or self._write(number, []) for number in missing}

    def make_on_ray(self, found: Mapping[int, ExtractedPart], on_event: Observer) -> dict[int, ExtractedPart]:
        """Make the parts that are missing by tasks of Ray, and write each here once it is whole."""
        from frostline.ray.control import join
        from frostline.ray.tasks import parts_by_ray

        ray, total = join(), len(self._setup.data)
        missing = [number for number in range(self._ranges.parts) if number not in found]
        rows = {number: self._rows_to_compute(number) for number in missing}
        asked = {number: some for number, some in rows.items() if len(some)}
        made = {number: self._write(number, []) for number in missing if number not in asked}
        done, skipped = total - sum(map(len, asked.values())), 0
        for part in parts_by_ray(ray, self._setup.job.row_reader(_ROWS), asked):
            here = asked[part.number][np.isin(self._setup.data.samples.ids_at(asked[part.number]), part.ids)]
            piece = _Piece(number=part.number, rows=here, features=part.features)
            made[part.number] = self._write(part.number, [piece] if len(here) else [], part.done.skipped)
            self.wire_bytes += part.done.wire_bytes
            self.codec_error = max(self.codec_error, part.done.codec_error)
            skipped += len(part.done.skipped)
            self._check_skipped(skipped)
            done += len(asked[part.number])
            on_event(ProgressMade(done=done, total=total))
        return made

    def _check_skipped(self, skipped: int) -> None:
        """Processes of Ray count what each has skipped, and here all are counted together."""
        allowed = self._max_skipped
        if skipped > allowed:
            raise TooManySkipped(
                f"{skipped} of {len(self._setup.data)} samples cannot be read, and at most {allowed} may be left out: "
                "see which, or allow more with --max-skipped-fraction"
            )

    def _pieces(self, missing: Sequence[int], on_event: Observer) -> Iterator["_Piece"]:
        """What arrives, in the manifest's order, cut where a part ends."""
        data = self._setup.data
        is_missing = np.zeros(len(data), np.bool_)
        for number in missing:
            rows_here = self._ranges.of(number)
            is_missing[rows_here.start : rows_here.stop] = self._rows_before(number) < 0
        if not is_missing.any():
            return
        done = len(data) - int(np.count_nonzero(is_missing))
        rows = _RowsOf(data.samples, (self._ranges.of(number) for number in missing))
        for batch in self._setup.job.loader(_ROWS, data=data.take(is_missing), targets=False):
            here = rows.of(batch.ids.tolist())
            numbers = here // self._ranges.rows_per_part
            for number in np.unique(numbers).tolist():
                yield _Piece(number=number, rows=here[numbers == number], features=_features(batch)[numbers == number])
            done += len(here)
            on_event(ProgressMade(done=done, total=len(data)))

    def _write(self, number: int, pieces: Sequence["_Piece"], elsewhere: Sequence[Skipped] = ()) -> ExtractedPart:
        """Keep a part; samples of its range that no piece has were skipped, here or elsewhere."""
        data = self._setup.data
        expected = np.array(self._ranges.of(number), np.int64)
        pieces = [*pieces, *self._kept(number)]
        rows = np.concatenate([np.zeros(0, np.int64), *(piece.rows for piece in pieces)])
        lost = set(data.samples.ids_at(np.setdiff1d(expected, rows)).tolist())
        told = (*self._setup.job.statistics().skipped, *elsewhere)
        skipped = tuple(sample for sample in told if sample.id in lost)
        empty = np.zeros((0, *self.shape), self.dtype)
        features = np.concatenate([empty, *(piece.features for piece in pieces)])
        order = np.argsort(rows)
        rows, features = rows[order], features[order]
        part = ExtractedPart(
            rows=len(rows),
            skipped=skipped,
            nonfinite=tuple(data.samples.ids_at(rows[~finite_rows([features], len(rows))]).tolist()),
        )
        self.parts.write(number, _table(data, rows, features), part)
        return part

    def _rows_before(self, number: int) -> npt.NDArray[np.int64]:
        """The row in the file from before of each sample of a part; -1 where it must be computed."""
        samples = self._setup.data.samples.take(np.array(self._ranges.of(number), np.int64))
        return self._previous.rows_of(samples.ids, keys_of(samples))

    def _rows_to_compute(self, number: int) -> npt.NDArray[np.int64]:
        return np.array(self._ranges.of(number), np.int64)[self._rows_before(number) < 0]

    def _kept(self, number: int) -> Iterator["_Piece"]:
        """What of a part the file from before has."""
        before = self._rows_before(number)
        rows = np.array(self._ranges.of(number), np.int64)[before >= 0]
        self.kept += len(rows)
        if len(rows):
            yield _Piece(number=number, rows=rows, features=self._previous.features_of(before[before >= 0]))

    def keep_state(self, done: Mapping[int, ExtractedPart]) -> None:
        """Keep which samples the finished file has, for the next extraction into it."""
        ids = list(self.parts.ids())
        keys = []
        for number, there in enumerate(ids):
            samples = self._setup.data.samples.take(np.array(self._ranges.of(number), np.int64))
            known = keys_of(samples)
            known[np.isin(samples.ids, done[number].nonfinite)] = _UNKNOWN  # it is computed again, and judged
            keys.append(known[np.isin(samples.ids, there)])
        _keep_state(self._out, self._identity, ids, keys)


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
    features: npt.NDArray[Any] = widen_bfloat16(as_array(batch.features))
    return features


def _table(data: Dataset, rows: npt.NDArray[np.int64], features: npt.NDArray[Any]) -> pa.Table:
    labels = data.samples.labels_at(rows)
    classes = [data.classes[label] if label >= 0 else None for label in labels.tolist()]
    return pa.table(
        {
            "id": pa.array(data.samples.ids_at(rows)),
            "object": pa.array(take_texts(data.names, rows), pa.string()),
            "label": label_column(labels),
            "class": pa.array(classes, pa.string()),
            "features": tensor_column(features),
        }
    )
