"""The three outputs of a request: samples as stored, their pixels, or the features of a prefix."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS, Limit, batch_size, pad_rows, readable_bytes, stretches_of_bytes, stretches_of_work
from frostline.cache.keys import Tensors
from frostline.core import EXACT, Cut, FeatureBatch, Samples, Skipped, TensorSpec
from frostline.core.errors import OverBudget
from frostline.core.nouns import array_dtype, finite_rows
from frostline.engines.protocols import Arrays, Footprint, levels_of
from frostline.node.decode import SampleReader
from frostline.node.device import HEADROOM, Device, Devices, QueuedRows, RowWork
from frostline.node.feature_cache import CachedFeatures, Found
from frostline.node.memory import CancelScope, RequestMemory, Reservation
from frostline.node.pipeline import Made, PendingBatch, Slab
from frostline.node.prefixes import Resident
from frostline.node.statistics import Counters
from frostline.node.tenants import Account
from frostline.wire.packing import PackingMemory, pack, packing_memory

__all__ = ("HEADROOM", "Decoded", "EncodedOutput", "Packing", "PrefixRun")


T = TypeVar("T")


class PrefixRun:
    """A prefix up to one cut, for one request.

    Args:
        resident: prefix with its engine.
        cut: number of the cut.
        devices: run the prefix, each with its own engine.
        scope: cancel scope of the request.
        account: account of the tenant that asks.
    """

    def __init__(self, resident: Resident, cut: int, devices: Devices, scope: CancelScope, account: Account) -> None:
        self._resident = resident
        self._cut = resident.cut(cut)
        self._footprint = resident.engine.footprint(cut)
        self._devices = devices
        self._scope = scope
        self._account = account

    @property
    def crossing(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The shapes per sample and the dtypes of the tensors at the cut."""
        return self._cut.shapes, self._cut.dtypes

    @property
    def takes(self) -> tuple[tuple[int, ...], "np.dtype[Any]"]:
        """The shape and dtype of a row of the engine's input: the network's input, or the pixels before that."""
        channels, *sides = self._resident.prefix.input_shape
        if levels_of(self._resident.engine.name):
            return (*sides, channels), np.dtype(np.uint8)
        return (channels, *sides), np.dtype(self._resident.prefix.inputs[0].dtype)

    @property
    def answer_bytes(self) -> int:
        """The bytes per sample at the cut."""
        crossing = zip(self._cut.shapes, self._cut.dtypes, strict=True)
        return sum(math.prod(shape) * array_dtype(kind).itemsize for shape, kind in crossing)

    @property
    def limit(self) -> Limit:
        """The rows that the memory for activations allows."""
        return Limit(
            budget_bytes=int(self._devices.memory.total_bytes / HEADROOM),
            fixed_bytes=self._footprint.fixed_bytes,
            bytes_per_row=self._footprint.bytes_per_sample,
        )

    def check(self, rows: int = ROWS) -> None:
        """Check that so many rows fit.

        Raises:
            OverBudget: The rows do not fit.
        """
        if self.limit.max_rows < rows:
            raise OverBudget(
                f"running {rows} samples to this cut takes {readable_bytes(self._bytes(rows))}, and the node has "
                f"{readable_bytes(self._devices.memory.total_bytes)} for it: start it with more --memory, "
                "or choose an earlier cut"
            )

    def expected_s(self, run_rows: int) -> float:
        """The expected device seconds of a run."""
        works = self._works(run_rows)
        only = self._devices.only
        return self._devices.expected_s(works) if only is None else only.expected_s(works[0])

    def __call__(self, slab: Slab, rows: int) -> list[npt.NDArray[np.generic]]:
        """Run the prefix on the first rows of a slab when it is their turn, and return the tensors at the cut.

        Meanwhile the slab belongs to the device, which may add rows of other requests behind these, to run them
        together. Every tensor has at least these rows, and they come first.

        Raises:
            UnsafeArtifact: The prefix mixes rows, which are then not run beside those of others.
        """
        if (check := self._resident.check_rows) is not None:
            check(self._cut, self._crossing_values)
        works = self._works(len(slab))
        batch = QueuedRows(
            account=self._account,
            is_abandoned=self._scope.is_cancelled,
            work=works[0],
            slab=slab,
            rows=rows,
            served=self._resident.served,
        )
        if (only := self._devices.only) is None:
            return self._devices.run(batch, works, self._scope)
        return self._scope.follow(batch.future, partial(only.enqueue, batch)).result()

    def timed_run(
        self, slab: Slab, *, repeats: int
    ) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.generic], ...]]:
        """Measure the seconds per sample up to each cut on the first device; see ``TorchEngine.timed_run``.

        The other devices measure the same at the same time, so that it is known how fast all are together.
        """
        calls = {number: partial(self._measure, number, slab, repeats) for number in self._devices.in_service()}
        found = self._devices.run_on_each(calls, self._account, self._scope)
        self._devices.record_seconds({number: float(np.median(each[:, -1])) for number, (each, _) in found.items()})
        return found[min(found)]

    def values(self, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """Compute the tensors at some cuts for up to eight samples; see ``TorchEngine.cut_values``."""
        number = self._devices.in_service()[0]
        return self._devices.run_exclusive(
            number, partial(self._values, number, slab, cuts), self._account, self._scope
        )

    def _crossing_values(self, inputs: Arrays) -> Sequence[npt.NDArray[np.generic]]:
        number = self._devices.in_service()[0]
        between = self._devices.device(number).between
        call = partial(self._resident.references[number].cut_values, [self._cut], inputs, between)
        made = self._devices.run_exclusive(number, call, self._account, self._scope, nbytes=self._bytes(ROWS))
        return made[self._cut.number]

    def reference_footprint(self, cut: int) -> Footprint:
        """The memory of one run of the reference up to a cut."""
        return self._resident.reference.footprint(cut)

    def _works(self, run_rows: int) -> tuple[RowWork, ...]:
        """The work on each device."""
        return tuple(
            RowWork(engine=engine, cut=self._cut.number, run_rows=run_rows) for engine in self._resident.engines
        )

    def run_exclusive(self, call: Callable[[], T]) -> T:
        """Run a call that has the first device to itself, and return its result."""
        return self._devices.run_exclusive(self._devices.in_service()[0], call, self._account, self._scope)

    def _measure(
        self, number: int, slab: Slab, repeats: int
    ) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.generic], ...]]:
        device, reference = self._devices.device(number), self._resident.references[number]
        with self._activations(device, len(slab)):
            return reference.timed_run(slab, repeats=repeats, clock=time.perf_counter, between=device.between)

    def _values(self, number: int, slab: Slab, cuts: Sequence[Cut]) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        device = self._devices.device(number)
        with self._activations(device, ROWS):
            return self._resident.references[number].cut_values(cuts, slab, device.between)

    def _activations(self, device: Device, rows: int) -> Reservation:
        memory = device.memory.take(self._bytes(rows))
        assert memory is not None, "calls run alone, and its rows were chosen to fit"
        return memory

    def _bytes(self, rows: int) -> int:
        return int(self._footprint.at(rows) * HEADROOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the answers of a request are packed.

    Attributes:
        codec: name of the codec; ``exact`` leaves them as they are.
        tolerance: the largest relative error allowed; None allows any.
        counters: counters of the request.
    """

    codec: str
    tolerance: float | None
    counters: Counters

    def memory(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> PackingMemory:
        """The memory that packing takes for tensors of these shapes and dtypes."""
        if self.codec == EXACT:
            return PackingMemory()
        return packing_memory(shapes, [array_dtype(dtype) for dtype in dtypes], self.codec)

    def __call__(self, batch: FeatureBatch) -> FeatureBatch:
        """Pack a batch for the wire."""
        if self.codec == EXACT:
            return batch
        started = time.perf_counter()
        packed = pack(batch, self.codec, self.tolerance)
        self.counters.add(encode_s=time.perf_counter() - started)
        return packed


# Bytes of a batch of encoded samples: large enough for the network, small enough that several requests fit.
_ENCODED_BATCH_BYTES = 8 << 20
# Records of a memory-mapped ready format take hundredths of a millisecond each, less than handing one to a thread, and
# threads that do so little in Python wait for each other: one thread for a whole batch takes half of the processor time
# of several threads.
_AT_A_TIME = 32
# Cached rows need no run: batches are large enough that the cost per batch is small beside its bytes.
_FOUND_BYTES = 4 << 20


class EncodedOutput:
    """Cut 0: samples as they are stored."""

    def __init__(self, samples: Samples, reader: SampleReader, memory: RequestMemory, max_rows: int) -> None:
        self._samples = samples
        self._reader = reader
        self._max_rows = max_rows
        self._max_bytes, self._batch_bytes = memory.total_bytes, min(2 * _ENCODED_BATCH_BYTES, memory.batch_bytes)
        # Each sample takes memory twice: as it was read, and in the one buffer in which a batch is sent.
        self._takes: list[int] = [2 * length for length in samples.lengths.tolist()]

    def stretches(self) -> Sequence[range]:
        """Divide the rows into batches of a good size for the network."""
        return stretches_of_bytes(self._takes, max_rows=self._max_rows, max_bytes=self._batch_bytes)

    def nbytes(self, rows: range) -> int:
        """The memory of the samples that fit at all."""
        return sum(self._takes[row] for row in rows if self._takes[row] <= self._max_bytes)

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:  # noqa: ARG002
        """The same as ``nbytes``: the samples are sent as they were read."""
        return self.nbytes(rows)

    def begin(self, rows: range) -> PendingBatch:
        """Start to read the samples ahead; they stay encoded, and none is cached."""
        self._reader.expect(row for row in rows if self._takes[row] <= self._max_bytes)
        return PendingBatch(rows=rows, wanted=rows)

    @property
    def at_a_time(self) -> int:
        """One: each sample waits for the store."""
        return 1

    def samples(self, rows: Sequence[int], out: Slab | None) -> list[Made]:  # noqa: ARG002
        """Read some samples."""
        return [self._sample(row) for row in rows]

    def _sample(self, row: int) -> Made:
        if self._takes[row] > self._max_bytes:
            size = readable_bytes(self._takes[row] // 2)
            return self._reader.record_skip(row, f"too large for the node: {size}; start it with more --memory")
        return self._reader.read_encoded(row)

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """Put the samples that could be read into a batch."""
        return FeatureBatch(
            ids=self._samples.ids[work.rows.start : work.rows.stop][_kept(made)],
            encoded=tuple(sample for sample in made if isinstance(sample, bytes | memoryview)),
            skipped=_skipped(made),
        )


class Decoded:
    """Cut 1 and higher: samples are decoded, and run through a prefix if there is one.

    Args:
        samples: samples of the request.
        reader: reads and decodes the samples.
        sample: shape and type of one decoded sample.
        memory: access to the memory for batches.
        packing: packing of the answers.
        max_rows: maximum rows of a batch.
        run: run of the prefix on the pixels; None ships the pixels.
        min_rows: minimum rows of a run of the prefix.
        fixed_rows: True if every run has the same number of rows, because kernels may round differently for others.
        kept: function that returns the cached features for a number of rows per run; None without a cache.

    Raises:
        OverBudget: Memory is too small for ``min_rows`` samples, or for eight at cut 1.
    """

    def __init__(
        self,
        samples: Samples,
        reader: SampleReader,
        sample: TensorSpec,
        memory: RequestMemory,
        packing: Packing,
        *,
        max_rows: int,
        run: PrefixRun | None = None,
        min_rows: int = ROWS,
        fixed_rows: bool = True,
        kept: Callable[[int], CachedFeatures] | None = None,
    ) -> None:
        self._samples = samples
        self._reader = reader
        self._shape, self._dtype = (sample.shape, np.dtype(sample.dtype)) if run is None else run.takes
        self._run = run
        self._packing = packing
        pixels = math.prod(self._shape) * self._dtype.itemsize
        self._answer_bytes = pixels if run is None else run.answer_bytes
        packed = packing.memory([sample.shape], [sample.dtype]) if run is None else packing.memory(*run.crossing)
        # At cut 1 the pixels are the answer. The answer is counted twice, since it is copied if samples were skipped,
        # and the packed answer once more.
        self._made_bytes = pixels if run is None else pixels + self._answer_bytes
        self._sent_bytes = self._answer_bytes + packed.bytes_per_sample
        if kept is not None:
            # Cached rows lie beside the computed ones, and rows are copied once more on their way to the cache.
            self._made_bytes += self._answer_bytes
            self._sent_bytes += self._answer_bytes
        self._fixed_bytes = packed.fixed_bytes
        self._has_fixed_rows = run is not None and fixed_rows
        wanted = max_rows if self._has_fixed_rows else len(samples)
        fewest = ROWS if run is None else min_rows
        self._rows = batch_size(self._limits(memory, fewest), wanted=wanted, maximum=max_rows)
        if self._rows < fewest:
            self._refuse(memory, fewest)
        self._kept = None if kept is None else kept(self._rows if self._has_fixed_rows else 0)
        self._max_rows = self._rows
        if self._kept is not None:
            free_bytes = memory.batch_bytes - self._bytes(self._rows)
            found = min(free_bytes // max(1, self._sent_bytes), _FOUND_BYTES // max(1, self._answer_bytes))
            self._max_rows = max(self._rows, found)

    def stretches(self) -> Sequence[range]:
        """Divide the rows into batches with one run of computing each; cached rows are added while there is memory."""
        needs_work = [True] * len(self._samples) if self._kept is None else (~self._kept.cached_rows()).tolist()
        return stretches_of_work(needs_work, run_rows=self._rows, max_rows=self._max_rows)

    @property
    def has_run(self) -> bool:
        """Whether it needs the device."""
        return self._run is not None

    @property
    def device_s(self) -> float:
        """The expected device seconds of a batch."""
        return 0.0 if self._run is None else self._run.expected_s(self._rows)

    def nbytes(self, rows: range) -> int:
        """The memory of the pixels and the answer, also packed; activations belong to the device's memory."""
        made = self._rows if self._run is not None else min(len(rows), self._rows)
        return self._fixed_bytes + made * self._made_bytes + max(made, len(rows)) * self._sent_bytes

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """The memory of the answer. An unpacked tensor is a view of the run's output, which includes the padding."""
        padding = max(0, self._run_rows(len(rows)) - len(rows))
        return (batch.nbytes if batch.packed else len(rows) * self._answer_bytes) + padding * self._answer_bytes

    def begin(self, rows: range) -> PendingBatch:
        """Look up cached rows, and make a slab for the others, padded with zeros to the rows of a run."""
        found: Found | None = None
        wanted: Sequence[int] = rows
        if self._kept is not None:
            # Rows may have left the cache since ``stretches``, so that more are missing than a run has rows.
            found = self._kept.find(rows).upto(self._rows)
            self._kept.count(found)
            rows = rows[: len(found.mask)]
            wanted = [row for row, is_there in zip(rows, found.mask, strict=True) if not is_there]
        if not wanted:
            return PendingBatch(rows=rows, wanted=(), found=found)
        self._reader.expect(wanted)
        slab = np.empty((self._run_rows(len(wanted)), *self._shape), self._dtype)
        slab[len(wanted) :] = 0
        return PendingBatch(rows=rows, wanted=wanted, slab=slab, found=found)

    @property
    def at_a_time(self) -> int:
        """Several if the reader never waits for a store."""
        return _AT_A_TIME if self._reader.is_mapped else 1

    def samples(self, rows: Sequence[int], out: Slab | None) -> Sequence[Made]:
        """Read and decode some samples."""
        assert out is not None
        return self._reader.all_pixels_into(rows, out)

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """Run the prefix when it is this batch's turn, drop padding and skipped samples, and pack the rest."""
        computed = () if work.slab is None else self._computed(work.slab, len(work.wanted))
        if computed:
            self._keep(work.wanted, made, computed)
        return self._packing(self._answer(work, made, computed))

    def _run_rows(self, rows: int) -> int:
        if self._run is None:
            return rows
        return self._rows if self._has_fixed_rows else pad_rows(rows)

    def _computed(self, slab: Slab, rows: int) -> Tensors:
        tensors: Sequence[npt.NDArray[np.generic]] = [slab] if self._run is None else self._run(slab, rows)
        return tuple(tensor[:rows] for tensor in tensors)

    def _keep(self, wanted: Sequence[int], made: Sequence[Made], computed: Tensors) -> None:
        """Cache the rows that could be read and have the version that the request names; count what is not finite.

        Features with Inf or NaN are delivered, since who trains decides what they are worth, and cached nowhere.
        """
        places = _kept(made)
        if self._run is not None:
            finite = finite_rows(computed, len(wanted), self._run.crossing[1])
            if not finite.all():
                there = [place for place in places if finite[place]]
                self._packing.counters.add(nonfinite=len(places) - len(there))
                places = there
        if (kept := self._kept) is None:
            return
        places = [place for place in places if self._reader.is_as_listed(wanted[place])]
        if places:
            some = computed if len(places) == len(wanted) else tuple(tensor[places] for tensor in computed)
            kept.keep([wanted[place] for place in places], some)

    def _answer(self, work: PendingBatch, made: Sequence[Made], computed: Tensors) -> FeatureBatch:
        ids, tensors, lost = self._samples.ids[work.rows.start : work.rows.stop], computed, _lost(made)
        if work.found is not None:
            places, tensors = np.flatnonzero(~work.found.mask), work.found.tensors
            for tensor, values in zip(tensors, computed, strict=bool(computed)):
                tensor[places] = values
            lost = places[lost]
        if not len(lost):
            return FeatureBatch(ids=ids, tensors=tensors)
        there = np.delete(np.arange(len(ids)), lost)
        return FeatureBatch(ids=ids[there], tensors=tuple(sample[there] for sample in tensors), skipped=_skipped(made))

    def _bytes(self, rows: int) -> int:
        return self._fixed_bytes + rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self._made_bytes + self._sent_bytes

    def _limits(self, memory: RequestMemory, fewest: int) -> list[Limit]:
        # A part of the memory, or what the minimum rows need if that is more.
        budget_bytes = max(memory.batch_bytes, min(memory.total_bytes, self._bytes(fewest)))
        batches = Limit(budget_bytes=budget_bytes, fixed_bytes=self._fixed_bytes, bytes_per_row=self._row_bytes)
        return [batches] if self._run is None else [batches, self._run.limit]

    def _refuse(self, memory: RequestMemory, fewest: int) -> None:
        if self._run is not None:
            self._run.check(fewest)
        raise OverBudget(
            f"{fewest} samples at this cut take {readable_bytes(self._bytes(fewest))}, and the node has "
            f"{readable_bytes(memory.total_bytes)} for them: start it with more --memory, or choose another cut"
        )


def _kept(made: Sequence[Made]) -> list[int]:
    return [place for place, sample in enumerate(made) if not isinstance(sample, Skipped)]


def _lost(made: Sequence[Made]) -> npt.NDArray[np.int64]:
    return np.array([place for place, sample in enumerate(made) if isinstance(sample, Skipped)], np.int64)


def _skipped(made: Sequence[Made]) -> tuple[Skipped, ...]:
    return tuple(sample for sample in made if isinstance(sample, Skipped))
