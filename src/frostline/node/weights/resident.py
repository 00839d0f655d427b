"""Something that lies in the memory for weights: who uses it, and what is known for when others want its place."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from frostline.batching import DRAINED_WITHIN_S, Stay

__all__ = ("ResidentWeights",)

T = TypeVar("T")

# A tenant that used it no longer ago still uses it: the pause between two of its requests.
_RECENT_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class ResidentWeights(Generic[T]):
    """What lies there.

    Attributes:
        value: itself.
        memory: gives back what it takes.
        nbytes: that it takes.
        owner: the tenant that it came for, whose quota it counts against.
        counted_bytes: of that quota.
        used_at: when it came, or its last use ended.
        users: requests that use it now, by tenant; None names those that cannot be asked to come again.
        recent: when each tenant's last use of it ended.
        served_s: device seconds, divided by its tenants' weights, that it had since it came.
        asked_at: when it was asked to leave; None where it may stay.
    """

    value: T
    memory: ExitStack
    nbytes: int
    owner: str
    counted_bytes: int
    used_at: float
    users: Counter[str | None] = field(default_factory=Counter)
    recent: dict[str, float] = field(default_factory=dict)
    served_s: float = 0.0
    asked_at: float | None = None

    def enter(self, user: str | None) -> None:
        """A use begins."""
        self.users[user] += 1

    def leave(self, user: str | None, now: float) -> None:
        """A use ends."""
        self.users[user] -= 1
        self.users = +self.users
        self.used_at = now
        if user is not None:
            self.recent[user] = now

    def is_leaving(self, now: float) -> bool:
        """Nobody is to begin to use it."""
        return self.asked_at is not None and now - self.asked_at < DRAINED_WITHIN_S

    def stay(
        self, key: Hashable, engines: "Iterable[ResidentWeights[T]]", tag: Callable[[str], float], now: float
    ) -> Stay:
        """What decides whether it leaves.

        Args:
            key: names it.
            engines: that leave with it.
            tag: where a tenant stands.
            now: the time.
        """
        parts = (self, *engines)
        used_by = {user for user in self.users if user is not None}
        used_by |= {one for one, at in self.recent.items() if now - at < _RECENT_S}
        return Stay(
            key=key,
            owner=self.owner,
            nbytes=sum(part.nbytes for part in parts),
            counted_bytes=sum(part.counted_bytes for part in parts if part.owner == self.owner),
            idle_s=0.0 if self.users else now - self.used_at,
            served_s=self.served_s,
            tag=min(map(tag, used_by), default=0.0),
            asked_s=None if self.asked_at is None else now - self.asked_at,
        )
