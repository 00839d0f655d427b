"""Decides which samples are asked for together where each has an owner among nodes, and puts them in order again.

A node's samples wait until they fill a request, so that no run of its device has rows to spare. What the window hands
out waits for the samples before it that are still missing, and then leaves in the order of the epoch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, SampleTable, Skipped
from frostline.prefetch.requests import Delivery, PlannedRequest, RequestSource

__all__ = ("OwnedRequests", "PlanRequests", "RowOwners", "in_pieces")

_Ints = npt.NDArray[np.int64]

PlanRequests = Callable[[SampleTable, _Ints, _Ints, RequestSource], Iterator[PlannedRequest]]
"""Divides what an epoch must ask for into requests; see ``prefetch.requests.plan_requests``."""

# A sample waits for others of its node while at most so many requests of samples for each node come after it. Chance
# fills a request long before that; the request of a node that owns little is sent with fewer.
_MAX_WAIT = 4


class RowOwners(Protocol):
    """Which node owns each row of a data set's whole manifest."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, by number."""

    def of_rows(self, rows: _Ints) -> npt.NDArray[np.int32]:
        """The number of the node that owns each row."""

    def second(self, row: int) -> int | None:
        """The node to ask for a row where its owner does not answer; None where there is no other one."""


class _Mark(NamedTuple):
    """A request: the rows that were planned up to its end, and the place below which none is missing when it is out."""

    rows: int
    place: int


