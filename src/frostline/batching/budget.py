"""Decides who may use how much of a fixed amount of memory, and who waits for it."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from frostline.batching.forming import readable_bytes
from frostline.batching.shares import FairShares
from frostline.errors import OverBudget

__all__ = ("ANYBODY", "Allowance", "Claim", "MemoryBudget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a piece of work says when it asks for memory or for the device.

    Attributes:
        tenant: tenant that owns it.
        device_s: device seconds it will probably take; only the order of tenants depends on this, and the time it
            really takes is charged later.
        max_bytes: its tenant never holds more than this, but for one piece alone.
    """

    tenant: str
    device_s: float = 0.0
    max_bytes: float = math.inf

    def __post_init__(self) -> None:
        assert self.device_s >= 0, f"work takes no less than nothing, not {self.device_s} s"


ANYBODY = Claim(tenant="")
"""Where nobody tells tenants apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    nbytes: int
    claim: Claim


class MemoryBudget:
    """Who may use how much of a fixed amount of memory. Not for several threads.

    A reservation is a number. It is granted at once or waits. First come is first served, or by the tenants' shares
    where those are given: next is the tenant that stands lowest once what it has in work has run. Whoever is next
    is not overtaken until there is room for it, so that a large reservation is not starved by small ones; only one
    whose tenant may hold no more lets others go first.

    Args:
        total_bytes: never exceeded by what is granted.
        shares: the order between tenants.
    """

    def __init__(self, total_bytes: int, shares: FairShares | None = None) -> None:
        self._total = total_bytes
        self._shares = shares
        self._reserved = 0
        self._peak = 0
        self._granted: dict[int, _Asked] = {}
        self._waiting: dict[int, _Asked] = {}  # first come first
        self._held: Counter[str] = Counter()
        self._promised: defaultdict[str, float] = defaultdict(float)
        self._unsettled: set[int] = set()
        self._next = 0

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._total

    @property
    def reserved_bytes(self) -> int:
        """What is granted now."""
        return self._reserved

    @property
    def peak_bytes(self) -> int:
        """The most that was ever granted at once."""
        return self._peak

    @property
    def waiting(self) -> int:
        """Reservations that wait."""
        return len(self._waiting)

    def held_bytes(self, tenant: str) -> int:
        """What is granted to a tenant now."""
        return self._held[tenant]

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant's work waits for memory that it holds itself."""
        mine = [claimant for claimant in self._waiting.values() if claimant.claim.tenant == tenant]
        return any(self._is_full(claimant.nbytes, claimant.claim) for claimant in mine)

    def ask(self, nbytes: int, claim: Claim = ANYBODY) -> int:
        """Ask for memory; look with ``is_granted`` whether it may be used.

        Raises:
            OverBudget: The claim is larger than the budget ever grants.
        """
        self.check(nbytes)
        self._next += 1
        self._waiting[self._next] = _Asked(nbytes=nbytes, claim=claim)
        self._unsettled.add(self._next)
        if self._shares is not None:
            self._shares.arrive(claim.tenant)
        self._grant()
        return self._next

    def take(self, nbytes: int, claim: Claim = ANYBODY) -> int | None:
        """Memory that is there now, or None where it is not, or where somebody waits for it already."""
        if self._first() is not None or self._reserved + nbytes > self._total or self._is_full(nbytes, claim):
            return None
        return self.ask(nbytes, claim)

    def check(self, nbytes: int) -> None:
        """Do nothing if so much could be granted at all.

        Raises:
            OverBudget: The bytes are more than the total.
        """
        if nbytes > self._total:
            raise OverBudget(
                f"this needs {readable_bytes(nbytes)} at once, and the node has {readable_bytes(self._total)} "
                "for it: start the node with more --memory"
            )

    def is_granted(self, reservation: int) -> bool:
        """Whether the memory may be used."""
        return reservation in self._granted

    def shrink(self, reservation: int, nbytes: int) -> None:
        """Keep only so much of a granted reservation, whose work on the device has been done."""
        asked = self._granted[reservation]
        assert 0 <= nbytes <= asked.nbytes, f"a reservation of {asked.nbytes} bytes cannot shrink to {nbytes}"
        self._granted[reservation] = replace(asked, nbytes=nbytes)
        self._give_back(asked.nbytes - nbytes, asked.claim)
        self._settle(reservation, asked.claim)
        self._grant()

    def release(self, reservation: int) -> None:
        """Give back a reservation, granted or waiting. Giving back again does nothing."""
        granted = self._granted.get(reservation)
        asked = granted or self._waiting.get(reservation)
        if asked is None:
            return
        self._settle(reservation, asked.claim)
        if granted is not None:
            self._give_back(granted.nbytes, granted.claim)
        self._granted.pop(reservation, None)
        self._waiting.pop(reservation, None)
        self._grant()

    def _give_back(self, nbytes: int, claim: Claim) -> None:
        self._reserved -= nbytes
        self._held[claim.tenant] -= nbytes

    def _settle(self, reservation: int, claim: Claim) -> None:
        """It takes no more of the device than was charged until now."""
        if reservation not in self._unsettled:
            return
        self._unsettled.discard(reservation)
        if reservation in self._granted:
            self._promised[claim.tenant] -= claim.device_s
        if self._shares is not None:
            self._shares.depart(claim.tenant)

    def _grant(self) -> None:
        while (number := self._first()) is not None and self._reserved + self._waiting[number].nbytes <= self._total:
            asked = self._granted[number] = self._waiting.pop(number)
            self._reserved += asked.nbytes
            self._held[asked.claim.tenant] += asked.nbytes
            self._promised[asked.claim.tenant] += asked.claim.device_s
            self._peak = max(self._peak, self._reserved)

    def _first(self) -> int | None:
        """The reservation that is next, of those whose tenants may hold more."""
        able = [
            number for number, claimant in self._waiting.items() if not self._is_full(claimant.nbytes, claimant.claim)
        ]
        return min(able, key=self._place, default=None)

    def _place(self, number: int) -> tuple[float, int]:
        return self._standing(self._waiting[number].claim.tenant), number

    def _standing(self, tenant: str) -> float:
        if self._shares is None:
            return 0.0
        return self._shares.tag(tenant) + self._promised[tenant] / self._shares.weight(tenant)

    def _is_full(self, nbytes: int, claim: Claim) -> bool:
        held = self._held[claim.tenant]
        return held > 0 and held + nbytes > claim.max_bytes


