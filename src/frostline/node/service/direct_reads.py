"""Answers requests for encoded samples that come from this process: the store is read by the thread that asks.

A job alone on its node needs no admission, fair shares or memory pools, since its window bounds what is under way.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Self

from frostline.batching import readable_bytes
from frostline.core import FeatureBatch, Samples, Skipped
from frostline.node.request.decode import StoredSamples
from frostline.node.request.pipeline import BatchStream, Ending
from frostline.node.request.validation import checked_preprocess
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.service.open import RequestOpener
from frostline.stores.objects.local import FolderStore
from frostline.wire.messages import FeatureRequest

__all__ = ("DirectReads", "FolderStream")

# Bytes and samples of a batch: few enough that rows are handed on while others are read.
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 1024


class DirectReads:
    """Reads encoded samples for this process. Safe for threads.

    Samples of a folder are read one after the other by the thread that takes the answer. Samples of a store that
    waits are read ahead of it, from the local tier or in blocks, as for any request.

    Args:
        opener: opens stores and reads ahead.
        account: account whose counters count what is read.
        max_bytes: maximum bytes of a sample; larger ones are skipped.
    """

    def __init__(self, opener: RequestOpener, account: Account, max_bytes: int) -> None:
        self._opener = opener
        self._account = account
        self._max_bytes = max_bytes
        self._folders: dict[tuple[str, str], FolderStore] = {}
        self._answers: weakref.WeakSet[BatchStream | FolderStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def answer(self, request: FeatureRequest) -> "BatchStream | FolderStream":
        """The encoded samples of a request, in its order; work begins when the first batch is asked for.

        Raises:
            BadRequest: if the samples do not lie under a root of this node.
        """
        folder = self._folders.get((request.data, request.reading))
        answer = self._waiting(request) if folder is None else self._at_once(request, folder)
        with self._lock:
            self._answers.add(answer)
        return answer

    def close(self) -> None:
        """Cancel every answer."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()

    def _at_once(self, request: FeatureRequest, folder: FolderStore) -> "FolderStream":
        """The samples of a folder, whose reads end by themselves."""
        reader = StoredSamples(folder, request.samples, Counters(self._account.counters))
        cancelled = threading.Event()
        return FolderStream(self._batches(request.samples, reader, cancelled.is_set), cancelled.set)

    def _waiting(self, request: FeatureRequest) -> "BatchStream | FolderStream":
        """The samples of a store that may keep a reader waiting, who is then freed when the answer is closed."""
        preprocess, scope = checked_preprocess(request), CancelScope(())
        if request.data.startswith("file:"):
            store = self._opener.store(request, preprocess, self._account)
            if isinstance(store, FolderStore):
                self._folders[request.data, request.reading] = store
                return self._at_once(request, store)
        with ExitStack() as held:
            counters = Counters(self._account.counters)
            reader = self._opener.reader(request, preprocess, self._account, counters, scope, held)
            batches = self._batches(request.samples, reader, scope.is_cancelled)
            return BatchStream(batches, scope.cancel, partial(_close, held.pop_all()))

    def _batches(
        self, samples: Samples, reader: StoredSamples, is_cancelled: Callable[[], bool]
    ) -> Generator[FeatureBatch, None, None]:
        lengths = samples.lengths.tolist()
        reader.expect(row for row, length in enumerate(lengths) if length <= self._max_bytes)
        start = 0
        while start < len(lengths):
            found, nbytes, stop = [], 0, start
            while stop < min(len(lengths), start + _BATCH_ROWS) and not is_cancelled():
                if nbytes and nbytes + lengths[stop] > _BATCH_BYTES:
                    break
                found.append(self._read(reader, stop, lengths[stop]))
                nbytes, stop = nbytes + lengths[stop], stop + 1
            if is_cancelled():
                return
            there = [row for row, sample in enumerate(found, start) if not isinstance(sample, Skipped)]
            yield FeatureBatch(
                ids=samples.ids[there],
                encoded=tuple(sample for sample in found if not isinstance(sample, Skipped)),
                skipped=tuple(sample for sample in found if isinstance(sample, Skipped)),
            )
            start = stop

    def _read(self, reader: StoredSamples, row: int, length: int) -> "bytes | memoryview | Skipped":
        if length > self._max_bytes:
            return reader.skipped(row, f"too large for the node: {readable_bytes(length)}; start it with more --memory")
        return reader.encoded(row)


class FolderStream:
    """The batches of one answer from a folder.

    Args:
        batches: reads them.
        cancel: ends the reading after the sample that is being read; safe from any thread.
    """

    def __init__(self, batches: Iterator[FeatureBatch], cancel: Callable[[], None]) -> None:
        self._batches = batches
        self.close = cancel

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        return next(self._batches)


def _close(held: ExitStack, answer: BatchStream, ending: Ending) -> None:  # noqa: ARG001
    held.close()
