"""Names the machine, its processor's abilities and its libraries, so that measurements are compared with their like."""

import hashlib
import importlib.util
import platform
import sys
import uuid
from collections.abc import Mapping, Set
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType

from frostline.processors import usable_cores

__all__ = (
    "abilities",
    "free_device_bytes",
    "hardware_name",
    "host_digest",
    "imported",
    "is_accelerator",
    "is_installed",
    "quick_dtypes",
    "version_of",
    "versions",
)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CPU = Path("/proc/cpuinfo")
_QUICK: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"cuda", "amx_bf16", "avx512_bf16", "bf16"}),
    "float16": frozenset({"cuda", "amx_fp16", "avx512_fp16", "asimdhp"}),
    "float64": frozenset({"cuda"}),
}


def hardware_name(device: str) -> str:
    """The processor with the threads that this process may use, or the accelerators, each kind once.

    Args:
        device: in torch's words; several with commas.
    """
    if is_accelerator(device):
        from frostline.engines.machine.accelerator import accelerator_name

        return " and ".join(dict.fromkeys(map(accelerator_name, device.split(","))))
    return f"{_processor()}, {len(usable_cores())} threads"


def abilities(device: str) -> frozenset[str]:
    """What computes can do, by the flags of its processor in Linux's names, such as ``avx512_bf16``, or ``cuda``.

    Empty where nobody says.

    Args:
        device: in torch's words.
    """
    if is_accelerator(device):
        return frozenset({"cuda"})
    lines = _CPU.read_text().splitlines() if _CPU.exists() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def quick_dtypes(abilities: Set[str]) -> tuple[str, ...]:
    """The types of numbers that a device multiplies at its full speed, in torch's names.

    Args:
        abilities: flags of the device (``abilities``).
    """
    return ("float32", *(name for name, flags in _QUICK.items() if flags & abilities))


def is_accelerator(device: str) -> bool:
    """Whether a device, in torch's words, is an accelerator and not the processor."""
    return device.partition(":")[0] == "cuda"


def free_device_bytes(device: str) -> int | None:
    """What nobody has taken of an accelerator's memory now; None where engines run in the processor's own.

    Args:
        device: in torch's words.
    """
    if not is_accelerator(device):
        return None
    from frostline.engines.machine.accelerator import free_bytes

    return free_bytes(device)


def host_digest() -> str:
    """A digest that names the running machine; containers on one machine, which share its cores, give the same."""
    # Linux draws this anew at each boot, so that it tells nothing about the machine beyond being the same.
    identity = _BOOT.read_text() if _BOOT.exists() else f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(identity.strip().encode()).hexdigest()[:16]


def _processor() -> str:
    lines = _CPU.read_text().splitlines() if _CPU.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


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
