"""Brings nodes up under Ray, here or where an address leads, says how they are, and takes them down."""

import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frostline.core.config import environment
from frostline.core.declared import parse_json
from frostline.core.errors import NodeUnreachable, SettingError
from frostline.core.files import make_private_folder, with_schema, without_schema
from frostline.ray.scaling import NAMESPACE, ClusterSettings
from frostline.ray.supervisor import ClusterState, Supervisor, is_ours, node_actors, stop_node
from frostline.wire.node_lists import SUPERVISOR

__all__ = (
    "Cluster",
    "end",
    "end_own_ray",
    "folder",
    "hosts_with",
    "join",
    "leave_if_ended",
    "ray_session",
    "reach_or_start",
    "running_address",
    "start",
)


_START_S = 120.0
_FORMAT = 1
_STOP_S = 45.0
_LOCAL_LOOK_S = 0.1
_KNOCK_S = 5.0
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


def _require_own(at: Path) -> None:
    """Do nothing where a folder is this user's alone, or is not there: anybody can make one of that name before.

    Who joins another user's Ray runs what that sends.

    Raises:
        SettingError: The folder is another user's, a link, or others may write there.
    """
    try:
        found = at.lstat()
    except FileNotFoundError:
        return
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingError(
            f"{at} is not a folder of your own that nobody else may write to: set TMPDIR to another one, or name the "
            "Ray to join (RAY_ADDRESS)"
        )


def running_address() -> str | None:
    """The address of the Ray that was started here; None where none runs.

    Raises:
        SettingError: The folder of Ray's files is not this user's alone.
    """
    _require_own(folder())
    try:
        found = without_schema(parse_json((folder() / "head.json").read_bytes()), _FORMAT, folder(), ("address", "pid"))
        address, pid = str(found["address"]), int(found["pid"])
    except (OSError, ValueError, KeyError, TypeError, SettingError):
        return None
    return address if _is_ray(pid) else None


def start(cpus: int, object_bytes: int) -> str:
    """Start a Ray that listens on this machine alone and outlives this process; give its address.

    It has no dashboard and sends no usage statistics.

    Args:
        cpus: processors that it may give away.
        object_bytes: memory for objects that tasks hand to each other.

    Raises:
        SettingError: The folder of Ray's files is not this user's alone.
        NodeUnreachable: Ray did not start; the message holds the end of its output.
    """
    at = folder()
    make_private_folder(at)
    _require_own(at)
    # Ray lets everybody write to the folder that it is given: within this one, nobody else reaches it.
    within = at / "ray"
    address = within / "ray_current_cluster"
    address.unlink(missing_ok=True)
    options = (f"--num-cpus={cpus}", f"--object-store-memory={object_bytes}", f"--temp-dir={within}")
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
    _wait(process, address, at / "head.log")
    found = address.read_text().strip()
    (at / "head.json").write_text(json.dumps(with_schema({"pid": process.pid, "address": found}, _FORMAT)))
    return found


def end() -> None:
    """End the Ray that was started here, with all that runs in it; nothing where none runs."""
    if running_address() is None:
        return
    state = folder() / "head.json"
    pid = int(json.loads(state.read_text())["pid"])
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_S
    while _is_ray(pid) and time.monotonic() < until:
        time.sleep(_LOCAL_LOOK_S)
    if _is_ray(pid):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder(), ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], address: Path, log: Path) -> None:
    """Wait until Ray has written its address, which it does once it runs."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        if address.is_file() and address.read_text().strip():
            return
        time.sleep(_LOCAL_LOOK_S)
    process.terminate()
    said = log.read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
    raise NodeUnreachable(f"Ray did not start on this machine: {' / '.join(said.splitlines())}")


def _is_ray(pid: int) -> bool:
    """Whether a process is the Ray that was started, and not another one with its number, nor one that has ended."""
    try:
        return b"ray.scripts.scripts" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


_LOOPBACK = ("127.", "localhost")
# Without it Ray takes 127.0.0.1 for the machine's address in its network, where a Ray started here does not listen.
_STAY_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _address_of_ray(address: str | None = None) -> str | None:
    """The address of the Ray to join; None where whichever runs is meant.

    Args:
        address: the address as it was asked for; None or ``auto`` take ``RAY_ADDRESS``, and then the Ray that was
            started here.
    """
    if address not in (None, "auto"):
        return address
    named = environment("RAY_").get("RAY_ADDRESS")
    return named if named not in (None, "auto") else running_address()


def join(address: str | None = None) -> Any:
    """Join Ray and give its package; nothing where this process has joined already.

    Raises:
        SettingError: Ray is not installed.
        NodeUnreachable: No Ray answers.
    """
    if find_spec("ray") is None:
        raise SettingError("nodes under Ray need the package ray: pip install 'frostline[ray]'")
    found = _address_of_ray(address)
    # Both are read when the package is imported.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", **(_STAY_LOCAL if _is_local(found) else {})})
    import ray

    if not ray.is_initialized():
        try:
            if found is not None:
                _require_answer(found)
            ray.init(found or "auto", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise NodeUnreachable(
                f"no Ray answers at {found or 'any address of this machine'}: start it (ray start --head, or frostline "
                f"cluster up on one machine), or correct --address or RAY_ADDRESS ({error})"
            ) from error
    return ray


def _require_answer(address: str) -> None:
    """Refuse a ``host:port`` where nothing takes connections, which Ray would try for minutes; it knows others itself.

    Raises:
        ConnectionError: No program takes connections there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error


