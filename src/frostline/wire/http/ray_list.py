"""Asks Ray which nodes there are: in this process where it has joined Ray, else in one that joins it for that.

A trainer thus needs no Ray of its own, loses nothing where Ray goes away, and may fork workers.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

from frostline.errors import NodeUnreachable

__all__ = ("SUPERVISOR", "nodes_under_ray", "said_by_supervisor")

SUPERVISOR = "frostline-supervisor"
"""Name of the actor that knows the nodes of a namespace."""

# Joining Ray takes seconds; later answers take milliseconds.
_ANSWER_S = 30.0
_ASK_S = 5.0


def nodes_under_ray(namespace: str) -> tuple[str, ...]:
    """URLs of the nodes of a namespace of Ray by now.

    Args:
        namespace: as ``frostline cluster up`` was given it.

    Raises:
        NodeUnreachable: Ray does not answer, or has no nodes there.
    """
    ray = _RAYS.joined()
    said = _RAYS.asked(namespace) if ray is None else said_by_supervisor(ray, namespace)
    if "nodes" not in said:
        raise NodeUnreachable(
            f"ray://{namespace} says no nodes: {said.get('error', 'its answer makes no sense')}; start them with "
            "frostline cluster up, name another Ray with RAY_ADDRESS, or correct near="
        )
    return tuple(map(str, said["nodes"]))


def said_by_supervisor(ray: Any, namespace: str) -> dict[str, Any]:
    """What the supervisor of a namespace says in a process that has joined Ray: ``nodes``, or why not as ``error``.

    Args:
        ray: the package.
        namespace: namespace to ask in.
    """
    try:
        supervisor = ray.get_actor(SUPERVISOR, namespace=namespace)
    except ValueError:  # its own sentence has three guesses
        return {"error": "nobody keeps nodes in that namespace"}
    try:
        return {"nodes": ray.get(supervisor.listed.remote(), timeout=_ASK_S)}
    except ray.exceptions.RayError as error:
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}


class _Asking:
    """A process that has joined Ray and answers each line on its stdin. For one thread at a time."""

    def __init__(self, namespace: str) -> None:
        # -P keeps the current folder off the import path. A new session keeps Ctrl-C in the terminal away.
        self._process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
            [sys.executable, "-P", "-m", "frostline.cluster.listing", namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ask(self) -> dict[str, Any] | None:
        """What it says; None where it has ended or says nothing in time."""
        try:
            _pipe(self._process.stdin).write(b"\n")
            _pipe(self._process.stdin).flush()
            line = _line(_pipe(self._process.stdout))
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._end()
            return None
        said = json.loads(line)
        return said if isinstance(said, dict) else None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        _pipe(self._process.stdout).close()
        with suppress(BrokenPipeError):  # the line that it did not take
            _pipe(self._process.stdin).close()


class _Rays:
    """What this process knows of Ray; a forked one begins anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: dict[str, _Asking] = {}
        self._is_forked = False

    def forked(self) -> None:
        """Forget what belongs to the process that forked this one: connections do not survive that."""
        self._lock = threading.Lock()
        self._asking = {}
        self._is_forked = True

    def joined(self) -> Any:
        """The package where this process has joined Ray; None elsewhere."""
        ray = None if self._is_forked else sys.modules.get("ray")
        is_joined = ray is not None and getattr(ray, "is_initialized", bool)()
        return ray if is_joined else None

    def asked(self, namespace: str) -> dict[str, Any]:
        """What a process beside this one says; it ends a minute after it was asked last, or with this one."""
        with self._lock:
            there = self._asking.pop(namespace, None)
            said = None if there is None else there.ask()
            if said is None:
                there = _Asking(namespace)
                said = there.ask()
            if said is not None and there is not None:
                self._asking[namespace] = there
        return said or {"error": "no answer; is Ray installed here (frostline[ray]), and does it run?"}


def _line(pipe: IO[bytes]) -> bytes:
    """A line, or what there is of it in time."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(_ANSWER_S):
            data = os.read(pipe.fileno(), 65_536)
            if not data:
                break
            line += data
    return line


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


_RAYS = _Rays()
os.register_at_fork(after_in_child=_RAYS.forked)
