"""The way from a job to its nodes: those at an address, the I/O service of this machine, or one in this process."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from frostline.client.balanced import BalancedTransport
from frostline.client.http import HttpTransport
from frostline.client.membership import PROBE_S, NodeWatch, ask_protocol, connect_balanced
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineNotReady, SettingError
from frostline.core.events import Event, NodeBack, NodeJoined, NodeLeft, NodeLost, Observer, SetupWarning
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.io_service.client import SCHEME
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.transport import Transport
from frostline.wire.node_lists import NodeList

__all__ = ("members_of", "reach")


def _nobody(_: Event) -> None:
    pass


def reach(
    nodes: Sequence[str],
    data: Dataset,
    settings: LoaderSettings,
    node: NodeSettings,
    left_out: Callable[[str, str, EngineNotReady], None],
    stack: ExitStack,
    on_event: Observer = _nobody,
) -> Transport:
    """The way to the nodes, or to one of this process.

    Args:
        nodes: the URLs or those of lists of them, or that of the I/O service; none for one in this process.
        data: data that it reads.
        settings: the way that the job asks.
        node: settings of the node in this process.
        left_out: function that is told of a node that cannot run an engine, by its URL.
        stack: stack that closes what was made.
        on_event: function that is called when nodes come and go.

    Raises:
        Refused: No node speaks a protocol of this version.
        NodeUnreachable: A list of nodes cannot be read, or names none.
    """
    probing = replace(settings, deadline_s=min(PROBE_S, settings.deadline_s))
    if len(nodes) > 1 or any(map(NodeList.is_one, nodes)):
        several = connect_balanced(
            nodes,
            make=partial(_way, settings=settings),
            probe=partial(_way, settings=probing),
            left_out=left_out,
            watch=_watch(on_event),
            patience_s=settings.retry_for_s / 2,
        )
        return stack.enter_context(several)
    if nodes:
        transport = _way(nodes[0], settings)
        ask_protocol(nodes[0], _way(nodes[0], probing))
    else:
        # Who wants no request made twice wants no read made twice either.
        quantile = max(node.hedge_quantile, settings.hedge_quantile)
        deadline_s = min(node.store_deadline_s, settings.deadline_s)
        own = replace(
            node,
            hedge_quantile=quantile,
            store_deadline_s=deadline_s,
            follow_links=True,
            trial_niceness=0,
            trials_in_process=True,
        )
        embedded = Node(own, roots_of(data))
        stack.callback(embedded.close)
        transport = LocalTransport(embedded)
    stack.callback(transport.close)
    return transport


def members_of(transport: Transport, nodes: Sequence[str]) -> Sequence[str]:
    """URLs of the nodes that a job asks now.

    Args:
        transport: way to them.
        nodes: addresses that they were given by.
    """
    return transport.members if isinstance(transport, BalancedTransport) else nodes


def _watch(on_event: Observer) -> NodeWatch:
    return NodeWatch(
        joined=lambda url: on_event(NodeJoined(url=url)),
        left=lambda url, why: on_event(NodeLeft(url=url, reason=why)),
        lost=lambda url, why: on_event(NodeLost(url=url, reason=why)),
        back=lambda url: on_event(NodeBack(url=url)),
        refused=lambda url, why: on_event(SetupWarning(reason=f"a node is left out, {url}: {why}")),
    )


def _way(url: str, settings: LoaderSettings) -> Transport:
    if not url.startswith(SCHEME):
        return HttpTransport(url, settings)
    if not hasattr(os, "memfd_create"):
        raise SettingError(f"{url} is an I/O service, which only Linux has: give near= the URL of a node")
    from frostline.io_service.client import IoTransport

    return IoTransport(url, settings)
