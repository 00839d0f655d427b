"""What is under way in the window: which rows arrived, which attempt brings the rest, and how long to back off."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Samples
from frostline.errors import NodeUnreachable, Overloaded, Refused, StoreUnavailable, Unavailable
from frostline.prefetch.requests import PlannedRequest

__all__ = ("Arrival", "Failing", "InFlight", "delay_s")


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
        attempts: by the number of each attempt under way, the row that it brings next.
        ready: arrived and not handed out, in order.
        rows_arrived: rows that arrived; they are the first ones, whichever attempt brought them.
        rows_out: rows that were handed out.
        bytes_arrived: bytes of payload that arrived.
        failures: attempts that failed since rows arrived.
        failing_since: when the first of those failed; None where none did.
        not_before: when the next attempt may be made.
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

    def arrived(self, number: int, batch: FeatureBatch) -> int:
        """Take rows that an attempt brought; those that another attempt brought before are left.

        Returns:
            How many were left.

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
        samples: how many are missing; 0 where something else was asked for.
        failures: attempts that failed in a row, the last one counted.
        since: when the first of these failed, in seconds.
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
        now: in seconds.
        retry_for_s: how long to try.
        jitter: from 0, for none, to 1.

    Raises:
        NodeUnreachable: it has been failing for ``retry_for_s``, or would be before the node wants to be
            asked again.
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
