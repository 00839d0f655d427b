"""Brings nodes up under Ray, says how they are, changes their number and takes them down."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from frostline.cluster import local
from frostline.cluster.connect import address_of_ray, join
from frostline.cluster.settings import NAMESPACE, ClusterSettings
from frostline.cluster.supervisor import ClusterState, Supervisor, is_ours, node_actors, stop_node
from frostline.errors import NodeUnreachable, SettingError
from frostline.wire.http.ray_list import SUPERVISOR

__all__ = ("Cluster", "end_own_ray", "hosts_with", "reach_or_start")

_ASK_S = 20.0
_LOOK_S = 0.2
# A node that cannot start says why at once, and may find its folder or its port a little later.
_PATIENCE_S = 10.0


def reach_or_start(address: str | None, *, cpus: int, object_bytes: int) -> tuple[Any, str | None]:
    """Join Ray, and start one on this machine where no other is named; give its package and the address started.

    Args:
        address: as ``--address`` says it.
        cpus: processors of a Ray that is started.
        object_bytes: its memory for objects.
    """
    if address_of_ray(address) is not None:
        return join(address), None
    started = local.start(cpus, object_bytes)
    return join(started), started


def hosts_with(ray: Any, label: str) -> int:
    """How many hosts of Ray have a label, as ``KEY=VALUE``.

    Args:
        ray: the package.
        label: the label.
    """
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

    def up(
        self, settings: ClusterSettings, timeout_s: float, tell: Callable[[ClusterState], None] | None = None
    ) -> ClusterState:
        """Bring nodes up, or bring those that there are in line one after another; return when they are.

        Args:
            settings: settings that nodes should have.
            timeout_s: longest to wait.
            tell: told how far it is.

        Raises:
            SettingError: A node cannot start with these settings.
            NodeUnreachable: They are not ready in time.
        """
        self._replace_supervisor(settings)
        return self._settled(timeout_s, tell or _ignore)

    def scale(self, nodes: int, timeout_s: float) -> ClusterState:
        """Have another number of nodes, whatever the demand.

        Args:
            nodes: the number.
            timeout_s: longest to wait.

        Raises:
            SettingError: The number makes no sense.
            NodeUnreachable: There are no nodes to begin with, or they are not ready in time.
        """
        settings: ClusterSettings = self._asked("settings")
        return self.up(replace(settings, min_nodes=nodes, max_nodes=nodes), timeout_s)

    def state(self) -> ClusterState:
        """How the nodes are.

        Raises:
            NodeUnreachable: There are none.
        """
        found: ClusterState = self._asked("state")
        return found

    def down(self) -> int:
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

    def _settled(self, timeout_s: float, tell: Callable[[ClusterState], None]) -> ClusterState:
        began_s = failing_s = time.monotonic()
        while True:
            state, now_s = self.state(), time.monotonic()
            tell(state)
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

    Args:
        address: as ``--address`` says it.

    Returns:
        Whether it was ended.
    """
    own = local.running()
    if own is None or address_of_ray(address) != own:
        return False
    ray = join(own)
    if any(map(is_ours, (actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)))):
        return False
    ray.shutdown()
    local.end()
    return True


def _ignore(_: ClusterState) -> None:
    pass
