"""Decides what names a row of an answer: everything that its bytes depend on. Pure."""

import hashlib
import json

from frostline.cache.keys import row_keys
from frostline.core import EXACT, REFERENCE
from frostline.wire.messages import FeatureRequest

__all__ = ("request_keys", "scope_of")

# Part of every name: raise it whenever the same inputs would give other bytes.
_RULE = "frostline rows 1"


def scope_of(request: FeatureRequest) -> bytes:
    """What rows of a request depend on beside their samples, as 16 bytes.

    An encoded sample depends on where it is alone, so that jobs that decode it in different ways share it.
    """
    values = {
        "rule": _RULE,
        "data": request.data,
        "reading": request.reading,
        "cut": request.cut,
        **(_computed(request) if request.cut else {}),
    }
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()


def request_keys(request: FeatureRequest, scope: bytes) -> list[bytes | None]:
    """A name for each sample's row; None where nobody knows its object's version: it could be another one by now."""
    return [None if key is None else scope + key for key in row_keys(request.samples)]


def _computed(request: FeatureRequest) -> dict[str, object]:
    view = request.view
    return {
        "prefix": request.prefix,
        "preprocess": request.preprocess,
        # Whether it will be wanted again changes no pixel.
        "view": None if view is None else [view.seed, view.epoch],
        "codec": request.codec,
        "tolerance": None if request.codec == EXACT else request.tolerance,
        "engine": request.engine if request.cut > 1 else REFERENCE,
    }
