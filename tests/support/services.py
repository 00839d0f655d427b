"""An I/O service in this process, for tests that look into it."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

from frostline.core.config import IoSettings, LoaderSettings
from frostline.io_service.client import IoTransport
from frostline.io_service.service import IoService
from frostline.io_service.start import listen_at, unnamed_address
from frostline.node.in_process import LocalTransport

SETTINGS = LoaderSettings(deadline_s=30)


@contextmanager
def serving(upstream, url=None, **settings):
    """A service over a transport; yields it and its address."""
    url = url or unnamed_address()
    with listen_at(url) as listening, IoService(upstream, IoSettings(**settings), listening) as service:
        yield service, url


@contextmanager
def serving_node(node, **settings):
    """A service over a node of this process; yields it and a way to it."""
    with serving(LocalTransport(node), **settings) as (service, url):
        transport = IoTransport(url, SETTINGS)
        try:
            yield service, transport
        finally:
            transport.close()


def is_quiet(service):
    """Nothing is under way, and nobody holds anything."""
    return service.statistics()["window"]["used_bytes"] == 0


def descriptors(pid="self"):
    """How many a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def shared_memory():
    """All that is there: what other processes have goes with them, what a service left behind would stay.

    Semaphores of living pools of joblib's, which bear a process's number, are those of tests that run beside this one.
    """
    return {path for path in Path("/dev/shm").iterdir() if not _is_a_living_pools(path.name)}


def _is_a_living_pools(name):
    found = re.match(r"sem\.loky-(\d+)-", name)
    return found is not None and Path("/proc", found[1]).exists()


def of_sessions(sessions):
    """Processes that are left in these sessions, by their ids: of who began one, what it started, and so on."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) in sessions:
            found.append(int(path.parent.name))
    return found


@contextmanager
def python(code, *arguments):
    """A process that runs some code, killed at the end; its stdout is a pipe of lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
