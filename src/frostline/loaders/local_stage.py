"""The local stage: what the trainer does of the frozen part, decoding on a few threads in the order of the rows."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from heapq import heapify, heappush
from itertools import count
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS
from frostline.core import Cut, FeatureBatch, Route, Samples, SampleTable, Skipped, View
from frostline.core.errors import NotFinite, SampleError
from frostline.core.events import Observer, SampleSkipped
from frostline.core.nouns import Closing, array_dtype, finite_rows, is_finite
from frostline.core.system import in_background, usable_cores
from frostline.prefetch import NextRequest, RequestSource
from frostline.prefetch.requests import Delivery, Memory, Slabs
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import decode_into

__all__ = (
    "THREADS",
    "Decode",
    "DecodePool",
    "DeliveryDecoder",
    "FiniteCheck",
    "LocalPrefix",
    "LocalStage",
    "UndecodedRequests",
    "decode",
    "pieces",
    "undecoded_bytes",
)

THREADS = "frostline-decode"
_END: Final = object()
# Samples whose lengths stand for those of all: a hundred million are not looked at.
_LOOKED_AT = 64

_Ints = npt.NDArray[np.int64]


Decode = Callable[[FeatureBatch, Samples], FeatureBatch]
"""Decodes the encoded samples of a batch, given where they are; those that cannot be decoded become skipped ones."""


class UndecodedRequests:
    """Another source's requests, of which encoded samples stay encoded in the window.

    Args:
        request_source: source that chooses the cut and codec of the next samples.
    """

    def __init__(self, request_source: RequestSource) -> None:
        self._request_source = request_source

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        following = self._request_source.next_request(left, again)
        return following if following.route.cut else replace(following, bytes_per_sample=0)


def undecoded_bytes(samples: SampleTable, preprocess: Preprocess, window_bytes: int) -> int:
    """Bytes of as many encoded samples as a window would hold decoded.

    What waits encoded takes less, and is no deeper for that: more would be read long before a slow decoder needs it.
    """
    if not len(samples):
        return window_bytes
    rows = np.linspace(0, len(samples) - 1, min(len(samples), _LOOKED_AT)).astype(np.int64)
    encoded_bytes = samples.take(rows).encoded_bytes / len(rows)
    decoded_bytes = max(1, math.prod(preprocess.shape) * np.dtype(preprocess.dtype).itemsize)
    return max(1, min(window_bytes, int(window_bytes * encoded_bytes / decoded_bytes)))


class DeliveryDecoder:
    """Decodes deliveries of one pass. Safe for the threads of a pool, and for the one that fills batches.

    Args:
        decode: function that decodes the samples of a batch; None where they come decoded.
        samples_at: function that gives the samples at some places of the pass; safe for several threads.
        tell: function that is told of samples that cannot be decoded; safe for several threads.
    """

    def __init__(self, decode: Decode | None, samples_at: Callable[[_Ints], Samples], tell: Observer) -> None:
        self._decode = decode
        self._samples_at = samples_at
        self._tell = tell

    def decode_rows(self, delivery: Delivery) -> Delivery:
        """The same rows without any that are encoded; those that cannot be decoded are told.

        Args:
            delivery: delivery of places that were not handed out yet.
        """
        if self._decode is None or not delivery.batch.encoded:
            return delivery
        samples = self._samples_at(delivery.positions)
        batch = self._decode(replace(delivery.batch, skipped=()), samples)
        for skipped in batch.skipped:
            self._tell(
                SampleSkipped(id=skipped.id, object=skipped.object, reason=skipped.reason, changed=skipped.changed)
            )
        there = ~np.isin(samples.ids, [skipped.id for skipped in batch.skipped])
        return replace(delivery, positions=delivery.positions[there], batch=batch)


class DecodePool(Closing):
    """The rows of a pass, decoded; for one thread at a time. A context manager.

    What waits in the window stays encoded, which for a photograph is a tenth of its pixels. A piece of rows is decoded
    for each thread, and one more waits, so that nothing is decoded long before its place in a batch is free.

    Args:
        decode: function that returns the rows decoded, without those that cannot be; called from several threads.
        threads: number of threads that decode.
        rows: the largest number of rows that a thread decodes at a time.

    Attributes:
        is_starved: a thread had nothing to decode when rows were asked for last, since nothing had arrived.
    """

    def __init__(self, decode: Callable[[Delivery], Delivery], *, threads: int, rows: int) -> None:
        assert threads >= 1, "rows would wait for a thread for ever"
        assert rows >= 1, "a piece without a row would never end"
        self._decode = decode
        self._rows = rows
        self._threads = threads
        self.is_starved = False
        self._pool = ThreadPoolExecutor(threads, THREADS, in_background)
        self._listener: Callable[[], None] | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have a function called on the thread that decoded some rows, each time; None calls none."""
        self._listener = listener

    def deliveries(self, arriving: Iterator[Delivery | None]) -> Iterator[Delivery | None]:
        """What arrives, decoded, in its order; None where nothing may be handed on now. Waits for nothing.

        Args:
            arriving: delivery; None where nothing arrived; nothing is taken of it before it can be decoded.
        """
        pieces = self._pieces(arriving)
        begun: deque[Future[Delivery]] = deque()
        is_over = False
        while True:
            lacks = False
            while not (is_over or lacks) and len(begun) <= self._threads:
                piece = next(pieces, _END)
                lacks = piece is None
                if isinstance(piece, Delivery):
                    begun.append(self._begin(piece))
                else:
                    is_over = not lacks
            self.is_starved = lacks and sum(not piece.done() for piece in begun) < self._threads
            if is_over and not begun:
                return
            yield begun.popleft().result() if begun and begun[0].done() else None

    def close(self) -> None:
        """Decode no more, and wait for what is being decoded. Calling it again does nothing."""
        # A pass that was dropped in a cycle is closed by the garbage collector, which may run in such a thread itself.
        is_own = threading.current_thread().name.startswith(THREADS)
        self._pool.shutdown(wait=not is_own, cancel_futures=True)

    def _pieces(self, arriving: Iterator[Delivery | None]) -> Iterator[Delivery | None]:
        for delivery in arriving:
            if delivery is None:
                yield None
            else:
                yield from pieces(delivery, self._rows)

    def _begin(self, piece: Delivery) -> Future[Delivery]:
        future = self._pool.submit(self._decode, piece)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Delivery]) -> None:
        if (listener := self._listener) is not None:
            listener()


