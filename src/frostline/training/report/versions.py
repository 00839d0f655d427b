"""The versions that decide a run's numbers."""

import platform
from importlib.metadata import version

import torch

from frostline.version import __version__

__all__ = ("versions",)

_DECIDING = ("numpy", "pillow", "pyarrow")


def versions() -> dict[str, str]:
    """Of Frostline, Python and the libraries that decide the numbers."""
    found = {"frostline": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**found, **{name: version(name) for name in _DECIDING}}
