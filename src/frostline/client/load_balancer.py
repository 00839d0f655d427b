"""Decides which of several nodes takes the next request: who counts as lost or refuses, and how fast each is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("LoadBalancer",)


# A node that failed so often in a row owns no blocks until it answers: a single broken connection moves none.
_LOST_AFTER = 3
# A node that refuses what others give is asked again after a minute, then two, up to an hour: blocks move each time.
_REFUSED_S, _LONGEST_REFUSED_S = 60.0, 3600.0
# A node that cannot read so many samples in a row that others can has lost its store, or a part of it.
_MISREAD_MAX = 3
# Rows that a node must have computed before its speed counts: fewer say more of chance than of the node.
_MIN_ROWS = 1024


@dataclass(slots=True)
class _Place:
    is_member: bool = True
    in_flight: int = 0
    timed: int = 0
    begun: int = 0
    away_until: float = 0.0
    away_since: float = math.inf
    failures: int = 0
    rows: int = 0
    busy_s: float = 0.0
    busy_since: float = 0.0
    refusals: int = 0
    is_refusing: bool = False
    misread_in_a_row: int = 0
    full_in_a_row: int = 0
    samples: int = 0
    failed: int = 0
    retried: int = 0
    misread: int = 0
    damaged: int = 0
    reason: str = ""

    @property
    def is_lost(self) -> bool:
        return self.failures >= _LOST_AFTER

    @property
    def is_full(self) -> bool:
        return self.full_in_a_row >= _LOST_AFTER

    def busy_by(self, now: float) -> float:
        return self.busy_s + (now - self.busy_since if self.timed else 0.0)


class LoadBalancer:
    """Decides which node takes the next request. Takes the time and reads no clock; not for several threads.

    Args:
        nodes: the number of nodes.
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
        return [node for node in self.members if self._places[node].is_lost]

    @property
    def out(self) -> dict[int, str]:
        """Members that are lost, or refuse what others give, and why."""
        return {node: place.reason for node, place in self._member_places if place.is_lost or place.is_refusing}

    @property
    def in_trouble(self) -> dict[int, str]:
        """Those, and members that said several times in a row that they, or their store, are full; and why."""
        return self.out | {node: place.reason for node, place in self._member_places if place.is_full}

    @property
    def _member_places(self) -> list[tuple[int, _Place]]:
        return [(node, self._places[node]) for node in self.members]

    def uses(self) -> list[tuple[int, _Place]]:
        """What was asked of each that is or was asked."""
        return [(node, place) for node, place in enumerate(self._places) if place.is_member or place.begun]

    def add(self) -> None:
        """One more node, with the number behind the last, which is asked once it joins."""
        self._places.append(_Place(is_member=False))

    def join(self, node: int) -> None:
        """Ask that node from now on, as one that answers."""
        place = self._places[node]
        place.is_member, place.away_until, place.away_since, place.failures = True, 0.0, math.inf, 0
        place.is_refusing, place.misread_in_a_row = False, 0

    def leave(self, node: int) -> None:
        """Ask it nothing more."""
        self._places[node].is_member = False

    def order(self, now: float, first: Sequence[int] = ()) -> list[int]:
        """All nodes, the one to ask first in front: those that answer by how busy they are, then those away.

        Args:
            now: the time in seconds.
            first: nodes that are asked before all others, in order, where they are not away.
        """

        def rank(node: int) -> tuple[float, int, int, int]:
            place = self._places[node]
            turn = first.index(node) if node in first else len(first)
            return max(0.0, place.away_until - now), turn, place.in_flight, place.begun

        return sorted(self.members, key=rank)

    def reachable_nodes(self, now: float) -> list[int]:
        """Those that are not known to be away, in the same order."""
        return [node for node in self.order(now) if self._places[node].away_until <= now]

    def refusing_nodes(self, now: float) -> list[int]:
        """Those that answer, and are away since they refused what another one gave, in the same order."""
        places = self._places
        return [node for node in self.order(now) if places[node].is_refusing and not places[node].is_lost]

    def may_come_back(self, now: float, patience_s: float) -> list[int]:
        """Those that are away, and have been for so short a time that they may only be starting again.

        So are those that refuse: what came garbled on the way looks like a refusal, and not for long.
        """
        places = {node: self._places[node] for node in self.members}
        return [
            node for node, place in places.items() if place.away_until > now and now - place.away_since < patience_s
        ]

    def begin_request(self, node: int, now: float = 0.0, *, is_timed: bool = True, is_retry: bool = False) -> None:
        """A request went to it.

        Args:
            node: the number.
            now: the time in seconds.
            is_timed: the request says how fast the node is. One by which a job measures something does not.
            is_retry: true if another node has failed the request before.
        """
        place = self._places[node]
        if is_timed and not place.timed:
            place.busy_since = now
        place.timed += is_timed
        place.in_flight += 1
        place.begun += 1
        place.retried += is_retry

    def end_request(self, node: int, now: float = 0.0, *, rows: int = 0, is_timed: bool = True) -> None:
        """The request is over, whatever became of it, and brought so many rows."""
        place = self._places[node]
        if is_timed:
            place.busy_s = place.busy_by(now)
            place.busy_since = now
            place.timed -= 1
            place.rows += rows
        place.in_flight -= 1
        place.samples += rows
        # What a lost node had brought before it fell silent is no sign that it is back.
        if rows and math.isfinite(place.away_until):
            place.failures, place.full_in_a_row, place.away_since = 0, 0, math.inf
            place.is_refusing = place.is_refusing and place.away_until > now  # its time goes on

    def note_failure(
        self, node: int, now: float, *, away_s: float, is_full: bool = False, reason: str = "", is_damaged: bool = False
    ) -> None:
        """It did not answer, or asked not to be asked for so long, being full.

        Args:
            node: the number.
            now: the time in seconds.
            away_s: the time that others are asked before it.
            is_full: True if it answered, and says when to come back.
            reason: the reason why, in a sentence.
            is_damaged: the answer did not come as it was sent.
        """
        place = self._places[node]
        place.away_until, place.away_since = max(place.away_until, now + away_s), min(place.away_since, now)
        place.failed += 1
        place.damaged += is_damaged
        place.full_in_a_row += is_full
        if place.is_full and not (place.is_lost or place.is_refusing):
            place.reason = reason
        # What breaks while it is left out was freed by whoever left it out.
        if not is_full and not (place.is_refusing and place.away_until > now):
            place.reason = place.reason if place.is_lost else reason
            place.failures += 1

    def lose(self, node: int, reason: str, now: float = 0.0) -> None:
        """It is silent, or in trouble: nothing is asked of it until it joins again, but where nobody else is left."""
        place = self._places[node]
        place.reason, place.away_since = reason, min(place.away_since, now)
        place.away_until, place.failures = math.inf, max(place.failures, _LOST_AFTER)

    def note_refusal(self, node: int, now: float, reason: str, again_s: float = _REFUSED_S) -> None:
        """It refuses, or keeps back, what another one gave: others are asked before it, and own its blocks.

        That is so for ``again_s`` seconds, then for twice as long, and so on up to an hour.
        """
        place = self._places[node]
        wait_s = min(again_s * 2.0 ** min(place.refusals, 16), _LONGEST_REFUSED_S)
        place.reason = reason
        place.away_until, place.is_refusing = max(place.away_until, now + wait_s), True
        place.away_since = min(place.away_since, now)
        place.refusals += 1
        place.failed += 1

    def note_read_failure(self, node: int, now: float, samples: int, reason: str, *, read_others: bool) -> None:
        """It could not read samples that another one gave; several in a row, and it is asked nothing for a while."""
        place = self._places[node]
        place.misread += samples
        place.misread_in_a_row = samples + (0 if read_others else place.misread_in_a_row)
        if place.misread_in_a_row >= _MISREAD_MAX and not read_others:
            place.misread_in_a_row = 0
            self.note_refusal(node, now, reason)

    def samples_per_s(self, now: float) -> dict[int, float]:
        """How fast each node was while it was asked for something by a timed request, 0 where too little is known.

        Of the members that count as lost, or refuse what others give, none is named, unless all do.
        """
        nodes = [node for node in self.members if not self._is_out(self._places[node], now)] or self.members
        return {node: self._rate(self._places[node], now) for node in nodes}

    def _is_out(self, place: _Place, now: float) -> bool:
        return place.is_lost or (place.is_refusing and place.away_until > now)

    def _rate(self, place: _Place, now: float) -> float:
        busy_s = place.busy_by(now)
        return place.rows / busy_s if place.rows >= _MIN_ROWS and busy_s > 0 else 0.0
