"""The process that inspects prefixes for a node: it forks a child for each, with limits on memory and time.

A graph that crashes its child, or takes too long, fails only the request that brought it. Torch is imported once,
before the first fork, so that a child is ready in milliseconds.
"""

import json
import os
import resource
import signal
import socket
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import Any, NoReturn, Self

from frostline.core import Cut, Graph, GraphNode, Ref
from frostline.core.errors import FrostlineError, UnsafeArtifact
from frostline.core.system import imports_stay
from frostline.engines.machine import limit_memory
from frostline.engines.measure import GraphLimits
from frostline.models.artifact import inspect_graph, inspect_prefix, try_tokenizer
from frostline.preprocess.confinement import confine
from frostline.preprocess.tokens import has_tokenizers
from frostline.wire.messages import error_to_json

__all__ = ("MAX_CHECK_BYTES", "request_of", "serve_inspections")

MAX_CHECK_BYTES = 1 << 30
"""The memory limit of one check, in bytes; a graph of the largest size takes a quarter of it."""

# Processor seconds after which a child lowers its priority: usual networks are done by then, and somebody waits.
_USUAL_S = 2.0
_NICE = 5
_MAX_FILES = 64


def request_of(
    header: bytes, *, max_rows: int, max_check_s: float, limits: GraphLimits, tokenizer: bytes = b""
) -> bytes:
    """The message to a child: a line of JSON, then the header of the prefix's file, then its tokenizer."""
    terms = {"max_rows": max_rows, "max_check_s": max_check_s, "limits": asdict(limits), "header": len(header)}
    return b"".join((json.dumps(terms).encode(), b"\n", header, tokenizer))


def serve_inspections(control: socket.socket, *, warm_up: bool) -> NoReturn:
    """Accept connections sent over a socket, with a child for each, until the socket is closed. Never returns.

    Args:
        control: Unix socket; each message is a byte with one connected socket.
        warm_up: True to import first what PyTorch needs for shapes; otherwise each child does, in about a second.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of children is not needed
    _need_no_folder()
    with imports_stay():  # children need not collect what exists already
        if warm_up:
            _warm_up()
    while True:
        said, files, _, _ = socket.recv_fds(control, 1, 1)
        if not said:
            os._exit(0)
        for file in files:
            if os.fork() == 0:
                control.close()
                _answer(socket.socket(fileno=file))
                os._exit(0)
            os.close(file)


def _answer(peer: socket.socket) -> None:
    with peer, peer.makefile("rb") as request:
        terms: dict[str, Any] = json.loads(request.readline())
        header, tokenizer = request.read(terms["header"]), request.read()
        _bound_this_process(terms["max_check_s"])
        with _FailureReporter(peer):
            limits = GraphLimits(**terms["limits"])
            answer = inspect_prefix(header, max_rows=terms["max_rows"], limits=limits).to_json()
            # Without the package the node says so when texts are asked for, and the trainer then tokenizes.
            if tokenizer and has_tokenizers():
                _confine_this_process()
                try_tokenizer(tokenizer)
            peer.sendall(answer.encode())


class _FailureReporter:
    """Sends any error of a check to the node that waits for it."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._peer.sendall(json.dumps(error_to_json(_refusal(error))).encode())
        return error is not None


def _refusal(error: BaseException) -> FrostlineError:
    if isinstance(error, FrostlineError):
        return error
    # Without its words, which may name files of this machine.
    return UnsafeArtifact(f"PyTorch failed on the prefix with {type(error).__name__}: it is refused")


def _need_no_folder() -> None:
    """Name a folder for what torch would keep on disk, which it looks for by writing a file.

    A part of torch's compiler is imported by the first operator that has a decomposition, which may be in a child: no
    file can be written there.
    """
    tempfile.tempdir = os.sep
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.sep


def _bound_this_process(max_check_s: float) -> None:
    """Limit memory, processor seconds and open files, and forbid writing to disk."""
    signal.signal(signal.SIGPROF, lambda *_: os.nice(_NICE))
    signal.setitimer(signal.ITIMER_PROF, _USUAL_S)
    limit_memory(MAX_CHECK_BYTES)
    seconds = max(1, round(max_check_s))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _confine_this_process() -> None:
    """Take from it what to read a tokenizer does not need: files, connections, threads and other processes."""
    signal.setitimer(signal.ITIMER_PROF, 0)  # its signal has this process ask for a lower priority
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    confine()


def _warm_up() -> None:
    """Inspect a small graph, so that what torch imports at its first run is imported before the first fork."""
    cut = Cut(
        number=1, name="", after=-1, tensors=("x",), shapes=((1, 2, 2),), dtypes=("float32",), bytes_per_sample=16
    )
    nodes = (
        GraphNode(name="relu", op="aten.relu.default", args=(Ref("x"),)),
        GraphNode(name="sum", op="aten.add.Tensor", args=(Ref("relu"), Ref("x"))),
    )
    graph = Graph(inputs=("x",), leaves=(), nodes=nodes, outputs=(Ref("sum"),))
    limits = GraphLimits(max_nodes=2, max_values=2, max_run_s=1, max_operation_s=1, operations_per_s=1e9)
    inspect_graph(graph, (), (cut,), max_rows=8, limits=limits)


if __name__ == "__main__":
    serve_inspections(socket.socket(fileno=int(sys.argv[1])), warm_up=True)
