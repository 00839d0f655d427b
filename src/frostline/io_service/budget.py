"""Decides which request may be made now, so that jobs share the bytes under way fairly. Pure."""

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ("InFlightBudget", "JobBytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBytes:
    """What a job has under way.

    Attributes:
        expected_bytes: bytes still to come for requests that were let go ahead.
        lent_bytes: in blocks that it has and has not given back.
        waiting: requests that wait for room.
    """

    expected_bytes: int
    lent_bytes: int
    waiting: int


@dataclass(slots=True, kw_only=True)
class _Ticket:
    job: str
    expected_bytes: int
    is_granted: bool = False


class InFlightBudget:
    """Bytes under way: those that were asked for and have not come, and those that a job was lent. Not for threads.

    The next request is the oldest of the job with the fewest bytes, and goes ahead where there is room for it. So a job
    alone has all of it, several that want more than there is come to have the same, and whoever wants less has what it
    wants: shares are max-min fair. A large request at the front is not passed by smaller ones of other jobs.

    A job with no request under way may always make one, whatever it was lent: it may hold rows that it can use only
    once that one has come. So the bound is ``total_bytes`` and one request of each job.

    Args:
        total_bytes: the bound.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._max_requests = math.inf
        self._tickets: dict[int, _Ticket] = {}
        self._next = 0
        self._waiting: defaultdict[str, deque[int]] = defaultdict(deque)
        self._under_way: defaultdict[str, int] = defaultdict(int)
        self._expected: defaultdict[str, int] = defaultdict(int)
        self._lent: defaultdict[str, int] = defaultdict(int)
        self.peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Under way, all jobs together."""
        return sum(self._expected.values()) + sum(self._lent.values())

    def bound(self, total_bytes: int, max_requests: float) -> None:
        """Let no more bytes and requests be under way from now on, beside one request of each job."""
        self._total_bytes, self._max_requests = total_bytes, max_requests

    def ask(self, job: str, nbytes: int) -> int:
        """A job wants to make a request; ``granted`` says when it may, and ``end`` follows in any case."""
        self._next += 1
        self._tickets[self._next] = _Ticket(job=job, expected_bytes=nbytes)
        self._waiting[job].append(self._next)
        return self._next

    def granted(self) -> list[int]:
        """The requests that may be made now and could not before."""
        found = list(self._grants())
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return found

    def lend(self, ticket: int, nbytes: int) -> None:
        """A block of so many bytes came of what was expected, and the job has it from now on."""
        one = self._tickets[ticket]
        self._lent[one.job] += nbytes
        self._expect(one, max(0, one.expected_bytes - nbytes))
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give_back(self, job: str, nbytes: int) -> None:
        """A job has done with blocks of so many bytes."""
        self._lent[job] -= nbytes
        assert self._lent[job] >= 0, f"{job!r} was not lent so much"
        self._tidy(job)

    def end(self, ticket: int) -> None:
        """A request is over, or is not wanted any more."""
        one = self._tickets.pop(ticket)
        if one.is_granted:
            self._expect(one, 0)
            self._under_way[one.job] -= 1
        else:
            self._waiting[one.job].remove(ticket)
        self._tidy(one.job)

    def jobs(self) -> dict[str, JobBytes]:
        """What each job has under way; jobs with nothing are not named."""
        return {
            job: JobBytes(
                expected_bytes=self._expected.get(job, 0),
                lent_bytes=self._lent.get(job, 0),
                waiting=len(self._waiting.get(job, ())),
            )
            for job in {**self._expected, **self._lent, **self._waiting}
        }

    def _grants(self) -> Iterator[int]:
        for job in [job for job, waiting in self._waiting.items() if waiting and not self._under_way[job]]:
            yield self._grant(job)
        while hungry := [job for job, waiting in self._waiting.items() if waiting]:
            job = min(hungry, key=self._used)
            wanted = self._tickets[self._waiting[job][0]].expected_bytes
            is_many = sum(self._under_way.values()) >= self._max_requests
            if is_many or self.used_bytes + wanted > self._total_bytes:
                return
            yield self._grant(job)

    def _grant(self, job: str) -> int:
        ticket = self._waiting[job].popleft()
        one = self._tickets[ticket]
        one.is_granted = True
        self._under_way[job] += 1
        self._expected[job] += one.expected_bytes
        return ticket

    def _used(self, job: str) -> int:
        return self._expected.get(job, 0) + self._lent.get(job, 0)

    def _expect(self, one: _Ticket, nbytes: int) -> None:
        self._expected[one.job] += nbytes - one.expected_bytes
        one.expected_bytes = nbytes

    def _tidy(self, job: str) -> None:
        """Forget a job that has nothing: there may be many in the life of a service."""
        if self._used(job) or self._waiting.get(job) or self._under_way.get(job):
            return
        for table in (self._waiting, self._under_way, self._expected, self._lent):
            table.pop(job, None)
