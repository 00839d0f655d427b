"""Answers requests for encoded samples that come from this process: the store is read by the thread that asks.

A job alone on its node needs no admission, fair shares or memory pools, since its window bounds what is under way.
"""

import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial

from frostline.batching import readable_bytes
from frostline.core import FeatureBatch, Samples, Skipped
from frostline.node.request.answer import BatchStream, Ending
from frostline.node.request.decode import StoredSamples
from frostline.node.request.validation import checked_preprocess
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.service.open import RequestOpener
from frostline.stores.objects.local import FolderStore
from frostline.wire.messages import FeatureRequest

__all__ = ("DirectReads",)

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
        self._answers: weakref.WeakSet[BatchStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def answer(self, request: FeatureRequest) -> BatchStream:
        """The encoded samples of a request, in its order; work begins when the first batch is asked for.

        Raises:
            BadRequest: if the samples do not lie under a root of this node.
        """
        folder = self._folders.get((request.data, request.reading))
        with ExitStack() as held:
            if folder is not None:
                cancelled = threading.Event()
                reader, cancel, is_cancelled = self._of_folder(folder, request), cancelled.set, cancelled.is_set
            else:
                scope = CancelScope(())
                reader, cancel, is_cancelled = self._opened(request, scope, held), scope.cancel, scope.is_cancelled
            batches = self._batches(request.samples, reader, is_cancelled)
            answer = BatchStream(batches, cancel, partial(_close, held.pop_all()))
        with self._lock:
            self._answers.add(answer)
        return answer

    def close(self) -> None:
        """Cancel every answer."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.close()

    def _of_folder(self, folder: FolderStore, request: FeatureRequest) -> StoredSamples:
        return StoredSamples(folder, request.samples, Counters(self._account.counters))

    def _opened(self, request: FeatureRequest, scope: CancelScope, held: ExitStack) -> StoredSamples:
        preprocess = checked_preprocess(request)
        store = self._opener.store(request, preprocess, self._account)
        if isinstance(store, FolderStore):
            self._folders[request.data, request.reading] = store
            return self._of_folder(store, request)
        return self._opener.reader(request, preprocess, self._account, Counters(self._account.counters), scope, held)

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


def _close(held: ExitStack, answer: BatchStream, ending: Ending) -> None:  # noqa: ARG001
    held.close()
