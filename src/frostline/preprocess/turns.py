"""Decides whose sample is decoded next: those that take long hold up others of their own tenant alone. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ("DecodingTurns",)

# Seconds that a sample takes where one may say that its tenant's take long; one of fifty million pixels takes two.
_SLOW_S = 2.0
# Seconds since its last sample for which a tenant counts as one that may come at any moment.
_SEEN_S = 60.0


@dataclass(frozen=True, slots=True)
class _Turn:
    tenant: str
    began_s: float


class DecodingTurns:
    """Whose turn it is to decode, of several at once. Not for threads.

    Next is the tenant that has had the fewest seconds, from when it came on; of equal ones whoever waits longest. What
    is decoded cannot be broken off, so a tenant whose samples take long leaves the last slot to others, if there are
    several slots, and others have come within the last minute.

    Args:
        slots: number of samples, or of those that go together, that are decoded at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._turns: dict[int, _Turn] = {}
        self._next = 0
        # Start-time fair queueing (Goyal et al., 1996): seconds so far, which begin no lower than the last start.
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._floor_s = 0.0
        self._seen_s: dict[str, float] = {}
        self._is_slow: dict[str, bool] = {}

    def note(self, tenant: str, now_s: float) -> None:
        """Note that a sample of a tenant came.

        Args:
            tenant: name of the tenant.
            now_s: seconds of a monotonic clock.
        """
        self._seen_s[tenant] = now_s

    def choose(self, waiting: Iterable[str], now_s: float) -> str | None:
        """The tenant whose turn it is now; None where all slots are taken, or kept for others.

        Args:
            waiting: tenants of the samples that wait, whichever came first is first.
            now_s: seconds of a monotonic clock.
        """
        if len(self._turns) >= self._slots:
            return None
        able = [tenant for tenant in dict.fromkeys(waiting) if not self._is_held_back(tenant, now_s)]
        return min(able, key=lambda tenant: self._standing_s(tenant, now_s), default=None)

    def begin(self, tenant: str, now_s: float) -> int:
        """Give a tenant a turn, and return its number for ``end``."""
        self._floor_s = self._spent_s[tenant] = max(self._spent_s[tenant], self._floor_s)
        self._next += 1
        self._turns[self._next] = _Turn(tenant, now_s)
        return self._next

    def end(self, number: int, samples: int, now_s: float) -> None:
        """Note that a turn has ended.

        Args:
            number: number of the turn.
            samples: number of samples that were decoded in it, one at least.
            now_s: seconds of a monotonic clock.
        """
        turn = self._turns.pop(number)
        took_s = now_s - turn.began_s
        self._spent_s[turn.tenant] += took_s
        self._is_slow[turn.tenant] = took_s > _SLOW_S * samples

    def _mine(self, tenant: str) -> list[_Turn]:
        return [turn for turn in self._turns.values() if turn.tenant == tenant]

    def _standing_s(self, tenant: str, now_s: float) -> float:
        under_way_s = sum(now_s - turn.began_s for turn in self._mine(tenant))
        return max(self._spent_s[tenant], self._floor_s) + under_way_s

    def _is_held_back(self, tenant: str, now_s: float) -> bool:
        mine = self._mine(tenant)
        if self._slots == 1 or len(mine) < self._slots - 1:
            return False
        if not any(name != tenant and now_s - seen_s < _SEEN_S for name, seen_s in self._seen_s.items()):
            return False
        return self._is_slow.get(tenant, False) or any(now_s - turn.began_s > _SLOW_S for turn in mine)
