"""Looks at this machine: processors, memory, the accelerator, open files, and the folder that keeps things."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from frostline.checks import devices_of
from frostline.config import cache_folder, default_node_memory_bytes
from frostline.core.units import in_bytes
from frostline.doctor.findings import FINE, PROBLEM, WARNING, Finding
from frostline.private import make_private_folder
from frostline.processors import usable_cores, usable_memory_bytes

__all__ = ("examine_devices", "examine_machine")

_GIB = 1 << 30
_MIN_CACHE_BYTES = _GIB
# As many as a window's connections, a node's readers and the files of an environment together.
_MIN_FILES = 1024


def examine_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """What a job finds on this machine.

    Args:
        root: folder in which ``proc``, ``sys`` and ``dev`` lie.
    """
    yield from _processors(root)
    yield from _open_files()
    yield from _accelerator(root)
    yield from _cache()


def examine_devices(device: str) -> Iterator[Finding]:
    """Whether each of some devices is there, as the ``device`` of a node names them.

    Args:
        device: such as ``cuda:0,cuda:1``.

    Raises:
        SettingError: It names none, one twice, or devices of several kinds.
    """
    devices_of(device)
    for name in device.split(","):
        yield _device(name)


def _device(name: str) -> Finding:
    kind, _, digits = name.partition(":")
    number = int(digits or 0)
    cores = len(usable_cores())
    if kind == "cpu":
        if number < cores:
            return Finding(part=f"device {name}", level=FINE, says=f"the processor, {cores} cores of which may be used")
        return Finding(
            part=f"device {name}",
            level=WARNING,
            says=f"parts of the processor have a core each at least, and there are {cores}",
            mend=f"name cpu:0 to cpu:{cores - 1}, or cpu alone",
        )
    import torch

    there = torch.cuda.device_count()
    if number < there:
        free, total = torch.cuda.mem_get_info(number)
        says = f"{torch.cuda.get_device_name(number)}, {in_bytes(free)} of {in_bytes(total)} free"
        return Finding(part=f"device {name}", level=FINE, says=says)
    known = ", ".join(f"cuda:{found}" for found in range(there))
    return Finding(
        part=f"device {name}",
        level=PROBLEM,
        says=f"it is not there: PyTorch sees {known or 'no accelerator'}",
        mend=f"name what is there (--device {known.replace(' ', '') or 'cpu'}), or look why it is not (nvidia-smi)",
    )


def _processors(root: Path) -> Iterator[Finding]:
    cores, memory = len(usable_cores()), usable_memory_bytes(root)
    says = f"{cores} processor cores and {in_bytes(memory)} of memory may be used"
    free = _available_bytes(root)
    needed = default_node_memory_bytes()
    if free is not None and free < needed:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"{says}, of which {in_bytes(free)} are free, and a node takes up to {in_bytes(needed)}",
            mend=f"end what else runs here, or give a node less (--memory {free // 2 // (1 << 20)}MiB)",
        )
    elif cores == 1:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"{says}: node and training loop would share one core",
            mend="run a node elsewhere (frostline serve, then --near), or give this process more cores",
        )
    else:
        yield Finding(part="machine", level=FINE, says=says)


def _available_bytes(root: Path) -> int | None:
    """What could be taken now without swapping, as Linux reckons; None where nobody says."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) << 10


def _open_files() -> Iterator[Finding]:
    soft = _max_open_files()
    if 0 <= soft < _MIN_FILES:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"a process may have {soft} files and connections open, and a wide window takes hundreds",
            mend=f"ulimit -n {4 * _MIN_FILES}",
        )


def _max_open_files() -> int:
    """Of this process; -1 where nobody counts them."""
    try:
        import resource
    except ImportError:  # it is Unix's
        return -1
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _accelerator(root: Path) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding(
            part="pytorch",
            level=PROBLEM,
            says="PyTorch is not installed, and no network can be trained or cut without it",
            mend="pip install torch, as the page for your accelerator at pytorch.org says",
        )
        return
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        says = (
            f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}, {in_bytes(free)} of {in_bytes(total)} free"
        )
        yield Finding(part="accelerator", level=FINE, says=says)
    elif (root / "dev/nvidia0").exists():
        why = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, which cannot use it"
        yield Finding(
            part="accelerator",
            level=PROBLEM,
            says=f"this machine has an NVIDIA accelerator, and PyTorch {torch.__version__} is built {why}",
            mend="install the build of PyTorch for your driver, as the selector at pytorch.org says",
        )
    else:
        yield Finding(
            part="accelerator", level=FINE, says=f"PyTorch {torch.__version__}; networks run on the processor"
        )


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    try:
        make_private_folder(folder)
        with (folder / f".examined-{id(folder)}").open("xb") as file:
            file.write(b"\0")
        Path(file.name).unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(
            part="cache folder",
            level=PROBLEM,
            says=f"nothing can be kept in {folder}: {error.strerror}",
            mend="make room or mend its permissions, or name another folder (XDG_CACHE_HOME)",
        )
        return
    if free < _MIN_CACHE_BYTES:
        yield Finding(
            part="cache folder",
            level=WARNING,
            says=f"{in_bytes(free)} are free for {folder}, where features and manifests are kept",
            mend="make room, or name a folder on another disk (XDG_CACHE_HOME)",
        )
    else:
        yield Finding(part="cache folder", level=FINE, says=f"{in_bytes(free)} are free for {folder}")
