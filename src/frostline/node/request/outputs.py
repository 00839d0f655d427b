"""What a request does with its samples: ship them encoded, ship their pixels, or run a prefix on them."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS, Limit, batch_size, readable_bytes, stretches_of_bytes, stretches_of_work
from frostline.cache.rows import Tensors
from frostline.core import FeatureBatch, Samples, Skipped
from frostline.errors import OverBudget
from frostline.node.request.decode import SampleReader
from frostline.node.request.feature_cache import CachedFeatures, Found
from frostline.node.request.packing import Packing
from frostline.node.request.pipeline import Made, PendingBatch, Slab
from frostline.node.request.prefix_run import PrefixRun
from frostline.node.scheduling.memory_pool import Lane

__all__ = ("Decoded", "EncodedOutput")

# Batches of encoded samples: large enough for the line, small enough that several requests have room.
_ENCODED_BATCH_BYTES = 8 << 20
# One batch takes at most this part of the room for batches where it can, so that others are read meanwhile.
_PART = 4
# Records of a mapped ready form take hundredths of a millisecond each, less than handing one to a thread, and threads
# that do so little in Python wait for each other: one that reads a whole batch takes half of the processor time that
# several take together.
_AT_A_TIME = 32
# Rows that only have to be found follow no run: large enough that a batch costs little beside its bytes.
_FOUND_BYTES = 4 << 20


class EncodedOutput:
    """Cut 0: samples as they are stored.

    Args:
        samples: of the request.
        reader: reads them.
        memory: for batches.
        max_rows: of a batch.
    """

    def __init__(self, samples: Samples, reader: SampleReader, memory: Lane, max_rows: int) -> None:
        self._samples = samples
        self._reader = reader
        self._max_rows = max_rows
        self._room = memory.total_bytes
        # Each takes memory twice: as it was read, and in the one piece in which a batch is sent.
        self._takes: list[int] = [2 * length for length in samples.lengths.tolist()]

    def stretches(self) -> Sequence[range]:
        """Batches of a good size for the line."""
        max_bytes = min(2 * _ENCODED_BATCH_BYTES, self._room // _PART)
        return stretches_of_bytes(self._takes, max_rows=self._max_rows, max_bytes=max_bytes)

    def nbytes(self, rows: range) -> int:
        """Of the samples that can be read at all."""
        return sum(self._takes[row] for row in rows if self._takes[row] <= self._room)

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:  # noqa: ARG002
        """Nothing is done with them before they are sent."""
        return self.nbytes(rows)

    def begin(self, rows: range) -> PendingBatch:
        """They stay encoded, and none is kept."""
        self._reader.expect(row for row in rows if self._takes[row] <= self._room)
        return PendingBatch(rows=rows, wanted=rows)

    @property
    def at_a_time(self) -> int:
        """Each waits for the store alone."""
        return 1

    def samples(self, rows: Sequence[int], out: Slab | None) -> list[Made]:  # noqa: ARG002
        """Read some."""
        return [self._sample(row) for row in rows]

    def _sample(self, row: int) -> Made:
        if self._takes[row] > self._room:
            size = readable_bytes(self._takes[row] // 2)
            return self._reader.skipped(row, f"too large for the node: {size}; start it with more --memory")
        return self._reader.encoded(row)

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """The samples that could be read."""
        return FeatureBatch(
            ids=self._samples.ids[work.rows.start : work.rows.stop][_kept(made)],
            encoded=tuple(one for one in made if isinstance(one, bytes | memoryview)),
            skipped=_skipped(made),
        )


class Decoded:
    """Cut 1 and higher: samples are decoded, and run through a prefix where there is one.

    Args:
        samples: of the request.
        reader: reads and decodes them.
        shape: of one decoded sample.
        memory: for batches.
        packing: how the answers are packed.
        max_rows: of a batch.
        run: what is done with the pixels; None ships them.
        min_rows: of a run of the prefix.
        kept: what the node's cache holds of them, for a number of rows of a run; None without a cache.

    Raises:
        OverBudget: Not even so many samples fit, and not even eight at cut 1.
    """

    def __init__(
        self,
        samples: Samples,
        reader: SampleReader,
        shape: tuple[int, ...],
        memory: Lane,
        packing: Packing,
        *,
        max_rows: int,
        run: PrefixRun | None = None,
        min_rows: int = ROWS,
        kept: Callable[[int], CachedFeatures] | None = None,
    ) -> None:
        self._samples = samples
        self._reader = reader
        shipped: tuple[tuple[int, ...], type[np.generic]] = (shape, np.float32)
        self._shape, self._dtype = shipped if run is None else run.takes
        self._run = run
        self._packing = packing
        pixels = math.prod(self._shape) * np.dtype(self._dtype).itemsize
        self._answer_bytes = pixels if run is None else run.answer_bytes
        packed = packing.memory([shape], ["float32"]) if run is None else packing.memory(*run.crossing)
        # Pixels and answer are one at cut 1. There is room for a copy of the answer: one is made where samples
        # were skipped. And there is room for the answer as it is packed.
        self._made_bytes = pixels if run is None else pixels + self._answer_bytes
        self._sent_bytes = self._answer_bytes + packed.bytes_per_sample
        if kept is not None:
            # What is found stands beside what is computed, and what is kept is copied once more on its way.
            self._made_bytes += self._answer_bytes
            self._sent_bytes += self._answer_bytes
        self._fixed_bytes = packed.fixed_bytes
        # With a prefix every run has the same rows, whatever is asked: kernels may round otherwise for others.
        wanted = len(samples) if run is None else max_rows
        fewest = ROWS if run is None else min_rows
        self._rows = batch_size(self._limits(memory, fewest), wanted=wanted, most=max_rows)
        if self._rows < fewest:
            self._refuse(memory, fewest)
        self._kept = None if kept is None else kept(0 if run is None else self._rows)
        self._max_rows = self._rows
        if self._kept is not None:
            room = memory.total_bytes // _PART - self._bytes(self._rows)
            found = min(room // max(1, self._sent_bytes), _FOUND_BYTES // max(1, self._answer_bytes))
            self._max_rows = max(self._rows, found)

    def stretches(self) -> Sequence[range]:
        """Batches with a run's rows to compute each, and as many as there is room for where nothing is."""
        needs_work = [True] * len(self._samples) if self._kept is None else (~self._kept.known()).tolist()
        return stretches_of_work(needs_work, run_rows=self._rows, max_rows=self._max_rows)

    @property
    def has_run(self) -> bool:
        """It needs the device."""
        return self._run is not None

    @property
    def device_s(self) -> float:
        """What a batch will probably take of the device."""
        return 0.0 if self._run is None else self._run.expected_s(self._rows)

    def nbytes(self, rows: range) -> int:
        """The pixels and the answer, packed too; activations are the device's."""
        made = self._rows if self._run is not None else min(len(rows), self._rows)
        return self._fixed_bytes + made * self._made_bytes + max(made, len(rows)) * self._sent_bytes

    def kept_bytes(self, rows: range, batch: FeatureBatch) -> int:
        """The answer. A tensor that is sent as it is views what the run gave, padding and all."""
        padding = 0 if self._run is None else max(0, self._rows - len(rows))
        return (batch.nbytes if batch.packed else len(rows) * self._answer_bytes) + padding * self._answer_bytes

    def begin(self, rows: range) -> PendingBatch:
        """Look what is kept. The rest gets a row each, up to the rows of a run, and zeros up to those."""
        found: Found | None = None
        wanted: Sequence[int] = rows
        if self._kept is not None:
            # What was there may have gone, so that more is to compute than a run has rows.
            found = self._kept.find(rows).upto(self._rows)
            self._kept.count(found)
            rows = rows[: len(found.mask)]
            wanted = [row for row, is_there in zip(rows, found.mask, strict=True) if not is_there]
        if not wanted:
            return PendingBatch(rows=rows, wanted=(), found=found)
        self._reader.expect(wanted)
        slab = np.empty((len(wanted) if self._run is None else self._rows, *self._shape), self._dtype)
        slab[len(wanted) :] = 0
        return PendingBatch(rows=rows, wanted=wanted, slab=slab, found=found)

    @property
    def at_a_time(self) -> int:
        """Several where the reader waits for nothing."""
        return _AT_A_TIME if self._reader.is_mapped else 1

    def samples(self, rows: Sequence[int], out: Slab | None) -> Sequence[Made]:
        """Read and decode some."""
        assert out is not None
        return self._reader.all_pixels_into(rows, out)

    def finish(self, work: PendingBatch, made: Sequence[Made]) -> FeatureBatch:
        """Run the prefix when it is this batch's turn, leave out padding and skipped samples, and pack the rest."""
        computed = () if work.slab is None else self._computed(work.slab, len(work.wanted))
        if self._kept is not None and computed:
            self._keep(self._kept, work.wanted, made, computed)
        return self._packing(self._answer(work, made, computed))

    def _computed(self, slab: Slab, rows: int) -> Tensors:
        tensors: Sequence[npt.NDArray[np.generic]] = [slab] if self._run is None else self._run(slab, rows)
        return tuple(tensor[:rows] for tensor in tensors)

    def _keep(self, kept: CachedFeatures, wanted: Sequence[int], made: Sequence[Made], computed: Tensors) -> None:
        """Keep what is whole and of the version that the request names."""
        places = [place for place in _kept(made) if self._reader.is_as_listed(wanted[place])]
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
        return FeatureBatch(ids=ids[there], tensors=tuple(one[there] for one in tensors), skipped=_skipped(made))

    def _bytes(self, rows: int) -> int:
        return self._fixed_bytes + rows * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return self._made_bytes + self._sent_bytes

    def _limits(self, memory: Lane, fewest: int) -> list[Limit]:
        # A part of the room, or what the fewest rows need where they need more.
        room = max(memory.total_bytes // _PART, min(memory.total_bytes, self._bytes(fewest)))
        batches = Limit(room_bytes=room, fixed_bytes=self._fixed_bytes, bytes_per_row=self._row_bytes)
        return [batches] if self._run is None else [batches, self._run.limit]

    def _refuse(self, memory: Lane, fewest: int) -> None:
        if self._run is not None:
            self._run.check(fewest)
        raise OverBudget(
            f"{fewest} samples at this cut take {readable_bytes(self._bytes(fewest))}, and the node has "
            f"{readable_bytes(memory.total_bytes)} for them: start it with more --memory, or choose another cut"
        )


def _kept(made: Sequence[Made]) -> list[int]:
    return [place for place, one in enumerate(made) if not isinstance(one, Skipped)]


def _lost(made: Sequence[Made]) -> npt.NDArray[np.int64]:
    return np.array([place for place, one in enumerate(made) if isinstance(one, Skipped)], np.int64)


def _skipped(made: Sequence[Made]) -> tuple[Skipped, ...]:
    return tuple(one for one in made if isinstance(one, Skipped))
