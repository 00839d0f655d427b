"""The way to several nodes that serve the same data: who is asked next, who counts as lost, and how fast each is.

The way to several nodes that serve the same data: a request goes to the owner of its samples while that answers.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from frostline.client.owners import BlockOwners, Blocks, OwnerTables, as_steps
from frostline.core import REFERENCE, FeatureBatch
from frostline.core.errors import EngineNotReady, Overloaded, Unavailable
from frostline.profiles import Profile
from frostline.transport import Cancellation, Transport, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = (
    "BalancedResponse",
    "BalancedTransport",
    "LoadBalancer",
    "OwnersFirst",
)


# A node that failed so often in a row owns no blocks until it answers: a single broken connection moves none.
_LOST_AFTER = 3
# Rows that a node must have computed before its speed counts: fewer say more of chance than of the node.
_MIN_ROWS = 1024


@dataclass(slots=True)
class _Place:
    is_member: bool = True
    in_flight: int = 0
    timed: int = 0
    begun: int = 0
    away_until: float = 0.0
    failures: int = 0
    rows: int = 0
    busy_s: float = 0.0
    busy_since: float = 0.0

    def busy_by(self, now: float) -> float:
        return self.busy_s + (now - self.busy_since if self.timed else 0.0)


class LoadBalancer:
    """Decides which node takes the next request. Takes the time and reads no clock; not for several threads.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._places = [_Place() for _ in range(nodes)]

    @property
    def members(self) -> list[int]:
        """Those that are asked."""
        return [node for node, place in enumerate(self._places) if place.is_member]

    @property
    def lost(self) -> list[int]:
        """Members that failed several times in a row, and have not answered since."""
        return [node for node in self.members if self._places[node].failures >= _LOST_AFTER]

    def join(self, node: int) -> None:
        """Ask that node from now on, as one that answers; a new one has the number behind the last."""
        if node == len(self._places):
            self._places.append(_Place())
        place = self._places[node]
        place.is_member, place.away_until, place.failures = True, 0.0, 0

    def leave(self, node: int) -> None:
        """Ask it nothing more."""
        self._places[node].is_member = False

    def order(self, now: float, first: Sequence[int] = ()) -> list[int]:
        """All nodes, the one to ask first in front: those that answer by how busy they are, then those away.

        Args:
            now: in seconds.
            first: nodes that are asked before all others, in order, where they are not away.
        """

        def rank(node: int) -> tuple[float, int, int, int]:
            place = self._places[node]
            turn = first.index(node) if node in first else len(first)
            return max(0.0, place.away_until - now), turn, place.in_flight, place.begun

        return sorted(self.members, key=rank)

    def present(self, now: float) -> list[int]:
        """Those that are not known to be away, in the same order."""
        return [node for node in self.order(now) if self._places[node].away_until <= now]

    def began(self, node: int, now: float = 0.0, *, is_timed: bool = True) -> None:
        """A request went to it.

        Args:
            node: its number.
            now: in seconds.
            is_timed: the request says how fast the node is. One by which a job measures something does not.
        """
        place = self._places[node]
        if is_timed and not place.timed:
            place.busy_since = now
        place.timed += is_timed
        place.in_flight += 1
        place.begun += 1

    def ended(self, node: int, now: float = 0.0, *, rows: int = 0, is_timed: bool = True) -> None:
        """The request is over, whatever became of it, and brought so many rows."""
        place = self._places[node]
        if is_timed:
            place.busy_s = place.busy_by(now)
            place.busy_since = now
            place.timed -= 1
            place.rows += rows
        place.in_flight -= 1
        if rows:
            place.failures = 0

    def failed(self, node: int, now: float, *, away_s: float, is_full: bool = False) -> None:
        """It did not answer, or asked not to be asked for so long, being full."""
        place = self._places[node]
        place.away_until = now + away_s
        place.failures += 0 if is_full else 1

    def samples_per_s(self, now: float) -> dict[int, float]:
        """How fast each node was while it was asked for something by a timed request, 0 where too little is known.

        Of the members that count as lost none is named, unless all do.
        """
        lost = self.lost
        nodes = [node for node in self.members if node not in lost] or self.members
        return {node: self._rate(self._places[node], now) for node in nodes}

    def _rate(self, place: _Place, now: float) -> float:
        busy_s = place.busy_by(now)
        return place.rows / busy_s if place.rows >= _MIN_ROWS and busy_s > 0 else 0.0


