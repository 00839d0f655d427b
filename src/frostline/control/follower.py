"""Lets the requests of a job, or of an I/O service, go within the share that the control plane gives."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from frostline.control.messages import JobActivity
from frostline.control.reporter import ControlLink, ControlReporter, Measured, ReportedStage
from frostline.control.shares import Amounts, Pace, Used
from frostline.core import FeatureBatch
from frostline.profiles import Profile
from frostline.transport import Cancellation, CountsNodes, NodeUse, Transport, TransportStatistics
from frostline.tuning import Setting
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = (
    "ControlFollower",
    "PacedRows",
    "PacedTransport",
)


# Who is not held back may come to want half as much again before it is asked next.
_AMPLE = 1.5
_NOTHING = Amounts(compute_s_per_s=0.0, bytes_per_s=0.0, requests_per_s=0.0, requests=0.0, memory_bytes=0.0)
# Whoever is idle still wants this much a second, so that it has a part of what nobody asks for.
_IDLE = 1.0


class ControlFollower:
    """Has the requests of one process keep to its share. Safe for threads; it starts with the first request.

    Args:
        link: way to the control plane.
        limit: function that bounds the requests under way and their bytes from now on.
        maximum: bounds of the process itself, which a share never exceeds.
        kind: ``window`` or ``io``.
        beside: stages of the same process, such as its cache.
        counted_elsewhere: True if somebody else reports what is asked for here, such as an I/O service. Then
            memory alone is wanted and kept to, and no byte is counted twice.
        activity: function that describes the work of the process for its job; None reports nothing.
        was_named: True if the user named the control plane, as for ``ControlReporter``.
        clock: seconds of a monotonic clock.

    Attributes:
        share: amounts that it may use now.
        held_s: seconds so far in which the next request waited for its share.
    """

    def __init__(
        self,
        link: ControlLink,
        limit: Callable[[Setting], None],
        maximum: Setting,
        *,
        kind: str = "window",
        beside: Sequence[ReportedStage] = (),
        counted_elsewhere: Callable[[], bool] = lambda: False,
        activity: Callable[[], JobActivity] | None = None,
        was_named: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.job = link.job
        self._limit = limit
        self._counted_elsewhere = counted_elsewhere
        self._is_counted = False
        self._maximum = maximum
        self._clock = clock
        self._lock = threading.Lock()
        # Requests go in the order in which they came, and only the first one is woken.
        self._line: deque[threading.Condition] = deque()
        self._pace = Pace(clock())
        self._is_closed = False
        self.share = Amounts()
        self.held_s = 0.0
        self._has_begun = False
        self._activity = activity
        self._may_hold_back = was_named
        self._reporter = ControlReporter(link, (self, *beside), clock, was_named=was_named)

    @property
    def may_hold_back(self) -> bool:
        """Whether a request may have to wait for its turn: always where somebody named the control plane."""
        return self._may_hold_back

    def begin(self) -> None:
        """See ``ControlReporter.begin``."""
        if not self._has_begun:  # each request asks, and all but the first need no lock for it
            self._reporter.begin()
            self._has_begun = True

    def report(self) -> None:
        """See ``ControlReporter.report``."""
        self._reporter.report()

    def measure(self, *, is_first: bool) -> Measured:
        """What was used since the last report, and is wanted."""
        is_counted = self._counted_elsewhere()
        activity = None if self._activity is None else self._activity()
        with self._lock:
            self._is_counted = is_counted
            used = self._pace.take_usage(self._clock())
            if is_counted:
                memory_bytes = float(self._maximum.window_bytes)
                return Measured(demand=replace(_NOTHING, memory_bytes=memory_bytes))
            return Measured(
                activity=activity,
                demand=self._demand(used, is_first=is_first or used.seconds <= 0),
                used=_rates(used),
                moved_bytes=self._pace.moved_bytes,
            )

    def keep_to(self, share: Amounts) -> None:
        """Let requests go within this share from now on."""
        with self._lock:
            if self._is_counted:
                share = Amounts(memory_bytes=share.memory_bytes)
            self.share = share
            self._may_hold_back |= min(share.requests_per_s, share.bytes_per_s) < math.inf
            self._pace.change(share, self._clock())
            maximum = self._maximum
            requests = int(max(1.0, min(share.requests, maximum.requests)))
            window_bytes = int(max(1.0, min(share.memory_bytes, maximum.window_bytes)))
            self._limit(Setting(requests=requests, window_bytes=window_bytes))
            self._wake_first()

    def ask(self) -> float:
        """See ``Pace.ask``."""
        with self._lock:
            return self._pace.ask(self._clock())

    def count_bytes(self, nbytes: int, paid_bytes: float = 0.0) -> None:
        """See ``Pace.count_bytes``."""
        with self._lock:
            self._pace.count_bytes(nbytes, self._clock(), paid_bytes)

    def end_request(self, nbytes: int, unused_bytes: float) -> None:
        """See ``Pace.end_request``."""
        with self._lock:
            self._pace.end_request(nbytes, unused_bytes, self._clock())
            if unused_bytes:
                self._wake_first()

    def wait(self, is_over: Callable[[], bool]) -> float | None:
        """Wait until a request may go.

        Returns:
            The bytes that it was paid with; None where it may not go, since it is over or the job closed.
        """
        with self._lock:
            paid_bytes = self._pace.expected_bytes
            if not (self._line or self._is_closed or is_over()) and self._pace.ask(self._clock()) <= 0:
                return paid_bytes
            own = threading.Condition(self._lock)
            self._line.append(own)
            try:
                while not (is_over() or self._is_closed):
                    paid_bytes = self._pace.expected_bytes
                    wait_s = self._pace.ask(self._clock()) if self._line[0] is own else math.inf
                    if wait_s <= 0:
                        return paid_bytes
                    self._wait(own, wait_s)
            finally:
                self._line.remove(own)
                self._wake_first()
            return None

    def _wait(self, own: threading.Condition, wait_s: float) -> None:
        """Wait for a place at the head of the line, or there until the share allows it."""
        is_first, since_s = self._line[0] is own, self._clock()
        own.wait(None if wait_s == math.inf else wait_s)
        if is_first:
            self.held_s += self._clock() - since_s

    def wake(self) -> None:
        """Have everybody who waits look whether it is over."""
        with self._lock:
            self._wake_all()

    def pace(self, fetch: Callable[[], Iterator[FeatureBatch]]) -> "PacedRows":
        """A request that goes when it may."""
        self.begin()
        return PacedRows(self, fetch)

    def close(self) -> None:
        """Say that the stage has ended, and stop the thread. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            self._wake_all()
        self._reporter.close()

    def _wake_first(self) -> None:
        if self._line:
            self._line[0].notify()

    def _wake_all(self) -> None:
        for waiting in self._line:
            waiting.notify()

    def _demand(self, used: Used, *, is_first: bool) -> Amounts:
        requests_per_s = bytes_per_s = math.inf
        if not (is_first or used.waited_requests):
            requests_per_s = max(_IDLE, _AMPLE * used.requests / used.seconds)
        if not (is_first or used.waited_bytes):
            bytes_per_s = max(_IDLE, _AMPLE * used.nbytes / used.seconds)
        return Amounts(
            compute_s_per_s=0.0,
            requests_per_s=requests_per_s,
            bytes_per_s=bytes_per_s,
            requests=float(self._maximum.requests),
            memory_bytes=float(self._maximum.window_bytes),
        )


