"""What engines must know and set of a machine: its hardware, freed memory, isolated processes, first calls.

A network that runs in another thread meanwhile takes other kernels, and its features differ in the last bits. So runs
share the process among themselves, and a trace waits for them and has it alone. Two traces at a time fail, each by
what the other has changed.

Asks an accelerator for its name and free memory, through torch; ``engines.machine`` knows when to ask.

Has MKL's vector functions called first by one thread: called first by several at once, they may be imprecise.
"""

import atexit
import ctypes
import functools
import gc
import hashlib
import importlib.util
import math
import os
import platform
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from types import ModuleType

from frostline.core.config import cache_folder
from frostline.core.errors import SettingError
from frostline.core.files import FileCache
from frostline.core.system import usable_cores

__all__ = (
    "ENVIRONMENT",
    "FUNCTIONS",
    "abilities",
    "can_measure",
    "compute_slot",
    "end_at_once",
    "estimated_operations_per_s",
    "free_bytes",
    "free_device_bytes",
    "hardware_name",
    "host_digest",
    "import_now",
    "is_accelerator",
    "is_installed",
    "keep_freed_memory",
    "keeps_freed_memory",
    "limit_memory",
    "look_anew",
    "operations_per_s",
    "pause_compute",
    "peak_bytes",
    "quick_dtypes",
    "resident_bytes",
    "settle_kernels",
    "trace_slot",
    "version_of",
    "versions",
)


# mallopt(3) of glibc; the numbers are part of its binary interface (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER = (1 << 31) - 1

ENVIRONMENT = {
    # Threads that compute must not spin while others decode; OpenMP reads it once, when torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
    # As keep_freed_memory, in the words of glibc's manual (mallopt(3), "Environment variables").
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(_NEVER),
}
"""For a process of Frostline's own that runs networks: what it must know before its first thread."""

_kept = threading.Event()


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; for a process that is a node and nothing else.

    Eager networks free and ask for the same tens of megabytes at every layer. glibc maps each such block anew, and
    on a virtual machine the page faults take longer than the layers: EfficientNet-lite0 at batch 32 ran at 13
    images/s without this and at 46 with it (see ``benchmarks/results``). One arena, since only the main one can
    hold large blocks: call this before numpy or torch is imported, whose threads make arenas of their own, which
    later threads then share. A child process is better told by ``ENVIRONMENT``.

    Returns:
        True if the C library took the setting; False without glibc, where nothing changes.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
    taken = [mallopt(name, value) for name, value in wanted]
    if all(taken):
        _kept.set()
    return all(taken)


def keeps_freed_memory() -> bool:
    """Whether this process does: it was made to, or told so when it was started."""
    told = os.environ.get("MALLOC_MMAP_MAX_") == ENVIRONMENT["MALLOC_MMAP_MAX_"]
    return _kept.is_set() or (told and sys.platform == "linux")


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
        device: the device in torch's words; several with commas.
    """
    if is_accelerator(device):
        return " and ".join(dict.fromkeys(map(_accelerator_name, device.split(","))))
    return f"{_processor()}, {len(usable_cores())}{_THREADS}"


_THREADS = " threads"
# VGG-11 reaches 9e10 on one core here, and a hundred times that on an accelerator.
_CORE_PER_S, _ACCELERATOR_PER_S = 5e10, 1e13


def estimated_operations_per_s(hardware: str, cores: int) -> float:
    """Operations a second that are believed of a device as long as nobody has measured it.

    Args:
        hardware: name of the device, as ``hardware_name`` gives it.
        cores: number of cores that it may use, where it is a processor.
    """
    return cores * _CORE_PER_S if hardware.endswith(_THREADS) else _ACCELERATOR_PER_S


# A layer in the middle of a ResNet: what most frozen layers spend their time in.
_CHANNELS, _SIDE, _KERNEL = 64, 56, 3
_TIMED_S, _TIMES, _MAX_ROWS = 0.005, 5, 512


def operations_per_s(device: str) -> float:
    """Operations a second of a convolution, measured once a machine, in less than a second, and kept.

    Only to be compared with the same of another device: a network of other layers reaches more or less.

    Args:
        device: one device in torch's words.
    """
    import torch

    about = f"{hardware_name(device)} {version_of('torch')} {torch.get_num_threads()}"
    kept, key = FileCache(cache_folder() / "speed", ".txt"), hashlib.sha256(about.encode()).hexdigest()
    with suppress(ValueError):
        if (found := float(kept.get(key) or b"0")) > 0 and math.isfinite(found):
            return found
    measured = _measured_operations_per_s(device)
    kept.put(key, f"{measured:.4g}".encode())
    return measured


def _measured_operations_per_s(device: str) -> float:
    """The fastest of a few runs, since other programs may have a part of any."""
    import torch

    # No random numbers: those of this process are its user's.
    kernel = torch.full((_CHANNELS, _CHANNELS, _KERNEL, _KERNEL), 1e-3, dtype=torch.float32, device=device)

    def seconds(rows: int) -> float:
        images = torch.full((rows, _CHANNELS, _SIDE, _SIDE), 1e-3, dtype=torch.float32, device=device)
        began_s = time.perf_counter()
        torch.nn.functional.conv2d(images, kernel, padding=1)[0, 0, 0, 0].item()  # which waits for an accelerator
        return time.perf_counter() - began_s

    rows, operations = 1, 2 * (_CHANNELS * _KERNEL * _SIDE) ** 2
    with torch.inference_mode(), compute_slot():
        seconds(rows)  # makes kernels ready
        while rows < _MAX_ROWS and seconds(rows) < _TIMED_S:
            rows *= 2
        return rows * operations / min(seconds(rows) for _ in range(_TIMES))


def abilities(device: str) -> frozenset[str]:
    """What computes can do, by the flags of its processor in Linux's names, such as ``avx512_bf16``, or ``cuda``.

    Empty where nobody says.
    """
    if is_accelerator(device):
        return frozenset({"cuda"})
    lines = _CPU.read_text().splitlines() if _CPU.exists() else []
    named = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(named, ()))


def quick_dtypes(abilities: Set[str]) -> tuple[str, ...]:
    """The types of numbers that a device multiplies at its full speed, in torch's names."""
    return ("float32", *(name for name, flags in _QUICK.items() if flags & abilities))


