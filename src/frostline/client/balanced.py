"""The way to several nodes that serve the same data: a request goes to the owner of its samples while that answers."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any, TypeVar

from frostline.client.answers import BalancedResponse
from frostline.client.load_balancer import LoadBalancer
from frostline.client.owners import BlockOwners, Blocks, OwnerTables, as_steps
from frostline.core import REFERENCE, FeatureBatch
from frostline.core.errors import (
    AnswerDamaged,
    EngineNotReady,
    FrostlineError,
    Overloaded,
    StoreThrottled,
    StoreUnavailable,
    Unavailable,
    UnknownPrefix,
)
from frostline.profiles import Profile
from frostline.transport import Cancellation, Layout, NodeUse, Transport, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = (
    "PATIENCE_S",
    "BalancedTransport",
    "OwnersFirst",
)


# A wait is that of a stuck node where it is longer than this, and than so many times the median of the last ones at the
# others: the first are longer, since a node makes the network ready in them, and a slow node's own say nothing.
_STUCK_S, _STUCK_TIMES, _LAST_WAITS = 1.8, 6.0, 256
# A node that is away is tried again after so long: soon enough for one that restarts, rare enough for one that is gone.
_AWAY_S = 2.0
# A job begins when one node has its network; the others, which have it soon after, own blocks from the start.
_GRACE_S = 1.0
# What one node can say is asked of another too where that one takes so long: it may never say it.
_BESIDE_S = 2.0
_AT_ONCE = 32
PATIENCE_S = 30.0
"""What no node can read is left out of a job for good: one that starts again gets so long to say whether it can."""

T = TypeVar("T")


def _nobody_told(_: str, __: str, ___: EngineNotReady) -> None:
    pass


class BalancedTransport:
    """A ``Transport`` to several nodes that serve the same data, as fast as all of them together.

    Nodes may come and go while it is used. A node that does not answer, or refuses what another one gives, is left out
    for a while, and another one takes what it had been asked for; rows that arrived already are not asked for again.
    Only where none answers does a call fail, and only where all refuse is one refused. Each block of a data set has an
    owner among the nodes that answer; see ``at``.

    A node that cannot run an engine, or not exactly enough, gets none of the requests that name it, as long as there
    is another one that can: numbers of two engines are never mixed.

    Args:
        nodes: a way to each; closed with this one.
        clock: seconds that only grow.
        left_out: function that is told of a node, by its name, that cannot run an engine; once for each, in the
            caller's thread.
        names: names of the nodes, such as their URLs; their places by default.
        patience_s: seconds for which a node that went away may still be the one that reads what others cannot.

    Attributes:
        layouts: the tensors that answers have, as of ``ExpectsLayouts``.
        failed: names of nodes that did not answer, until whoever looks after them takes them out.
    """

    def __init__(
        self,
        nodes: Sequence[Transport],
        clock: Callable[[], float] = time.monotonic,
        left_out: Callable[[str, str, EngineNotReady], None] = _nobody_told,
        names: Sequence[str] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._patience_s = patience_s
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
        self.layouts: dict[tuple[str, int], Layout] = {}
        self.failed: set[str] = set()
        self._lacking: set[tuple[int, str]] = set()
        self._sending: set[tuple[int, str]] = set()
        self._waits: dict[object, tuple[int, float, bool]] = {}
        self._last_waits = deque[tuple[int, float]](maxlen=_LAST_WAITS)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the nodes that are asked."""
        with self._lock:
            return tuple(self._names[number] for number in self._turns.members)

    @property
    def to_join(self) -> tuple[str, ...]:
        """Names of the members that are to join again: lost, or without a network that was sent to all."""
        with self._lock:
            present = self._turns.reachable_nodes(self._clock())
            lacking = {number for number, _ in self._lacking - self._sending}.intersection(present)
            return tuple(self._names[number] for number in sorted(lacking.union(self._turns.lost)))

    @property
    def out(self) -> dict[str, str]:
        """Members that are asked nothing for now, by name, and why."""
        with self._lock:
            return {self._names[number]: reason for number, reason in self._turns.out.items()}

    def uses(self) -> tuple[NodeUse, ...]:
        """What was asked of each node so far, and what came of it."""
        with self._lock:
            trouble = self._turns.in_trouble
            return tuple(
                NodeUse(
                    url=self._names[number],
                    requests=place.begun,
                    samples=place.samples,
                    retries=place.retried,
                    failures=place.failed,
                    unreadable=place.misread,
                    damaged=place.damaged,
                    trouble=trouble.get(number, "") if place.is_member else "it takes part no more",
                )
                for number, place in self._turns.uses()
            )

    def silent_nodes(self, longer_than_s: float | None) -> tuple[str, ...]:
        """Names of the members for which a thread has waited for longer than that since they said anything.

        Args:
            longer_than_s: seconds; None for a wait for features that is far longer than the last ones at others were.
        """
        now = self._clock()
        numbers = {
            number
            for number, began, is_of_features in tuple(self._waits.values())
            if (is_of_features or longer_than_s is not None)
            and now - began > (self._stuck_after_s(number) if longer_than_s is None else longer_than_s)
        }
        with self._lock:
            return tuple(self._names[number] for number in sorted(numbers.intersection(self._turns.members)))

    def _stuck_after_s(self, number: int) -> float:
        """How long a thread may wait for features of a node, by the last waits at others, or by all without those."""
        last = tuple(self._last_waits)
        waits = [wait_s for other, wait_s in last if other != number] or [wait_s for _, wait_s in last]
        return max(_STUCK_S, _STUCK_TIMES * median(waits)) if waits else math.inf

    def lose(self, name: str, error: FrostlineError, again_s: float | None = None) -> None:
        """Ask a node nothing more until it joins again, and free whoever waits for it; another takes over.

        One that answers, and refuses what the others took, is asked again after a while; so is one that keeps its
        answers back, after ``again_s`` seconds, and twice as many the next time.
        """
        with self._lock:
            number = self._names.index(name)
            if again_s is not None:
                self._turns.note_refusal(number, self._clock(), str(error), again_s)
            elif isinstance(error, Unavailable):
                self._turns.lose(number, str(error), self._clock())
        if again_s is None and not isinstance(error, Unavailable):
            self.note_failure(number, error)
        self._nodes[number].break_off()

    def join(self, name: str, make: Callable[[], Transport]) -> None:
        """Ask a node too, once it has what the others were given.

        Args:
            name: name of the node; one that left keeps its connections.
            make: function that makes the way to the new node.

        Raises:
            Unavailable: The node does not answer.
            Refused: The node refuses what the other nodes were given.
        """
        with self._lock:
            if name not in self._names:
                self._names.append(name)
                self._nodes.append(make())
                self._turns.add()
            number = self._names.index(name)
        for digest, artifact in tuple(self._prefixes.items()):
            self._put(number, digest, artifact)
        with self._lock:
            self._turns.join(number)

    def _put(self, number: int, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._sending.add((number, digest))
        try:
            self._nodes[number].put_prefix(digest, artifact, before_upload)
        finally:
            with self._lock:
                self._sending.discard((number, digest))
        with self._lock:
            self._lacking.discard((number, digest))

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
        return self._first(lambda _, node, __: node.health(), Cancellation())

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        """See ``Transport``; to all nodes at once. It is enough that one has it: the others take part once they do."""
        with self._lock:
            numbers = self._turns.order(self._clock())
            is_new = digest not in self._prefixes
            if is_new:
                self._lacking |= {(number, digest) for number in numbers}
            self._prefixes[digest] = artifact
        try:
            self._every(lambda number, _: self._put(number, digest, artifact, before_upload), numbers, grace_s=_GRACE_S)
        except FrostlineError:
            if is_new:
                with self._lock:  # nobody has it, so nobody lacks it
                    self._lacking = {(number, lacked) for number, lacked in self._lacking if lacked != digest}
                    self._prefixes.pop(digest, None)
            raise

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport``; of the first node that answers. An engine is made ready at every one that does.

        Then the profile is that of the node where the engine is furthest from the reference.
        """
        cancellation, engine = cancellation or Cancellation(), wanted.features.engine

        if engine == REFERENCE:
            return self._first(lambda _, node, others: node.profile(wanted, others), cancellation)
        with self._lock:
            numbers = self._able(self._turns.order(self._clock()), engine)
        found = self._every(lambda _, node: node.profile(wanted, cancellation), numbers, engine, cancellation)
        if not found:
            with self._lock:
                self._able(numbers, engine)
        return max(found, key=lambda item: max((trial.error for trial in item.trials), default=0.0))

    def features(self, request: FeatureRequest, first: tuple[str, ...] = ()) -> "BalancedResponse":
        """See ``Transport``.

        Args:
            request: request to make.
            first: names of the nodes to ask before all others.
        """
        layout = None if request.prefix is None else self.layouts.get((request.prefix, request.cut))
        return BalancedResponse(self, request, first, layout)

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport``; totals are those of all nodes that answer together."""
        totals: dict[str, float] = {}
        with self._lock:
            numbers = self._turns.reachable_nodes(self._clock())
        for number, said in self._outcomes(lambda _, node: node.node_statistics(), numbers, math.inf):
            if isinstance(said, FrostlineError):
                self.note_failure(number, said)
                continue
            totals = {name: totals.get(name, 0) + value for name, value in said.get("totals", {}).items()}
        return {"totals": totals}

    def statistics(self) -> TransportStatistics:
        """See ``Transport``; the sum over the nodes."""
        each = [node.statistics() for node in tuple(self._nodes)]
        sums = {field.name: sum(getattr(part, field.name) for part in each) for field in fields(TransportStatistics)}
        return TransportStatistics(**sums)

    def break_off(self) -> None:
        """See ``Transport``; at every node."""
        for node in tuple(self._nodes):
            node.break_off()

    def close(self) -> None:
        """Close the connections to every node."""
        self.break_off()
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
            EngineNotReady: No node can run the engine.
        """
        with self._lock:
            now, preferred = self._clock(), [self._names.index(name) for name in first if name in self._names]
            able = self._able(self._turns.order(now, preferred), request.engine, request.prefix)
            number = next(index for index in able if index not in tried)
            self._turns.begin_request(number, now, is_timed=bool(first), is_retry=bool(tried))
        return number, self._nodes[number].features(request)

    def end_request(self, number: int, rows: int = 0, *, is_owned: bool = True) -> None:
        """A request to that node is over, which brought so many rows; only requests by owner say how fast nodes are."""
        with self._lock:
            self._turns.end_request(number, self._clock(), rows=rows, is_timed=is_owned)

    @contextmanager
    def watch_wait(self, number: int, *, is_of_features: bool = False) -> Iterator[None]:
        """Know that a thread waits for that node, which counts as silent where that lasts."""
        mark, began = object(), self._clock()
        self._waits[mark] = number, began, is_of_features
        try:
            yield
        finally:
            del self._waits[mark]
        if is_of_features:
            self._last_waits.append((number, self._clock() - began))

    def note_failure(self, number: int, error: FrostlineError) -> None:
        """Note that a node, or its store, did not answer; one that refused what another gave is left out a while."""
        if isinstance(error, UnknownPrefix):
            return  # it is still being sent, or was evicted: nothing is wrong with the node
        if isinstance(error, Unavailable) and not isinstance(error, Overloaded):
            self.failed.add(self._names[number])
        away_s = error.retry_after_s if isinstance(error, Overloaded) else _AWAY_S
        if isinstance(error, StoreThrottled):
            away_s = 0.0  # the store wants fewer requests, whoever makes them: its blocks stay with the node
        with self._lock:
            if not isinstance(error, Unavailable | StoreUnavailable):
                self._turns.note_refusal(number, self._clock(), f"it refuses what other nodes give: {error}")
                return
            self._turns.note_failure(
                number,
                self._clock(),
                away_s=away_s,
                is_full=isinstance(error, Overloaded | StoreUnavailable),
                reason=str(error),
                is_damaged=isinstance(error, AnswerDamaged),
            )

    def note_read_failure(self, number: int, samples: int, reason: str, *, read_others: bool) -> None:
        """Note that a node could not read samples that another one gave."""
        with self._lock:
            self._turns.note_read_failure(number, self._clock(), samples, reason, read_others=read_others)

    def others(self, request: FeatureRequest, tried: set[int], *, even_refusing: bool = False) -> bool:
        """Whether a node is left that can run the request's engine and is not known to be away.

        Args:
            request: request to make.
            tried: nodes that were asked for it before.
            even_refusing: a node counts too that answers, and is left out for a while for what it refused.
        """
        with self._lock:
            now = self._clock()
            able = self._able(self._turns.order(now), request.engine, request.prefix)
            there = {*self._turns.reachable_nodes(now), *(self._turns.refusing_nodes(now) if even_refusing else ())}
            return bool(there.intersection(able) - tried)

    def names_by_number(self, *, may_come_back: bool = False) -> dict[int, str]:
        """Names of the members by number; or of those alone that went away a moment ago, and may be back soon."""
        with self._lock:
            away = self._turns.may_come_back(self._clock(), self._patience_s) if may_come_back else None
            return {number: self._names[number] for number in (self._turns.members if away is None else away)}

    def _able(self, numbers: Sequence[int], engine: str, prefix: str | None = None) -> list[int]:
        """Those that can run the engine; of these, those that have the network, where there are such."""
        able = [number for number in numbers if (number, engine) not in self._unable]
        if not able:
            raise self._unable[numbers[0], engine]
        return [number for number in able if (number, prefix) not in self._lacking] or able

    def _cannot(self, number: int, engine: str, why: EngineNotReady) -> None:
        with self._lock:
            is_new = (number, engine) not in self._unable
            self._unable[number, engine] = why
        if is_new:
            self._left_out(self._names[number], engine, why)

    def _every(
        self,
        call: Callable[[int, Transport], T],
        numbers: Sequence[int],
        engine: str = REFERENCE,
        cancellation: Cancellation | None = None,
        grace_s: float = math.inf,
    ) -> list[T]:
        """What these nodes say that answer and can run the engine, all asked at once.

        Raises:
            FrostlineError: No node answers: the refusal of one node, or else why one cannot be reached.
        """
        found: list[T] = []
        errors: dict[int, FrostlineError] = {}
        for number, outcome in self._outcomes(call, numbers, grace_s):
            if isinstance(outcome, EngineNotReady):
                self._cannot(number, engine, outcome)
            elif isinstance(outcome, FrostlineError):
                errors[number] = outcome
            else:
                found.append(outcome)
        _check(cancellation)
        if found or not errors:
            for number, error in errors.items():
                self.note_failure(number, error)
            return found
        for number, error in errors.items():
            if isinstance(error, Unavailable):
                self.note_failure(number, error)
        raise self._verdict(errors)

    def _first(self, call: Callable[[int, Transport, Cancellation], T], cancellation: Cancellation) -> T:
        """What the first node says that answers; the next is asked where one fails, and beside one that lets wait."""
        errors: dict[int, FrostlineError] = {}
        all_said: dict[int, FrostlineError] = {}
        with self._lock:
            numbers = self._turns.order(self._clock())
        others = Cancellation()
        with cancellation.ends(others.cancel):
            try:
                for number, outcome in self._by_turns(lambda number, node: call(number, node, others), numbers):
                    if not isinstance(outcome, FrostlineError):
                        for refusing, error in errors.items():
                            self.note_failure(refusing, error)
                        return outcome
                    others.check()
                    if isinstance(outcome, Unavailable):
                        self.note_failure(number, outcome)
                    else:
                        errors[number] = outcome
                    all_said[number] = outcome
            finally:
                others.cancel()
        raise self._verdict(all_said)

    def _verdict(self, errors: Mapping[int, FrostlineError]) -> FrostlineError:
        """Which failure to tell: a refusal, which waiting does not mend, or that of the full node that is back first.

        A refusal says what each node said.
        """
        refusal = next((error for error in errors.values() if not isinstance(error, Unavailable)), None)
        if refusal is None:
            full = [error for error in errors.values() if isinstance(error, Overloaded)]
            return min(full, key=lambda error: error.retry_after_s, default=[*errors.values()][-1])
        each = [
            f"{self._names[number]} {'cannot be reached' if isinstance(error, Unavailable) else 'refuses'}: {error}"
            for number, error in errors.items()
        ]
        are_all = not any(isinstance(error, Unavailable) for error in errors.values())
        if len(each) > 1:
            refusal.args = (f"{f'all {len(each)} nodes refuse: ' if are_all else ''}{'; '.join(each)}",)
        return refusal

    def _by_turns(
        self, call: Callable[[int, Transport], T], numbers: Sequence[int]
    ) -> Iterator[tuple[int, T | FrostlineError]]:
        """What these nodes say, as it comes; each is asked once the one before has said something, or lets wait."""
        told, left, pending = SimpleQueue[tuple[int, T | FrostlineError | BaseException]](), deque(numbers), 0
        while left or pending:
            if left:
                self._ask_in_threads(call, deque([left.popleft()]), told)
                pending += 1
            try:
                number, outcome = told.get(timeout=_BESIDE_S if left else None)
            except Empty:
                continue
            pending -= 1
            yield number, _outcome_or_raise(outcome)

    def _outcome(self, number: int, call: Callable[[int, Transport], T]) -> T | FrostlineError:
        with self.watch_wait(number):
            try:
                return call(number, self._nodes[number])
            except FrostlineError as error:
                return error

    def _outcomes(
        self,
        call: Callable[[int, Transport], T],
        numbers: Sequence[int],
        grace_s: float,
    ) -> Iterator[tuple[int, T | FrostlineError]]:
        """What these nodes say, as it comes; what comes later than a while after the first success is left."""
        told = SimpleQueue[tuple[int, T | FrostlineError | BaseException]]()
        self._ask_in_threads(call, deque(numbers), told)
        until = math.inf
        for _ in numbers:
            try:
                number, said = told.get(timeout=_seconds_until(until, self._clock()))
            except Empty:
                return
            outcome = _outcome_or_raise(said)
            if not isinstance(outcome, FrostlineError):
                until = min(until, self._clock() + grace_s)
            yield number, outcome

    def _ask_in_threads(
        self,
        call: Callable[[int, Transport], T],
        left: "deque[int]",
        told: "SimpleQueue[tuple[int, T | FrostlineError | BaseException]]",
    ) -> None:
        """Ask some nodes at once, of which each is told of as it answers."""

        def ask() -> None:
            while left:
                try:
                    number = left.popleft()
                except IndexError:  # another thread has it
                    return
                try:
                    told.put((number, self._outcome(number, call)))
                except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                    told.put((number, error))

        # A daemon: a node that hangs keeps its thread until somebody breaks that off.
        for _ in range(min(len(left), _AT_ONCE)):
            threading.Thread(target=ask, name="frostline-nodes", daemon=True).start()


def _outcome_or_raise(said: T | FrostlineError | BaseException) -> T | FrostlineError:
    """What a node said; what is no word of a node's is raised here."""
    if isinstance(said, BaseException) and not isinstance(said, FrostlineError):
        raise said
    return said


def _seconds_until(until: float, now: float) -> float | None:
    return None if until == math.inf else max(0.0, until - now)


def _check(cancellation: Cancellation | None) -> None:
    """A node whose answer nobody wants any more has not failed, and no other is asked for it."""
    if cancellation is not None:
        cancellation.check()


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
        self.break_off = spread.break_off
        self.close = spread.close

    def features(self, request: FeatureRequest) -> BalancedResponse:
        """See ``Transport``."""
        return self._spread.features(request, self._first)
