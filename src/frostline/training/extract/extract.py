"""Bulk extraction: the features of every sample of a data set, in the manifest's order, to one file."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from frostline.core import REFERENCE, SampleTable, Skipped
from frostline.core.features import widened
from frostline.core.samples import taken
from frostline.datasets import Dataset
from frostline.engines.base.runner import as_array
from frostline.errors import DataError, ModelError, TooManySkipped
from frostline.events import Observer, PhaseStarted, ProgressMade
from frostline.loaders import Batch
from frostline.training.extract.feature_files import Contents, check_suffix, tensor_column, write_features
from frostline.training.extract.parts import ExtractedPart, Parts, Ranges
from frostline.training.extract.previous import Previous, keep_state, keys_of
from frostline.training.files import make_folder
from frostline.training.settings import ExtractSettings
from frostline.training.setup import Setup, measured_first, set_up
from frostline.training.start import StartedJob

__all__ = ("Extracted", "extract")

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

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shape": list(self.shape), "skipped": [asdict(sample) for sample in self.skipped]}


def extract(
    settings: ExtractSettings, observe: Observer, *, begun: StartedJob | None = None, began_at: float | None = None
) -> Extracted:
    """Write the features of every readable sample; the file appears when it is whole.

    Parts are kept beside it meanwhile, and a run that was broken off is taken up where it was: the same call goes on.
    Where the file is there from before, of the same network and engine, samples that did not change are copied from it.
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
        done = {**found, **(work.make_on_ray if settings.on_ray else work.make)(found, observe)}
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
        work.keep_state()
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
        self._max_skipped = settings.job.loader.max_skipped(len(setup.data))
        self._previous = Previous.found(settings.out, self._identity)
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

    def make(self, found: Mapping[int, ExtractedPart], observe: Observer) -> dict[int, ExtractedPart]:
        """Make the parts that are missing, one after another, from one pass over their rows."""
        missing = [number for number in range(self._ranges.parts) if number not in found]
        made: dict[int, ExtractedPart] = {}
        if missing:
            for number, pieces in groupby(self._pieces(missing, observe), key=attrgetter("number")):
                made[number] = self._write(number, list(pieces))
        # Those of which not one sample could be read came with no piece.
        return {number: made.get(number) or self._write(number, []) for number in missing}

    def make_on_ray(self, found: Mapping[int, ExtractedPart], observe: Observer) -> dict[int, ExtractedPart]:
        """Make the parts that are missing by tasks of Ray, and write each here once it is whole."""
        from frostline.cluster.connect import join
        from frostline.ray.parts import parts_by_ray

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
            observe(ProgressMade(done=done, total=total))
        return made

    def _check_skipped(self, skipped: int) -> None:
        """Processes of Ray count what each has skipped, and here all are counted together."""
        allowed = self._max_skipped
        if skipped > allowed:
            raise TooManySkipped(
                f"{skipped} of {len(self._setup.data)} samples cannot be read, and at most {allowed} may be left out: "
                "see which, or allow more with --skip-allowance"
            )

    def _pieces(self, missing: Sequence[int], observe: Observer) -> Iterator["_Piece"]:
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
            observe(ProgressMade(done=done, total=len(data)))

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
        self.parts.write(number, _table(data, rows, features), skipped)
        return ExtractedPart(rows=len(rows), skipped=skipped)

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

    def keep_state(self) -> None:
        """Keep which samples the finished file has, for the next extraction into it."""
        ids = list(self.parts.ids())
        keys = []
        for number, there in enumerate(ids):
            samples = self._setup.data.samples.take(np.array(self._ranges.of(number), np.int64))
            keys.append(keys_of(samples)[np.isin(samples.ids, there)])
        keep_state(self._out, self._identity, ids, keys)


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
