"""Brings in the packages that engines are made with: found without being imported, and kept from calling home."""

import importlib.util
import sys
from importlib.metadata import version
from types import ModuleType

__all__ = ("imported", "is_installed", "versions")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def versions(*packages: str) -> str:
    """Some packages with their versions, as a part of a file's name."""
    return "-".join(f"{package}-{version(package).replace('+', '.')}" for package in packages)


def imported(package: str) -> ModuleType:
    """A package or module, imported now.

    OpenVINO and its companions report every import over the network if they find ``openvino_telemetry``, which comes
    with them: here they do not find it.
    """
    if package.partition(".")[0] in ("nncf", "openvino"):
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # how Python says "not there"
    return importlib.import_module(package)