def _rates(used: Used) -> Amounts:
    if used.seconds <= 0:
        return Amounts()
    return Amounts(requests_per_s=used.requests / used.seconds, bytes_per_s=used.nbytes / used.seconds)


class PacedRows:
    """The rows of a request that goes when its job may make it. ``close`` may be called from any thread."""

    def __init__(self, follower: ControlFollower, fetch: Callable[[], Iterator[FeatureBatch]]) -> None:
        self._follower = follower
        self._fetch = fetch
        self._rows: Iterator[FeatureBatch] | None = None
        self._is_over = False
        self._counting = threading.Lock()
        self._paid_bytes = 0.0
        self._came_bytes = 0

    def __iter__(self) -> Iterator[FeatureBatch]:
        return self

    def __next__(self) -> FeatureBatch:
        if self._rows is None:
            paid_bytes = self._follower.wait(lambda: self._is_over)
            if paid_bytes is None:
                raise StopIteration
            self._paid_bytes, self._rows = paid_bytes, self._fetch()
        batch = None
        try:
            batch = next(self._rows)
        finally:
            if batch is None:
                self._end()
        with self._counting:
            paid_bytes = min(self._paid_bytes, float(batch.nbytes))
            self._paid_bytes -= paid_bytes
            self._came_bytes += batch.nbytes
        self._follower.count_bytes(batch.nbytes, paid_bytes)
        return batch

    def close(self) -> None:
        """Give the request up; who waits for its turn goes on at once."""
        self._is_over = True
        if self._rows is None:
            self._follower.wake()
        close = getattr(self._rows, "close", None)  # an iterator need not have one
        if close is not None:
            close()
        self._end()

    def _end(self) -> None:
        with self._counting:  # whoever closes it may be another thread, and bytes are given back once
            came_bytes, unused_bytes = self._came_bytes, self._paid_bytes
            self._came_bytes, self._paid_bytes = 0, 0.0
        if came_bytes or unused_bytes:
            self._follower.end_request(came_bytes, unused_bytes)


class PacedTransport:
    """The same transport, whose requests for rows go when they may. The caller closes what it is given."""

    def __init__(self, transport: Transport, follower: ControlFollower) -> None:
        self._transport = transport
        self._follower = follower

    def health(self) -> Health:
        """See ``Transport.health``."""
        return self._transport.health()

    def put_prefix(self, digest: str, artifact: bytes, before_upload: Callable[[], None] | None = None) -> None:
        """See ``Transport.put_prefix``."""
        self._transport.put_prefix(digest, artifact, before_upload)

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport.profile``; it is not paced, since it is rare and short."""
        return self._transport.profile(wanted, cancellation)

    def features(self, request: FeatureRequest) -> Iterator[FeatureBatch]:
        """See ``Transport.features``; the exchange begins when it may."""
        return self._follower.pace(partial(self._transport.features, request))

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport.node_statistics``."""
        return self._transport.node_statistics()

    def statistics(self) -> TransportStatistics:
        """See ``Transport.statistics``."""
        return self._transport.statistics()

    def uses(self) -> tuple[NodeUse, ...]:
        """See ``CountsNodes``; nothing where it is the way to one node alone."""
        return self._transport.uses() if isinstance(self._transport, CountsNodes) else ()

    def break_off(self) -> None:
        """See ``Transport.break_off``."""
        self._transport.break_off()

    def close(self) -> None:
        """Stop the requests that wait."""
        self._follower.close()