# Seconds' worth of it that may be used at once after a pause, so that a request need not be cut up.
_SAVED_S = 10.0


class Allowance:
    """A bucket of device seconds that fills at a rate. Not for several threads.

    Work is paid when it has run, since nobody knows before what it takes; what is owed must be saved up again before
    more begins. So in the long run no more than the rate is used, and beyond it only what was let in at once.

    Args:
        per_s: device seconds a second.
        saved_s: seconds' worth of it that may be used at once after a pause.
    """

    def __init__(self, per_s: float, saved_s: float = _SAVED_S) -> None:
        assert per_s > 0, "an allowance is above 0"
        self._per_s = per_s
        self._saved_s = saved_s
        self._left = saved_s * per_s
        self._at_s = 0.0
        self._owed = 0.0

    def change(self, per_s: float, now_s: float) -> None:
        """Fill at another rate from now on."""
        assert per_s > 0, "an allowance is above 0"
        self._fill(now_s)
        self._per_s = per_s
        self._left = min(self._left, self._saved_s * per_s)

    def spend(self, device_s: float, now_s: float) -> None:
        """So much was used, which counts twice while some is owed."""
        self._fill(now_s)
        paid_s = min(self._owed, device_s)
        self._owed -= paid_s
        self._left -= device_s + paid_s

    def owe(self, device_s: float) -> None:
        """So much was used that is to be paid by instalments: minutes at once would shut its tenant out for long."""
        self._owed += device_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until more may begin; 0 where it may now."""
        self._fill(now_s)
        return max(0.0, -self._left / self._per_s)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._left = min(self._saved_s * self._per_s, self._left + self._per_s * max(0.0, passed_s))
