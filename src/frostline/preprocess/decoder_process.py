"""Runs in processes that decode what untrusted clients may have made: one forks the others, which are confined.

A child has a socket, memory that it shares with the node, and nothing else: see ``decoders`` for who asks it.
"""

import contextlib
import ctypes
import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from PIL import AvifImagePlugin, Image

from frostline.core import View
from frostline.core.errors import FrostlineError, SampleError
from frostline.core.system import imports_stay
from frostline.preprocess import Preprocess, audio, imagenet
from frostline.preprocess.apply import MAX_PIXELS, decode_into, pixels_into, pixels_needed, scratch_bytes
from frostline.preprocess.confinement import confine
from frostline.preprocess.sounds import has_sound_packages
from frostline.preprocess.tokens import opened_tokenizer

with contextlib.suppress(ImportError):  # it is Unix's, as ``Decoders.are_possible`` says
    import resource

__all__ = ("COUNT", "MAX_DECODE_S", "MAX_TOGETHER", "MESSAGE_BYTES", "PAGE", "Errand", "serve_decoding")

MAX_DECODE_S = 20.0
"""Core seconds that one sample may take; an image of 50 million pixels takes a tenth of it."""
MESSAGE_BYTES = 1 << 16
"""Bytes of a message to a child, and of its answer."""
MAX_TOGETHER = 8
"""Samples in one message: to wake a process and to be woken takes a tenth of the time of decoding a photograph."""
PAGE = 4096
"""Bytes of memory before what is made, which begins in a page of its own."""
COUNT = struct.Struct("<I")
"""Samples of a message that the child has done with, at the beginning of the memory that it shares."""

Errand = Callable[[Mapping[str, Any], Sequence[memoryview], memoryview], list[int]]
"""Work of another kind: of what is asked, some bytes and memory for what it makes; how many bytes it made, and more."""

# Core seconds after which no further sample of a message is begun, so that other tenants have their turn.
_TURN_S = 0.5
# What a child may take beside what was reserved: gaps in its heap, and tokenizers, each several times its JSON.
_SLACK_BYTES, _TOKENIZER_BYTES = 64 << 20, 1 << 30
_KEPT_TOKENIZERS = 4
# Milliseconds without a sample after which a child gives back what it has freed: it would keep tens of megabytes.
_RESTS_MS = 300
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF", "JPEG2000", "ICO", "AVIF")
# The number of it in prctl(2).
_PR_SET_PDEATHSIG = 1


def serve_decoding(
    control: socket.socket, memory_bytes: int, errands: Mapping[str, Errand] = MappingProxyType({})
) -> NoReturn:
    """Fork a child for each socket that comes over another one, until that is closed. Never returns.

    Where the number of a child comes alone, how that has ended is answered.

    Args:
        control: socket over which the sockets come.
        memory_bytes: memory for decoding of the node.
        errands: the other kinds of work that a child does, by their names.
    """
    with imports_stay():
        _warm_up()
    starter = os.getpid()
    while True:
        said, files, _, _ = socket.recv_fds(control, 32, 1)
        if not said:
            os._exit(0)
        if not files:
            control.send(str(_ending_of(int(said))).encode())
        for file in files:
            if os.fork() == 0:
                control.close()
                _end_with(starter)
                _serve(socket.socket(fileno=file), memory_bytes, errands)
            os.close(file)


