"""The way from a job to its nodes: those at an address, the I/O service of this machine, or one in this process."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from frostline.client.balanced import BalancedTransport
from frostline.client.http import HttpTransport
from frostline.client.membership import PROBE_S, NodeWatch, ask_protocol, connect_balanced, watch_node
from frostline.core import FeatureBatch, Samples
from frostline.core.config import LoaderSettings, NodeSettings, cache_folder
from frostline.core.errors import EngineNotReady, SettingError
from frostline.core.events import Event, NodeBack, NodeJoined, NodeLeft, NodeLost, Observer, SetupWarning
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.datasets.source import is_loopback
from frostline.io_service.client import SCHEME
from frostline.jobs.context import has_engines, judges_of
from frostline.jobs.loader_factory import has_kept_features
from frostline.loaders.ahead import SamplesAhead
from frostline.loaders.arguments import Ranks
from frostline.loaders.fetch import RetryPolicy, join_batches
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.ordering import Order
from frostline.preprocess import Preprocess, imagenet
from frostline.transport import Transport
from frostline.wire.messages import FeatureRequest
from frostline.wire.node_lists import NodeList

__all__ = ("AskedNodes", "ask_ahead", "asked_early", "first_of", "members_of", "reach")


# Samples that are asked for before there is a network: what a processor computes in some seconds.
_ROWS_AHEAD, _BYTES_AHEAD = 64, 16 << 20
# As few at a time, since what makes a node ready queues behind them on a thin link.
_ROWS_A_PART = 2


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
    *,
    opened: Transport | None = None,
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
        opened: transport to the only node, where it was asked already; None opens one.

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
        transport, probe = opened or _way(nodes[0], settings), partial(_way, settings=probing)
        if isinstance(transport, HttpTransport):
            watch, patience_s = _watch(on_event, only=settings), settings.deadline_s
            stack.enter_context(watch_node(nodes[0], transport, probe=probe, watch=watch, patience_s=patience_s))
        ask_protocol(nodes[0], probe(nodes[0]))
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


def first_of(data: Dataset, *, seed: int) -> Samples:
    """The samples that the first requests of a shuffled epoch 0 are for."""
    return data.samples.take(Order(size=len(data), seed=seed, epoch=0).indices(0, min(len(data), _ROWS_AHEAD)))


def ask_ahead(
    data: Dataset,
    first: Samples,
    preprocess: Preprocess,
    transport: Transport,
    asking: RetryPolicy,
    nodes: Sequence[str],
    settings: LoaderSettings,
    accuracy: str | float,
) -> SamplesAhead | None:
    """Ask for encoded samples, for which the link has time while a network is built and traced.

    They are those on which an engine is judged, where one may be, and the first ones of an epoch, unless a node is on
    this machine or an earlier job left features of them, so that it may be that nobody wants them.

    Args:
        data: data set of the job.
        first: the first samples of its loop, as far as anybody knows.
        preprocess: steps of the job.
        transport: way to its nodes.
        asking: policy that waits where a node is full.
        nodes: URLs of the nodes.
        settings: settings of the job.
        accuracy: accuracy of the job, which may allow other engines.
    """
    judges = judges_of(data)
    parts = [judges] if has_engines(data, preprocess, accuracy) else []
    folder = Path(settings.cache_folder or cache_folder() / "features")
    if not (any(map(is_loopback, nodes)) or Ranks.current().are_several or has_kept_features(folder, first)):
        is_judge = np.isin(first.ids, judges.ids) if parts else np.zeros(len(first), np.bool_)
        more = np.flatnonzero(~is_judge & (np.cumsum(first.lengths) <= _BYTES_AHEAD))
        parts += [first.take(more[start : start + _ROWS_A_PART]) for start in range(0, len(more), _ROWS_A_PART)]
    if not parts:
        return None
    request = FeatureRequest(
        data=data.url,
        reading=data.manifest.reading,
        samples=parts[0],
        prefix=None,
        cut=0,
        preprocess=preprocess.to_json(),
    )

    def ask(samples: Samples) -> FeatureBatch:
        return join_batches(asking(lambda: list(transport.features(replace(request, samples=samples)))))

    return SamplesAhead(ask, parts, transport)


class AskedNodes(tuple[str, ...]):
    """URLs of nodes that were asked for a job's first samples before the job was made.

    Args:
        nodes: the URLs.
        ahead: the samples; None where none are worth it.
    """

    ahead: SamplesAhead | None

    def __new__(cls, nodes: Sequence[str], ahead: SamplesAhead | None) -> Self:
        """Keep the samples beside the URLs."""
        asked = super().__new__(cls, nodes)
        asked.ahead = ahead
        return asked


@contextmanager
def asked_early(
    data: Dataset, first: Samples, nodes: Sequence[str], settings: LoaderSettings, accuracy: str | float
) -> Iterator[Sequence[str]]:
    """Ask a job's nodes for its first samples before the job can be made, unless they are on this machine, or several.

    Yields the URLs to make the job with, as ``near`` of ``offload``: ``AskedNodes`` where they were asked.

    Args:
        data: data set of photographs.
        first: the first samples of the job's loop.
        nodes: URLs of the job's nodes.
        settings: settings of the job.
        accuracy: accuracy of the job.
    """
    if len(nodes) != 1 or is_loopback(nodes[0]) or NodeList.is_one(nodes[0]) or nodes[0].startswith(SCHEME):
        yield nodes
        return
    asking = RetryPolicy(retry_for_s=settings.retry_for_s, on_event=_nobody)
    with closing(HttpTransport(nodes[0], settings)) as transport:
        yield AskedNodes(nodes, ask_ahead(data, first, imagenet(224), transport, asking, nodes, settings, accuracy))


def members_of(transport: Transport, nodes: Sequence[str]) -> Sequence[str]:
    """URLs of the nodes that a job asks now.

    Args:
        transport: way to them.
        nodes: addresses that they were given by.
    """
    return transport.members if isinstance(transport, BalancedTransport) else nodes


def _watch(on_event: Observer, *, only: LoaderSettings | None = None) -> NodeWatch:
    """What tells a job of its nodes; ``only``: settings of a job whose only node is waited for."""
    limit = ""
    if only is not None:
        # A request that was under way, the time of making it again, and the last one, made as that time ends.
        bound_s = 2 * only.deadline_s + only.retry_for_s
        both = f"twice deadline_s, now {only.deadline_s:g} s, and retry_for_s, now {only.retry_for_s:g} s"
        limit = (
            f"; the job ends after about {bound_s:g} s of silence ({both}, of LoaderSettings), sooner if it just began"
        )
    return NodeWatch(
        joined=lambda url: on_event(NodeJoined(url=url)),
        left=lambda url, why: on_event(NodeLeft(url=url, reason=why)),
        lost=lambda url, why: on_event(NodeLost(url=url, reason=why + limit, is_only=only is not None)),
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
