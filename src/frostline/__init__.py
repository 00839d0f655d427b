"""Fine-tune pretrained networks on data that stays in its store."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline import preprocess
    from frostline.core import errors
    from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
    from frostline.core.system import __version__
    from frostline.datasets import Dataset, MultiLabel
    from frostline.jobs import Job, loader, offload
    from frostline.loaders import (
        Batch,
        EpochOptions,
        Epochs,
        FeatureMixup,
        FeatureNoise,
        Loader,
        Mixture,
        Ranks,
        Sample,
    )
    from frostline.models import Head, freeze
    from frostline.ordering import BlockShuffle
    from frostline.wire.recipes import Recipe

__all__ = (
    "Batch",
    "BlockShuffle",
    "Dataset",
    "EpochOptions",
    "Epochs",
    "FeatureMixup",
    "FeatureNoise",
    "Head",
    "Job",
    "Loader",
    "LoaderSettings",
    "Mixture",
    "MultiLabel",
    "NodeSettings",
    "Ranks",
    "Recipe",
    "Sample",
    "TenantSettings",
    "__version__",
    "errors",
    "freeze",
    "loader",
    "offload",
    "preprocess",
)

# Importing torch takes seconds and a node or a listing may never need it: each name is imported when it is used.
_DEFINED_IN = {
    "Batch": "frostline.loaders",
    "Mixture": "frostline.loaders",
    "BlockShuffle": "frostline.ordering",
    "Dataset": "frostline.datasets",
    "EpochOptions": "frostline.loaders",
    "Epochs": "frostline.loaders",
    "FeatureMixup": "frostline.loaders",
    "FeatureNoise": "frostline.loaders",
    "Head": "frostline.models",
    "Job": "frostline.jobs",
    "Loader": "frostline.loaders",
    "LoaderSettings": "frostline.core.config",
    "MultiLabel": "frostline.datasets",
    "NodeSettings": "frostline.core.config",
    "Ranks": "frostline.loaders",
    "Recipe": "frostline.wire.recipes",
    "Sample": "frostline.loaders",
    "TenantSettings": "frostline.core.config",
    "__version__": "frostline.core.system",
    "freeze": "frostline.models",
    "loader": "frostline.jobs",
    "offload": "frostline.jobs",
}


_MODULES = {"errors": "frostline.core.errors", "preprocess": "frostline.preprocess"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _DEFINED_IN:
        from frostline.core.hints import hint_for

        hint = "" if name.startswith("_") else hint_for(name, __all__, "frostline")
        raise AttributeError(f"module 'frostline' has no attribute {name!r}{hint}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
