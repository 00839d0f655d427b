"""Decodes rows between the window and their batches, on a few threads: in order, and few ahead of who takes them."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, Self

import numpy as np

from frostline.core import SampleTable
from frostline.prefetch import Deal, Dealer
from frostline.prefetch.requests import Delivery
from frostline.preprocess import Preprocess
from frostline.processors import in_background

__all__ = ("THREADS", "DecodePool", "UndecodedDealer", "pieces", "undecoded_bytes")

THREADS = "frostline-decode"
_END: Final = object()
# Samples whose lengths stand for those of all: a hundred million are not looked at.
_LOOKED_AT = 64


class UndecodedDealer:
    """Another dealer's requests, of which encoded samples stay encoded in the window.

    Args:
        dealer: says which way the next samples take.
    """

    def __init__(self, dealer: Dealer) -> None:
        self._dealer = dealer

    def deal(self, left: int) -> Deal:
        """See ``Dealer``."""
        deal = self._dealer.deal(left)
        return deal if deal.route.cut else replace(deal, bytes_per_sample=0)


def undecoded_bytes(samples: SampleTable, preprocess: Preprocess, window_bytes: int) -> int:
    """Bytes of as many encoded samples as a window would hold decoded.

    What waits encoded takes less, and is no deeper for that: more would be read long before a slow decoder needs it.
    """
    if not len(samples):
        return window_bytes
    rows = np.linspace(0, len(samples) - 1, min(len(samples), _LOOKED_AT)).astype(np.int64)
    encoded_bytes = samples.take(rows).encoded_bytes / len(rows)
    decoded_bytes = max(1, math.prod(preprocess.shape) * np.dtype(np.float32).itemsize)
    return max(1, min(window_bytes, int(window_bytes * encoded_bytes / decoded_bytes)))


class DecodePool:
    """The rows of a pass, decoded; for one thread at a time. A context manager.

    What waits in the window stays encoded, which for a photograph is a tenth of its pixels. A piece of rows is decoded
    for each thread, and one more waits, so that nothing is decoded long before its place in a batch is free.

    Args:
        decode: the same rows, decoded, and without those that cannot be; called from several threads.
        threads: that decode.
        rows: that a thread decodes at a time, at most.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Have a function called on the thread that decoded some rows, each time; None calls none."""
        self._listener = listener

    def deliveries(self, arriving: Iterator[Delivery | None]) -> Iterator[Delivery | None]:
        """What arrives, decoded, in its order; None where nothing may be handed on now. Waits for nothing.

        Args:
            arriving: None where nothing arrived; nothing is taken of it before it can be decoded.
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
            self.is_starved = lacks and sum(not one.done() for one in begun) < self._threads
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
