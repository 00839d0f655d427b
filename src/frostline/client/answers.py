"""The batches of one request to several nodes: another takes over where one is gone, refuses, or cannot read."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from frostline.core import REFERENCE, FeatureBatch
from frostline.core.errors import (
    EngineNotReady,
    FrostlineError,
    NodeUnreachable,
    Refused,
    StoreThrottled,
    StoreUnavailable,
    Unavailable,
    UnknownPrefix,
)
from frostline.core.nouns import array_dtype
from frostline.transport import Layout
from frostline.wire.messages import FeatureRequest
from frostline.wire.packing import unpack

__all__ = ("BalancedResponse", "NodePool")


class NodePool(Protocol):
    """Nodes that serve the same data, by number; see ``BalancedTransport``."""

    def begin(
        self, request: FeatureRequest, tried: set[int], first: tuple[str, ...] = ()
    ) -> tuple[int, Iterator[FeatureBatch]]:
        """Ask the node whose turn it is, and that was not tried yet."""

    def watch_wait(self, number: int, *, is_of_features: bool = False) -> AbstractContextManager[None]:
        """Know, while the context lasts, that a thread waits for that node."""

    def end_request(self, number: int, rows: int = 0, *, is_owned: bool = True) -> None:
        """A request to that node is over, which brought so many rows."""

    def note_failure(self, number: int, error: FrostlineError) -> None:
        """Note that a node, or its store, did not answer; or that it refused what another one gave."""

    def note_read_failure(self, number: int, samples: int, reason: str, *, read_others: bool) -> None:
        """Note that a node could not read samples that another one gave."""

    def others(self, request: FeatureRequest, tried: set[int], *, even_refusing: bool = False) -> bool:
        """Whether a node is left that can run the request's engine and is not known to be away."""

    def names_by_number(self, *, may_come_back: bool = False) -> dict[int, str]:
        """Names of the members by number; or of those alone that went away a moment ago, and may be back soon."""


_OTHER_SAMPLES = "the node answered with other samples than were asked for; is it of the same version?"
# Axes of a sample's mask, and their type.
_MASK = (2, np.dtype(np.uint16))
# What says nothing of the node: it is asked again once it has the prefix or the engine, or the store has recovered.
_PASSED_ON = (EngineNotReady, StoreThrottled, UnknownPrefix)


