"""Has prefixes of strangers looked at apart: a node's side of the process that does so."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from frostline.batching import readable_bytes
from frostline.config import cache_folder
from frostline.errors import Overloaded, UnsafeArtifact
from frostline.file_cache import FileCache
from frostline.version import __version__
from frostline.wire.refusals import error_from_json

if TYPE_CHECKING:
    from frostline.engines.measure.operations import GraphLimits
    from frostline.models.files.inspection import Inspection

__all__ = ("Inspector", "kept_inspections")

_MAX_ANSWER_BYTES = 16 << 20
_PIECE = 1 << 16
# A child gets few of its processor seconds on a machine that is busy.
_WAIT_FACTOR = 6
_STARTING_S = 60.0
_RETRY_AFTER_S = 5.0


def kept_inspections() -> FileCache:
    """What nodes of this user have found out about prefixes."""
    return FileCache(cache_folder() / "inspections", ".json")


class Inspector:
    """Looks at prefixes in child processes, one at a time for each tenant. A context manager; safe for threads.

    Its process is started with it: where ``fork`` is given it is a copy of this one, which must have no threads yet,
    and shares the memory of what was imported; else, and where it is gone, it is started anew.

    Args:
        fork: Whether to begin with a copy of this process.
        kept: Where what is found out is kept, so that the same prefix is not looked at again; None keeps nothing.
    """

    def __init__(self, *, fork: bool = False, kept: FileCache | None = None) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._kept = kept
        # Where something is kept, the next prefix is probably known, and the job that brings it needs the processor.
        self._process = _forked(warm_up=kept is None or kept.is_empty) if fork else _started()
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process that children are copies of."""
        return self._process.pid

    def inspect(
        self, header: bytes, *, max_rows: int, max_check_s: float, limits: "GraphLimits", tenant: str = ""
    ) -> "Inspection":
        """What is found out about a prefix; see ``models.files.inspection.inspect_prefix``.

        Args:
            header: The header of its file.
            max_rows: The largest batch.
            max_check_s: Processor seconds that it may take.
            limits: What the prefix may have and do.
            tenant: Who asks.

        Raises:
            UnsafeArtifact: It is no prefix, or its check was ended.
            OverBudget: It computes more than it may.
            Overloaded: The machine has too much to do for it now.
        """
        from frostline.models.files.graph_file import BROKEN
        from frostline.models.files.inspection import Inspection
        from frostline.node.weights.inspection_process import MAX_CHECK_BYTES, request_of

        request = request_of(header, max_rows=max_rows, max_check_s=max_check_s, limits=limits)
        key = hashlib.sha256(b"\n".join((__version__.encode(), version("torch").encode(), request))).hexdigest()
        known = None if self._kept is None else self._kept.get(key)
        if known is not None:
            with contextlib.suppress(*BROKEN):
                return Inspection.from_json(_parsed(known))
        answer = self._answered(request, _STARTING_S + _WAIT_FACTOR * max_check_s, tenant)
        try:
            value = _parsed(answer)
            refusal = error_from_json(value)
            if refusal is None:
                found = Inspection.from_json(value)
                if self._kept is not None:
                    self._kept.put(key, answer)
                return found
        except BROKEN:
            raise UnsafeArtifact(
                f"checking the prefix took more than {max_check_s:g} s of a core or {readable_bytes(MAX_CHECK_BYTES)}, "
                "or it makes PyTorch fail: it is not taken"
            ) from None
        raise refusal

    def close(self) -> None:
        """End the process, and start no other. Calling it again does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._process.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answered(self, request: bytes, longest_s: float, tenant: str) -> bytes:
        with self._lock:
            turn = self._turns.setdefault(tenant, threading.Lock())
        if not turn.acquire(timeout=longest_s):
            raise _busy()
        try:
            with self._connected() as peer:
                peer.settimeout(longest_s)
                return _exchange(peer, request)
        except TimeoutError as error:
            raise _busy() from error
        finally:
            turn.release()

    def _connected(self) -> socket.socket:
        """A connection to a child of its own."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._is_closed:
                ours.close()
                raise Overloaded("the node is stopping", retry_after_s=_RETRY_AFTER_S)
            try:
                socket.send_fds(self._process.control, [b"x"], [theirs.fileno()])
            except OSError:  # its process is gone
                self._process.end()
                self._process = _started()
                socket.send_fds(self._process.control, [b"x"], [theirs.fileno()])
        return ours


def _exchange(peer: socket.socket, request: bytes) -> bytes:
    """What a child answers; nothing where it ended before."""
    answer = bytearray()
    with contextlib.suppress(ConnectionError):
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        while len(answer) <= _MAX_ANSWER_BYTES and (piece := peer.recv(_PIECE)):
            answer += piece
    return bytes(answer)


def _parsed(answer: bytes) -> dict[str, object]:
    value = json.loads(answer)
    if not isinstance(value, dict):
        raise TypeError
    return value


def _busy() -> Overloaded:
    return Overloaded("this machine is too busy to check a prefix: ask again later", retry_after_s=_RETRY_AFTER_S)


@dataclass(frozen=True, slots=True)
class _Process:
    control: socket.socket
    pid: int
    wait: Callable[[], object]

    def end(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()


def _forked(*, warm_up: bool) -> _Process:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _serve_as_child(ours, theirs, warm_up=warm_up)
    theirs.close()
    return _Process(ours, pid, partial(os.waitpid, pid, 0))


def _serve_as_child(ours: socket.socket, theirs: socket.socket, *, warm_up: bool) -> NoReturn:
    ours.close()
    os.setsid()  # no Ctrl-C from the terminal
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    try:
        from frostline.node.weights.inspection_process import serve_inspections

        serve_inspections(theirs, warm_up=warm_up)
    finally:
        os._exit(1)


def _started() -> _Process:
    ours, theirs = socket.socketpair()
    with theirs:
        # -P: the current folder is no place to import from. A session of its own: no Ctrl-C from the terminal.
        process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [sys.executable, "-P", "-m", "frostline.node.weights.inspection_process", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return _Process(ours, process.pid, process.wait)
