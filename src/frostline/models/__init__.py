"""Networks: freeze, trace, cut, ship the prefix, keep the head."""

import importlib
from typing import TYPE_CHECKING, Any

from frostline.models.freeze import freeze

if TYPE_CHECKING:
    from frostline.models.cutting import CutNetwork, cut_network
    from frostline.models.head import Head

__all__ = ("CutNetwork", "Head", "cut_network", "freeze")

# Who reads a prefix needs nothing of what traces networks, which takes half a second to import.
_MODULES = {
    "CutNetwork": "frostline.models.cutting",
    "Head": "frostline.models.head",
    "cut_network": "frostline.models.cutting",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