class BalancedResponse:
    """The batches of one request, from whichever node takes it. ``close`` may be called from any thread.

    Args:
        pool: the nodes.
        request: request to make.
        first: names of the nodes to ask before all others.
        layout: the tensors that the answer has; None where nobody said it.
    """

    def __init__(
        self, pool: NodePool, request: FeatureRequest, first: tuple[str, ...] = (), layout: Layout | None = None
    ) -> None:
        self._pool = pool
        self._request = request
        self._first = first
        self._layout = layout
        self._lock = threading.Lock()
        self._tried: set[int] = set()
        self._refusals: dict[int, FrostlineError] = {}
        self._node: int | None = None
        self._batches: Iterator[FeatureBatch] | None = None
        self._second: Iterator[FeatureBatch] | None = None
        self._rows = self._read = 0
        self._has_arrived = False
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        while True:
            number, batches = self._asked()
            try:
                with self._pool.watch_wait(number, is_of_features=True):
                    batch = next(batches)
                self._check(batch)
            except FrostlineError as error:
                if self._is_passed_on(error):
                    self._end()
                    if isinstance(error, StoreThrottled):
                        self._pool.note_failure(number, error)
                    raise
                self._leave(error)
            except BaseException:
                self._end()
                raise
            else:
                return self._taken(number, batch)

    def close(self) -> None:
        """Abandon the rest of the answer."""
        with self._lock:
            self._is_closed = True
            answers = self._batches, self._second
        for answer in answers:
            _close(answer)
        self._end()

    def _asked(self) -> tuple[int, Iterator[FeatureBatch]]:
        with self._lock:
            if self._is_closed or (self._batches is not None and self._node is None):
                raise StopIteration
            if self._batches is None or self._node is None:
                self._node, self._batches = self._pool.begin(self._request, self._tried, self._first)
            return self._node, self._batches

    def _is_passed_on(self, error: FrostlineError) -> bool:
        """Whether an error says nothing of the node; one that lacks what each has, the reference engine, is another."""
        lacks_reference = isinstance(error, EngineNotReady) and self._request.engine == REFERENCE
        return isinstance(error, _PASSED_ON) and not lacks_reference

    def _check(self, batch: FeatureBatch) -> None:
        """A node that answers other rows than the next ones is of another kind, or out of its mind."""
        expected = self._stretch(batch)
        if batch.skipped:
            expected = expected[~np.isin(expected, [sample.id for sample in batch.skipped])]
        if not np.array_equal(expected, batch.ids):
            raise Refused(_OTHER_SAMPLES)
        _check_layout(self._layout, batch)

    def _stretch(self, batch: FeatureBatch) -> npt.NDArray[np.int64]:
        """Ids of the next samples of the request, as many as a batch tells of."""
        return self._request.samples.ids[self._rows : self._rows + len(batch) + len(batch.skipped)]

    def _taken(self, number: int, batch: FeatureBatch) -> FeatureBatch:
        for refusing, error in self._refusals.items():
            self._pool.note_failure(refusing, error)
        self._refusals.clear()
        self._has_arrived = True
        self._read += len(batch)
        if batch.skipped:
            batch = self._read_elsewhere(number, batch)
        self._rows += len(batch) + len(batch.skipped)
        return batch

    def _read_elsewhere(self, number: int, batch: FeatureBatch) -> FeatureBatch:
        """Ask the other nodes for what this one could not read: only what no node can read is unreadable.

        Raises:
            NodeUnreachable: A node that went away a moment ago may be able to read the samples.
        """
        asked = self._stretch(batch)
        rows = self._rows + np.flatnonzero(np.isin(asked, [sample.id for sample in batch.skipped]))
        answered, busy = {number}, dict[int, FrostlineError]()
        request = replace(self._request, samples=self._request.samples.take(rows))
        found = self._answers_elsewhere(request, answered, busy)
        whole = _merged(batch, found, asked)
        read = len(batch.skipped) - len(whole.skipped)
        if read:
            lost = batch.skipped[0]
            reason = f"it cannot read what another node can, such as {lost.object}: {lost.reason}"
            self._pool.note_read_failure(number, read, reason, read_others=len(batch) > 0)
        away = self._pool.names_by_number(may_come_back=True) if whole.skipped else {}
        absent = [f"{name}, which may, cannot be reached" for other, name in away.items() if other not in answered]
        names = self._pool.names_by_number()
        absent += [f"{names.get(other, 'one that left')}, which may, refuses: {why}" for other, why in busy.items()]
        if whole.skipped and absent:
            lost, name = whole.skipped[0], names.get(number, "one that left")
            self._end()
            raise NodeUnreachable(f"{name} cannot read {lost.object} ({lost.reason}), and {'; '.join(absent[:3])}")
        return whole

    def _answers_elsewhere(
        self, request: FeatureRequest, answered: set[int], busy: dict[int, FrostlineError]
    ) -> list[FeatureBatch]:
        """What the other nodes say, each of what none before it could read; those that say something are added.

        So are those in ``busy`` whose store has too much to do to say anything of the samples now.
        """
        tried, all_found = set(answered), list[FeatureBatch]()
        while len(request.samples) and self._pool.others(request, tried, even_refusing=True):
            other, answer = self._pool.begin(request, tried)
            tried.add(other)
            with self._lock:
                self._second = answer
                is_closed = self._is_closed
            found: list[FeatureBatch] = []
            try:
                if is_closed:
                    return []
                with self._pool.watch_wait(other, is_of_features=True):
                    found = [unpack(part) if part.packed else part for part in answer]
                _check_samples(request, found)
                for part in found:
                    _check_layout(self._layout, part)
            except (Unavailable, StoreUnavailable) as error:
                found = []
                self._pool.note_failure(other, error)
                if isinstance(error, StoreThrottled):  # for which no node counts as away
                    busy[other] = error
            except FrostlineError as error:
                found = []
                if type(error) is FrostlineError:  # it makes no sense, as what is garbled on its way
                    self._pool.note_failure(other, error)
                else:
                    answered.add(other)  # what is read there at all is another request's to find out
            else:
                answered.add(other)
            finally:
                _close(answer)
                self._pool.end_request(other, sum(map(len, found)), is_owned=False)
            all_found += found
            read = np.isin(request.samples.ids, [id for part in found for id in part.ids])
            request = replace(request, samples=request.samples.take(np.flatnonzero(~read)))
        return all_found

    def _leave(self, error: FrostlineError) -> None:
        """Leave a node that failed, so that another takes the whole request; raise where none can."""
        number = self._end()
        with self._lock:
            is_closed = self._is_closed
        if is_closed or number is None:
            raise error
        self._tried.add(number)
        if isinstance(error, Unavailable | StoreUnavailable):
            self._pool.note_failure(number, error)
            if self._has_arrived:
                raise error
        elif self._has_arrived:
            self._pool.note_failure(number, error)
            name = self._pool.names_by_number().get(number, "a node that left")
            raise NodeUnreachable(f"{name} broke off its answer: {error}") from error
        else:
            self._refusals[number] = error
        if not self._pool.others(self._request, self._tried):
            raise self._verdict(error)
        with self._lock:
            self._batches = None

    def _verdict(self, error: FrostlineError) -> FrostlineError:
        """What none of the nodes answers: a refusal where all refuse, else that some may come back."""
        if not self._refusals:
            return error
        names = self._pool.names_by_number()
        absent = [name for number, name in names.items() if number not in self._refusals]
        refusal = next(iter(self._refusals.values()))
        said = "; ".join(
            f"{names.get(number, 'one that left')} refuses: {reason}" for number, reason in self._refusals.items()
        )
        if absent:
            return NodeUnreachable(f"{said}; and {', '.join(absent[:3])} cannot be reached")
        if len(self._refusals) > 1:
            refusal.args = (f"all {len(self._refusals)} nodes refuse: {said}",)
        return refusal

    def _end(self) -> int | None:
        """Count the request as over, once; the node that it was at."""
        with self._lock:
            number, self._node = self._node, None
        if number is not None:
            self._pool.end_request(number, self._read, is_owned=bool(self._first))
        return number