# A node that is away is tried again after so long: soon enough for one that restarts, rare enough for one that is gone.
_AWAY_S = 2.0

T = TypeVar("T")


def _nobody_told(_: str, __: str, ___: EngineNotReady) -> None:
    pass


class BalancedTransport:
    """A ``Transport`` to several nodes that serve the same data, as fast as all of them together.

    Nodes may come and go while it is used. A node that does not answer is left out for a while, and another one takes
    what it had been asked for; rows that arrived already are not asked for again. Only where none answers does a call
    fail. Each block of a data set has an owner among the nodes that answer; see ``at``.

    A node that cannot run an engine, or not exactly enough, gets none of the requests that name it, as long as there
    is another one that can: numbers of two engines are never mixed.

    Args:
        nodes: a way to each; closed with this one.
        clock: seconds that only grow.
        left_out: told of a node, by its name, that cannot run an engine; once for each, in the caller's thread.
        names: names of the nodes, such as their URLs; their places by default.
    """

    def __init__(
        self,
        nodes: Sequence[Transport],
        clock: Callable[[], float] = time.monotonic,
        left_out: Callable[[str, str, EngineNotReady], None] = _nobody_told,
        names: Sequence[str] = (),
    ) -> None:
        self._nodes = list(nodes)
        self._names = list(names) or [str(place) for place in range(len(nodes))]
        self._left_out = left_out
        self._unable: dict[tuple[int, str], EngineNotReady] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._turns = LoadBalancer(len(self._nodes))
        self._tables = OwnerTables()
        self._speeds: dict[str, float] = {}
        self._prefixes: dict[str, bytes] = {}

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the nodes that are asked."""
        with self._lock:
            return tuple(self._names[number] for number in self._turns.members)

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of those among them that have not answered for several times."""
        with self._lock:
            return tuple(self._names[number] for number in self._turns.lost)

    def join(self, name: str, make: Callable[[], Transport]) -> None:
        """Ask a node too, once it has what the others were given.

        Args:
            name: name of the node; one that left keeps its connections.
            make: makes the way to it.

        Raises:
            Unavailable: It does not answer.
            Refused: It does not take what the others did.
        """
        node = self._nodes[self._names.index(name)] if name in self._names else make()
        for digest, artifact in tuple(self._prefixes.items()):
            node.put_prefix(digest, artifact)
        with self._lock:
            if name not in self._names:
                self._names.append(name)
                self._nodes.append(node)
            self._turns.join(self._names.index(name))

    def leave(self, name: str) -> None:
        """Ask a node nothing more; what it was asked for may still come."""
        with self._lock:
            self._turns.leave(self._names.index(name))

    def owners(self, data: str, samples: int) -> BlockOwners:
        """See ``OwnsBlocks``; among the nodes that answer, by how fast they were seen to be."""
        with self._lock:
            measured = {
                self._names[number]: speed for number, speed in self._turns.samples_per_s(self._clock()).items()
            }
            self._speeds = speeds = as_steps(measured, self._speeds)
        return self._tables.at(Blocks(data=data, samples=samples), speeds)

    def at(self, nodes: tuple[str, ...]) -> "OwnersFirst":
        """See ``OwnsBlocks``."""
        return OwnersFirst(self, nodes)

    def health(self) -> Health:
        """See ``Transport``; of the first node that answers."""
        return self._first(lambda node: node.health())

    def put_prefix(self, digest: str, artifact: bytes) -> None:
        """See ``Transport``; to every node that answers, one at least."""
        self._prefixes[digest] = artifact
        self._every(lambda node: node.put_prefix(digest, artifact))

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport``; of the first node that answers. An engine is made ready at every one that does.

        Then the profile is that of the node where the engine is furthest from the reference.
        """
        cancellation, engine = cancellation or Cancellation(), wanted.features.engine

        def measured(node: Transport) -> Profile:
            return node.profile(wanted, cancellation)

        if engine == REFERENCE:
            return self._first(measured, cancellation)
        found = self._every(measured, engine, cancellation)
        return max(found, key=lambda item: max((trial.error for trial in item.trials), default=0.0))

    def features(self, request: FeatureRequest, first: tuple[str, ...] = ()) -> "BalancedResponse":
        """See ``Transport``.

        Args:
            request: request to make.
            first: names of the nodes to ask before all others.
        """
        return BalancedResponse(self, request, first)

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport``; totals are those of all nodes that answer together."""
        totals: dict[str, float] = {}
        for number in self._order():
            try:
                found = self._nodes[number].node_statistics().get("totals", {})
            except Unavailable as error:
                self.failed(number, error)
                continue
            totals = {name: totals.get(name, 0) + value for name, value in found.items()}
        return {"totals": totals}

    def statistics(self) -> TransportStatistics:
        """See ``Transport``; the sum over the nodes."""
        each = [node.statistics() for node in tuple(self._nodes)]
        sums = {field.name: sum(getattr(part, field.name) for part in each) for field in fields(TransportStatistics)}
        return TransportStatistics(**sums)

    def close(self) -> None:
        """Close the connections to every node."""
        for node in self._nodes:
            node.close()

    def begin(
        self, request: FeatureRequest, tried: set[int], first: tuple[str, ...] = ()
    ) -> tuple[int, Iterator[FeatureBatch]]:
        """Ask the node whose turn it is, that was not tried yet and that can run the engine.

        Args:
            request: request to make.
            tried: nodes that were asked for it before.
            first: names of the nodes to ask before all others.

        Raises:
            EngineNotReady: None of them can.
        """
        with self._lock:
            now, preferred = self._clock(), [self._names.index(name) for name in first if name in self._names]
            able = self._able(self._turns.order(now, preferred), request.engine)
            number = next(index for index in able if index not in tried)
            self._turns.began(number, now, is_timed=bool(first))
        return number, self._nodes[number].features(request)

    def ended(self, number: int, rows: int = 0, *, is_owned: bool = True) -> None:
        """A request to that node is over, which brought so many rows; only requests by owner say how fast nodes are."""
        with self._lock:
            self._turns.ended(number, self._clock(), rows=rows, is_timed=is_owned)

    def failed(self, number: int, error: Unavailable) -> None:
        """That node did not answer."""
        away_s = error.retry_after_s if isinstance(error, Overloaded) else _AWAY_S
        with self._lock:
            self._turns.failed(number, self._clock(), away_s=away_s, is_full=isinstance(error, Overloaded))

    def others(self, request: FeatureRequest, tried: set[int]) -> bool:
        """Whether a node is left that can run the request's engine and is not known to be away."""
        with self._lock:
            able = self._able(self._turns.order(self._clock()), request.engine)
            return bool(set(self._turns.present(self._clock())).intersection(able) - tried)

    def _order(self) -> list[int]:
        with self._lock:
            return self._turns.order(self._clock())

    def _able(self, numbers: Sequence[int], engine: str) -> list[int]:
        able = [number for number in numbers if (number, engine) not in self._unable]
        if not able:
            raise self._unable[numbers[0], engine]
        return able

    def _cannot(self, number: int, engine: str, why: EngineNotReady) -> None:
        with self._lock:
            is_new = (number, engine) not in self._unable
            self._unable[number, engine] = why
        if is_new:
            self._left_out(self._names[number], engine, why)

    def _every(
        self, call: Callable[[Transport], T], engine: str = REFERENCE, cancellation: Cancellation | None = None
    ) -> list[T]:
        """What every node says that answers and can run the engine, one at least."""
        failure: Unavailable | None = None
        found: list[T] = []
        with self._lock:
            numbers = self._able(self._turns.order(self._clock()), engine)
        for number in numbers:
            try:
                found.append(call(self._nodes[number]))
            except EngineNotReady as error:
                self._cannot(number, engine, error)
            except Unavailable as error:
                _check(cancellation)
                failure = _better_known(failure, error)
                self.failed(number, error)
        if failure is not None and not found:
            raise failure
        if not found:
            with self._lock:
                self._able(numbers, engine)
        return found

    def _first(self, call: Callable[[Transport], T], cancellation: Cancellation | None = None) -> T:
        failure: Unavailable | None = None
        for number in self._order():
            try:
                return call(self._nodes[number])
            except Unavailable as error:
                _check(cancellation)
                failure = _better_known(failure, error)
                self.failed(number, error)
        assert failure is not None
        raise failure