def pieces(delivery: Delivery, rows: int) -> Iterator[Delivery]:
    """The same rows in deliveries of at most so many; of each all is said that holds once it was handed out."""
    positions, batch = delivery.positions, delivery.batch
    for start in range(0, max(1, len(positions)), rows):
        some = slice(start, start + rows)
        after = positions[start + rows] if start + rows < len(positions) else None
        yield replace(
            delivery,
            positions=positions[some],
            stop=delivery.stop if after is None else min(delivery.stop, int(after)),
            reach=delivery.reach if after is None else min(delivery.reach, int(after)),
            batch=replace(
                batch,
                ids=batch.ids[some],
                tensors=tuple(tensor[some] for tensor in batch.tensors),
                encoded=batch.encoded[some],
                skipped=batch.skipped if after is None else (),
            ),
        )


class FiniteCheck:
    """Refuses rows with Inf or NaN at the frost line, or counts them where they are allowed. Safe for threads.

    Args:
        cuts: every cut by number; the last is the frost line.
        engine: function that gives the name of the engine that ran the frozen layers, by the cut where the store side
            stopped.
        is_allowed: count them.
        count: function that is told of how many there were, and in words of the first, where they are allowed.
    """

    def __init__(
        self, cuts: Sequence[Cut], engine: Callable[[int], str], count: Callable[[int, str], None], *, is_allowed: bool
    ) -> None:
        self._cuts = tuple(cuts)
        self._engine = engine
        self._is_allowed = is_allowed
        self._count = count

    def __call__(self, batch: FeatureBatch, samples: Samples, cut: int) -> None:
        """Look at the rows of a batch.

        Args:
            batch: rows at the frost line.
            samples: samples of the request, for their names.
            cut: the place where the store side stopped.

        Raises:
            NotFinite: A row is not finite, and none may be.
        """
        rows = np.flatnonzero(~finite_rows(batch.tensors, len(batch), self._cuts[-1].dtypes if self._cuts else None))
        if not len(rows):
            return
        first = self._described(batch, int(rows[0]), samples, cut)
        if self._is_allowed:
            self._count(len(rows), first)
        else:
            others = "" if len(rows) == 1 else f", as for {len(rows)} of the {len(batch)} samples that came together"
            raise NotFinite(
                f"{first}{others}: compute the frozen layers in a type with more range, such as float32, look at the "
                "sample, or allow such rows (allow_nonfinite=True of LoaderSettings, --allow-nonfinite)"
            )

    def _described(self, batch: FeatureBatch, row: int, samples: Samples, cut: int) -> str:
        id = int(batch.ids[row])
        object = samples.objects[int(np.flatnonzero(samples.ids == id)[0])]
        tensor = next(tensor[row] for tensor in batch.tensors if not is_finite(tensor[row]))
        dtype = "bfloat16" if tensor.dtype == array_dtype("bfloat16") else tensor.dtype.name
        line = f" at {self._cuts[-1].name} (cut {self._cuts[-1].number})" if self._cuts else ""
        by = self._engine(cut)
        return f"the frozen layers gave Inf or NaN for sample {object} (id {id}){line}, in {dtype} by {by}"


