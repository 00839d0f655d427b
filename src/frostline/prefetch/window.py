"""Decides what to ask for now and what may be handed out next: bounded disorder, bounded bytes, bounded retries.

A state machine over values. It is told the time, what arrived and what failed; it answers with what to ask for. It is
not safe for several threads: its driver holds a lock.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Route, Samples
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable, Overloaded, Refused, StoreUnavailable, Unavailable
from frostline.core.events import RequestRetried
from frostline.core.request_timing import HedgeTimer
from frostline.prefetch.requests import Ask, Delivery, NextRequest, PlannedRequest, RequestSource

__all__ = (
    "Arrival",
    "Failing",
    "InFlight",
    "RampLengths",
    "RampUp",
    "Window",
    "WindowStatistics",
    "delay_s",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """Rows that arrived together and are handed out together.

    Attributes:
        start: the first row of the request among them, skipped ones counted.
        stop: the row after the last one.
        batch: the rows.
    """

    start: int
    stop: int
    batch: FeatureBatch


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """A request that was asked for and has not left the window whole.

    Attributes:
        request: request that was asked for.
        attempts: the row, by the number of each attempt under way, that it brings next.
        ready: the rows that arrived and not handed out, in order.
        rows_arrived: rows that arrived; they are the first ones, whichever attempt brought them.
        rows_out: rows that were handed out.
        bytes_arrived: bytes of payload that arrived.
        failures: attempts that failed since rows arrived.
        failing_since: the time when the first of those failed; None where none did.
        not_before: the time when the next attempt may be made.
    """

    request: PlannedRequest
    attempts: dict[int, int] = field(default_factory=dict)
    ready: deque[Arrival] = field(default_factory=deque)
    rows_arrived: int = 0
    rows_out: int = 0
    bytes_arrived: int = 0
    failures: int = 0
    failing_since: float | None = None
    not_before: float = 0.0

    @property
    def missing(self) -> int:
        """Rows that have not arrived."""
        return len(self.request) - self.rows_arrived

    @property
    def expected_bytes(self) -> int:
        """Payload that is still to come."""
        return max(0, self.request.expected_bytes - self.bytes_arrived) if self.missing else 0

    @property
    def is_out(self) -> bool:
        """Whether all its rows were handed out or skipped."""
        return self.rows_out == len(self.request)

    def place(self, row: int) -> int:
        """The place in the epoch of a row."""
        return int(self.request.positions[row])

    def positions(self, arrival: Arrival) -> npt.NDArray[np.int64]:
        """The places in the epoch of the rows of an arrival, without those that were skipped."""
        places = self.request.positions[arrival.start : arrival.stop]
        if not arrival.batch.skipped:
            return places
        ids = self.request.samples.ids[arrival.start : arrival.stop]
        return places[~np.isin(ids, [skipped.id for skipped in arrival.batch.skipped])]

    def begin(self, number: int) -> Samples:
        """An attempt at what is missing begins; what it asks for."""
        self.attempts[number] = self.rows_arrived
        return self.request.samples.take(np.arange(self.rows_arrived, len(self.request)))

    def take_rows(self, number: int, batch: FeatureBatch) -> int:
        """Take rows that an attempt brought; those that another attempt brought before are left.

        Returns:
            Number of rows that were new.

        Raises:
            Refused: the answer has other rows than were asked for.
        """
        start = self.attempts[number]
        stop = start + len(batch) + len(batch.skipped)
        self._check(start, stop, batch)
        self.attempts[number] = stop
        known = min(self.rows_arrived, stop) - start
        if stop > self.rows_arrived:
            self._take(start + known, stop, batch if known == 0 else self._without(start, known, batch))
        return known

    def hand_out(self) -> Arrival:
        """The next rows that arrived leave."""
        arrival = self.ready.popleft()
        self.rows_out = arrival.stop
        return arrival

    def _take(self, start: int, stop: int, batch: FeatureBatch) -> None:
        """Keep the rows until they are handed out. What moves on has stopped failing."""
        self.ready.append(Arrival(start=start, stop=stop, batch=batch))
        self.rows_arrived = stop
        self.bytes_arrived += batch.nbytes
        self.failures = 0
        self.failing_since = None

    def _check(self, start: int, stop: int, batch: FeatureBatch) -> None:
        """The order is the request's, so a row's place is where the attempt's last ones ended."""
        expected = self.request.samples.ids[start:stop]
        if batch.skipped:
            expected = expected[~np.isin(expected, np.array([skipped.id for skipped in batch.skipped], np.int64))]
        if stop > len(self.request) or not np.array_equal(expected, batch.ids):
            near = int(batch.ids[0]) if len(batch) else batch.skipped[0].id
            raise Refused(
                f"the node answered with other samples than were asked for, near sample {near}; "
                "is it of the same version?"
            )

    def _without(self, start: int, known: int, batch: FeatureBatch) -> FeatureBatch:
        """The batch without its first ``known`` rows, skipped ones counted."""
        skipped = int(
            np.isin(self.request.samples.ids[start : start + known], [skipped.id for skipped in batch.skipped]).sum()
        )
        first = known - skipped
        return replace(
            batch,
            ids=batch.ids[first:],
            tensors=tuple(tensor[first:] for tensor in batch.tensors),
            encoded=batch.encoded[first:],
            skipped=batch.skipped[skipped:],
        )


