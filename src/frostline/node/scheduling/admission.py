"""Admits or refuses requests before any work is done for them."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from frostline.batching import readable_bytes
from frostline.errors import OverBudget, Overloaded
from frostline.node.scheduling.memory_pool import Pool, Reservation
from frostline.node.scheduling.tenants import Account

__all__ = ("Admission", "Gate")

# Bytes of Python objects per byte of JSON while it is parsed; the worst case, `{"":0},`, takes 27.
_PARSED = 30
# Bytes that stay per byte of JSON: a name of two letters takes 51 bytes, and four numbers take 32.
_KEPT = 10
# Memory for the part of an answer that is being sent, the request's own objects and its connection.
_REQUEST_BYTES = 1 << 20
_RETRY_AFTER_S = 1.0


class Admission:
    """An admitted request. A context manager.

    Attributes:
        account: account of the tenant that asks.
    """

    def __init__(self, gate: "Gate", memory: Reservation, body_bytes: int, account: Account) -> None:
        self.account = account
        self._gate = gate
        self._memory = memory
        self._body_bytes = body_bytes

    def read(self) -> None:
        """Release the memory that only reading and parsing the body needed."""
        self._memory.shrink(_REQUEST_BYTES + _KEPT * self._body_bytes)

    def close(self) -> None:
        """End the request. Calling it again does nothing."""
        self._memory.release()
        self._gate.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Gate:
    """Counts the requests under way. Safe for threads.

    One slot is reserved for every tenant that has no request under way, so that no tenant can take all of them.

    Args:
        maximum: maximum number of requests under way.
        memory: pool for messages.
        work: pool for work.
        accounts: accounts of all tenants.
    """

    def __init__(self, maximum: int, memory: Pool, work: Pool, accounts: Sequence[Account]) -> None:
        self._max_requests = maximum
        self._memory = memory
        self._work = work
        self._accounts = accounts
        self._lock = threading.Lock()
        self._inside: set[Admission] = set()
        self._is_shut = False

    @property
    def inside(self) -> int:
        """The number of requests under way."""
        return len(self._inside)

    def enter(self, body_bytes: int, account: Account) -> Admission:
        """Admit a request.

        Args:
            body_bytes: length of its JSON; 0 if it comes as a value.
            account: account of the tenant that asks.

        Raises:
            Overloaded: if too many requests are under way, or the tenant has used up a quota.
            OverBudget: if its body is longer than this node can ever read.
        """
        self.check_body(body_bytes)
        admission = self._admission(body_bytes, account)
        if admission is None:
            account.counters.add(refused_busy=1)
            raise Overloaded(
                f"the node is busy with {self.inside} requests: ask again later, or with fewer at once",
                retry_after_s=_RETRY_AFTER_S,
            )
        account.counters.add(requests=1)
        return admission

    def check_body(self, body_bytes: int) -> None:
        """Check that a body of that length could be read.

        Raises:
            OverBudget: if it is too long.
        """
        maximum = (self._memory.total_bytes - _REQUEST_BYTES) // _PARSED
        if body_bytes > maximum:
            raise OverBudget(
                f"the request has {readable_bytes(body_bytes)} and this node reads up to {readable_bytes(maximum)}: "
                "ask for fewer samples at once, or start it with more --memory"
            )

    def leave(self, admission: Admission) -> None:
        """Count a request as ended."""
        with self._lock:
            if admission in self._inside:
                self._inside.discard(admission)
                admission.account.leave()

    def shut(self) -> None:
        """Admit no more requests."""
        with self._lock:
            self._is_shut = True

    def _admission(self, body_bytes: int, account: Account) -> Admission | None:
        with self._lock:
            account.check(has_room=not self._work.is_full(account.name))
            if self._is_shut or len(self._inside) + self._kept_for_others(account) >= self._max_requests:
                return None
            memory = self._memory.take(_REQUEST_BYTES + _PARSED * body_bytes)
            if memory is None:
                return None
            admission = Admission(self, memory, body_bytes, account)
            self._inside.add(admission)
            account.enter()
            return admission

    def _kept_for_others(self, account: Account) -> int:
        return sum(not other.inside for other in self._accounts if other is not account)
