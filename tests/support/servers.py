"""What starting a real server takes: free ports, a process whose words are kept, and waiting until it answers."""

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ("free_ports", "listens", "served", "wait_until")

# Below those that the system gives to connections (Linux: from 32768), which come and go at any moment.
_PORTS = range(20_000, 32_000)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports that nobody listens on, and that no connection is given before a server takes them."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            one, port = stack.enter_context(socket.socket()), random.SystemRandom().choice(_PORTS)
            with contextlib.suppress(OSError):
                one.bind((host, port))
                ports.append(port)
    return ports


def listens(port: int) -> bool:
    """Whether somebody takes connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def served(
    command: list[str],
    log: Path,
    is_ready: Callable[[], bool],
    *,
    within_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a server in the folder of its log, ready, until the block ends; it is stopped with SIGKILL.

    Raises:
        RuntimeError: it was not ready in time; with its last words.
    """
    with (
        log.open("wb") as words,
        subprocess.Popen(command, stdout=words, stderr=words, cwd=log.parent, env=environment) as process,
    ):
        try:
            if not wait_until(is_ready, process, within_s):
                last = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{log.stem} was not ready within {within_s} s:\n{last}")
            yield
        finally:
            process.kill()


def wait_until(is_ready: Callable[[], bool], process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Ask until it is ready; False where its process ends before that, or time does."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if is_ready():
            return True
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            return False
    return False
