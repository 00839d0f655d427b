"""Errors as HTTP answers and back: one table, read in both directions."""

import json
import math
from typing import Any

from frostline.errors import (
    AccessDenied,
    BadRequest,
    EngineNotReady,
    EngineUnsupported,
    Forbidden,
    FrostlineError,
    NodeUnreachable,
    ObjectNotFound,
    OverBudget,
    Overloaded,
    Refused,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
    UnknownName,
    UnknownPrefix,
    UnknownTraining,
    UnsafeArtifact,
)

__all__ = (
    "TRAVELLING",
    "error_from_answer",
    "error_from_json",
    "error_from_line",
    "error_to_json",
    "retry_after",
    "status_of",
)

TRAVELLING: dict[type[FrostlineError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    AccessDenied: 403,
    Forbidden: 403,
    ObjectNotFound: 404,
    UnknownName: 404,
    UnknownPrefix: 404,
    UnknownTraining: 404,
    EngineNotReady: 409,
    OverBudget: 413,
    EngineUnsupported: 422,
    UnsafeArtifact: 422,
    Overloaded: 429,
    StoreError: 502,
    StoreThrottled: 503,
    StoreUnavailable: 503,
    NodeUnreachable: 503,
    Unavailable: 503,
    Refused: 400,
}
"""Every error that a node may answer with, and its HTTP status."""

_BY_NAME = {kind.__name__: kind for kind in TRAVELLING}
_TRY_AGAIN = {408, 425, 429}
_RETRY_AFTER_S = 1.0
_LONGEST_WAIT_S = 3600.0


def status_of(error: FrostlineError) -> int:
    """The HTTP status of an error; 500 for one that a node does not answer with."""
    return next((TRAVELLING[kind] for kind in type(error).__mro__ if kind in TRAVELLING), 500)


def error_to_json(error: FrostlineError) -> dict[str, Any]:
    """The body of the answer: ``error``, ``message`` and, where it is known, ``retry_after_s``."""
    kind = next((kind for kind in type(error).__mro__ if kind in TRAVELLING), type(error))
    wait = {"retry_after_s": error.retry_after_s} if isinstance(error, Overloaded | StoreThrottled) else {}
    return {"error": kind.__name__, "message": str(error), **wait}


def retry_after(error: FrostlineError) -> dict[str, str]:
    """The headers that tell a client what to do: ``Retry-After`` in whole seconds, or how to say who it is."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | StoreThrottled):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {"Retry-After": "1"} if isinstance(error, Unavailable | StoreUnavailable) else {}


def error_from_answer(status: int, body: bytes) -> FrostlineError:
    """The error that an HTTP answer other than success means; also for one that no node wrote (a proxy's, say)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    known = error_from_json(value)
    if known is not None:
        return known
    said = body[:200].decode(errors="replace").strip() or "nothing more"
    sentence = f"the node answered with HTTP status {status}: {said}"
    if status in _TRY_AGAIN or status >= 500:
        return Unavailable(sentence)
    return Refused(sentence)


def error_from_json(value: object) -> FrostlineError | None:
    """The inverse of ``error_to_json``; None where the value is no error of a node."""
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return None
    kind = _BY_NAME.get(str(value.get("error")))
    if kind is Overloaded or kind is StoreThrottled:
        return kind(value["message"], retry_after_s=_seconds(value.get("retry_after_s")))
    return kind(value["message"]) if kind else None


def error_from_line(line: bytes) -> FrostlineError | None:
    """The error that the first line of a trainer's process tells; None where it tells that all is well."""
    value = json.loads(line) if line else {}
    if value.get("event") == "ready":
        return None
    return error_from_json(value) or Refused(f"the training did not begin: {str(value.get('message'))[:500]}")


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_WAIT_S:
        return _RETRY_AFTER_S
    return float(value)
