"""Decides what leaves a memory that cannot hold all that is wanted in it, so that everything has its turn there."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ("DRAINED_WITHIN_S", "Evictable", "Incoming", "to_evict")

# Unused for longer than this is not in use: the pause between two requests of a job that has one under way.
_IDLE_S = 1.0
# Device seconds at weight 1 that a stay lasts at least where others wait: several times what it takes a network to be
# read and made ready (0.16 s for ResNet-18, 0.3 s for ShuffleNet), so that most of the node's time goes into answers.
_TURN_S = 1.0
# What was asked to leave and still has requests in work after that time is asked again much later.
_ASKED_AGAIN_S = 30.0

DRAINED_WITHIN_S = 5.0
"""Requests that use what is to leave have so long to end; those of a slow client may not, and others leave instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictable:
    """Something that is in memory.

    Attributes:
        key: names it.
        owner: the tenant against whose quota it counts.
        nbytes: bytes that are free without it.
        counted_bytes: bytes that count against the owner's quota.
        idle_s: since it was used last; 0 while it is in use.
        served_s: device seconds, divided by its tenants' weights, that it had since it came.
        tag: where the lowest of the tenants stands that use it; see ``FairShares.tag``.
        asked_s: since it was asked to leave; None where it was not.
    """

    key: Hashable
    owner: str
    nbytes: int
    counted_bytes: int
    idle_s: float
    served_s: float
    tag: float
    asked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Something that is to come into memory.

    Attributes:
        tenant: tenant whose quota it will count against.
        tag: where that tenant stands.
        lacking_bytes: bytes of memory that are lacking; none where 0 or below.
        over_bytes: by which the tenant's quota is too small beside what it has; not at all where 0 or below.
    """

    tenant: str
    tag: float
    lacking_bytes: int
    over_bytes: float


def to_evict(incoming: Incoming, residents: Sequence[Evictable]) -> tuple[Hashable, ...] | None:
    """What has to leave for something that comes in.

    What is not in use may always leave, longest unused first. What is in use may once it had a turn's worth of the
    device, unless its tenant stands lower than the one that waits; the most served first. So all take turns, each
    with device seconds in proportion to its tenant's weight, and who came late or has been without waits for no more
    than one turn of each other.

    Returns:
        As few as are enough, those that have begun to leave among them; none where too few may leave yet; and None
        where all that could ever leave were not enough, so that nobody should wait behind it.
    """
    able = [resident for resident in residents if not _is_stuck(resident)]
    if not _is_enough(incoming, able):
        return None
    ready = sorted((entry for entry in able if _may_leave(entry, incoming)), key=_order)
    chosen: list[Evictable] = []
    for entry in ready:
        if entry.owner == incoming.tenant and _missing_quota(incoming, chosen) > 0:
            chosen.append(entry)
    for entry in ready:
        if entry not in chosen and _missing_memory(incoming, chosen) > 0:
            chosen.append(entry)
    if not _is_enough(incoming, chosen):
        return ()
    for entry in tuple(chosen):  # a large one that came in later may do for several before it
        others = [other for other in chosen if other is not entry]
        if entry.asked_s is None and _is_enough(incoming, others):
            chosen = others
    return tuple(entry.key for entry in chosen)


def _is_enough(incoming: Incoming, gone: Sequence[Evictable]) -> bool:
    return _missing_quota(incoming, gone) <= 0 and _missing_memory(incoming, gone) <= 0


def _missing_quota(incoming: Incoming, gone: Sequence[Evictable]) -> float:
    return incoming.over_bytes - sum(entry.counted_bytes for entry in gone if entry.owner == incoming.tenant)


def _missing_memory(incoming: Incoming, gone: Sequence[Evictable]) -> float:
    return incoming.lacking_bytes - sum(entry.nbytes for entry in gone)


def _may_leave(one: Evictable, incoming: Incoming) -> bool:
    if one.idle_s >= _IDLE_S or one.asked_s is not None:
        return True
    return one.served_s >= _TURN_S and one.tag >= incoming.tag


def _is_stuck(one: Evictable) -> bool:
    return one.asked_s is not None and DRAINED_WITHIN_S <= one.asked_s < _ASKED_AGAIN_S


def _order(one: Evictable) -> tuple[int, float]:
    if one.asked_s is not None:
        return 0, -one.asked_s
    if one.idle_s >= _IDLE_S:
        return 1, -one.idle_s
    return 2, -one.served_s
