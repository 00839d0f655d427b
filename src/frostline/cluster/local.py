"""A Ray of this machine alone: started in the background, found again by later commands, and ended by ``down``."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from frostline.errors import NodeUnreachable, SettingError
from frostline.private import make_private_folder

__all__ = ("end", "folder", "running", "start")

_START_S = 120.0
_STOP_S = 45.0
_LOOK_S = 0.1
_LAST_WORDS = 2000
_OPTIONS = (
    "--head",
    "--block",
    "--port=0",
    "--include-dashboard=false",
    "--include-log-monitor=false",
    "--disable-usage-stats",
)
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers give way to all else; nodes are asked by those who wait for them.
    "RAY_worker_niceness": "0",
    # Else Ray listens on all addresses of the machine, and runs what it is sent.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def folder() -> Path:
    """Where the Ray of this user keeps its files; sockets among them need a short path."""
    return Path(tempfile.gettempdir()) / f"frostline-ray-{os.geteuid()}"


def running() -> str | None:
    """The address of the Ray that was started here; None where none runs."""
    try:
        found = json.loads((folder() / "head.json").read_text())
        address, pid = str(found["address"]), int(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if _is_ray(pid) else None


def start(cpus: int, object_bytes: int) -> str:
    """Start a Ray that listens on this machine alone and outlives this process; give its address.

    It has no dashboard and sends no usage statistics.

    Args:
        cpus: processors that it may give away.
        object_bytes: memory for objects that tasks hand to each other.

    Raises:
        SettingError: Somebody else owns the folder of its files.
        NodeUnreachable: It did not start; the message holds the end of what it said.
    """
    at = folder()
    make_private_folder(at)
    if at.stat().st_uid != os.geteuid():
        raise SettingError(f"{at} belongs to somebody else: set TMPDIR to a folder of your own")
    address = at / "ray_current_cluster"
    address.unlink(missing_ok=True)
    options = (f"--num-cpus={cpus}", f"--object-store-memory={object_bytes}", f"--temp-dir={at}")
    with (at / "head.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 (Ray's own command, no shell)
            [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *_OPTIONS, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # Else it asks for a token where this user has one from another Ray, and who joins by an address sends none.
            env={"RAY_AUTH_MODE": "disabled", **os.environ, **_ENVIRONMENT},
        )
    _wait(process, address)
    found = address.read_text().strip()
    (at / "head.json").write_text(json.dumps({"pid": process.pid, "address": found}))
    return found


def end() -> None:
    """End the Ray that was started here, with all that runs in it; nothing where none runs."""
    if running() is None:
        return
    state = folder() / "head.json"
    pid = int(json.loads(state.read_text())["pid"])
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while _is_ray(pid) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if _is_ray(pid):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder(), ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], address: Path) -> None:
    """Wait until Ray has written its address, which it does once it runs."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        if address.is_file() and address.read_text().strip():
            return
        time.sleep(_LOOK_S)
    process.terminate()
    said = (address.parent / "head.log").read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
    raise NodeUnreachable(f"Ray did not start on this machine:\n{said}")


def _is_ray(pid: int) -> bool:
    """Whether a process is the Ray that was started, and not another one with its number, nor one that has ended."""
    try:
        return b"ray.scripts.scripts" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
