"""Decides which samples are asked for together where each has an owner among nodes, and puts them in order again.

An epoch's places are divided into groups. Of a group each owner's samples are asked for together, so that requests stay
large and each goes to one node; when the whole group was handed out by the window, its rows leave in their order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, SampleTable
from frostline.prefetch.requests import Dealer, Delivery, PlannedRequest

__all__ = ("GroupedRequests", "PlanRequests", "RowOwners", "in_pieces")

_Ints = npt.NDArray[np.int64]

PlanRequests = Callable[[SampleTable, _Ints, _Ints, Dealer], Iterator[PlannedRequest]]
"""Divides what an epoch must ask for into requests; see ``prefetch.requests.plan_requests``."""

# Requests of a group for each node. Chance gives a node some more or fewer of a group's samples: with this many they
# make up two requests nearly always, and neither is short of half a device batch.
_PER_NODE = 1.75


class RowOwners(Protocol):
    """Which node owns each row of a data set's whole manifest."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, by number."""

    def of_rows(self, rows: _Ints) -> npt.NDArray[np.int32]:
        """The number of the node that owns each row."""

    def second(self, row: int) -> int | None:
        """The node to ask for a row where its owner does not answer; None where there is no other one."""


class GroupedRequests:
    """The requests of one pass, by owner, and the way back to the order of its places. For one pass.

    A window that keeps the order hands out a group's requests one after the other. The one with the group's last place
    comes last, so that where the window stands says when the group is whole.

    Args:
        owners: gives the owners at present, which may be others for the next group.
        whole_rows: gives the rows of the whole manifest at which rows of the pass's table stand.
        request_rows: most samples in one request.
        max_rows: most samples in a group.
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
        self._stops: deque[int] = deque()

    def plan(self, table: SampleTable, rows: _Ints, positions: _Ints, dealer: Dealer) -> Iterator[PlannedRequest]:
        """Divide what an epoch must ask for; see ``prefetch.requests.plan_requests``."""
        start = 0
        while start < len(positions):
            owners = self._owners()
            stop = start + min(self._max_rows, int(_PER_NODE * self._request_rows * len(owners.nodes)))
            some = slice(start, stop)
            yield from self._group(table, rows[some], positions[some], dealer, owners)
            start = stop

    def in_order(self, deliveries: Iterator[Delivery | None]) -> Iterator[Delivery | None]:
        """What the window hands out, group by group, each in the order of its places."""
        waiting: list[Delivery] = []
        for delivery in deliveries:
            if delivery is None:
                yield None
                continue
            waiting.append(delivery)
            if delivery.stop >= self._stops[0]:
                self._stops.popleft()
                yield from _joined(waiting, delivery.stop)
                waiting = []

    def _group(
        self, table: SampleTable, rows: _Ints, positions: _Ints, dealer: Dealer, owners: RowOwners
    ) -> Iterator[PlannedRequest]:
        self._stops.append(int(positions[-1]) + 1)
        whole = self._whole_rows(rows)
        for places in in_pieces(owners.of_rows(whole), self._request_rows):
            done = 0
            nodes = _nodes(owners, int(whole[places[0]]))
            while done < len(places):
                deal = dealer.deal(len(places) - done)
                chosen = places[done : done + deal.rows]
                samples = table.take(rows[chosen])
                expected = deal.bytes_per_sample * len(chosen) if deal.bytes_per_sample else samples.encoded_bytes
                done += len(chosen)
                yield PlannedRequest(
                    positions=positions[chosen],
                    samples=samples,
                    expected_bytes=expected,
                    route=deal.route,
                    nodes=nodes,
                )


def in_pieces(numbers: npt.NDArray[np.int32], request_rows: int) -> list[_Ints]:
    """The places of each owner in pieces of nearly equal length, the piece with the last place behind all others.

    Args:
        numbers: number of the owner at each place.
        request_rows: most places in a piece.
    """
    found: list[_Ints] = []
    for number in np.unique(numbers).tolist():
        mine = np.flatnonzero(numbers == number)
        found += np.array_split(mine, -(-len(mine) // request_rows))
    return sorted(found, key=lambda places: int(places[-1]))


def _nodes(owners: RowOwners, row: int) -> tuple[str, ...]:
    """Names of the nodes to ask for what begins with a row, the owner first."""
    (owner,) = owners.of_rows(np.array([row], np.int64)).tolist()
    second = owners.second(row)
    return (owners.nodes[owner],) if second is None else (owners.nodes[owner], owners.nodes[second])


def _joined(parts: Sequence[Delivery], stop: int) -> Iterator[Delivery]:
    """The rows of some deliveries in the order of their places."""
    if len(parts) == 1:
        yield replace(parts[0], stop=stop, reach=stop)
        return
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions)
    skipped = tuple(lost for part in parts for lost in part.batch.skipped)
    batches = [part.batch for part in parts if len(part.batch)]
    if len({(bool(batch.encoded), len(batch.tensors)) for batch in batches}) > 1:
        yield from _one_by_one(parts, order, stop)
        return
    batch = replace(_merged(batches, order), skipped=skipped)
    yield Delivery(positions=positions[order], stop=stop, reach=stop, batch=batch)


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


def _one_by_one(parts: Sequence[Delivery], order: _Ints, stop: int) -> Iterator[Delivery]:
    """Rows of several kinds, encoded ones among them, each as a delivery."""
    rows = [(part, row) for part in parts for row in range(len(part.positions))]
    for place in order.tolist():
        part, row = rows[place]
        some, batch = slice(row, row + 1), part.batch
        alone = FeatureBatch(
            ids=batch.ids[some], tensors=tuple(tensor[some] for tensor in batch.tensors), encoded=batch.encoded[some]
        )
        after = int(part.positions[row]) + 1
        yield Delivery(positions=part.positions[some], stop=after, reach=after, batch=alone)
    yield Delivery(positions=np.zeros(0, np.int64), stop=stop, reach=stop, batch=_merged((), order))
