"""The process that inspects prefixes for a node: it forks a child for each, with limits on memory and time.

A graph that crashes its child, or takes too long, fails only the request that brought it. Torch is imported once,
before the first fork, so that a child is ready in milliseconds.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any, NoReturn

from frostline.core import Cut, Graph, GraphNode, Ref
from frostline.engines.machine.isolation import limit_memory
from frostline.engines.measure.operations import GraphLimits
from frostline.errors import FrostlineError
from frostline.models.files.inspection import inspect_graph, inspect_prefix
from frostline.processors import collector_rests
from frostline.wire.refusals import error_to_json

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
        warm_up: whether to import first what PyTorch needs for shapes; otherwise each child does, in about a second.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of children is not needed
    if warm_up:
        with collector_rests():
            _warm_up()
    gc.freeze()  # children need not collect what exists already
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
        try:
            limits = GraphLimits(**terms["limits"])
            found = inspect_prefix(header, max_rows=terms["max_rows"], limits=limits, tokenizer=tokenizer)
            answer = found.to_json()
        except FrostlineError as error:
            answer = json.dumps(error_to_json(error))
        peer.sendall(answer.encode())


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
