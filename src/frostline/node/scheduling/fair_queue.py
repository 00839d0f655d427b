"""The tenants' fair shares of the node, shared by the memory pools and the device."""

import threading

from frostline.batching import FairShares

__all__ = ("FairQueue",)


class FairQueue(FairShares):
    """``FairShares`` behind a lock. The lock is always taken last, and no other is taken while it is held."""

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__(weights)
        self._lock = threading.RLock()

    def tag(self, tenant: str) -> float:
        """See ``FairShares``."""
        with self._lock:
            return super().tag(tenant)

    def arrive(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().arrive(tenant)

    def depart(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().depart(tenant)

    def begin(self, tenant: str) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().begin(tenant)

    def owe(self, tenant: str, device_s: float) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().owe(tenant, device_s)

    def charge(self, tenant: str, device_s: float) -> None:
        """See ``FairShares``."""
        with self._lock:
            super().charge(tenant, device_s)