def _close(answer: Iterator[FeatureBatch] | None) -> None:
    close = getattr(answer, "close", None)
    if close is None:
        return
    try:
        close()
    except ValueError:  # a generator that is running in another thread: that thread closes it
        return


def _check_samples(request: FeatureRequest, found: Sequence[FeatureBatch]) -> None:
    """Make sure that an answer tells of each sample of a request once, given or skipped."""
    ids = [id for part in found for id in (*part.ids.tolist(), *(sample.id for sample in part.skipped))]
    if sorted(ids) != sorted(request.samples.ids.tolist()):
        raise FrostlineError(_OTHER_SAMPLES)


def _check_layout(layout: Layout | None, batch: FeatureBatch) -> None:
    """Make sure that an answer has the tensors of its cut; a mask may be there as well."""
    if layout is None or not len(batch):
        return
    plain = [(tensor.shape[1:], tensor.dtype) for tensor in batch.tensors]
    found = plain + [(packed.shape, packed.dtype) for packed in batch.packed]
    expected = [(shape, array_dtype(kind)) for shape, kind in layout]
    beside = [(len(shape), kind) for shape, kind in found[len(expected) :]]
    if found[: len(expected)] != expected or beside not in ([], [_MASK]):
        shown = ", ".join(f"{kind.name}{list(shape)}" for shape, kind in found[:4]) or "none"
        wanted = ", ".join(f"{kind.name}{list(shape)}" for shape, kind in expected[:4])
        raise Refused(f"the node answered with other features than were asked for: {shown} in place of {wanted}")


def _merged(batch: FeatureBatch, found: list[FeatureBatch], asked: npt.NDArray[np.int64]) -> FeatureBatch:
    """A batch with rows that another node gave of its skipped ones, in the order of the request."""
    if not any(map(len, found)):
        return batch
    parts = [part for part in (unpack(batch) if batch.packed else batch, *found) if len(part)]
    ids = np.concatenate([part.ids for part in parts])
    places = {id: place for place, id in enumerate(ids.tolist())}
    order = [places[id] for id in asked.tolist() if id in places]
    encoded = [sample for part in parts for sample in part.encoded]
    columns = zip(*(part.tensors for part in parts), strict=True)
    return FeatureBatch(
        ids=ids[order],
        tensors=tuple(np.concatenate(column)[order] for column in columns),
        encoded=[encoded[place] for place in order] if encoded else (),
        skipped=tuple(sample for sample in batch.skipped if sample.id not in places),
        error=max(part.error for part in parts),
    )