# A node that restarts is back within seconds: the first retry costs little, and later ones stay within one step.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """What was asked for in vain.

    Attributes:
        samples: number of samples that are missing; 0 where something else was asked for.
        failures: attempts that failed in a row, the last one counted.
        since: the time when the first of these failed, in seconds.
    """

    samples: int
    failures: int
    since: float


def delay_s(
    failing: Failing, reason: Unavailable | StoreUnavailable, now: float, retry_for_s: float, jitter: float = 0.0
) -> float:
    """Seconds until the next attempt, the last of them when ``retry_for_s`` ends.

    It doubles with each failure in a row, and is at least what an ``Overloaded`` node asked for. Jitter shortens it by
    up to a half, and makes it up to a quarter longer than the node asked for: clients that failed at one time would
    else come back at one time ("equal jitter": Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015).

    Args:
        failing: requests that failed.
        reason: reason of the last failure.
        now: the time in seconds.
        retry_for_s: the time to try.
        jitter: random part of each wait, from 0, for none, to 1.

    Raises:
        NodeUnreachable: The request has failed for ``retry_for_s`` seconds, or the node asks to wait for longer than
            that.
        StoreUnavailable: the same, where it is the store that does not answer.
    """
    left_s = failing.since + retry_for_s - now
    asked_s = reason.retry_after_s if isinstance(reason, Overloaded) else 0.0
    if left_s <= 0 or asked_s > left_s:
        raise _surrender(failing, reason, now, retry_for_s) from reason
    # The exponent is bounded so that a long outage does not overflow.
    backoff_s = min(_FIRST_DELAY_S * 2.0 ** min(failing.failures - 1, 16), _LONGEST_DELAY_S)
    asked_s = min(asked_s * (1 + jitter / 4), left_s)
    return max(min(backoff_s * (1 - jitter / 2), left_s), asked_s)


def _surrender(
    failing: Failing, reason: Unavailable | StoreUnavailable, now: float, retry_for_s: float
) -> NodeUnreachable | StoreUnavailable:
    store = isinstance(reason, StoreUnavailable)
    did_not = f"did not give {failing.samples} samples in" if failing.samples else "was full at"
    sentence = (
        f"the {'store' if store else 'node'} {did_not} {failing.failures} attempts "
        f"over {now - failing.since:.0f} s: {reason}; bring it back, or raise retry_for_s (now {retry_for_s:g} s)"
    )
    return StoreUnavailable(sentence) if store else NodeUnreachable(sentence)


# Whole requests with which a ramp begins: one answer is on its way while another is read.
_FIRST_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RampLengths:
    """How long the requests of a beginning are: a round of the shortest, a round of twice as many samples, and so on.

    Attributes:
        first: samples in a request of the first round.
        whole: samples in a request after the last round.
        round_requests: requests in a round.
    """

    first: int
    whole: int
    round_requests: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.whole or self.round_requests < 1:
            raise ValueError(f"requests cannot begin with {self.first} of {self.whole} samples")

    @classmethod
    def of(cls, settings: LoaderSettings) -> Self:
        """Lengths that put as many samples under way as whole requests do, in as many requests as may be at first.

        A window that begins with two requests of 32 samples, and may have eight, begins with eight of 8; then come
        eight of 16: so many samples were under way in each round before, in two requests and in four.
        """
        whole, requests = settings.samples_per_request, settings.first_requests
        first = -(-_FIRST_REQUESTS * whole // requests) if settings.ramp else whole
        return cls(first=min(first, whole), whole=whole, round_requests=requests)

    def at(self, number: int) -> int:
        """Samples in a request, by its number from 0."""
        rounds = min(number // self.round_requests, self.whole.bit_length())
        return min(self.first << rounds, self.whole)


class RampUp:
    """Another source's requests, the first of them short; a ``RequestSource`` for one window, not for several threads.

    A request is answered when its last sample is there. Nothing new goes out before, so that whole ones leave a link
    and a processor without work while the first of them are read; a batch, too, has to wait for more than its samples.

    Args:
        request_source: source that chooses the cut and codec of the next samples.
        lengths: the most samples in each request.
    """

    def __init__(self, request_source: RequestSource, lengths: RampLengths) -> None:
        self._request_source = request_source
        self._lengths = lengths
        self._assigned = 0

    def next_request(self, left: int, again: Route | None = None) -> NextRequest:
        """See ``RequestSource``."""
        if again is not None:
            return self._request_source.next_request(left, again)
        maximum = self._lengths.at(self._assigned)
        self._assigned += 1
        # After the beginning the source alone says how many.
        return self._request_source.next_request(left if maximum == self._lengths.whole else min(left, maximum))


_NO_BOUND = 1 << 62
# Whole requests whose samples may be here and wait for this side's processor, beside those under way, and one more for
# each second that it is at the first: a link that idles while a processor has no engine yet lacks their bytes later.
# As long as nobody knows how long a row takes, those under way count too: there may be many seconds of work in them.
_COMPUTING_REQUESTS = 4
# A request that is held is looked at so often: another way may have opened, of which no arrival tells.
_LOOK_S = 0.25
# Nor more seconds of its work than this, with those under way: they can find no other way, such as a node that becomes
# ready. Where nothing waits here the link is what is slow, and is kept busy; as it is where there is no other way.
_COMPUTING_S = 3.0
# The newest answers, which say how long a row takes. The slowest of them is left out: a first run makes kernels ready,
# and one may have waited until an engine was found.
_TOLD_BY = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatistics:
    """Where the window stands.

    Attributes:
        requests_in_flight: the requests under way now.
        requests_allowed: the most that may be under way now; low for long means that the node keeps failing.
        expected_bytes: the bytes, asked for and not arrived.
        ready_bytes: the bytes, arrived and not handed out, though in a batch perhaps; always near zero means that the
            trainer waits for the node.
        bytes_arrived: the bytes arrived so far, each row's once.
        bytes_handed_out: the bytes handed out so far.
        is_full: bytes, and not the number of requests, keep it from asking; with a trainer that waits it is too small.
        is_ending: True if all that is left was asked for already.
        rows_handed_out: the rows handed out so far, without skipped ones.
        rows_skipped: the rows skipped so far.
        rows_late: the rows that arrived for an attempt that had been given up, or twice; not taken.
        retries: requests made again so far, because they failed.
        hedges: requests made a second time so far, because they were late.
    """

    requests_in_flight: int
    requests_allowed: int
    expected_bytes: int
    ready_bytes: int
    bytes_arrived: int
    bytes_handed_out: int
    is_full: bool
    is_ending: bool
    rows_handed_out: int
    rows_skipped: int
    rows_late: int
    retries: int
    hedges: int


class Window:
    """The window: each sample leaves it exactly once, ``max_reorder`` places before a missing one at most.

    With ``max_reorder=0`` rows leave in the order of the requests. What is asked for or has arrived, and is not yet
    handed out, stays within ``window_bytes``, with what was put into batches that wait (``hold_after``); a request
    larger than that is asked for when nothing else is in the window. With ``ramp`` what is under way starts with the
    samples of two whole requests, in however many, and grows by those of each answer, as TCP's slow start does
    (RFC 5681, section 3.1), so that a node never meets the whole window as a burst; after a failure it starts again
    from one request.

    An answer that is here whole, and whose rows are still computed, is no longer under way: the network goes on with
    others, for as many rows as some whole requests have.

    While a failed request waits for its next attempt nothing new is asked for: a node that is down is probed, not
    stormed. A straggler is asked for a second time (``core.request_timing``), and whichever answer brings a row first
    is taken; the other attempt is given up when nothing of the request is missing.

    Args:
        requests: requests that the epoch must make, in order; drawn as the window allows. An iterator that has none
            now may have some later.
        settings: ``max_reorder``, ``hedge_quantile``, ``retry_for_s`` and ``ramp`` are used, and the bounds
            hold until ``bound`` gives others.
        jitter: random part of each wait, from 0 to below 1, so that many windows do not ask a node again at once.
        nodes: nodes that the requests name; the ramp begins with two requests for each.
        has_choice: function that says whether what is not asked for yet may take another way than what is.
        deal_again: function that gives a request which nobody made the way that is best now.
    """

    def __init__(
        self,
        requests: Iterable[PlannedRequest],
        settings: LoaderSettings,
        *,
        jitter: Callable[[], float] = float,
        nodes: int = 1,
        has_choice: Callable[[], bool] = lambda: True,
        deal_again: Callable[[PlannedRequest], PlannedRequest] = lambda request: request,
    ) -> None:
        self._jitter = jitter
        self._has_choice = has_choice
        self._deal_again = deal_again
        self._source = iter(requests)
        self._settings = settings
        self._max_reorder = _NO_BOUND if settings.max_reorder is None else settings.max_reorder
        self._hedge_timer = HedgeTimer(settings.hedge_quantile)
        self._next = next(self._source, None)
        self._open: deque[InFlight] = deque()
        self._waiting: list[InFlight] = []
        self._flights: dict[int, _Flight] = {}
        self._given_up: list[int] = []
        self._max_requests = settings.first_requests
        self._max_bytes = settings.window_bytes
        self._rows_allowed = self._max_rows
        if settings.ramp:
            self._rows_allowed = min(_FIRST_REQUESTS * nodes, settings.last_requests) * settings.samples_per_request
        self._rows_under_way = 0
        self._computing: set[int] = set()
        self._rows_computing: Counter[Route] = Counter()
        self._runs: dict[Route, deque[tuple[float, int]]] = {}  # seconds of this side's processor, and rows
        self._computed_at: dict[Route, float] = {}  # and since when it is at the next one
        self._held_at = -math.inf  # when a request was looked at last that had to wait
        self._asks = 0
        self._stop = 0  # the place after the last row of the requests that left whole
        self._expected_bytes = 0
        self._ready_bytes = 0
        self._bytes_taken = 0
        self._held_after: int | None = None
        self._rows_handed_out = 0
        self._rows_skipped = 0
        self._rows_late = 0
        self._retries = 0
        self._hedges = 0

    @property
    def is_done(self) -> bool:
        """Every row was handed out or skipped, and no request is under way."""
        return self._next is None and not self._open and not self._flights

    @property
    def bytes_taken(self) -> int:
        """So far, by ``take``."""
        return self._bytes_taken

    @property
    def _held_bytes(self) -> int:
        """Taken, and not handed out."""
        return 0 if self._held_after is None else max(0, self._bytes_taken - self._held_after)

    @property
    def _max_rows(self) -> int:
        """Under way at once, in whole requests."""
        return self._max_requests * self._settings.samples_per_request

    @property
    def _may_ask(self) -> bool:
        """One more request may be under way; the last of them may bring more rows than its part."""
        requests = len(self._flights) - len(self._computing)
        return requests < self._max_requests and self._rows_under_way < self._rows_allowed

    @property
    def _requests_allowed(self) -> int:
        return -(-self._rows_allowed // self._settings.samples_per_request)

    def bound(self, *, requests: int, window_bytes: int) -> None:
        """Other bounds from now on. What is under way or has arrived stays; with smaller ones nothing new is asked for.

        Args:
            requests: the most under way at once, at least 1.
            window_bytes: the most bytes asked for and not yet handed out; never more than the settings allow.
        """
        assert requests >= 1, "a window without requests would wait for ever"
        self._max_requests, self._max_bytes = requests, min(window_bytes, self._settings.window_bytes)
        self._rows_allowed = min(self._rows_allowed, self._max_rows)

    def hold_after(self, bytes_taken: int | None) -> None:
        """Count what was or will be taken after so many bytes as not handed out; None counts nothing so."""
        self._held_after = bytes_taken

    def asks(self, now: float) -> tuple[Ask, ...]:
        """What to ask for now: failed requests whose time has come first, then stragglers, then new ones."""
        found = []
        while self._may_ask:
            chosen = self._due(now) or self._straggling(now) or self._new(now)
            if chosen is None:
                break
            found.append(self._ask(chosen, now))
        return tuple(found)

    def next_wakeup(self) -> float | None:
        """When ``asks`` is worth calling again though nothing arrived; None where only an arrival helps."""
        if not self._may_ask:
            return None
        times = [entry.not_before for entry in self._waiting]
        if not self._waiting:
            if self._next is not None and self._fits(self._next):
                at = self._free_at(self._next)
                if at > -math.inf:
                    times.append(at if math.isfinite(at) else self._held_at + _LOOK_S)
            awaited = (flight for number, flight in self._flights.items() if number not in self._computing)
            times += [late for flight in awaited if (late := self._late_at(flight)) is not None]
        return min(times, default=None)

    def take_abandoned(self) -> tuple[int, ...]:
        """Numbers of the attempts that nobody waits for any more, named once: another attempt brought their rows."""
        numbers, self._given_up = tuple(self._given_up), []
        return numbers

    def take_rows(self, ask: Ask, batch: FeatureBatch) -> None:
        """Take the next rows of an answer. Rows of an attempt that was given up are counted and left.

        Raises:
            Refused: the rows are not the ones that were asked for.
        """
        rows = len(batch) + len(batch.skipped)
        flight = self._flights.get(ask.number)
        if flight is None:
            self._rows_late += rows
            return
        if rows == 0:
            return
        one = flight.opened
        before = one.expected_bytes, one.bytes_arrived
        self._rows_late += one.take_rows(ask.number, batch)
        self._expected_bytes += one.expected_bytes - before[0]
        self._ready_bytes += one.bytes_arrived - before[1]

    def mark_received(self, ask: Ask, now: float) -> None:
        """The answer is here whole; its rows arrive when they were computed."""
        flight = self._flights.get(ask.number)
        if flight is not None and ask.number not in self._computing:
            if not self._rows_computing[ask.route]:
                self._computed_at[ask.route] = now
            self._computing.add(ask.number)
            self._rows_computing[ask.route] += flight.rows
            self._rows_under_way -= flight.rows

    def finish(self, ask: Ask, now: float) -> RequestRetried | None:
        """The answer ended. One that ended before its last row counts as failed.

        Raises:
            NodeUnreachable: The request has failed for ``retry_for_s`` seconds, or the node asks to wait for longer
                than that.
        """
        flight = self._flights.get(ask.number)
        if flight is None:
            return None
        if flight.opened.missing:
            return self.fail(ask, NodeUnreachable("the answer ended before its last row"), now)
        self._rows_allowed = min(self._rows_allowed + flight.rows, self._max_rows)
        if ask.number in self._computing:
            self._learn_pace(ask.route, flight.rows, now)
        self._end(ask.number)
        self._hedge_timer.record(ask.route, flight.rows, now - flight.since)
        for number in tuple(flight.opened.attempts):
            self._end(number)
            self._given_up.append(number)
        return None

    def fail(self, ask: Ask, reason: Unavailable | StoreUnavailable, now: float) -> RequestRetried | None:
        """The request broke. What arrived stays; the rest is asked for again later.

        Returns:
            Time of the next attempt; None if no row is missing, another attempt is under way, or this one was given up.

        Raises:
            NodeUnreachable: the request's samples have been failing for ``retry_for_s``, or would be before
                the node wants to be asked again.
            StoreUnavailable: the same, where it is the store that does not answer.
        """
        flight = self._end(ask.number)
        if flight is None:
            return None
        self._rows_allowed = 1
        one = flight.opened
        if not one.missing or one.attempts:
            return None
        one.failing_since = now if one.failing_since is None else one.failing_since
        one.failures += 1
        failing = Failing(samples=one.missing, failures=one.failures, since=one.failing_since)
        wait_s = delay_s(failing, reason, now, self._settings.retry_for_s, self._jitter())
        one.not_before = now + wait_s
        self._waiting.append(one)
        self._retries += 1
        return RequestRetried(samples=one.missing, attempt=one.failures + 1, delay_s=wait_s, reason=str(reason))

    def take(self) -> Delivery | None:
        """The next rows that may be handed out, None where they have not arrived. Unless held they leave the window."""
        first = self._first_place()
        for number, entry in enumerate(self._open):
            if entry.request.epoch != self._open[0].request.epoch:  # the fence
                break
            if entry.ready and (number == 0 or entry.place(entry.ready[0].stop - 1) - first <= self._max_reorder):
                return self._hand_out(entry)
            if not self._max_reorder or entry.place(0) - first > self._max_reorder:
                break
        return None

    def statistics(self) -> WindowStatistics:
        """Where the window stands now."""
        return WindowStatistics(
            requests_in_flight=len(self._flights) - len(self._computing),
            requests_allowed=self._requests_allowed,
            expected_bytes=self._expected_bytes,
            ready_bytes=self._ready_bytes + self._held_bytes,
            bytes_arrived=self._bytes_taken + self._ready_bytes,
            bytes_handed_out=self._bytes_taken - self._held_bytes,
            is_full=self._next is not None and not self._fits(self._next) and self._may_ask,
            is_ending=self._next is None,
            rows_handed_out=self._rows_handed_out,
            rows_skipped=self._rows_skipped,
            rows_late=self._rows_late,
            retries=self._retries,
            hedges=self._hedges,
        )

    def _due(self, now: float) -> InFlight | None:
        due = [entry for entry in self._waiting if entry.not_before <= now]
        if not due:
            return None
        first = min(due, key=lambda item: item.place(0))
        self._waiting.remove(first)
        return first

    def _straggling(self, now: float) -> InFlight | None:
        """The earliest request whose only attempt is late."""
        if self._waiting:  # a node that fails is not asked for more
            return None
        awaited = (flight for number, flight in self._flights.items() if number not in self._computing)
        late = [flight for flight in awaited if (at := self._late_at(flight)) is not None and at <= now]
        if not late:
            return None
        first = min(late, key=lambda flight: flight.opened.place(0)).opened
        self._hedge_timer.count_hedge(first.request.route)
        self._hedges += 1
        return first

    def _late_at(self, flight: "_Flight") -> float | None:
        """When a request becomes a straggler; None where it is not to be made twice."""
        late_after_s = self._hedge_timer.late_after_s(flight.opened.request.route, flight.rows)
        is_alone = len(flight.opened.attempts) == 1 and flight.opened.missing
        return flight.since + late_after_s if is_alone and late_after_s is not None else None

    def _new(self, now: float) -> InFlight | None:
        if self._waiting:
            return None
        request = self._next = self._next or next(self._source, None)
        if request is None:
            return None
        if now < self._free_at(request):  # another way may have opened, or may be done first by now
            self._held_at = now
            request = self._next = self._deal_again(request)
        if not self._fits(request) or now < self._free_at(request):
            return None
        self._next = next(self._source, None)
        one = InFlight(request=request)
        self._open.append(one)
        self._expected_bytes += one.expected_bytes
        return one

    def _fits(self, request: PlannedRequest) -> bool:
        held = self._expected_bytes + self._ready_bytes + self._held_bytes
        return not held or held + request.expected_bytes <= self._max_bytes

    def _free_at(self, request: PlannedRequest) -> float:
        """When a request may go; infinity where so many rows of its way wait here that it may find another way."""
        route = request.route
        told, computing = self._row_s(route), self._rows_computing[route]
        row_s = request.row_s if told is None else told
        if not (computing or row_s) or not self._has_choice():
            return -math.inf
        asked = sum(flight.rows for flight in self._flights.values() if flight.opened.request.route == route)
        if row_s is not None and asked and asked * row_s >= _COMPUTING_S:
            return math.inf
        if not computing:
            return -math.inf
        waiting = asked if told is None else computing
        more = waiting // self._settings.samples_per_request - _COMPUTING_REQUESTS + 1
        return self._computed_at[route] + more if more > 0 else -math.inf

    def _row_s(self, route: Route) -> float | None:
        """Seconds that this side's processor takes for a row of a way; None where too little is known."""
        runs = self._runs.get(route, ())
        if len(runs) < 2:
            return None
        slowest = max(runs)
        return (sum(took_s for took_s, _ in runs) - slowest[0]) / (sum(rows for _, rows in runs) - slowest[1])

    def _learn_pace(self, route: Route, rows: int, now: float) -> None:
        runs = self._runs.setdefault(route, deque(maxlen=_TOLD_BY))
        runs.append((now - self._computed_at[route], max(1, rows)))
        self._computed_at[route] = now

    def _ask(self, flight: InFlight, now: float) -> Ask:
        self._asks += 1
        under_way = len(flight.attempts)
        attempt, samples = flight.failures + under_way + 1, flight.begin(self._asks)
        self._flights[self._asks] = _Flight(opened=flight, since=now, rows=len(samples))
        self._rows_under_way += len(samples)
        return Ask(
            number=self._asks,
            attempt=attempt,
            samples=samples,
            route=flight.request.route,
            is_hedge=under_way > 0,
            epoch=flight.request.epoch,
            nodes=flight.request.nodes if attempt % 2 else flight.request.nodes[::-1],
        )

    def _end(self, number: int) -> "_Flight | None":
        flight = self._flights.pop(number, None)
        if flight is not None:
            del flight.opened.attempts[number]
            if number in self._computing:
                self._computing.remove(number)
                self._rows_computing[flight.opened.request.route] -= flight.rows
            else:
                self._rows_under_way -= flight.rows
        return flight

    def _first_place(self) -> int:
        """The earliest place that was drawn and not handed out: by owner, the next request may lie before others."""
        first = self._open[0].place(self._open[0].rows_out) if self._open else self._stop
        return first if self._next is None else min(first, int(self._next.positions[0]))

    def _hand_out(self, flight: InFlight) -> Delivery:
        arrival = flight.hand_out()
        while self._open and self._open[0].is_out:
            self._stop = max(self._stop, self._open.popleft().place(-1) + 1)
        batch = arrival.batch
        self._ready_bytes -= batch.nbytes
        self._bytes_taken += batch.nbytes
        self._rows_handed_out += len(batch)
        self._rows_skipped += len(batch.skipped)
        stop = self._first_place()
        reach = (
            min(stop + self._max_reorder, self._open[-1].place(-1)) + 1 if self._open and self._max_reorder else stop
        )
        return Delivery(positions=flight.positions(arrival), stop=stop, reach=reach, batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flight:
    """An attempt that is under way."""

    opened: InFlight
    since: float
    rows: int
