"""Brings in the packages that engines are made with: found without being imported, and kept from calling home."""

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import ModuleType

__all__ = ("imported", "is_installed", "version_of", "versions")


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def versions(*packages: str) -> str:
    """Some packages, which are installed, with their versions, as a part of a file's name."""
    return "-".join(f"{package}-{version_of(package)}".replace("+", ".") for package in packages)


def version_of(package: str) -> str | None:
    """The version of a package by the name under which it is imported; None where it is not installed.

    Another distribution may stand in its place, as ``onnxruntime-gpu`` does for ``onnxruntime``: then it is named too.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        found = _distributions().get(package, []) if is_installed(package) else []
    return "-".join(f"{name}-{version(name)}" for name in sorted(set(found))) or None


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Which distributions bring a package; to find out takes all of their lists of files."""
    return packages_distributions()


def imported(package: str) -> ModuleType:
    """A package or module, imported now.

    OpenVINO and its companions report every import over the network if they find ``openvino_telemetry``, which comes
    with them: here they do not find it.
    """
    if package.partition(".")[0] in ("nncf", "openvino"):
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # how Python says "not there"
    return importlib.import_module(package)
