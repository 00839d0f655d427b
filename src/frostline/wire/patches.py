"""Decides which fields the body of a PATCH sets, within bounds, before anybody looks at what they mean."""

from collections.abc import Iterable

from frostline.errors import BadRequest

__all__ = ("MAX_PATCH_BYTES", "Patch", "fields_of_patch")

MAX_PATCH_BYTES = 4 << 10
"""Longest body of a PATCH."""

# As far as floats count whole numbers exactly.
_MAX_NUMBER = 2**52
_MAX_TEXT = 256

Patch = dict[str, int | float | str | None]
"""Values by their fields; None where a field is to be taken back."""


def fields_of_patch(value: object, known: Iterable[str]) -> Patch:
    """The fields that a stranger's PATCH sets.

    Args:
        value: the body, as JSON gave it.
        known: names of the fields that may be set.

    Raises:
        BadRequest: It is no object of such fields, or a value is neither null, a bounded number nor a short text.
    """
    names = tuple(known)
    if not isinstance(value, dict) or not value or not value.keys() <= set(names):
        raise BadRequest(f"a change is an object with one or more of {', '.join(names)}")
    for name, found in value.items():
        if not (found is None or _is_number(found) or _is_text(found)):
            raise BadRequest(f"{name} must be null, a finite number within ±2^52, or a short text")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT
