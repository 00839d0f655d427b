"""The verb ``cluster``: nodes under Ray, which places them and starts them again."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from frostline.cli.options import VerbCommand, as_json, node_options
from frostline.cli.serve import serve, served_settings
from frostline.cli.show import print_json, print_table, say
from frostline.cli.units import BYTES
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.system import usable_cores

if TYPE_CHECKING:
    from frostline.ray.control import Cluster
    from frostline.ray.scaling import ClusterSettings
    from frostline.ray.supervisor import ClusterState

__all__ = ("cluster",)

Verb = Callable[..., int | None]


@click.group()
def cluster() -> None:
    """Run nodes under Ray, which places, restarts and scales them.

    Nodes are placed by labels and upgraded one by one. Jobs find them by --near ray://NAMESPACE. Needs frostline[ray].
    """


def _where(verb: Verb) -> Verb:
    """Which nodes of which Ray."""
    address = click.option(
        "--address",
        metavar="auto|HOST:PORT",
        help="Address of the Ray cluster to join; by default RAY_ADDRESS, or the one that frostline cluster up started "
        "here.",
    )
    namespace = click.option(
        "--namespace", default="frostline", show_default=True, help="Ray namespace in which the nodes are."
    )
    return address(namespace(verb))


_timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum seconds to wait until the nodes are ready.",
)


cluster.command_class = VerbCommand


@cluster.command(
    epilog="Example: frostline cluster up --data-root file:///photos --on-label store=photos --allow-anonymous"
)
@_where
@click.option(
    "--data-root", "roots", required=True, multiple=True, metavar="URL", help="URL of the data that the nodes serve."
)
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes; 1 by default.")
@click.option(
    "--on-label",
    "label",
    metavar="KEY=VALUE",
    help="Place nodes on hosts with this Ray label: one on each such host, unless --nodes asks for more.",
)
@click.option(
    "--min",
    "min_nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Minimum number of nodes when --max lets the number follow the load.",
)
@click.option(
    "--max",
    "max_nodes",
    type=click.IntRange(min=1),
    metavar="M",
    help="Maximum number of nodes; the number follows the load between --min and this.",
)
@click.option(
    "--port",
    default=0,
    show_default=True,
    help="Port of the first node; the next ones use the following ports. 0 takes free ports.",
)
@click.option(
    "--ray-memory",
    type=BYTES,
    default="256MiB",
    show_default=True,
    help="Memory for Ray's object store, if this command starts Ray.",
)
@_timeout
@node_options
@as_json
def up(
    address: str | None,
    namespace: str,
    roots: tuple[str, ...],
    nodes: int | None,
    label: str | None,
    min_nodes: int | None,
    max_nodes: int | None,
    port: int,
    ray_memory: int,
    timeout: float,
    node: NodeSettings,
    as_json: bool,
    tenants: Path | None,
    control: str | None,
    **options: Any,
) -> None:
    """Start nodes under Ray; if they run already, restart them one by one with the options given now.

    Without --address and RAY_ADDRESS, Ray is started on this machine alone, in the background; "down" stops it. All
    options of serve are accepted and apply to every node.
    """
    node = served_settings(node, tenants=tenants, **options)

    from frostline.ray.control import Cluster, hosts_with, reach_or_start
    from frostline.ray.scaling import ClusterSettings

    wanted = ClusterSettings(
        roots=roots,
        node=node,
        namespace=namespace,
        min_nodes=min_nodes or nodes or 1,
        max_nodes=max_nodes or nodes or min_nodes or 1,
        label=label,
        port=port,
        control=control or LoaderSettings().control,
    )
    with _ray_elsewhere():
        ray, started = reach_or_start(address, cpus=len(usable_cores()), object_bytes=ray_memory)
        if label is not None and nodes is None and max_nodes is None:
            wanted = _on_all(wanted, hosts_with(ray, label))
        state = Cluster(ray, namespace).bring_up(wanted, timeout)
    if as_json:
        print_json({**state.to_json(), "ray": started})
        return
    if started is not None:
        say(
            f"Ray started at {started}, for this machine alone. Programs that join it themselves need",
            f"  export RAY_ADDRESS={started} RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0",
        )
    _show(state)
    say(f"jobs find them by --near ray://{namespace}; frostline cluster down ends them")


_NOT_UNDER_RAY = ("audit", "listen", "control_config", "prices")
# The options of serve, with the same words; its own are there already.
up.params.extend(
    option for option in serve.params if option.name not in {*_NOT_UNDER_RAY, *(known.name for known in up.params)}
)


@cluster.command()
@_where
@as_json
def status(address: str | None, namespace: str, as_json: bool) -> None:
    """Show the nodes and their state."""
    with _ray_elsewhere():
        state = _joined(address, namespace).state()
    if as_json:
        print_json(state.to_json())
        return
    _show(state)


@cluster.command()
@_where
@click.argument("nodes", type=click.IntRange(min=1), metavar="N")
@_timeout
@as_json
def scale(address: str | None, namespace: str, nodes: int, timeout: float, as_json: bool) -> None:
    """Run exactly N nodes, whatever the load."""
    with _ray_elsewhere():
        state = _joined(address, namespace).scale(nodes, timeout)
    if as_json:
        print_json(state.to_json())
        return
    _show(state)


@cluster.command()
@_where
@as_json
def down(address: str | None, namespace: str, as_json: bool) -> None:
    """Stop the nodes, and also Ray if frostline cluster up started it and no other nodes are left in it."""
    from frostline.ray import control

    with _ray_elsewhere():
        ended = _joined(address, namespace).bring_down()
        ended_ray = control.end_own_ray(address)
    if as_json:
        print_json({"nodes": ended, "ray": ended_ray})
        return
    say(f"{ended} nodes ended" + (", and the Ray that was started for them" if ended_ray else ""))


def _ray_elsewhere() -> AbstractContextManager[object]:
    """Have Ray print what dies on stderr: stdout is for the result alone."""
    return redirect_stdout(sys.stderr)


def _joined(address: str | None, namespace: str) -> "Cluster":
    from frostline.ray.control import Cluster, join

    return Cluster(join(address), namespace)


def _on_all(wanted: "ClusterSettings", hosts: int) -> "ClusterSettings":
    """A node for each host with the label; one waits for a host where there is none yet."""
    nodes = max(1, hosts, wanted.min_nodes)
    return replace(wanted, min_nodes=nodes, max_nodes=nodes)


def _show(state: "ClusterState") -> None:
    rows = []
    for number, node in state.nodes.items():
        if node is None:
            rows.append([str(number), "-", "-", "is started, or does not answer", "", ""])
            continue
        how = "drained" if number in state.draining else "ready" if node.url else node.failure or "starts"
        how += "" if node.digest == state.digest else ", to be upgraded"
        rows.append([str(number), node.url or "-", node.host, how, str(node.requests), f"{node.busy:.0%}"])
    bounds = f", {state.min_nodes} to {state.max_nodes}" if state.min_nodes < state.max_nodes else ""
    title = f"nodes in {state.namespace}: {state.wanted} wanted{bounds}"
    print_table(title, ["node", "URL", "host", "how", "requests", "busy"], rows, left=(0, 1, 2, 3))
