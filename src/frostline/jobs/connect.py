"""The way from a job to its nodes: those at an address, the I/O service of this machine, or one in this process."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from frostline.client.http import HttpTransport
from frostline.client.load_balancer import BalancedTransport
from frostline.config import LoaderSettings, NodeSettings
from frostline.datasets import Dataset
from frostline.errors import EngineNotReady, SettingError
from frostline.io_service.client.socket import SCHEME
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.transport.protocol import Transport

__all__ = ("reach",)


def reach(
    nodes: Sequence[str],
    data: Dataset,
    settings: LoaderSettings,
    node: NodeSettings,
    left_out: Callable[[int, str, EngineNotReady], None],
    stack: ExitStack,
) -> Transport:
    """The way to the nodes, or to one of this process.

    Args:
        nodes: their URLs, or that of the I/O service; none for one in this process.
        data: data that it reads.
        settings: how the job asks.
        node: settings of the node in this process.
        left_out: told of a node that cannot run an engine, by its place among several.
        stack: closes what was made.
    """
    if nodes:
        ways = [_way(url, settings) for url in nodes]
        transport = ways[0] if len(ways) == 1 else BalancedTransport(ways, left_out=left_out, names=nodes)
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
            trials_here=True,
        )
        embedded = Node(own, data.roots)
        stack.callback(embedded.close)
        transport = LocalTransport(embedded)
    stack.callback(transport.close)
    return transport


def _way(url: str, settings: LoaderSettings) -> Transport:
    if not url.startswith(SCHEME):
        return HttpTransport(url, settings)
    if not hasattr(os, "memfd_create"):
        raise SettingError(f"{url} is an I/O service, which only Linux has: give near= the URL of a node")
    from frostline.io_service.client.transport import IoTransport

    return IoTransport(url, settings)