def is_accelerator(device: str) -> bool:
    """Whether a device, in torch's words, is an accelerator and not the processor."""
    return device.partition(":")[0] == "cuda"


def free_device_bytes(device: str) -> int | None:
    """What nobody has taken of an accelerator's memory now; None where engines run in the processor's own."""
    if not is_accelerator(device):
        return None
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


def import_now(package: str) -> ModuleType:
    """A package or module, imported now.

    OpenVINO and its companions report every import over the network if they find ``openvino_telemetry``, which comes
    with them: here they do not find it.
    """
    if package.partition(".")[0] in ("nncf", "openvino"):
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # how Python says "not there"
    return importlib.import_module(package)


_CHANGED = threading.Condition()
_ONE_TRACES = threading.RLock()
_running = 0
_traces = 0


@contextmanager
def compute_slot() -> Iterator[None]:
    """Run a network; waits while somebody traces. Not to be nested."""
    _enter()
    try:
        yield
    finally:
        _leave()


@contextmanager
def pause_compute() -> Iterator[None]:
    """Let others trace, or run another network in this thread, within ``compute_slot`` between two operations."""
    _leave()
    try:
        yield
    finally:
        _enter()


def _enter() -> None:
    global _running  # noqa: PLW0603 (the switch that this guards is the process's own)
    with _CHANGED:
        _CHANGED.wait_for(lambda: not _traces)
        _running += 1


def _leave() -> None:
    global _running  # noqa: PLW0603 (as above)
    with _CHANGED:
        _running -= 1
        _CHANGED.notify_all()


@contextmanager
def trace_slot() -> Iterator[None]:
    """Trace a network; waits for what runs and for other traces, and holds back runs that would begin."""
    global _traces  # noqa: PLW0603 (as above)
    with _CHANGED:
        _traces += 1
        try:
            _CHANGED.wait_for(lambda: not _running)
        except BaseException:
            _traces -= 1
            raise
    try:
        with _ONE_TRACES:
            yield
    finally:
        with _CHANGED:
            _traces -= 1
            _CHANGED.notify_all()


def end_at_once() -> None:
    """Have the interpreter not look through all that torch made once more as it ends, for most of a second."""
    atexit.register(gc.freeze)


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# proc(5): writing 5 sets the peak of resident memory to what is resident now.
_PEAK = "5"


def can_measure() -> bool:
    """Whether the system tells, and lets the peak be set back."""
    try:
        look_anew()
    except OSError:
        return False
    return _STATUS.exists()


def resident_bytes() -> int:
    """Memory of this process now."""
    return _field("VmRSS:")


def peak_bytes() -> int:
    """The most since the last ``look_anew``."""
    return _field("VmHWM:")


def look_anew() -> None:
    """Forget the peak so far."""
    _CLEAR.write_text(_PEAK)


def limit_memory(max_bytes: int) -> None:
    """Let this process take so many bytes more; what it asks for beyond is refused."""
    if sys.platform == "linux":
        import resource  # which Windows lacks

        resource.setrlimit(resource.RLIMIT_DATA, (_field("VmData:") + max_bytes, resource.RLIM_INFINITY))


def _field(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _accelerator_name(device: str) -> str:
    """As its driver has it.

    Args:
        device: the device in torch's words.
    """
    import torch

    return torch.cuda.get_device_name(device)


def free_bytes(device: str) -> int:
    """What nobody has taken of its memory now.

    What this process keeps for its next runs counts as taken, so that it is to be asked for before the first.

    Args:
        device: the device in torch's words.

    Raises:
        SettingError: This machine, or its PyTorch, has no such device.
    """
    import torch

    try:
        found, _ = torch.cuda.mem_get_info(device)
    except (AssertionError, RuntimeError, ValueError) as error:  # torch's, by what is lacking
        why = str(error).partition("\n")[0]
        raise SettingError(f"device {device} cannot be used here ({why}): write cpu, which is always there") from error
    return found


# What ATen hands to MKL's vector library (aten/src/ATen/cpu/vml.h of torch 2.13), by torch's names.
FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
_LOCK = threading.Lock()


def settle_kernels() -> None:
    """Have MKL choose its kernels now; the first call in a process does it, later ones return at once.

    MKL 2024.2, which torch is built with, chooses the kernel of a vector function at its first call. Where several
    threads of one operator make that call together, one of them may compute its share with a kernel of low precision:
    the first ``sqrt`` of an optimiser, and every loss behind it, then depend on how busy the machine was. See
    https://github.com/pytorch/pytorch/issues/188792. Call it before a process computes. Safe for threads.
    """
    with _LOCK:
        _call_each()


@functools.cache
def _call_each() -> None:
    import torch

    for dtype in (torch.float32, torch.float64):
        # Too few for torch to share them among threads, and on the CPU whatever the user's default device.
        some = torch.full((8,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(some)
