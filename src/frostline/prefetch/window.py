"""Decides what to ask for now and what may be handed out next: strict order, bounded bytes, bounded retries.

A state machine over values. It is told the time, what arrived and what failed; it answers with what to ask
for. It is not safe for several threads: its driver holds a lock.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from frostline.config import LoaderSettings
from frostline.core import FeatureBatch
from frostline.errors import NodeUnreachable, Overloaded, Refused, StoreUnavailable, Unavailable
from frostline.events import RequestRetried
from frostline.prefetch.stretches import Ask, Delivery, Stretch

__all__ = ("Window", "WindowStatistics")

# A start of two keeps one answer on the way while another is read; the rest is earned by answers.
_FIRST_REQUESTS = 2
# A node that restarts is back within seconds: the first retry costs little, and later ones stay within one step.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatistics:
    """Where the window stands.

    Attributes:
        requests_in_flight: under way now.
        requests_allowed: most that may be under way now; low for long means that the node keeps failing.
        expected_bytes: asked for and not arrived.
        ready_bytes: arrived and not handed out; always near zero means that the trainer waits for the node.
        rows_handed_out: so far, without skipped ones.
        rows_skipped: so far.
        rows_late: arrived for an attempt that had been given up; not taken.
        retries: requests made again so far.
    """

    requests_in_flight: int
    requests_allowed: int
    expected_bytes: int
    ready_bytes: int
    rows_handed_out: int
    rows_skipped: int
    rows_late: int
    retries: int


class Window:
    """The window for strict order: rows leave in the order of the stretches, each sample exactly once.

    What is asked for or has arrived, and is not yet handed out, stays within ``window_bytes``; a stretch
    larger than that is asked for when nothing else is in the window. The number of requests under way
    starts at two and grows by one with each answer, as TCP's slow start does (RFC 5681, section 3.1), so
    that a node never meets the whole window as a burst; after a failure it starts again from one.

    While a failed stretch waits for its next attempt nothing new is asked for: a node that is down is
    probed, not stormed, and what would arrive could not be handed out before the failed rows anyway.

    Args:
        stretches: what the epoch must ask for, in order; drawn from as room allows.
        settings: ``requests_in_flight``, ``window_bytes`` and ``retry_for_s`` are used.
    """

    def __init__(self, stretches: Iterable[Stretch], settings: LoaderSettings) -> None:
        self._source = iter(stretches)
        self._settings = settings
        self._next = next(self._source, None)
        self._open: deque[_Open] = deque()
        self._waiting: list[_Open] = []
        self._in_flight: dict[int, _Open] = {}
        self._allowed = min(_FIRST_REQUESTS, settings.requests_in_flight)
        self._asks = 0
        self._expected_bytes = 0
        self._ready_bytes = 0
        self._rows_handed_out = 0
        self._rows_skipped = 0
        self._rows_late = 0
        self._retries = 0

    @property
    def is_done(self) -> bool:
        """Every row was handed out or skipped, and no request is under way."""
        return self._next is None and not self._open and not self._in_flight

    def asks(self, now: float) -> tuple[Ask, ...]:
        """What to ask for now: failed stretches whose time has come first, then new ones."""
        found = []
        while len(self._in_flight) < self._allowed:
            chosen = self._due(now) or self._new()
            if chosen is None:
                break
            found.append(self._ask(chosen))
        return tuple(found)

    def next_wakeup(self) -> float | None:
        """When ``asks`` is worth calling again though nothing arrived; None where only an arrival helps."""
        if not self._waiting or len(self._in_flight) >= self._allowed:
            return None
        return min(one.not_before for one in self._waiting)

    def arrived(self, ask: Ask, batch: FeatureBatch) -> None:
        """Take the next rows of an answer. Rows of an attempt that was given up are counted and left.

        Raises:
            Refused: the rows are not the ones that were asked for.
        """
        rows = len(batch) + len(batch.skipped)
        one = self._in_flight.get(ask.number)
        if one is None:
            self._rows_late += rows
            return
        if rows == 0:
            return
        delivery = one.delivery(batch, rows)
        self._expected_bytes -= one.expected_bytes
        one.take(delivery, rows)
        self._expected_bytes += one.expected_bytes
        self._ready_bytes += batch.nbytes

    def finished(self, ask: Ask, now: float) -> RequestRetried | None:
        """The answer ended. One that ended before its last row counts as failed.

        Raises:
            NodeUnreachable: as ``failed`` does.
        """
        one = self._in_flight.get(ask.number)
        if one is None:
            return None
        if one.missing:
            return self.failed(ask, NodeUnreachable("the answer ended before its last row"), now)
        del self._in_flight[ask.number]
        self._allowed = min(self._allowed + 1, self._settings.requests_in_flight)
        return None

    def failed(self, ask: Ask, reason: Unavailable | StoreUnavailable, now: float) -> RequestRetried | None:
        """The request broke. What arrived stays; the rest is asked for again later.

        The delay doubles with each failure in a row, and is at least what an ``Overloaded`` node asked for.

        Returns:
            When it is made again; None where nothing was missing any more, or the attempt had been given up.

        Raises:
            NodeUnreachable: the stretch's samples have been failing for ``retry_for_s``, or would be before
                the node wants to be asked again.
            StoreUnavailable: the same, where it is the store that does not answer.
        """
        one = self._in_flight.pop(ask.number, None)
        if one is None:
            return None
        self._allowed = 1
        if not one.missing:
            return None
        one.failing_since = now if one.failing_since is None else one.failing_since
        one.failures += 1
        delay_s = self._delay_s(one, reason, now)
        one.not_before = now + delay_s
        self._waiting.append(one)
        self._retries += 1
        return RequestRetried(samples=one.missing, attempt=one.failures + 1, delay_s=delay_s, reason=str(reason))

    def take(self) -> Delivery | None:
        """The next rows in order, None where they have not arrived. Their bytes leave the window."""
        while self._open:
            first = self._open[0]
            if first.ready:
                return self._hand_out(first.ready.popleft())
            if first.missing:
                return None
            self._open.popleft()
        return None

    def statistics(self) -> WindowStatistics:
        """Where the window stands now."""
        return WindowStatistics(
            requests_in_flight=len(self._in_flight),
            requests_allowed=self._allowed,
            expected_bytes=self._expected_bytes,
            ready_bytes=self._ready_bytes,
            rows_handed_out=self._rows_handed_out,
            rows_skipped=self._rows_skipped,
            rows_late=self._rows_late,
            retries=self._retries,
        )

    def _due(self, now: float) -> "_Open | None":
        due = [one for one in self._waiting if one.not_before <= now]
        if not due:
            return None
        first = min(due, key=lambda one: one.place)
        self._waiting.remove(first)
        return first

    def _new(self) -> "_Open | None":
        stretch = self._next
        if stretch is None or self._waiting:
            return None
        held = self._expected_bytes + self._ready_bytes
        if held and held + stretch.expected_bytes > self._settings.window_bytes:
            return None
        self._next = next(self._source, None)
        one = _Open(stretch=stretch, place=int(stretch.positions[0]))
        self._open.append(one)
        self._expected_bytes += one.expected_bytes
        return one

    def _ask(self, one: "_Open") -> Ask:
        self._asks += 1
        self._in_flight[self._asks] = one
        missing = np.arange(one.rows_arrived, len(one.stretch))
        return Ask(
            number=self._asks,
            attempt=one.failures + 1,
            samples=one.stretch.samples.take(missing),
            route=one.stretch.route,
        )

    def _delay_s(self, one: "_Open", reason: Unavailable | StoreUnavailable, now: float) -> float:
        """Seconds until the next attempt, the last of them when ``retry_for_s`` ends."""
        assert one.failing_since is not None
        left_s = one.failing_since + self._settings.retry_for_s - now
        asked_s = reason.retry_after_s if isinstance(reason, Overloaded) else 0.0
        if left_s <= 0 or asked_s > left_s:
            raise self._surrender(one, reason, now) from reason
        # The exponent is bounded so that a long outage does not overflow.
        backoff_s = min(_FIRST_DELAY_S * 2.0 ** min(one.failures - 1, 16), _LONGEST_DELAY_S)
        return max(min(backoff_s, left_s), asked_s)

    def _surrender(
        self, one: "_Open", reason: Unavailable | StoreUnavailable, now: float
    ) -> NodeUnreachable | StoreUnavailable:
        assert one.failing_since is not None
        store = isinstance(reason, StoreUnavailable)
        sentence = (
            f"the {'store' if store else 'node'} did not give {one.missing} samples in {one.failures} attempts "
            f"over {now - one.failing_since:.0f} s: {reason}; bring it back, or raise retry_for_s "
            f"(now {self._settings.retry_for_s:g} s)"
        )
        return StoreUnavailable(sentence) if store else NodeUnreachable(sentence)

    def _hand_out(self, delivery: Delivery) -> Delivery:
        self._ready_bytes -= delivery.batch.nbytes
        self._rows_handed_out += len(delivery.batch)
        self._rows_skipped += len(delivery.batch.skipped)
        return delivery


@dataclass(slots=True, kw_only=True, eq=False)
class _Open:
    """A stretch that was asked for and has not left the window whole."""

    stretch: Stretch
    place: int
    rows_arrived: int = 0
    bytes_arrived: int = 0
    ready: deque[Delivery] = field(default_factory=deque)
    failures: int = 0
    failing_since: float | None = None
    not_before: float = 0.0

    @property
    def missing(self) -> int:
        return len(self.stretch) - self.rows_arrived

    @property
    def expected_bytes(self) -> int:
        return max(0, self.stretch.expected_bytes - self.bytes_arrived) if self.missing else 0

    def delivery(self, batch: FeatureBatch, rows: int) -> Delivery:
        """Place the next ``rows`` rows; the order is the request's, so their place is where the last ones ended."""
        span = slice(self.rows_arrived, self.rows_arrived + rows)
        expected = self.stretch.samples.ids[span]
        positions = self.stretch.positions[span]
        kept = ~np.isin(expected, np.array([one.id for one in batch.skipped], np.int64))
        if len(expected) != rows or not np.array_equal(expected[kept], batch.ids):
            raise Refused(
                f"the node answered with other samples than were asked for, near sample {self._near(batch)}; "
                "is it of the same version?"
            )
        return Delivery(positions=positions[kept], stop=int(positions[-1]) + 1, batch=batch)

    def take(self, delivery: Delivery, rows: int) -> None:
        """Keep the rows until they are handed out. An answer that moves on has stopped failing."""
        self.ready.append(delivery)
        self.rows_arrived += rows
        self.bytes_arrived += delivery.batch.nbytes
        self.failures = 0
        self.failing_since = None

    @staticmethod
    def _near(batch: FeatureBatch) -> int:
        return int(batch.ids[0]) if len(batch) else batch.skipped[0].id
