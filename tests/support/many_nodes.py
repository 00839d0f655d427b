"""Builders for jobs over several nodes of this process, each of which keeps features of its own."""

from contextlib import ExitStack, contextmanager

import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.models import freeze
from frostline.node import Node
from support.images import tiny_preprocess
from support.networks import Small
from support.nodes import served


@contextmanager
def some_nodes(folder, kept, count, device_batch=8):
    """Nodes in this process, each with a cache of its own; yields them and their URLs."""
    with ExitStack() as stack:
        nodes, urls = [], []
        for number in range(count):
            cache = str(kept / str(number))
            settings = NodeSettings(memory_bytes=512 << 20, device_batch=device_batch, trial_s=0, cache_folder=cache)
            nodes.append(stack.enter_context(Node(settings, (fl.Dataset(folder).url,))))
            urls.append(stack.enter_context(served(nodes[-1])))
        yield nodes, urls


def frozen():
    torch.manual_seed(1)
    return freeze(Small().eval(), "stem", input_shape=(3, 32, 32))


def job(folder, near, data=None, on_event=None, **settings):
    """A job that keeps no features itself, and makes no request twice."""
    chosen = {"samples_per_request": 8, "device_batch": 8, "cache_bytes": 0, "hedge_quantile": 1.0}
    chosen |= {"requests_in_flight": 4, **settings}
    return fl.offload(
        frozen(),
        data or fl.Dataset(folder),
        preprocess=tiny_preprocess(),
        near=near,
        accuracy="exact",
        settings=LoaderSettings(**chosen),
        on_event=on_event,
    )


def epoch(running, number, **options):
    return list(running.loader(16, shuffle=True, seed=3, epoch=number, **options))


def hits(nodes):
    return sum(node.statistics().totals.cache_hits for node in nodes)


def same(found, expected):
    """Two lists of batches have the same bits."""
    return len(found) == len(expected) and all(
        torch.equal(a.ids, b.ids) and torch.equal(a.features, b.features) and torch.equal(a.labels, b.labels)
        for a, b in zip(found, expected, strict=True)
    )
