"""Has uploaded prefixes checked in another process; this is the node's side of it."""

import contextlib
import hashlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

from frostline.batching import readable_bytes
from frostline.core.config import cache_folder
from frostline.core.errors import Overloaded, UnsafeArtifact
from frostline.core.files import FileCache
from frostline.core.nouns import Closing
from frostline.core.processes import Worker, without_keys
from frostline.core.system import STARTED, __version__
from frostline.wire.messages import error_from_json

if TYPE_CHECKING:
    from frostline.engines.measure import GraphLimits
    from frostline.models.artifact import Inspection

__all__ = ("Inspector", "kept_inspections")

_FORMAT = 2
_MAX_ANSWER_BYTES = 16 << 20
_PIECE = 1 << 16
# Seconds to wait per processor second of a check: on a busy machine a child gets few of its seconds.
_WAIT_FACTOR = 6
_STARTING_S = 60.0
_RETRY_AFTER_S = 5.0


def _key(request: bytes) -> str:
    """The name of an inspection, by everything that it depends on."""
    made_by = f"{_FORMAT}\n{__version__}\n{version('torch')}\n"
    return hashlib.sha256(made_by.encode() + request).hexdigest()


def kept_inspections() -> FileCache:
    """The cache of inspections that this user's nodes have made."""
    return FileCache(cache_folder() / "inspections", ".json")


class Inspector(Closing):
    """Inspects prefixes in child processes, one at a time per tenant. A context manager; safe for threads.

    With ``fork`` the inspecting process is a fork of this one, which must have no threads yet; it shares the memory of
    the imported modules. Without it, or if it has died, the process is started anew.

    Args:
        fork: True to begin with a fork of this process.
        kept: cache of inspections, so that the same prefix is not inspected again; None for no cache.
    """

    def __init__(self, *, fork: bool = False, kept: FileCache | None = None) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._kept = kept
        # With a filled cache the next prefix is probably known, and its job needs the processor.
        self._process = _forked(warm_up=kept is None or kept.is_empty) if fork else _started()
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The id of the process from which children are forked."""
        return self._process.pid

    def inspect(
        self,
        header: bytes,
        *,
        max_rows: int,
        max_check_s: float,
        limits: "GraphLimits",
        tenant: str = "",
        tokenizer: bytes = b"",
    ) -> "Inspection":
        """Inspect a prefix; see ``models.artifact.inspect_prefix``.

        Args:
            header: header of its file.
            max_rows: rows of the largest batch.
            max_check_s: limit of processor seconds.
            limits: limits of its graph.
            tenant: name of the tenant that asks.
            tokenizer: JSON of the tokenizer that came with it; empty where none did.

        Raises:
            UnsafeArtifact: The file is not a prefix, or its check was ended.
            OverBudget: The prefix computes more than this node allows.
            Overloaded: The machine is too busy to check the prefix now.
        """
        from frostline.models.artifact import BROKEN, Inspection
        from frostline.node.inspection_process import MAX_CHECK_BYTES, request_of

        request = request_of(header, max_rows=max_rows, max_check_s=max_check_s, limits=limits, tokenizer=tokenizer)
        key = _key(request)
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
                "or ended its process: it is refused"
            ) from None
        raise refusal

    def close(self) -> None:
        """Kill the process, and start no other. Calling it again does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._process.end()

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
        """Open a connection to a new child."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._is_closed:
                ours.close()
                raise Overloaded("the node is stopping", retry_after_s=_RETRY_AFTER_S)
            try:
                socket.send_fds(self._process.control, [b"x"], [theirs.fileno()])
            except OSError:  # the process has died
                self._process.end()
                self._process = _started()
                socket.send_fds(self._process.control, [b"x"], [theirs.fileno()])
        return ours


def _exchange(peer: socket.socket, request: bytes) -> bytes:
    """The reply of a child; empty if it died before."""
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
    os.setsid()  # keeps Ctrl-C in the terminal away
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    try:
        from frostline.node.inspection_process import serve_inspections

        serve_inspections(theirs, warm_up=warm_up)
    finally:
        os._exit(1)


def _started() -> _Process:
    ours, theirs = socket.socketpair()
    with theirs:
        files, environment = [theirs.fileno()], without_keys(os.environ)
        process = Worker(STARTED["inspection"], str(files[0]), files=files, environment=environment)
    return _Process(ours, process.pid, process.wait)