def _check(cancellation: Cancellation | None) -> None:
    """A node whose answer nobody wants any more has not failed, and no other is asked for it."""
    if cancellation is not None:
        cancellation.check()


def _better_known(before: Unavailable | None, error: Unavailable) -> Unavailable:
    """Which failure to tell: that of the node that is back first, where one is only full."""
    known = [problem for problem in (before, error) if isinstance(problem, Overloaded)]
    return min(known, key=lambda item: item.retry_after_s, default=error)


class BalancedResponse:
    """The batches of one request, from whichever node takes it. ``close`` may be called from any thread."""

    def __init__(self, spread: BalancedTransport, request: FeatureRequest, first: tuple[str, ...] = ()) -> None:
        self._spread = spread
        self._request = request
        self._first = first
        self._lock = threading.Lock()
        self._tried: set[int] = set()
        self._node: int | None = None
        self._batches: Iterator[FeatureBatch] | None = None
        self._rows = 0
        self._has_arrived = False
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FeatureBatch:
        while True:
            batches = self._asked()
            try:
                batch = next(batches)
            except Unavailable as error:
                if not self._goes_on(error):
                    raise
            except BaseException:
                self._end()
                raise
            else:
                self._has_arrived = True
                self._rows += len(batch) + len(batch.skipped)
                return batch

    def close(self) -> None:
        """Abandon the rest of the answer."""
        with self._lock:
            self._is_closed = True
            batches = self._batches
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        self._end()

    def _asked(self) -> Iterator[FeatureBatch]:
        with self._lock:
            if self._is_closed:
                raise StopIteration
            if self._batches is None:
                self._node, self._batches = self._spread.begin(self._request, self._tried, self._first)
            return self._batches

    def _goes_on(self, error: Unavailable) -> bool:
        """Leave a node that did not answer; whether another one can take the whole request."""
        number = self._end()
        if number is not None:
            self._spread.failed(number, error)
            self._tried.add(number)
        with self._lock:
            if self._has_arrived or self._is_closed or not self._spread.others(self._request, self._tried):
                return False
            self._batches = None
        return True

    def _end(self) -> int | None:
        """Count the request as over, once; the node that it was at."""
        with self._lock:
            number, self._node = self._node, None
        if number is not None:
            self._spread.ended(number, self._rows, is_owned=bool(self._first))
        return number


class OwnersFirst:
    """A ``Transport`` to the same nodes that asks some of them before all others.

    Args:
        spread: way to all nodes, which stays its owner's to close.
        first: names of the nodes to ask first, in order.
    """

    def __init__(self, spread: BalancedTransport, first: tuple[str, ...]) -> None:
        self._spread = spread
        self._first = first
        self.health = spread.health
        self.put_prefix = spread.put_prefix
        self.profile = spread.profile
        self.node_statistics = spread.node_statistics
        self.statistics = spread.statistics
        self.close = spread.close

    def features(self, request: FeatureRequest) -> BalancedResponse:
        """See ``Transport``."""
        return self._spread.features(request, self._first)
