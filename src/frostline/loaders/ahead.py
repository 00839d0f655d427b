"""Asks for encoded samples before it is known which requests want them: the link is idle while a network is traced."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any, Self

import numpy as np

from frostline.core import FeatureBatch, Samples, Skipped
from frostline.core.errors import FrostlineError
from frostline.transport import Transport
from frostline.wire.messages import FeatureRequest

__all__ = ("SamplesAhead",)

# Under way at once, so that none waits for a link's latency.
_REQUESTS = 4

_Answer = Future[FeatureBatch]
_Rows = dict[int, bytes | memoryview | Skipped]


class SamplesAhead:
    """Encoded samples that are asked for now, and are found by the requests for them. Safe for threads.

    Each is handed out once.

    Args:
        ask: function that makes a request for samples and gives its whole answer.
        parts: samples of each request, in the order in which they are asked for, no one twice. The first part is
            asked for in any case.
        transport: transport of these requests, which the job goes on with.
    """

    def __init__(self, ask: Callable[[Samples], FeatureBatch], parts: Sequence[Samples], transport: Transport) -> None:
        self.transport = transport
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(_REQUESTS, "frostline-ahead")
        self._answers = [self._pool.submit(ask, part) for part in parts]
        self._left = {key: answer for part, answer in zip(parts, self._answers, strict=True) for key in _keys(part)}

    @property
    def first(self) -> "Future[FeatureBatch]":
        """The answer for the first part."""
        return self._answers[0]

    def stop(self) -> None:
        """Ask for nothing more but the first part; what is under way is found as before."""
        for answer in self._answers[1:]:
            answer.cancel()  # unless it was begun

    def close(self) -> None:
        """Ask for nothing more; what is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def features(self, request: FeatureRequest, transport: Transport) -> Iterator[FeatureBatch]:
        """The answer to a request: what was asked for ahead, and the rest from the transport."""
        answers = self._take(request.samples) if request.cut == 0 and self._left else {}
        return _Found(request, answers, transport) if answers else transport.features(request)

    def _take(self, samples: Samples) -> dict[int, _Answer]:
        """Answers that have some of these samples or will have them, by the samples' ids."""
        with self._lock:
            found = {key[0]: self._left.pop(key, None) for key in _keys(samples)}
        return {id: answer for id, answer in found.items() if answer is not None and not answer.cancelled()}


def _keys(samples: Samples) -> list[tuple[int, str, int]]:
    """Names of samples; the mask of one has its id too."""
    return list(zip(samples.ids.tolist(), samples.objects, samples.offsets.tolist(), strict=True))


class _Found:
    """The answer to a request for samples of which some are here or under way. Another thread may call ``close``."""

    def __init__(self, request: FeatureRequest, answers: dict[int, _Answer], transport: Transport) -> None:
        self._request = request
        self._answers = answers
        self._transport = transport
        self._closed: Future[None] = Future()
        self._rest: Iterator[FeatureBatch] = iter(())
        self._is_out = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        if self._is_out:
            raise StopIteration
        self._is_out, ids = True, self._request.samples.ids.tolist()
        rows: _Rows = {}
        for answer in dict.fromkeys(self._answers.values()):
            rows |= self._wait_for(answer)
        lacking = [row for row, id in enumerate(ids) if id not in rows or id not in self._answers]
        if lacking:
            asked = replace(self._request, samples=self._request.samples.take(np.array(lacking)))
            self._rest = self._transport.features(asked)
            for batch in self._rest:
                rows |= _by_id(batch)
        if self._closed.done():
            raise StopIteration
        return _in_order([rows[id] for id in ids], ids)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        with suppress(InvalidStateError):  # it is closed already
            self._closed.set_result(None)
        close = getattr(self._rest, "close", None)
        if close is not None:
            close()

    def _wait_for(self, answer: _Answer) -> _Rows:
        """What an answer has; nothing where it failed or nobody waits any more, so that the samples are lacking."""
        either: tuple[Future[Any], ...] = (answer, self._closed)
        wait(either, return_when=FIRST_COMPLETED)
        if self._closed.done():
            raise StopIteration
        try:
            return _by_id(answer.result())
        except FrostlineError:
            return {}


def _by_id(batch: FeatureBatch) -> _Rows:
    return dict(zip(batch.ids.tolist(), batch.encoded, strict=True)) | {item.id: item for item in batch.skipped}


def _in_order(rows: Sequence[bytes | memoryview | Skipped], ids: Sequence[int]) -> FeatureBatch:
    kept = [(id, row) for id, row in zip(ids, rows, strict=True) if not isinstance(row, Skipped)]
    return FeatureBatch(
        ids=np.array([id for id, _ in kept], np.int64),
        encoded=[row for _, row in kept],
        skipped=tuple(row for row in rows if isinstance(row, Skipped)),
    )
