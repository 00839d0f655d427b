"""Decides which of several nodes takes the next request: who counts as lost or refuses, and how fast each is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("LoadBalancer",)


# A node that failed so often in a row owns no blocks until it answers: a single broken connection moves none.
_LOST_AFTER = 3
# A node that refuses what others give is asked again after a minute, then two, up to an hour: blocks move each time.
_REFUSED_S, _LONGEST_REFUSED_S = 60.0, 3600.0
# One that says that it is back, and fails again before it gave anything, is asked again after so long, then twice that.
_RELAPSED_S, _LONGEST_RELAPSED_S = 4.0, 60.0
# A node that cannot read so many samples in a row that others can has lost its store, or a part of it.
_MISREAD_MAX = 3
# Rows that a node must have computed before its speed counts: fewer say more of chance than of the node.
_MIN_ROWS = 1024
# A request leaves its owner for a node that is done with it sooner, by what this node takes for so many, and a second:
# by less, chance would move samples among nodes that are as fast, where the next epoch does not look for them.
_SOONER, _SOONER_S = 4, 1.0
# The newest interval between two answers of a node counts so much beside those before it.
_NEWEST = 0.25


@dataclass(slots=True)
class _NodeState:
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
    request_s: float = 0.0
    refusals: int = 0
    is_refusing: bool = False
    is_unproven: bool = False
    relapses: int = 0
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

    def takes_s(self, now: float, unknown_s: float) -> float:
        """Seconds for each request; one that has answered none takes no less than ``unknown_s``."""
        since_last_s = now - self.busy_since if self.timed else 0.0
        return max(since_last_s, self.request_s or unknown_s)


class LoadBalancer:
    """Decides which node takes the next request. Takes the time and reads no clock; not for several threads.

    Args:
        nodes: the number of nodes.
    """

    def __init__(self, nodes: int) -> None:
        self._states = [_NodeState() for _ in range(nodes)]

    @property
    def members(self) -> list[int]:
        """The nodes that are asked."""
        return [node for node, state in enumerate(self._states) if state.is_member]

    @property
    def lost(self) -> list[int]:
        """Members that failed several times in a row, and have not answered since."""
        return [node for node in self.members if self._states[node].is_lost]

    @property
    def out(self) -> dict[int, str]:
        """Members that are lost, or refuse what others give, and why."""
        return {node: state.reason for node, state in self._member_states if state.is_lost or state.is_refusing}

    @property
    def in_trouble(self) -> dict[int, str]:
        """The nodes that are left out, or said several times in a row that they or their store are full; and why."""
        return self.out | {node: state.reason for node, state in self._member_states if state.is_full}

    @property
    def _member_states(self) -> list[tuple[int, _NodeState]]:
        return [(node, self._states[node]) for node in self.members]

    def uses(self) -> list[tuple[int, _NodeState]]:
        """What was asked of each that is or was asked."""
        return [(node, state) for node, state in enumerate(self._states) if state.is_member or state.begun]

    def add(self) -> None:
        """One more node, with the number behind the last, which is asked once it joins."""
        self._states.append(_NodeState(is_member=False))

    def join(self, node: int) -> None:
        """Ask that node from now on, as one that answers."""
        state = self._states[node]
        state.is_unproven = state.is_unproven or state.is_lost
        state.is_member, state.away_until, state.away_since, state.failures = True, 0.0, math.inf, 0
        state.is_refusing, state.misread_in_a_row = False, 0

    def leave(self, node: int) -> None:
        """Ask it nothing more."""
        self._states[node].is_member = False

    def order(self, now: float, first: Sequence[int] = ()) -> list[int]:
        """All nodes, the one to ask first in front: those that answer by how busy they are, then those away.

        Args:
            now: the time in seconds.
            first: nodes that are asked before all others, in order, where they are not away; the owner of what is
                asked for in front, before which comes a node that would be done with it long before.
        """
        first = self._with_soonest(now, first)

        def rank(node: int) -> tuple[float, int, int, int]:
            state = self._states[node]
            turn = first.index(node) if node in first else len(first)
            return max(0.0, state.away_until - now), turn, state.in_flight, state.begun

        return sorted(self.members, key=rank)

    def _with_soonest(self, now: float, first: Sequence[int]) -> Sequence[int]:
        """The nodes to ask first, before them one that would be done long before the first of them."""
        there = [node for node, state in self._member_states if state.away_until <= now]
        known = [state.request_s for _, state in self._member_states if state.request_s]
        # An owner that has nothing to do is asked: how fast it is now would not be seen otherwise.
        if not (first and known and first[0] in there and self._states[first[0]].in_flight):
            return first
        takes = {node: self._states[node].takes_s(now, min(known)) for node in there}
        waits = {node: (self._states[node].in_flight + 1) * takes[node] for node in there}
        soonest = min(there, key=waits.__getitem__)
        is_long = waits[first[0]] - waits[soonest] > max(_SOONER_S, _SOONER * takes[soonest])
        return [soonest, *first] if is_long else first

    def reachable_nodes(self, now: float) -> list[int]:
        """The nodes that are not known to be away, in the same order."""
        return [node for node in self.order(now) if self._states[node].away_until <= now]

    def refusing_nodes(self, now: float) -> list[int]:
        """The nodes that answer, and are away since they refused what another one gave, in the same order."""
        states = self._states
        return [node for node in self.order(now) if states[node].is_refusing and not states[node].is_lost]

    def may_come_back(self, now: float, patience_s: float) -> list[int]:
        """The nodes that have been away for so short a time that they may only be starting again.

        So are those that refuse: what came garbled on the way looks like a refusal, and not for long.
        """
        states = {node: self._states[node] for node in self.members}
        return [
            node for node, state in states.items() if state.away_until > now and now - state.away_since < patience_s
        ]

    def begin_request(self, node: int, now: float = 0.0, *, is_timed: bool = True, is_retry: bool = False) -> None:
        """A request went to it.

        Args:
            node: the number.
            now: the time in seconds.
            is_timed: the request says how fast the node is. One by which a job measures something does not.
            is_retry: true if another node has failed the request before.
        """
        state = self._states[node]
        if is_timed and not state.timed:
            state.busy_since = now
        state.timed += is_timed
        state.in_flight += 1
        state.begun += 1
        state.retried += is_retry

    def end_request(self, node: int, now: float = 0.0, *, rows: int = 0, is_timed: bool = True) -> None:
        """The request is over, whatever became of it, and brought so many rows."""
        state = self._states[node]
        if is_timed:
            if rows:
                took_s = now - state.busy_since
                state.request_s += (_NEWEST if state.request_s else 1.0) * (took_s - state.request_s)
            state.busy_s = state.busy_by(now)
            state.busy_since = now
            state.timed -= 1
            state.rows += rows
        state.in_flight -= 1
        state.samples += rows
        # What a lost node had brought before it fell silent is no sign that it is back.
        if rows and math.isfinite(state.away_until):
            state.failures, state.full_in_a_row, state.away_since = 0, 0, math.inf
            state.is_unproven, state.relapses = False, 0
            state.is_refusing = state.is_refusing and state.away_until > now  # its time goes on

    def note_failure(
        self, node: int, now: float, *, away_s: float, is_full: bool = False, reason: str = "", is_damaged: bool = False
    ) -> None:
        """Note that a node did not answer, or is full and asked not to be asked for so long.

        Args:
            node: the number.
            now: the time in seconds.
            away_s: the time that others are asked before it.
            is_full: True if it answered, and says when to come back.
            reason: the reason why, in a sentence.
            is_damaged: the answer did not come as it was sent.
        """
        state = self._states[node]
        state.away_until, state.away_since = max(state.away_until, now + away_s), min(state.away_since, now)
        state.failed += 1
        state.damaged += is_damaged
        state.full_in_a_row += is_full
        if state.is_full and not (state.is_lost or state.is_refusing):
            state.reason = reason
        # What breaks while it is left out was freed by whoever left it out.
        if not is_full and not (state.is_refusing and state.away_until > now):
            state.reason = state.reason if state.is_lost else reason
            state.failures += 1
            if state.is_lost and state.is_unproven:
                _relapse(state, now)

    def lose(self, node: int, reason: str, now: float = 0.0) -> None:
        """Ask a node that is silent, or in trouble, nothing until it joins again, but where nobody else is left."""
        state = self._states[node]
        state.reason, state.away_since = reason, min(state.away_since, now)
        state.away_until, state.failures = math.inf, max(state.failures, _LOST_AFTER)

    def note_refusal(self, node: int, now: float, reason: str, again_s: float = _REFUSED_S) -> None:
        """Note that a node refuses what another one gave: others are asked before it, and own its blocks.

        That is so for ``again_s`` seconds, then for twice as long, and so on up to an hour.
        """
        state = self._states[node]
        wait_s = min(again_s * 2.0 ** min(state.refusals, 16), _LONGEST_REFUSED_S)
        state.reason = reason
        state.away_until, state.is_refusing = max(state.away_until, now + wait_s), True
        state.away_since = min(state.away_since, now)
        state.refusals += 1
        state.failed += 1

    def note_read_failure(self, node: int, now: float, samples: int, reason: str, *, read_others: bool) -> None:
        """Note that a node could not read samples that another gave; after several it is asked nothing for a while."""
        state = self._states[node]
        state.misread += samples
        state.misread_in_a_row = samples + (0 if read_others else state.misread_in_a_row)
        if state.misread_in_a_row >= _MISREAD_MAX and not read_others:
            state.misread_in_a_row = 0
            self.note_refusal(node, now, reason)

    def samples_per_s(self, now: float) -> dict[int, float]:
        """How fast each node was while it was asked for something by a timed request, 0 where too little is known.

        Of the members that count as lost, or refuse what others give, none is named, unless all do.
        """
        nodes = [node for node in self.members if not self._is_out(self._states[node], now)] or self.members
        return {node: self._rate(self._states[node], now) for node in nodes}

    def _is_out(self, state: _NodeState, now: float) -> bool:
        return state.is_lost or (state.is_refusing and state.away_until > now)

    def _rate(self, state: _NodeState, now: float) -> float:
        busy_s = state.busy_by(now)
        return state.rows / busy_s if state.rows >= _MIN_ROWS and busy_s > 0 else 0.0


def _relapse(state: _NodeState, now: float) -> None:
    """It says that it is there, and gives nothing: that is said once, however often it says so."""
    wait_s = min(_RELAPSED_S * 2.0 ** min(state.relapses, 16), _LONGEST_RELAPSED_S)
    state.away_until, state.is_refusing, state.failures = max(state.away_until, now + wait_s), True, 0
    state.relapses += 1