def _ending_of(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # another process forked it
        return 0


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _serve(peer: socket.socket, memory_bytes: int, errands: Mapping[str, Errand]) -> NoReturn:
    figures = os.open("/proc/self/statm", os.O_RDONLY)
    bounds = _Bounds(figures, memory_bytes)
    with contextlib.suppress(BaseException):
        trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", int)  # glibc's
        messages = select.poll()
        messages.register(peer, select.POLLIN)
        peer.send(json.dumps({"pid": os.getpid(), "by": confine()}).encode())
        memory = mmap.mmap(-1, PAGE)
        while True:
            if not messages.poll(_RESTS_MS):
                trim(0)
            said, files, _, _ = socket.recv_fds(peer, MESSAGE_BYTES, 1)
            if not said:
                break
            for file in files:
                memory = mmap.mmap(file, os.fstat(file).st_size)
                os.close(file)
            orders = json.loads(said)
            errand = errands.get(orders.get("errand", ""))
            answer = _answered(orders, memory, bounds) if errand is None else _done(errand, orders, memory, bounds)
            peer.send(json.dumps(answer).encode())
    os._exit(0)


@dataclass(slots=True)
class _Bounds:
    """The limits of a child, which it sets for each sample and cannot raise above those of the first."""

    figures: int
    memory_bytes: int
    base: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        self.take_base()
        self.most = self.base + self.memory_bytes + _SLACK_BYTES + _TOKENIZER_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (self.most, self.most))
        for kind, maximum in ((resource.RLIMIT_NOFILE, 16), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(kind, (maximum, maximum))

    def take_base(self) -> None:
        """Count from what the process has now."""
        self.base = int(os.pread(self.figures, 256, 0).split()[5]) * resource.getpagesize()

    def begin(self, nbytes: int) -> None:
        """A sample may take so many bytes, and its part of a core."""
        resource.setrlimit(resource.RLIMIT_DATA, (min(self.most, self.base + nbytes + _SLACK_BYTES), self.most))
        signal.setitimer(signal.ITIMER_PROF, MAX_DECODE_S)  # its signal ends the process, whatever library it is in

    def end(self) -> None:
        """Nothing is decoded."""
        signal.setitimer(signal.ITIMER_PROF, 0)


def _done(errand: Errand, orders: dict[str, Any], memory: mmap.mmap, bounds: _Bounds) -> list[Any]:
    """What an errand says; or one text that says why it was refused, empty where it takes more memory than it may."""
    start, *_ = made = orders["made"]
    pieces = [memoryview(memory)[place : place + length] for place, length in orders["pieces"]]
    try:
        bounds.begin(orders["may_take"])
        return errand(orders["asked"], pieces, memoryview(memory)[start : start + made[1]])
    except MemoryError:
        return [""]
    except FrostlineError as error:
        return [str(error)[: MESSAGE_BYTES // 16]]
    finally:
        bounds.end()


_equipped: dict[str, Preprocess] = {}
"""Preprocessings of texts with their tokenizers, by their steps."""


def _answered(orders: dict[str, Any], memory: mmap.mmap, bounds: _Bounds) -> list[Any] | None:
    """Of each sample the pixels that it needs and whether it was decoded, or why not; None without its tokenizer."""
    preprocess = _parsed(orders["steps"])
    if preprocess.tokens is not None:
        start, length = orders["tokenizer"]
        if orders["steps"] not in _equipped:
            if not length:
                return None
            _equip(orders["steps"], memory[start : start + length], bounds)
        preprocess = _equipped[orders["steps"]]
    answers, began_s = list[Any](), time.process_time()
    for sample in orders["samples"]:
        if answers and time.process_time() - began_s > _TURN_S:
            break
        COUNT.pack_into(memory, 0, len(answers))
        answers.append(_answer_of(preprocess, sample, memory, bounds, is_pixels=orders["is_pixels"]))
    return answers


def _answer_of(
    preprocess: Preprocess, sample: list[Any], memory: mmap.mmap, bounds: _Bounds, *, is_pixels: bool
) -> list[Any] | str:
    number, view, max_pixels, place, start, length = sample
    shape, dtype, into = preprocess.sample.shape, np.dtype(preprocess.sample.dtype), decode_into
    if is_pixels:
        channels, height, width = shape
        shape, dtype, into = (height, width, channels), np.dtype(np.uint8), pixels_into
    out = np.frombuffer(memory, dtype, math.prod(shape), place).reshape(shape)
    view = None if view is None else View(seed=view[0], epoch=view[1])
    encoded = memoryview(memory)[start : start + length]
    try:
        bounds.begin(3 * length + scratch_bytes(max_pixels))
        needed = pixels_needed(preprocess, encoded)
        is_made = not max_pixels < needed <= MAX_PIXELS
        if is_made:
            into(preprocess, encoded, out, id=number, view=view)
    except (SampleError, FrostlineError) as error:
        return str(error)[: MESSAGE_BYTES // (16 * MAX_TOGETHER)]
    except MemoryError:
        return "decoding it takes more memory than was reserved for it"
    else:
        return [needed, is_made]
    finally:
        bounds.end()


@lru_cache(64)
def _parsed(steps: str) -> Preprocess:
    return Preprocess.from_json(json.loads(steps))


def _equip(steps: str, content: bytes, bounds: _Bounds) -> None:
    """Open a tokenizer, which stays: what a text takes is counted from there on."""
    if len(_equipped) >= _KEPT_TOKENIZERS:
        _equipped.clear()
        opened_tokenizer.cache_clear()
    bounds.begin(bounds.most)
    _equipped[steps] = _parsed(steps).with_tokenizer(content)
    opened_tokenizer(content)
    bounds.end()
    bounds.take_base()


def _warm_up() -> None:
    """Decode a sample of each kind, which loads what children cannot load, and have no library start threads."""
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    for name in ("tokenizers", "pillow_heif"):
        if find_spec(name) is not None:
            import_module(name)
    heif = sys.modules.get("pillow_heif")
    if heif is not None:
        heif.options.DECODE_THREADS = 1
    for name in _FORMATS:
        with contextlib.suppress(OSError, KeyError):  # Pillow may be built without it
            file = BytesIO()
            Image.new("RGB", (64, 64)).save(file, name)
            _decode_once(imagenet(32, augment=True), file.getvalue())
    array = BytesIO()
    np.save(array, np.zeros((64, 64, 3), np.uint8))
    _decode_once(imagenet(32, augment=True), array.getvalue())
    if has_sound_packages():
        sound = BytesIO()
        import_module("soundfile").write(sound, np.zeros(16_000, np.float32), 16_000, format="WAV")
        _decode_once(audio(0.5, sample_rate=8_000), sound.getvalue())


def _decode_once(preprocess: Preprocess, encoded: bytes) -> None:
    out = np.empty(preprocess.shape, preprocess.dtype)
    with contextlib.suppress(SampleError):
        decode_into(preprocess, encoded, out, id=0, view=View(seed=0, epoch=0))