class OwnedRequests:
    """The requests of one pass, by owner, and the way back to the order of its places. For one pass.

    It looks ahead by a request's samples for each node at a time, and asks for what fills a request. The rest waits for
    more of the same owner. A window that keeps the order of requests hands them out as they were planned, so that the
    number of rows that it handed out says which places are still missing.

    Args:
        owners: function that gives the owners at present, which may be others for the samples that were not asked for
            yet.
        whole_rows: function that gives the rows of the whole manifest at which rows of the pass's table stand.
        request_rows: the most samples in one request.
        max_rows: the most samples that wait for each other, asked for or not.
    """

    def __init__(
        self,
        owners: Callable[[], RowOwners],
        whole_rows: Callable[[_Ints], _Ints],
        *,
        request_rows: int,
        max_rows: int,
    ) -> None:
        self._owners = owners
        self._whole_rows = whole_rows
        self._request_rows = request_rows
        self._max_rows = max(request_rows, max_rows)
        self._planned = 0
        self._marks: deque[_Mark] = deque()

    @property
    def nodes(self) -> int:
        """How many nodes own samples at present."""
        return len(self._owners().nodes)

    def plan(
        self, table: SampleTable, rows: _Ints, positions: _Ints, request_source: RequestSource
    ) -> Iterator[PlannedRequest]:
        """Divide what an epoch must ask for; see ``prefetch.requests.plan_requests``."""
        whole = self._whole_rows(rows)
        waiting, stop = np.zeros(0, np.int64), 0
        while stop < len(positions):
            owners = self._owners()
            start, stop, oldest = self._stretch(stop, len(positions), len(owners.nodes))
            places = np.concatenate([waiting, np.arange(start, stop)])
            pieces, waiting = in_pieces(owners.of_rows(whole[places]), places, self._request_rows, oldest)
            for piece, missing in zip(pieces, _missing(pieces, waiting, stop), strict=True):
                nodes = _nodes(owners, int(whole[piece[0]]))
                for request, rest in _requests_of_piece(table, rows, positions, request_source, piece):
                    self._mark(len(request), positions, min([missing, *rest[:1].tolist()]))
                    yield replace(request, nodes=nodes)

    def in_order(self, deliveries: Iterator[Delivery | None]) -> Iterator[Delivery | None]:
        """What the window hands out, in the order of places."""
        waiting, handed_out, done = _Waiting(), 0, -1
        for delivery in deliveries:
            if delivery is None:
                yield None
                continue
            waiting.add(delivery)
            handed_out += len(delivery.positions) + len(delivery.batch.skipped)
            stop = done
            while self._marks and self._marks[0].rows <= handed_out:
                stop = self._marks.popleft().place
            if stop > done:
                yield from waiting.below(stop)
                done = stop

    def _stretch(self, start: int, stop: int, nodes: int) -> tuple[int, int, int]:
        """The next places to look at, and the place from which on samples may still wait for others after these."""
        for_each = self._request_rows * nodes
        max_wait = min(self._max_rows, _MAX_WAIT * for_each)
        step = max(1, min(for_each, max_wait // 2))
        if start + step >= stop:
            return start, stop, stop
        return start, start + step, start + 2 * step - max_wait

    def _mark(self, rows: int, positions: _Ints, missing: int) -> None:
        self._planned += rows
        place = int(positions[missing]) if missing < len(positions) else int(positions[-1]) + 1
        self._marks.append(_Mark(self._planned, place))


def in_pieces(
    numbers: npt.NDArray[np.int32], places: _Ints, request_rows: int, oldest: int
) -> tuple[list[_Ints], _Ints]:
    """The places of each owner in pieces that fill requests, and the places that wait for more of their owner.

    Args:
        numbers: number of the owner of each place.
        places: ``int64[n]``, the places, ascending.
        request_rows: places in a piece.
        oldest: an owner whose first place that would wait is below this has a shorter piece, and none that waits.

    Returns:
        The pieces in the order of their first places, and the other places, ascending.
    """
    order = np.argsort(numbers, kind="stable")
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    pieces: list[_Ints] = []
    waiting: list[_Ints] = [places[:0]]
    for mine in np.split(places[order], edges):
        for start in range(0, len(mine), request_rows):
            piece = mine[start : start + request_rows]
            is_asked = len(piece) == request_rows or piece[0] < oldest
            (pieces if is_asked else waiting).append(piece)
    return sorted(pieces, key=lambda piece: int(piece[0])), np.sort(np.concatenate(waiting))


def _missing(pieces: Sequence[_Ints], waiting: _Ints, stop: int) -> list[int]:
    """The first place that is missing when each piece was handed out, those before it too."""
    first = min([stop, *waiting[:1].tolist()])
    return [min(first, following) for following in [*(int(piece[0]) for piece in pieces[1:]), stop]][: len(pieces)]


def _requests_of_piece(
    table: SampleTable, rows: _Ints, positions: _Ints, request_source: RequestSource, piece: _Ints
) -> Iterator[tuple[PlannedRequest, _Ints]]:
    """The requests for the samples of one owner, each with the places that are left after it."""
    while len(piece):
        following = request_source.next_request(len(piece))
        chosen, piece = piece[: following.rows], piece[following.rows :]
        yield following.make_request(positions[chosen], table.take(rows[chosen])), piece


class _Waiting:
    """What was handed out and waits for samples before it."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, Delivery]] = []
        self._skipped: list[Skipped] = []
        self._added = 0

    def add(self, part: Delivery) -> None:
        """Add rows, whose places are ascending."""
        self._skipped += part.batch.skipped
        if len(part.positions):
            self._added += 1  # no two are equal, so that the heap compares no deliveries
            heappush(self._parts, (int(part.positions[0]), self._added, part))

    def below(self, stop: int) -> Iterator[Delivery]:
        """The rows at places below one, in order; they wait no longer."""
        found: list[Delivery] = []
        while self._parts and self._parts[0][0] < stop:
            _, _, part = heappop(self._parts)
            count = int(np.searchsorted(part.positions, stop))
            found.append(_part(part, slice(0, count)))
            if count < len(part.positions):
                self.add(_part(part, slice(count, None)))
        skipped, self._skipped = tuple(self._skipped), []
        yield from _joined(found, stop, skipped)


def _part(delivery: Delivery, some: slice) -> Delivery:
    """Some of its rows, without the samples that were skipped."""
    batch = delivery.batch
    tensors = tuple(tensor[some] for tensor in batch.tensors)
    rows = FeatureBatch(ids=batch.ids[some], tensors=tensors, encoded=batch.encoded[some])
    return replace(delivery, positions=delivery.positions[some], batch=rows)


def _nodes(owners: RowOwners, row: int) -> tuple[str, ...]:
    """Names of the nodes to ask for what begins with a row, the owner first."""
    (owner,) = owners.of_rows(np.array([row], np.int64)).tolist()
    second = owners.second(row)
    return (owners.nodes[owner],) if second is None else (owners.nodes[owner], owners.nodes[second])


def _joined(parts: Sequence[Delivery], stop: int, skipped: tuple[Skipped, ...]) -> Iterator[Delivery]:
    """The rows of some deliveries in the order of their places."""
    positions = np.concatenate([np.zeros(0, np.int64), *(part.positions for part in parts)])
    order = np.argsort(positions)
    batches = [part.batch for part in parts]
    if len({(bool(batch.encoded), len(batch.tensors)) for batch in batches}) > 1:
        yield from _one_by_one(parts, order)
        positions, order, batches = positions[:0], order[:0], []
    batch = batches[0] if len(batches) == 1 else _merged(batches, order)
    yield Delivery(positions=positions[order], stop=stop, reach=stop, batch=replace(batch, skipped=skipped))


def _merged(batches: Sequence[FeatureBatch], order: _Ints) -> FeatureBatch:
    """Batches of one kind as one, whose rows are in another order."""
    if not batches:
        return FeatureBatch(ids=np.zeros(0, np.int64))
    encoded = [sample for batch in batches for sample in batch.encoded]
    columns = zip(*(batch.tensors for batch in batches), strict=True)
    return FeatureBatch(
        ids=np.concatenate([batch.ids for batch in batches])[order],
        tensors=tuple(_scattered(parts, order) for parts in columns),
        encoded=[encoded[row] for row in order.tolist()] if encoded else (),
    )


def _scattered(parts: Sequence[npt.NDArray[np.generic]], order: _Ints) -> npt.NDArray[np.generic]:
    """Arrays as one in another order, copied once."""
    places = np.argsort(order)
    found = np.empty((len(order), *parts[0].shape[1:]), parts[0].dtype)
    start = 0
    for part in parts:
        found[places[start : start + len(part)]] = part
        start += len(part)
    return found


def _one_by_one(parts: Sequence[Delivery], order: _Ints) -> Iterator[Delivery]:
    """Rows of several kinds, encoded ones among them, each as a delivery."""
    rows = [(part, row) for part in parts for row in range(len(part.positions))]
    for place in order.tolist():
        part, row = rows[place]
        after = int(part.positions[row]) + 1
        yield replace(_part(part, slice(row, row + 1)), stop=after, reach=after)