class LocalPrefix(Protocol):
    """The frozen part from one cut to the frost line, ready to run."""

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """The activations at the frost line.

        Args:
            arrays: arrays that cross the cut, ``[n, ...]`` for each tensor.
            size: rows of every run.
        """


class LocalStage:
    """Turns what crosses a cut into activations at the frost line. Safe for several threads.

    Args:
        cuts: every cut by number; the last is the frost line, the pixels where there is no model.
        rest: function that makes the frozen part from a cut to the frost line, or None where nothing is left of it
            (``jobs.partition``); None where there is no model.
        device: the place where the rest runs, in torch's words.
        device_batch: rows of every run, filled up with zeros: kernels may round otherwise for other batches.
        check: check of rows that are at the frost line; None where no network made them.
    """

    def __init__(
        self,
        *,
        cuts: Sequence[Cut],
        rest: Callable[[Cut], LocalPrefix | None] | None = None,
        device: str = "cpu",
        device_batch: int = 32,
        check: FiniteCheck | None = None,
    ) -> None:
        self._cuts = tuple(cuts)
        self._rest = rest
        self._device_batch = device_batch
        self.device = device
        self._check = check
        self._made: dict[int, LocalPrefix | None] = {}
        # One run at a time: several at once would only take each other's cores. A few rows may share it with others.
        self._running = _Turns(ROWS)
        # What waits for it stays encoded but for a few.
        self._decoded = _Turns(ROWS * (len(usable_cores()) + 1))
        self._asked = count()
        self._making = threading.Lock()
        self._counting = threading.Lock()
        self._decode_s = 0.0
        self._compute_s = 0.0
        self._memory = Slabs(max_idle=len(usable_cores()) + 1)  # a piece for each thread that decodes

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds spent decoding (summed over threads) and computing so far."""
        return self._decode_s, self._compute_s

    def wants(self, cut: int) -> int:
        """Rows that make full use of a run from this cut; answers with fewer are better put together first."""
        return 1 if self._rest_from(max(1, cut)) is None else self._device_batch

    def turn(self) -> int:
        """The place of a request among those whose rows wait for this side's processor: earlier ones go first."""
        return next(self._asked)

    def finish(
        self,
        batch: FeatureBatch,
        samples: Samples,
        *,
        cut: int,
        preprocess: Preprocess,
        view: View | None,
        turn: int | None = None,
    ) -> FeatureBatch:
        """The same rows at the frost line.

        Args:
            batch: the batch as the node answered, unpacked.
            cut: the place where the store side stopped.
            samples: samples of the request, for the names of those that turn out to be unreadable.
            preprocess: run here at cut 0.
            view: the random view, where the preprocessing is random.
            turn: place of the request, of ``turn``; None where rows are finished in the order of the calls.

        Raises:
            NotFinite: The network gave Inf or NaN for a sample, and none may have that.
        """
        batch = self._finished(batch, samples, cut, preprocess, view, self.turn() if turn is None else turn)
        if self._check is not None:
            self._check(batch, samples, cut)
        return batch

    def _finished(
        self, batch: FeatureBatch, samples: Samples, cut: int, preprocess: Preprocess, view: View | None, turn: int
    ) -> FeatureBatch:
        rest = self._rest_from(max(1, cut))
        if rest is None:
            return self._with_pixels(batch, samples, cut, preprocess, view)
        with self._decoded.taken(turn, min(ROWS, len(batch))):
            batch = self._with_pixels(batch, samples, cut, preprocess, view)
            if len(batch) == 0:
                return batch
            with self._running.taken(turn, min(ROWS, len(batch))):
                started = time.perf_counter()
                tensors = rest.run(batch.tensors, self._device_batch)
                self._count(compute_s=time.perf_counter() - started)
        return replace(batch, tensors=tensors)

    def _with_pixels(
        self, batch: FeatureBatch, samples: Samples, cut: int, preprocess: Preprocess, view: View | None
    ) -> FeatureBatch:
        if cut:
            return batch
        started = time.perf_counter()
        batch = decode(preprocess, batch, samples, view, self._memory)
        self._count(decode_s=time.perf_counter() - started)
        return batch

    def _rest_from(self, cut: int) -> LocalPrefix | None:
        """What is left from a cut, made when it is first needed; None where nothing is."""
        if self._rest is None or cut == self._cuts[-1].number:
            return None
        with self._making:
            if cut not in self._made:
                self._made[cut] = self._rest(self._cuts[cut])
            return self._made[cut]

    def _count(self, *, decode_s: float = 0.0, compute_s: float = 0.0) -> None:
        with self._counting:
            self._decode_s += decode_s
            self._compute_s += compute_s


