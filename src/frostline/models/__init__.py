"""Networks: freeze, trace, cut, ship the prefix, keep the head."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.models.cutting import CutNetwork, cut_network
    from frostline.models.freezing import freeze
    from frostline.models.head import Head

__all__ = ("CutNetwork", "Head", "cut_network", "freeze")

# Who counts cuts needs no torch, and who reads a prefix nothing of what traces networks.
_MODULES = {
    "CutNetwork": "frostline.models.cutting",
    "Head": "frostline.models.head",
    "cut_network": "frostline.models.cutting",
    "freeze": "frostline.models.freezing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
