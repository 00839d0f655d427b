"""Weights that occupy memory: their users, and the facts that decide about their eviction."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from frostline.batching import DRAINED_WITHIN_S, Stay

__all__ = ("ResidentWeights",)

T = TypeVar("T")

# Seconds after its last use in which a tenant counts as a user: the pause between two of its requests.
_RECENT_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class ResidentWeights(Generic[T]):
    """Weights that occupy memory: a prefix or an engine made from it.

    Attributes:
        value: prefix or engine.
        memory: releases the memory when it is closed.
        nbytes: size in bytes.
        owner: tenant for which it was made, whose quota it counts against.
        counted_bytes: bytes that count against that quota.
        used_at: time when it was made, or its last use ended.
        users: number of requests that use it now, by tenant; None stands for long uses that cannot be interrupted.
        recent: time when each tenant's last use ended.
        served_s: device seconds that it had so far, divided by its tenants' weights.
        asked_at: time when its eviction was decided; None if it may stay.
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
        """Count a use that begins."""
        self.users[user] += 1

    def leave(self, user: str | None, now: float) -> None:
        """Count a use that ends."""
        self.users[user] -= 1
        self.users = +self.users
        self.used_at = now
        if user is not None:
            self.recent[user] = now

    def is_leaving(self, now: float) -> bool:
        """Whether it is being evicted, so that no new use may begin."""
        return self.asked_at is not None and now - self.asked_at < DRAINED_WITHIN_S

    def stay(
        self, key: Hashable, engines: "Iterable[ResidentWeights[T]]", tag: Callable[[str], float], now: float
    ) -> Stay:
        """The facts that decide about its eviction.

        Args:
            key: key of the weights.
            engines: engines that are evicted with it.
            tag: returns the fair-share tag of a tenant.
            now: current time.
        """
        parts = (self, *engines)
        used_by = {user for user in self.users if user is not None}
        used_by |= {tenant for tenant, at in self.recent.items() if now - at < _RECENT_S}
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
