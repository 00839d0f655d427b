"""Brings in the packages that engines are made with: found without being imported, and kept from calling home."""

import importlib.util
import sys
from importlib.metadata import version
from types import ModuleType

__all__ = ("is_installed", "openvino", "versions")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def versions(*packages: str) -> str:
    """Some packages with their versions, as a part of a file's name."""
    return "-".join(f"{package}-{version(package).replace('+', '.')}" for package in packages)


def openvino() -> ModuleType:
    """OpenVINO, which would report its every import over the network if it found ``openvino_telemetry``."""
    if "openvino" not in sys.modules:
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # how Python says "not there"
    return importlib.import_module("openvino")
