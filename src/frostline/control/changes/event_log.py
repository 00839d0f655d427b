"""Decides which events of a control plane are kept: the latest of each tenant, so that none crowds out another."""

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ("MAX_EVENTS", "ControlEvent", "ControlEventLog")

MAX_EVENTS = 200
"""Events of a tenant that are kept, and that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """What happened at a control plane, and why.

    Attributes:
        number: its number; later events have greater ones.
        at_s: when it happened, in seconds since 1970.
        kind: ``joined``, ``ended``, ``lost``, ``changed``, ``late``, ``in_time`` or ``share``.
        tenant: tenant whose stages it is about; None where it is about those of all.
        sentence: sentence for people about what happened and why.
    """

    number: int
    at_s: float
    kind: str
    tenant: str | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """The event as plain values."""
        return asdict(self)


class ControlEventLog:
    """The latest events of each tenant. Not for several threads.

    Args:
        events: events that an earlier log had.
    """

    def __init__(self, events: Iterable[ControlEvent] = ()) -> None:
        self._kept: dict[str | None, deque[ControlEvent]] = {}
        for event in sorted(events, key=lambda event: event.number):
            self._kept.setdefault(event.tenant, deque()).append(event)
        self._number = max((queue[-1].number for queue in self._kept.values()), default=0)
        self._unsaved: dict[int, ControlEvent | None] = {}

    def add(self, kind: str, tenant: str | None, sentence: str, at_s: float) -> None:
        """Note an event, and forget the tenant's oldest one where it has too many; see ``ControlEvent``."""
        self._number += 1
        event = ControlEvent(number=self._number, at_s=at_s, kind=kind, tenant=tenant, sentence=sentence)
        queue = self._kept.setdefault(tenant, deque())
        queue.append(event)
        self._unsaved[event.number] = event
        if len(queue) > MAX_EVENTS:
            self._unsaved[queue.popleft().number] = None

    def seen_by(self, tenant: str | None) -> list[ControlEvent]:
        """The latest events, the oldest first.

        Args:
            tenant: tenant that asks, which sees those of its own stages; None sees all.
        """
        queues = self._kept.values() if tenant is None else [self._kept.get(tenant, deque())]
        found = sorted((event for queue in queues for event in queue), key=lambda event: event.number)
        return found[-MAX_EVENTS:]

    def unsaved(self) -> dict[int, ControlEvent | None]:
        """The events since the last call by their numbers; None for those that were forgotten."""
        found, self._unsaved = self._unsaved, {}
        return found
