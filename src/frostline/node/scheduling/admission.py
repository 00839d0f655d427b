"""Lets requests in or refuses them, before any work is done for them."""

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from frostline.batching import readable_bytes
from frostline.errors import OverBudget, Overloaded
from frostline.node.scheduling.memory_pool import Pool, Reservation
from frostline.node.scheduling.tenants import Account

__all__ = ("Admission", "Gate")

# Bytes of Python objects that a byte of JSON can become: `{"":0},` is the worst there is, at 27.
_PARSED = 30
# What stays of a request, for each byte of its JSON: a name of two letters takes 51 bytes, and four numbers 32.
_KEPT = 10
# The part of an answer that is on its way out, the request's own objects, and its connection.
_REQUEST_BYTES = 1 << 20
_RETRY_AFTER_S = 1.0


class Admission:
    """A request that was let in. A context manager.

    Attributes:
        account: whose it is.
    """

    def __init__(self, gate: "Gate", memory: Reservation, body_bytes: int, account: Account) -> None:
        self.account = account
        self._gate = gate
        self._memory = memory
        self._body_bytes = body_bytes

    def read(self) -> None:
        """The body was read and parsed: give back what only that needed."""
        self._memory.shrink(_REQUEST_BYTES + _KEPT * self._body_bytes)

    def close(self) -> None:
        """The request has ended. Calling it again does nothing."""
        self._memory.release()
        self._gate.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Gate:
    """Counts the requests in work. Safe for threads.

    A place is kept for each tenant that has none in work, so that nobody is sent away because others ask much.

    Args:
        most: requests in work at once.
        memory: for messages.
        work: the memory for work.
        accounts: of all tenants.
    """

    def __init__(self, most: int, memory: Pool, work: Pool, accounts: Sequence[Account]) -> None:
        self._most = most
        self._memory = memory
        self._work = work
        self._accounts = accounts
        self._lock = threading.Lock()
        self._inside: set[Admission] = set()
        self._is_shut = False

    @property
    def inside(self) -> int:
        """Requests in work."""
        return len(self._inside)

    def enter(self, body_bytes: int, account: Account) -> Admission:
        """Let a request in.

        Args:
            body_bytes: of its JSON; 0 where it comes as a value.
            account: whose it is.

        Raises:
            Overloaded: There are enough already, or its tenant has no more of something.
            OverBudget: Its body is too long, whatever else is going on.
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
        """Do nothing if a body of that length could be read.

        Raises:
            OverBudget: It could not.
        """
        most = (self._memory.total_bytes - _REQUEST_BYTES) // _PARSED
        if body_bytes > most:
            raise OverBudget(
                f"the request has {readable_bytes(body_bytes)} and this node reads up to {readable_bytes(most)}: "
                "ask for fewer samples at once, or start it with more --memory"
            )

    def leave(self, admission: Admission) -> None:
        """A request has ended."""
        with self._lock:
            if admission in self._inside:
                self._inside.discard(admission)
                admission.account.leave()

    def shut(self) -> None:
        """Let nobody in any more."""
        with self._lock:
            self._is_shut = True

    def _admission(self, body_bytes: int, account: Account) -> Admission | None:
        with self._lock:
            account.check(has_room=not self._work.is_full(account.name))
            if self._is_shut or len(self._inside) + self._kept_for_others(account) >= self._most:
                return None
            memory = self._memory.take(_REQUEST_BYTES + _PARSED * body_bytes)
            if memory is None:
                return None
            admission = Admission(self, memory, body_bytes, account)
            self._inside.add(admission)
            account.enter()
            return admission

    def _kept_for_others(self, account: Account) -> int:
        return sum(not one.inside for one in self._accounts if one is not account)