class _Turns:
    """Lets some threads in at a time; of those that wait, the one with the lowest number is next."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: list[int] = []
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, number: int, slots: int = 1) -> Iterator[None]:
        """Within the block so many of the slots are taken."""
        with self._changed:
            heappush(self._waiting, number)
            try:
                self._changed.wait_for(lambda: self._slots >= slots and self._waiting[0] == number)
            finally:
                self._waiting.remove(number)
                heapify(self._waiting)
                self._changed.notify_all()
            self._slots -= slots
        try:
            yield
        finally:
            with self._changed:
                self._slots += slots
                self._changed.notify_all()


def decode(
    preprocess: Preprocess, batch: FeatureBatch, samples: Samples, view: View | None, memory: Memory
) -> FeatureBatch:
    """Decode the encoded samples of a batch; those that cannot be read move to ``skipped``.

    Args:
        preprocess: the steps.
        batch: the encoded samples, perhaps with other tensors, which come after the pixels.
        samples: the samples and perhaps others, for the names of those that cannot be read.
        view: the random view.
        memory: the place where pixels lie.
    """
    pixels = memory.empty((len(batch), *preprocess.shape), np.dtype(preprocess.dtype))
    kept: list[int] = []
    skipped = list(batch.skipped)
    for row, (id, encoded) in enumerate(zip(batch.ids.tolist(), batch.encoded, strict=True)):
        try:
            decode_into(preprocess, encoded, pixels[row], id=id, view=view)
            kept.append(row)
        except SampleError as error:
            object = samples.objects[int(np.flatnonzero(samples.ids == id)[0])]
            skipped.append(Skipped(id=id, object=object, reason=str(error)))
    whole = len(kept) == len(batch)
    tensors = (pixels, *batch.tensors)
    return FeatureBatch(
        ids=batch.ids if whole else batch.ids[kept],
        tensors=tensors if whole else tuple(tensor[kept] for tensor in tensors),
        skipped=tuple(skipped),
    )