def leave_if_ended() -> None:
    """Leave a Ray that has ended. Its thread for errors would ask it again without a pause, on a whole core."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.util.client.ray.is_connected():  # a Ray client has no such thread
        return
    try:
        _require_answer(ray.get_runtime_context().gcs_address)
    except ConnectionError:
        ray.shutdown()


@contextmanager
def ray_session() -> Iterator[Any]:
    """Join Ray as ``join`` does, and give its package; a process that had not joined before leaves it afterwards."""
    before = sys.modules.get("ray")
    had_joined = before is not None and before.is_initialized()
    ray = join()
    try:
        yield ray
    finally:
        if not had_joined:
            ray.shutdown()


def _is_local(address: str | None) -> bool:
    return address is not None and address.startswith(_LOOPBACK)


_ASK_S = 20.0
_LOOK_S = 0.2
# A node that cannot start says why at once, and may find its folder or its port a little later.
_PATIENCE_S = 10.0


def reach_or_start(address: str | None, *, cpus: int, object_bytes: int) -> tuple[Any, str | None]:
    """Join Ray, and start one on this machine where no other is named; give its package and the address started.

    Args:
        address: the address as ``--address`` says it.
        cpus: processors of a Ray that is started.
        object_bytes: the memory for objects.
    """
    if _address_of_ray(address) is not None:
        return join(address), None
    started = start(cpus, object_bytes)
    return join(started), started


def hosts_with(ray: Any, label: str) -> int:
    """How many hosts of Ray have a label, as ``KEY=VALUE``."""
    key, _, value = label.partition("=")
    return sum(host["Alive"] and host["Labels"].get(key) == value for host in ray.nodes())


class Cluster:
    """The nodes of one namespace.

    Args:
        ray: the package, of a process that has joined it.
        namespace: the namespace.
    """

    def __init__(self, ray: Any, namespace: str = NAMESPACE) -> None:
        self._ray = ray
        self._namespace = namespace

    def bring_up(self, settings: ClusterSettings, timeout_s: float) -> ClusterState:
        """Bring nodes up, or bring those that there are in line one after another; return when they are.

        Args:
            settings: settings that nodes should have.
            timeout_s: the longest to wait.

        Raises:
            SettingError: A node cannot start with these settings.
            NodeUnreachable: The nodes are not ready in time.
        """
        self._replace_supervisor(settings)
        return self._settled(timeout_s)

    def scale(self, nodes: int, timeout_s: float) -> ClusterState:
        """Have another number of nodes, whatever the demand.

        Args:
            nodes: the number.
            timeout_s: the longest to wait.

        Raises:
            SettingError: The number makes no sense.
            NodeUnreachable: No node is running, or the nodes are not ready in time.
        """
        settings: ClusterSettings = self._asked("settings")
        return self.bring_up(replace(settings, min_nodes=nodes, max_nodes=nodes), timeout_s)

    def state(self) -> ClusterState:
        """How the nodes are.

        Raises:
            NodeUnreachable: No node is running.
        """
        found: ClusterState = self._asked("state")
        return found

    def bring_down(self) -> int:
        """End all nodes; give how many there were."""
        self._end_supervisor()
        actors = node_actors(self._ray, self._namespace)
        for actor in actors.values():
            stop_node(self._ray, actor)
        return len(actors)

    def _asked(self, method: str) -> Any:
        try:
            supervisor = self._ray.get_actor(SUPERVISOR, namespace=self._namespace)
            return self._ray.get(getattr(supervisor, method).remote(), timeout=_ASK_S)
        except (ValueError, self._ray.exceptions.RayError) as error:
            raise NodeUnreachable(
                f"there are no nodes in the namespace {self._namespace} of Ray: start them with frostline cluster up, "
                "or correct --namespace or --address"
            ) from error

    def _replace_supervisor(self, settings: ClusterSettings) -> None:
        self._end_supervisor()
        self._ray.remote(Supervisor).options(
            name=SUPERVISOR,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=16,
            num_cpus=0,
        ).remote(settings)

    def _end_supervisor(self) -> None:
        try:
            self._ray.kill(self._ray.get_actor(SUPERVISOR, namespace=self._namespace), no_restart=True)
        except ValueError:
            return  # there is none

    def _settled(self, timeout_s: float) -> ClusterState:
        began_s = failing_s = time.monotonic()
        while True:
            state, now_s = self.state(), time.monotonic()
            if state.is_settled:
                return state
            failing_s = failing_s if state.failure else now_s
            if now_s - failing_s > _PATIENCE_S:
                raise SettingError(f"a node cannot start: {state.failure}")
            if now_s - began_s > timeout_s:
                raise NodeUnreachable(
                    f"the nodes are not ready after {timeout_s:.0f} s; see frostline cluster status, and whether Ray "
                    f"has hosts for them{f' ({state.trouble})' if state.trouble else ''}"
                )
            time.sleep(_LOOK_S)


def end_own_ray(address: str | None) -> bool:
    """End the Ray that was started here, where that is the one at an address and no nodes are left in it.

    Returns:
        True if Ray was ended.
    """
    try:
        own = running_address()
    except SettingError:  # whose nodes are elsewhere
        return False
    if own is None or _address_of_ray(address) != own:
        return False
    ray = join(own)
    if any(map(is_ours, (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)))):
        return False
    ray.shutdown()
    end()
    return True
