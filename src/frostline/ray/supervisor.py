"""The actors under Ray: one that knows the nodes and brings them in line, and one for each node."""

import hashlib
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, TenantSettings
from frostline.core.errors import FrostlineError
from frostline.node.process import NodeProcess
from frostline.ray.scaling import (
    KEPT_S,
    ClusterSettings,
    Load,
    NodeView,
    busy_share,
    name_of,
    next_steps,
    nodes_for,
    number_of,
)
from frostline.wire.node_lists import SUPERVISOR

__all__ = (
    "ClusterState",
    "NodeActor",
    "NodeState",
    "Supervisor",
    "is_ours",
    "node_actors",
    "stop_node",
)


_AGAIN_S = 2.0
_ASK_S = 2.0
_ENDED = 1
_OWN = "frostline-cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What a node under Ray says of itself.

    Attributes:
        digest: digest of the settings that it was started with.
        host: address of its host.
        url: the URL; empty while it starts.
        pid: id of its process; 0 while it starts.
        failure: reason that it did not start; empty otherwise.
        requests: requests in work.
        busy: share of its time in which it was busy lately.
    """

    digest: str
    host: str
    url: str = ""
    pid: int = 0
    failure: str = ""
    requests: int = 0
    busy: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


class NodeActor:
    """A node under Ray. Ray starts the actor again where it ends, and with it the node.

    Args:
        settings: settings that nodes should have.
        number: number of this one.
        host: address on which it listens.
    """

    def __init__(self, settings: ClusterSettings, number: int, host: str | None = None) -> None:
        self._host = host or _host()
        self._digest = settings.digest
        self._decode_threads = settings.node.decode_threads
        self._token, node = _with_own_tenant(settings)
        port = settings.port_of(number)
        self._process = NodeProcess(settings.roots, node, self._host, port, control=settings.control)
        self._failure = ""
        self._is_stopping = False
        self._measured: tuple[float, dict[str, float]] | None = None
        threading.Thread(target=self._run, name="frostline-node", daemon=True).start()

    def state(self) -> NodeState:
        """How it is now."""
        known = NodeState(digest=self._digest, host=self._host, failure=self._failure)
        pid = self._process.pid
        if not pid or self._failure:
            return known
        requests, busy = self._load()
        return replace(known, url=self._process.url, pid=pid, requests=requests, busy=busy)

    def stop(self) -> None:
        """Give its answers a few seconds to end, and end the node."""
        self._is_stopping = True
        self._process.stop()

    def _run(self) -> None:
        """In a thread: start the node, again and again where it cannot start yet, and end this process with it."""
        while not self._is_stopping:
            try:
                self._process.start()
            except FrostlineError as error:  # its port is not free yet, or its folder is not mounted yet
                self._failure = str(error)
                time.sleep(_AGAIN_S)
                continue
            self._failure = ""
            self._process.wait()
            if not self._is_stopping:
                os._exit(_ENDED)  # whereupon Ray starts this actor again

    def _load(self) -> tuple[int, float]:
        """Requests in work, and how busy it was since it was asked last."""
        transport = HttpTransport(self._process.url, LoaderSettings(deadline_s=_ASK_S, token=self._token))
        try:
            found = transport.node_statistics()
        except FrostlineError:
            return 0, 0.0
        finally:
            transport.close()
        before, self._measured = self._measured, (time.monotonic(), found["totals"])
        busy = 0.0
        if before is not None:
            elapsed_s = self._measured[0] - before[0]
            busy = busy_share(before[1], found["totals"], elapsed_s, self._decode_threads)
        return int(found["requests_in_progress"]), busy


def _host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _with_own_tenant(settings: ClusterSettings) -> tuple[str | None, Any]:
    """A token with which the actor may see statistics, and settings of a node that knows it among its tenants."""
    if not settings.node.tenants:
        return None, settings.node
    token = secrets.token_urlsafe(32)
    own = TenantSettings(name=_OWN, token_sha256=hashlib.sha256(token.encode()).hexdigest(), weight=1e-3)
    return token, replace(settings.node, tenants=(*settings.node.tenants, own))


_EVERY_S = 0.5
_STOP_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The nodes of a namespace of Ray.

    Attributes:
        namespace: the namespace.
        wanted: nodes that there should be now.
        min_nodes: nodes that there are in any case.
        max_nodes: nodes that there may be.
        digest: digest of the settings that nodes should have.
        nodes: state of each node by its number; None for one that does not answer.
        draining: numbers of nodes that nobody should ask any more.
        trouble: failure of the last look; empty for none.
    """

    namespace: str
    wanted: int
    min_nodes: int
    max_nodes: int
    digest: str
    nodes: dict[int, NodeState | None] = field(default_factory=dict)
    draining: tuple[int, ...] = ()
    trouble: str = ""

    @property
    def is_settled(self) -> bool:
        """All nodes are what they should be, and take requests."""
        return (
            sorted(self.nodes) == list(range(self.wanted))
            and not self.draining
            and all(node is not None and node.url and node.digest == self.digest for node in self.nodes.values())
        )

    @property
    def failure(self) -> str:
        """Why a node with the present settings does not start; empty where each does."""
        return next((node.failure for node in self.nodes.values() if node and node.digest == self.digest), "")

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "draining": list(self.draining), "is_settled": self.is_settled}


