"""Decides which of several nodes is asked next, which of them count as lost, and how fast each was seen to be."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("LoadBalancer",)

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
