"""Names the machine and what computes on it, so that measurements are compared with their like."""

import hashlib
import os
import platform
import uuid
from pathlib import Path

import torch

__all__ = ("hardware_name", "host_digest", "usable_cores")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CPU = Path("/proc/cpuinfo")


def hardware_name(device: str) -> str:
    """The processor with the threads that this process may use, or the accelerator.

    Args:
        device: in torch's words.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {len(usable_cores())} threads"


def usable_cores() -> tuple[int, ...]:
    """Numbers of the processor cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def host_digest() -> str:
    """A digest that names the running machine; containers on one machine, which share its cores, give the same."""
    # Linux draws this anew at each boot, so that it tells nothing about the machine beyond being the same.
    identity = _BOOT.read_text() if _BOOT.exists() else f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(identity.strip().encode()).hexdigest()[:16]


def _processor() -> str:
    lines = _CPU.read_text().splitlines() if _CPU.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