class Supervisor:
    """Brings the nodes of a namespace in line with settings. A new one with other settings takes its place.

    Args:
        settings: settings that nodes should have.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        import ray

        self._ray = ray
        self._settings = settings
        # As many as there are to begin with: Ray may have started this actor again.
        self._wanted = self._within_bounds(len(node_actors(ray, settings.namespace)))
        self._known: dict[int, NodeState | None] = {}
        self._draining: dict[int, float] = {}
        self._loads: deque[Load] = deque()
        self._trouble = ""
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="frostline-supervisor", daemon=True).start()

    def node_urls(self) -> list[str]:
        """URLs of the nodes that jobs should ask."""
        with self._lock:
            known = sorted((number, node) for number, node in self._known.items() if number not in self._draining)
        return [node.url for _, node in known if node is not None and node.url]

    def settings(self) -> ClusterSettings:
        """What nodes should be."""
        return self._settings

    def state(self) -> ClusterState:
        """All that it knows."""
        with self._lock:
            return ClusterState(
                namespace=self._settings.namespace,
                wanted=self._wanted,
                min_nodes=self._settings.min_nodes,
                max_nodes=self._settings.max_nodes,
                digest=self._settings.digest,
                nodes=dict(sorted(self._known.items())),
                draining=tuple(sorted(self._draining)),
                trouble=self._trouble,
            )

    def _run(self) -> None:
        while True:
            trouble = ""
            try:
                self._look()
            except (ValueError, self._ray.exceptions.RayError) as error:  # an actor that comes or goes meanwhile
                trouble = str(error)
            with self._lock:
                self._trouble = trouble
            time.sleep(_EVERY_S)

    def _look(self) -> None:
        """See how nodes are, decide what is next, and do it."""
        now_s = time.monotonic()
        actors = node_actors(self._ray, self._settings.namespace)
        found = self._asked(actors)
        with self._lock:
            self._known = found
            self._draining = {number: since_s for number, since_s in self._draining.items() if number in found}
        self._follow_demand(found, now_s)
        views = [_view(number, node, self._settings.digest) for number, node in found.items()]
        steps = next_steps(views, self._wanted, self._draining, now_s)
        with self._lock:
            self._draining |= dict.fromkeys(steps.drain, now_s)
        for number in steps.start:
            self._start(number)
        for number in steps.stop:
            stop_node(self._ray, actors[number])

    def _asked(self, actors: dict[int, Any]) -> dict[int, NodeState | None]:
        """How nodes are; one that is too busy to say is as it was, one that is gone or starts says nothing."""
        answers = {number: actor.state.remote() for number, actor in actors.items()}
        if not answers:
            return {}
        ready, _ = self._ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ASK_S)
        return {
            number: self._answer(answer) if answer in ready else self._known.get(number)
            for number, answer in answers.items()
        }

    def _answer(self, answer: Any) -> NodeState | None:
        try:
            found: NodeState = self._ray.get(answer)
        except self._ray.exceptions.RayError:
            return None
        return found

    def _follow_demand(self, found: dict[int, NodeState | None], now_s: float) -> None:
        if not self._settings.follows_demand:
            return
        ready = [node for number, node in found.items() if node and node.url and number not in self._draining]
        self._loads.append(Load(at_s=now_s, nodes=len(ready), busy=sum(node.busy for node in ready)))
        while now_s - self._loads[0].at_s > KEPT_S:
            self._loads.popleft()
        self._wanted = nodes_for(
            self._loads,
            now_s,
            current=self._wanted,
            min_nodes=self._settings.min_nodes,
            max_nodes=self._settings.max_nodes,
        )

    def _within_bounds(self, nodes: int) -> int:
        return max(self._settings.min_nodes, min(self._settings.max_nodes, nodes))

    def _start(self, number: int) -> None:
        self._ray.remote(NodeActor).options(
            name=name_of(number),
            namespace=self._settings.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=0,
            num_gpus=1 if self._settings.node.device.startswith("cuda") else 0,
            scheduling_strategy="SPREAD",
            label_selector=self._settings.selector or None,
        ).remote(self._settings, number)


def node_actors(ray: Any, namespace: str) -> dict[int, Any]:
    """The actors of nodes in a namespace, by their numbers."""
    found: dict[int, Any] = {}
    for known in ray.util.list_named_actors(all_namespaces=True):
        number = number_of(known["name"])
        if known["namespace"] == namespace and number is not None:
            found[number] = ray.get_actor(known["name"], namespace=namespace)
    return found


def is_ours(name: str) -> bool:
    """Whether an actor with this name is a node, or the supervisor of some."""
    return name == SUPERVISOR or number_of(name) is not None


def stop_node(ray: Any, actor: Any) -> None:
    """End a node once its answers have ended, and its actor for good."""
    ray.wait([actor.stop.remote()], timeout=_STOP_S)
    ray.kill(actor, no_restart=True)


def _view(number: int, node: NodeState | None, digest: str) -> NodeView:
    if node is None:
        return NodeView(number=number, is_ready=False)
    return NodeView(number=number, is_current=node.digest == digest, is_ready=bool(node.url), requests=node.requests)
