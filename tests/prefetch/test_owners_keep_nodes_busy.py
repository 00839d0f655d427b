"""A window's requests over nodes of one device each, in simulated time: by owners all are as busy as by turns."""

import heapq
from collections import Counter

import numpy as np
import pytest

from frostline.batching import pad_rows
from frostline.client.owners import BlockOwners, Blocks
from frostline.core import FeatureBatch, Samples
from frostline.core.config import LoaderSettings
from frostline.prefetch import OwnedRequests, Window, plan_requests
from support.mixing import one_way

RATE = 50.0  # rows a second of a node's device, which runs whole eights
ROWS = 32
WAY_S = 0.015


def samples(count):
    zeros = np.zeros(count, np.int64)
    return Samples(ids=np.arange(count), objects=["x"] * count, offsets=zeros, lengths=zeros + 9, labels=zeros)


def epoch_s(count, nodes, *, by_owners, requests_a_node=4):
    """Seconds of one epoch, and the rows that each node was asked for."""
    table, order, places = samples(count), np.random.default_rng(0).permutation(count), np.arange(count)
    settings = LoaderSettings(requests_in_flight=requests_a_node * nodes, samples_per_request=ROWS, hedge_quantile=1.0)
    names = [f"http://store-{number}:7070" for number in range(nodes)]
    plan = plan_requests
    if by_owners:
        owners = BlockOwners.of(Blocks(data="s3://photos", samples=count), dict.fromkeys(names, 1.0))
        plan = OwnedRequests(lambda: owners, lambda rows: rows, request_rows=ROWS, max_rows=1 << 20).plan
    window = Window(plan(table, order, places, one_way(ROWS, 8)), settings, nodes=nodes)
    free, under_way, asked, arriving = dict.fromkeys(names, 0.0), Counter(), Counter(), []
    now = 0.0
    while not window.is_done:
        for ask in window.asks(now):
            node = ask.nodes[0] if ask.nodes else min(names, key=lambda name: (under_way[name], asked[name]))
            under_way[node] += 1
            asked[node] += len(ask.samples)
            free[node] = max(now + WAY_S, free[node]) + pad_rows(len(ask.samples)) / RATE
            heapq.heappush(arriving, (free[node] + WAY_S, ask.number, node, ask))
        now, _, node, ask = heapq.heappop(arriving)
        under_way[node] -= 1
        window.take_rows(ask, FeatureBatch(ids=ask.samples.ids, tensors=(np.zeros((len(ask.samples), 1)),)))
        window.finish(ask, now)
        while window.take() is not None:
            pass
    return now, asked


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_an_epoch_by_owners_takes_at_most_a_fiftieth_longer_than_by_turns(nodes):
    count = 2304 * nodes
    by_owners, _ = epoch_s(count, nodes, by_owners=True)
    by_turns, _ = epoch_s(count, nodes, by_owners=False)
    assert by_owners <= 1.02 * by_turns
    assert by_owners <= 1.03 * count / nodes / RATE


def test_a_beginning_asks_every_node_at_once():
    _, asked = epoch_s(8 * 2 * ROWS, 8, by_owners=False)
    assert set(asked.values()) == {2 * ROWS}


def test_two_requests_a_node_keep_all_busy_and_one_does_not():
    count, nodes = 8 * 1152, 8
    ideal_s = count / nodes / RATE
    assert epoch_s(count, nodes, by_owners=True, requests_a_node=2)[0] < 1.05 * ideal_s
    assert epoch_s(count, nodes, by_owners=True, requests_a_node=1)[0] > 1.08 * ideal_s
