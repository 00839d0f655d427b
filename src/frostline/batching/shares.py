"""Decides whose turn it is, so that tenants get weighted max-min fair shares of the device's seconds."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ("FairShares",)

# Device seconds at weight 1 that a tenant who always has work may lag behind: several of the longest runs (32 rows of
# VGG-19 take 3 s on two cores), so that nobody loses what other work under way kept from it, and few enough that
# others never wait longer than this for one who comes back from a store that was slow.
_CREDIT_S = 10.0


class FairShares:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants. Not for several threads.

    Each tenant has a tag: the device seconds that it was charged, divided by its weight. The one with the least tag
    is next. Its tag at that moment is the virtual time, and one that comes without work under way begins there: what
    it did not ask for earlier is not owed to it. What a piece takes need not be known before it has run, which is why
    this rule and not one that sorts by finish times.

    Where all always have work, the seconds of any two, divided by their weights, differ by at most what one piece
    of each takes, divided likewise (theorem 1 there), and who asks for less than its share gets what it asks for. So
    shares are weighted max-min fair, and nobody starves.

    Args:
        weights: by tenant; 1 for those who are not named.
        credit_s: device seconds at weight 1 that a tenant with work under way may lag behind the virtual time. Work
            that is still read from a slow store keeps its tenant's place, but no longer than this is worth.
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({}), *, credit_s: float = _CREDIT_S) -> None:
        assert all(weight > 0 for weight in weights.values()), "a weight is above 0"
        self._weights = dict(weights)
        self._credit_s = credit_s
        self._now = 0.0
        self._tags: dict[str, float] = {}
        self._owed: defaultdict[str, float] = defaultdict(float)
        self._under_way: Counter[str] = Counter()

    def weight(self, tenant: str) -> float:
        """What its share is in proportion to."""
        return self._weights.get(tenant, 1.0)

    def change_weight(self, tenant: str, weight: float) -> None:
        """Let its share be in proportion to another weight from now on; what it was charged stays charged."""
        assert weight > 0, "a weight is above 0"
        self._weights[tenant] = weight

    def tag(self, tenant: str) -> float:
        """Where it stands; the least is next."""
        return max(self._tags.get(tenant, 0.0), self._floor(tenant))

    def arrive(self, tenant: str) -> None:
        """A piece of its work came; ``depart`` follows for each."""
        self._tags[tenant] = self.tag(tenant)
        self._under_way[tenant] += 1

    def depart(self, tenant: str) -> None:
        """A piece of its work has run or was given up."""
        self._tags[tenant] = self.tag(tenant)
        self._under_way[tenant] -= 1
        assert self._under_way[tenant] >= 0, f"{tenant!r} has no work under way"

    def begin(self, tenant: str) -> None:
        """It has its turn."""
        self._now = max(self._now, self.tag(tenant))

    def charge(self, tenant: str, device_s: float) -> None:
        """It took so many seconds of the device, which count twice while it owes some."""
        paid_s = min(self._owed[tenant], device_s)
        self._owed[tenant] -= paid_s
        self._tags[tenant] = self.tag(tenant) + (device_s + paid_s) / self.weight(tenant)

    def owe(self, tenant: str, device_s: float) -> None:
        """Record device seconds as a debt of the tenant.

        Until it is paid, the tenant gets half of its share. Charging minutes at once would lock it out.
        """
        self._owed[tenant] += device_s

    def _floor(self, tenant: str) -> float:
        return self._now - self._credit_s if self._under_way[tenant] else self._now
