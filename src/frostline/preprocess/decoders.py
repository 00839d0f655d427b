"""Decodes untrusted samples in child processes: bounded, without files or a network, and kept ready.

A process that imports the decoders once forks a child for each decoding thread. Encoded samples, pixels and tokens
lie in memory that node and child share; what is said about them are small messages of JSON, one for all samples that
wait at that moment. A child that ends takes the one sample with it that it had, and the next ones get a new one.
"""

import contextlib
import json
import math
import mmap
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core import View
from frostline.core.errors import DataError, SampleError
from frostline.core.processes import Worker
from frostline.core.system import STARTED, is_stopped
from frostline.core.units import log_named
from frostline.preprocess import Decode, DecodeAudio, Preprocess, Tokenize
from frostline.preprocess.apply import MAX_PIXELS
from frostline.preprocess.decoder_process import COUNT, MAX_DECODE_S, MAX_TOGETHER, MESSAGE_BYTES, PAGE
from frostline.preprocess.turns import DecodingTurns

with contextlib.suppress(ImportError):  # it is Unix's, as ``are_possible`` says
    import fcntl

__all__ = ("DecoderStatistics", "Decoders", "takes_decoders")

# Seconds on the clock, on a machine where a child gets few of its core seconds.
_LONGEST_S = 6 * MAX_DECODE_S
_LOOK_S = 1.0  # between two looks at whether somebody has stopped it
_STARTING_S = 60.0
_MIN_BYTES, _TOGETHER_BYTES = 1 << 20, 16 << 20
# Memory that a child shares while it waits, and all of them: new pages take as long as copying them.
_KEPT_BYTES, _ALL_KEPT_BYTES = 64 << 20, 256 << 20
# Children that wait for a sample: as many tenants as ask at once have one each, of a few megabytes of its own.
_KEPT_CHILDREN = 16
_ENVIRONMENT = {
    # Threads of other libraries would not survive the forks, and cannot be started in children.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    # Freed memory is kept for the next sample, up to what most of them take.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    # What Arrow's own allocator reserves ahead would count as taken.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
# What tells Python and the loader of libraries where they are; all else may be a key, which a sample could carry out.
_PASSED_ON = re.compile(r"PATH|TZ|LANG|(LC|LD|PYTHON)[A-Z_]*")
_LOG = log_named("frostline.decoders")
# Why children end, and what is said of it to who wanted the sample.
_CAUSES = {
    "time": f"decoding it takes more than {MAX_DECODE_S:g} s of a core",
    "crash": "it breaks the decoder, or takes more memory than was reserved for it",
    "killed": "the system killed it",
    "exit": "it left off without an answer",
    "nonsense": "it answered what makes no sense",
}
# Of which not every system has all.
_CRASHES = {getattr(signal, f"SIG{name}", None) for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS")}


def takes_decoders(preprocess: Preprocess) -> bool:
    """Whether samples are decoded by libraries; records of a ready format and arrays are numbers as they lie there."""
    return any(isinstance(part.steps[0], Decode | DecodeAudio | Tokenize) for part in preprocess.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStatistics:
    """What became of the processes that decode.

    Attributes:
        confined_by: protections in force, such as "Landlock 6 and seccomp"; empty before the first began.
        started: number of processes that began.
        ended: number of those that a sample ended, or the system, by cause: ``time``, ``crash`` (broken or out of
            memory), ``killed``, ``exit`` and ``nonsense`` (an answer that makes no sense).
    """

    confined_by: str
    started: int
    ended: dict[str, int]


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """What a tenant wants of a child.

    Attributes:
        turn: lock that is held until it is done, or its thread is to have done what waits.
        error: reason why it failed.
        seconds: part of the time, its own, in which it and others were done.
        number: number of its turn; 0 where it is done in another one's.
    """

    tenant: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    error: SampleError | DataError | OSError | None = None
    seconds: float = 0.0
    number: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it failed, or succeeded."""
        return self.error is not None


@dataclass(slots=True, eq=False, kw_only=True)
class _Errand(_Waiting):
    """Work of another kind than decoding a sample; see ``Decoders.run``."""

    orders: dict[str, Any]
    pieces: Sequence[bytes | memoryview]
    made_bytes: int
    answer: list[int] | None = None
    made: bytes = b""

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.error is not None


@dataclass(slots=True, eq=False, kw_only=True)
class _Task(_Waiting):
    """A sample that is to be decoded, and what has become of it.

    Attributes:
        needed: pixels that it needs; None until it is decoded.
        shape: shape of what a child makes: of images pixels, whose numbers are made here as they are copied.
        dtype: type of that.
        made_bytes: bytes of that in shared memory, in whole pages.
    """

    preprocess: Preprocess
    steps: str
    encoded: bytes | memoryview
    out: npt.NDArray[Any]
    id: int
    view: View | None
    max_pixels: int
    needed: int | None = None
    shape: tuple[int, ...] = field(init=False)
    dtype: np.dtype[Any] = field(init=False)
    made_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.out.shape, self.out.dtype
        if self.preprocess.levels is not None and self.dtype != np.uint8:
            channels, height, width = self.shape
            self.shape, self.dtype = (height, width, channels), np.dtype(np.uint8)
        self.made_bytes = -(-math.prod(self.shape) * self.dtype.itemsize // PAGE) * PAGE

    @property
    def is_done(self) -> bool:
        return self.needed is not None or self.error is not None

    def goes_with(self, other: "_Task") -> bool:
        """Whether one message can hold both."""
        return (
            self.tenant == other.tenant
            and self.steps == other.steps
            and self.dtype == other.dtype
            and self.shape == other.shape
        )


class Decoders:
    """Child processes that decode, each for one tenant. The first sample starts them. Safe for threads.

    One of the threads that wait decodes for others too: it sends the samples of its tenant that wait at that moment in
    one message, a fair part of them where several children work.

    Args:
        memory_bytes: memory for decoding of the node: the most that a child may take for one sample.
        at_once: number of children that decode at the same time.
        module: module that runs ``serve_decoding``; it gets the number of its socket and the memory behind it.
    """

    def __init__(self, memory_bytes: int, at_once: int = 1, module: str = STARTED["decoding"]) -> None:
        self._memory_bytes = memory_bytes
        self._at_once = at_once
        self._module = module
        self._lock = threading.Lock()
        self._starter: _Starter | None = None
        self._waiting: deque[_Waiting] = deque()
        self._turns = DecodingTurns(at_once)
        # By tenant, None where it has seen no sample; the one that waits longest is first.
        self._idle: list[tuple[str | None, _Child]] = []
        self._is_closed = False
        self._confined_by = ""
        self._began = 0
        self._ended = dict.fromkeys(_CAUSES, 0)

    def decode_into(
        self,
        preprocess: Preprocess,
        encoded: bytes | memoryview,
        out: npt.NDArray[Any],
        *,
        id: int,
        view: View | None,
        max_pixels: int = MAX_PIXELS,
        tenant: str = "",
    ) -> tuple[int, float]:
        """Decode one sample into ``out`` as ``preprocess.apply`` does it, to the bit.

        Args:
            preprocess: the steps, of which ``takes_decoders`` is true.
            encoded: the sample as stored.
            out: array of the shape and type of ``preprocess.sample``, or ``uint8[H, W, C]`` for pixels alone.
            id: number of the sample; see ``preprocess.apply.decode_into``.
            view: random view; see there.
            max_pixels: pixels for which memory was reserved.
            tenant: name of the tenant whose sample it is: no process sees samples of two.

        Returns:
            The pixels that the sample needs; where they are more than ``max_pixels`` and may be reserved at all,
            nothing was decoded. And the seconds of decoding it, without those of waiting for its turn.

        Raises:
            SampleError: see ``preprocess.apply.decode_into``; or the child that decoded it ended.
        """
        task = _Task(
            preprocess=preprocess,
            steps=_steps(preprocess),
            encoded=encoded,
            out=out,
            id=id,
            view=view,
            max_pixels=max_pixels,
            tenant=tenant,
        )
        self._have_done(task)
        assert task.needed is not None, "its pixels are known once it is done"
        return task.needed, task.seconds

    def run(
        self,
        kind: str,
        asked: Mapping[str, Any],
        pieces: Sequence[bytes | memoryview],
        *,
        made_bytes: int,
        may_take: int,
        tenant: str,
    ) -> tuple[list[int], bytes]:
        """Have a child do work of another kind, as the module that it runs knows it.

        Args:
            kind: name of the work.
            asked: question, a small object of JSON.
            pieces: bytes that it needs for that.
            made_bytes: the most bytes that it may make.
            may_take: bytes of memory that it may take meanwhile.
            tenant: name of the tenant whose work it is: no process sees data of two.

        Returns:
            The numbers that it says, the first of which is how many bytes it made; and these bytes.

        Raises:
            DataError: The work was refused because of what the bytes are.
            SampleError: The work takes more memory than it may, or the child that did it ended.
        """
        orders = {"errand": kind, "asked": asked, "may_take": may_take}
        errand = _Errand(tenant=tenant, orders=orders, pieces=pieces, made_bytes=-(-made_bytes // PAGE) * PAGE)
        self._have_done(errand)
        assert errand.answer is not None, "it is done"
        return errand.answer, errand.made

    def _have_done(self, task: _Waiting) -> None:
        """Wait for a turn, in which this thread has it done, and raise why it failed."""
        task.turn.acquire()
        with self._lock:
            self._turns.note(task.tenant, time.monotonic())
            self._waiting.append(task)
            self._give_turns()
        task.turn.acquire()
        if not task.is_done:
            self._do_waiting(task)
        if task.error is not None:
            raise task.error

    def _do_waiting(self, task: _Waiting) -> None:
        """Decode a sample, whose turn it is, with others that wait; then it is the turn of the next one.

        Those of the others that took too long, or whose child ended, wait on, behind everybody.
        """
        tasks = [task]
        try:
            if isinstance(task, _Task):
                with self._lock:
                    tasks += self._that_go_with(task)
            began = time.perf_counter()
            self._decode(tasks)
            done = [each for each in tasks if each.is_done]
            for each in done:
                each.seconds = (time.perf_counter() - began) / len(done)
        finally:
            with self._lock:
                for each in tasks[1:]:
                    if each.is_done:
                        each.turn.release()
                    else:
                        self._waiting.append(each)
                self._turns.end(task.number, len(tasks), time.monotonic())
                self._give_turns()

    def _give_turns(self) -> None:
        """Wake those whose turn it is, as far as places are free."""
        now_s = time.monotonic()
        while (tenant := self._turns.choose([task.tenant for task in self._waiting], now_s)) is not None:
            task = next(task for task in self._waiting if task.tenant == tenant)
            self._waiting.remove(task)
            task.number = self._turns.begin(tenant, now_s)
            task.turn.release()

    def _that_go_with(self, task: _Task) -> list[_Task]:
        """Take a fair part of those that wait and fit into the same message, or a few."""
        part = -(-(1 + len(self._waiting)) // self._at_once)
        most = min(MAX_TOGETHER, max(MAX_TOGETHER // 2, part)) - 1
        found, left = list[_Task](), _TOGETHER_BYTES - task.made_bytes - len(task.encoded)
        for each in self._waiting:
            if len(found) == most:
                break
            if isinstance(each, _Task) and each.goes_with(task):
                nbytes = each.made_bytes + len(each.encoded)
                if nbytes <= left:
                    found.append(each)
                    left -= nbytes
        for each in found:
            self._waiting.remove(each)
        return found

    def _decode(self, tasks: Sequence[_Waiting]) -> None:
        """Have the first of some done, and as many of the others as go with it in one message."""
        first = tasks[0]
        while not first.is_done:
            try:
                child = self._taken(first.tenant)
            except (SampleError, OSError) as error:  # none can be had
                first.error = error
                return
            is_sound = False
            try:
                child.do(tasks)
                is_sound = True
            except BrokenPipeError:  # it had ended while it waited, or somebody stopped it: another one gets them
                continue
            except _Ended as ended:
                cause = self._bury(child, str(ended))
                if cause != "nonsense" or len(tasks) == 1:  # else it makes no sense of how far it came either
                    lost = tasks[min(child.count_done(), len(tasks) - 1)]
                    lost.error = SampleError(f"the process that decoded it ended: {_CAUSES[cause]}")
                tasks = [first]
            finally:
                if is_sound:
                    self._give_back(first.tenant, child)
                elif not child.is_buried:
                    self._bury(child)

    def pids(self) -> tuple[int, ...]:
        """Process ids of the children that wait for a sample."""
        with self._lock:
            return tuple(child.pid for _, child in self._idle)

    def statistics(self) -> DecoderStatistics:
        """What became of them."""
        with self._lock:
            return DecoderStatistics(confined_by=self._confined_by, started=self._began, ended=dict(self._ended))

    def warm(self) -> None:
        """Have the first child ready, so that the first sample need not wait for it."""
        with contextlib.suppress(SampleError):
            self._give_back(None, self._taken(None))

    @staticmethod
    def are_possible() -> bool:
        """Whether the system has what they need: memory without a name, and handles of processes."""
        return hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")

    def close(self) -> None:
        """Kill all of them. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            starter, self._starter = self._starter, None
        for _, child in idle:
            child.kill()
        if starter is not None:
            starter.close()

    def _taken(self, tenant: str | None) -> "_Child":
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] in (tenant, None):
                    return self._idle.pop(place)[1]
            if self._is_closed:
                raise SampleError("the node is stopping")
            try:
                return self._started()
            except OSError:  # what starts them has died
                if self._starter is not None:
                    self._starter.close()
                    self._starter = None
                return self._started()

    def _started(self) -> "_Child":
        if self._starter is None:
            self._starter = _Starter(self._module, self._memory_bytes)
        child = self._starter.child()
        self._began += 1
        if not self._confined_by:
            self._confined_by = child.confined_by
            _LOG.info("samples are decoded in processes of their own, confined by %s", child.confined_by)
        return child

    def _give_back(self, tenant: str | None, child: "_Child") -> None:
        surplus = None
        with self._lock:
            kept = sum(each.shared_bytes for _, each in self._idle) + child.shared_bytes
        if child.shared_bytes > _KEPT_BYTES or kept > _ALL_KEPT_BYTES:
            child.empty()
        with self._lock:
            if not self._is_closed:
                self._idle.append((tenant, child))
                if len(self._idle) <= _KEPT_CHILDREN:
                    return
                _, surplus = self._idle.pop(0)
        self._bury(surplus or child, is_wanted=True)

    def _bury(self, child: "_Child", cause: str = "", *, is_wanted: bool = False) -> str:
        """End it, count why it ended where nobody wanted that, and return it."""
        child.kill()
        with self._lock:
            status = 0 if self._starter is None else self._starter.status(child.pid)
            found = cause or _cause_of(status)
            self._ended[found] += not is_wanted
        return found


def _cause_of(status: int) -> str:
    """Of the end of a process: minus the number of the signal, or its exit status."""
    if -status == signal.SIGPROF:
        return "time"
    return "crash" if -status in _CRASHES else "killed" if status < 0 else "exit"


class _Ended(Exception):
    """The child has ended, or must; with the cause where it is known."""


def _without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """What processes of untrusted samples get of an environment, which holds tokens and keys."""
    return {name: value for name, value in environment.items() if _PASSED_ON.fullmatch(name)}


class _Starter:
    """The process that forks children, which end with it; it ends with this process."""

    def __init__(self, module: str, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            file, environment = theirs.fileno(), {**_without_keys(os.environ), **_ENVIRONMENT}
            self._process = Worker(module, str(file), str(memory_bytes), files=[file], environment=environment)
        ours.settimeout(_STARTING_S)
        self._control = ours

    def child(self) -> "_Child":
        """A new child, which is ready.

        Raises:
            OSError: the process has died.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
            ours.settimeout(_STARTING_S)
            hello = json.loads(ours.recv(MESSAGE_BYTES) or b"{}")
            if not hello:
                raise BrokenPipeError
            return _Child(ours, int(hello["pid"]), str(hello["by"]))
        except OSError:
            ours.close()
            raise

    def status(self, pid: int) -> int:
        """How a child of it that was killed, or ended before, has ended; 0 where that is not known."""
        try:
            self._control.send(str(pid).encode())
            return int(self._control.recv(MESSAGE_BYTES) or b"0")
        except OSError:  # it has died, as the next child will find
            return 0

    def close(self) -> None:
        """Kill it, and with it its children."""
        self._control.close()
        self._process.end()


class _Child:
    """One child, and the memory that it shares with this process. For one thread at a time."""

    def __init__(self, peer: socket.socket, pid: int, confined_by: str) -> None:
        self.pid = pid
        self.confined_by = confined_by
        self.is_buried = False
        self.shared_bytes = 0
        self._peer = peer
        peer.settimeout(_LOOK_S)
        # The number may be another process's once it has ended.
        self._handle = os.pidfd_open(pid)
        self._memory = mmap.mmap(-1, PAGE)
        self._unsent = -1

    def do(self, tasks: Sequence[_Waiting]) -> None:
        """Decode samples that go into one message, or the first of them where they take long; or run one errand.

        Raises:
            BrokenPipeError: The child process had ended before it was asked, or somebody stopped it (SIGSTOP).
            _Ended: The child process ended, or has to be ended, after as many samples as ``count_done`` says.
        """
        samples = [task for task in tasks if isinstance(task, _Task)]
        if samples:
            self._decode(samples)
        for task in tasks:
            if isinstance(task, _Errand):
                self._run(task)

    def _run(self, errand: _Errand) -> None:
        place, pieces = PAGE + errand.made_bytes, []
        self._share(place + sum(map(len, errand.pieces)))
        for piece in errand.pieces:
            self._memory[place : place + len(piece)] = piece
            pieces.append([place, len(piece)])
            place += len(piece)
        answer = self._asked({**errand.orders, "made": [PAGE, errand.made_bytes], "pieces": pieces})
        match answer:
            case [""]:
                errand.error = SampleError("decoding it takes more memory than was reserved for it")
            case [str(said)]:
                errand.error = DataError(said)
            case [int(count), *rest] if 0 <= count <= errand.made_bytes and all(type(part) is int for part in rest):
                errand.made = self._memory[PAGE : PAGE + count]
                errand.answer = [count, *rest]
            case _:
                raise _Ended("nonsense")

    def _decode(self, tasks: Sequence[_Task]) -> None:
        first = tasks[0]
        made = range(PAGE, PAGE + len(tasks) * first.made_bytes, first.made_bytes)
        orders = {"steps": first.steps, "is_pixels": first.dtype == np.uint8, "tokenizer": [0, 0]}
        start, stop, samples = made.stop, made.stop + sum(len(task.encoded) for task in tasks), []
        self._share(stop)
        for task, place in zip(tasks, made, strict=True):
            view = None if task.view is None else [task.view.seed, task.view.epoch]
            self._memory[start : start + len(task.encoded)] = task.encoded
            samples.append([task.id, view, task.max_pixels, place, start, len(task.encoded)])
            start += len(task.encoded)
        answer = self._asked({**orders, "samples": samples})
        if answer is None:
            tokenizer = first.preprocess.tokenizer
            self._share(stop + len(tokenizer), kept=stop)
            self._memory[stop : stop + len(tokenizer)] = tokenizer
            answer = self._asked({**orders, "samples": samples, "tokenizer": [stop, len(tokenizer)]})
        for task, place, said in zip(tasks, made, _checked(answer, len(tasks)), strict=False):
            if isinstance(said, str):
                task.error = SampleError(said)
                continue
            needed, is_made = said
            if is_made:
                self._copy(task, place)
            task.needed = needed

    def empty(self) -> None:
        """Give back the pages that both share, which are empty then."""
        self._memory.madvise(mmap.MADV_REMOVE)
        self.shared_bytes = 0

    def count_done(self) -> int:
        """Samples of the last message that it has done with."""
        return int(COUNT.unpack_from(self._memory)[0])

    def _copy(self, task: _Task, place: int) -> None:
        made = np.frombuffer(self._memory, task.dtype, math.prod(task.shape), place).reshape(task.shape)
        if task.dtype == task.out.dtype:
            np.copyto(task.out, made)
        else:
            assert task.preprocess.levels is not None, "its pixels were asked for"
            task.preprocess.levels.into(made, task.out)

    def kill(self) -> None:
        """End it, whatever it does."""
        self.is_buried = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)
        self._peer.close()
        if self._unsent >= 0:
            os.close(self._unsent)

    def _asked(self, orders: dict[str, Any]) -> list[Any] | None:
        """Its answer of each sample; None where it lacks the tokenizer."""
        COUNT.pack_into(self._memory, 0, 0)
        files = [] if self._unsent < 0 else [self._unsent]
        try:
            if files:
                socket.send_fds(self._peer, [json.dumps(orders).encode()], files)
            else:
                self._peer.send(json.dumps(orders).encode())
        except OSError as error:
            raise BrokenPipeError from error
        finally:
            self._unsent = -1
            for file in files:
                os.close(file)
        try:
            answer = json.loads(self._answer())
        except (ValueError, RecursionError) as error:
            raise _Ended("nonsense") from error
        if answer is None or isinstance(answer, list):
            return answer
        raise _Ended("nonsense")

    def _answer(self) -> bytes:
        done, until_s = 0, time.monotonic() + _LONGEST_S
        while True:
            try:
                answer = self._peer.recv(MESSAGE_BYTES)
            except TimeoutError as error:
                if is_stopped(self.pid):
                    raise BrokenPipeError from error
                before, done = done, self.count_done()
                if before < done <= MAX_TOGETHER:
                    until_s = time.monotonic() + _LONGEST_S
                elif time.monotonic() >= until_s:
                    raise _Ended("time") from error
            except OSError as error:
                raise _Ended from error
            else:
                if not answer:
                    raise _Ended
                return answer

    def _share(self, nbytes: int, kept: int = 0) -> None:
        """Share more memory, where that is needed, with what is kept; its file goes with the next message."""
        self.shared_bytes = max(self.shared_bytes, nbytes)
        if nbytes <= len(self._memory) and len(self._memory) > PAGE:
            return
        size = max(_MIN_BYTES, 1 << (nbytes - 1).bit_length())
        if self._unsent >= 0:
            os.close(self._unsent)
        self._unsent = file = os.memfd_create("frostline-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        # A child could cut it short, and this process would end where it reads on.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        before, self._memory, self.shared_bytes = self._memory, mmap.mmap(file, size), nbytes
        self._memory[:kept] = before[:kept]


def _checked(answer: list[Any] | None, count: int) -> list[str | tuple[int, bool]]:
    """What is said of each sample: why it is refused, or the pixels that it needs and whether it was decoded."""
    if answer is None or not 0 < len(answer) <= count:
        raise _Ended("nonsense")
    found = list[str | tuple[int, bool]]()
    for said in answer:
        if isinstance(said, str):
            found.append(said)
        elif isinstance(said, list) and [type(part) for part in said] == [int, bool]:
            found.append((said[0], said[1]))
        else:
            raise _Ended("nonsense")
    return found


@lru_cache(256)
def _steps(preprocess: Preprocess) -> str:
    return json.dumps(preprocess.to_json())
