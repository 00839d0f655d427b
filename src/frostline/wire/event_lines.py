"""Events as lines of JSON and back: what a training on a node tells while it runs."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from frostline.errors import BadRequest
from frostline.events import (
    BatchDelivered,
    EpochFinished,
    EpochsChosen,
    EpochStarted,
    EpochTrained,
    Evaluated,
    Event,
    HeadSelected,
    RequestRetried,
    SampleSkipped,
    StepFinished,
    WaitingForRows,
)

__all__ = ("event_from_json", "event_to_json", "line_of")

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        BatchDelivered,
        EpochFinished,
        EpochStarted,
        EpochsChosen,
        EpochTrained,
        Evaluated,
        HeadSelected,
        RequestRetried,
        SampleSkipped,
        StepFinished,
        WaitingForRows,
    )
}
_TYPES: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def event_to_json(event: Event) -> dict[str, Any] | None:
    """An event by the name of its kind, under ``event``; None for a kind that does not travel.

    Floats that JSON does not know (a loss that is not finite) are written as text.
    """
    kind = type(event)
    if kind.__name__ not in _KINDS:
        return None
    values = {field.name: getattr(event, field.name) for field in fields(kind)}
    return {"event": kind.__name__, **{name: _plain(value) for name, value in values.items()}}


def event_from_json(value: dict[str, Any]) -> Event | None:
    """The inverse of ``event_to_json``; None for what is no event of a job.

    Raises:
        BadRequest: A field of it is missing or of another kind.
    """
    kind = _KINDS.get(str(value.get("event")))
    if kind is None:
        return None
    read = {field.name: _read(value.get(field.name), field.type, field.name) for field in fields(kind)}
    event: Event = kind(**read)
    return event


def line_of(value: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: object, kind: object, name: str) -> object:
    if kind == Mapping[str, float]:
        return {str(key): _read(item, float, name) for key, item in _items(value, name)}
    if kind is float and value in ("nan", "inf", "-inf"):
        return float(str(value))
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, _TYPES[kind]):
        raise BadRequest(f"an event's {name} is missing, or of another kind")
    return float(value) if kind is float else value  # type: ignore[arg-type]


def _items(value: object, name: str) -> list[tuple[object, object]]:
    if not isinstance(value, dict):
        raise BadRequest(f"an event's {name} is missing, or of another kind")
    return list(value.items())
