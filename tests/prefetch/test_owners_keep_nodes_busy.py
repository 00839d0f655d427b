"""A window's requests over nodes of one device each, in simulated time: all are busy, alike or not."""

import heapq
from collections import Counter

import numpy as np
import pytest

from frostline.batching import pad_rows
from frostline.client.load_balancer import LoadBalancer
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


def epoch_s(count, rates, *, by_owners=True, requests_a_node=4):
    """Seconds of one epoch, the rows that each node was asked for, and the requests that did not go to their owner.

    ``rates`` has the rows a second of each node, by the time.
    """
    table, order, places = samples(count), np.random.default_rng(0).permutation(count), np.arange(count)
    nodes = len(rates)
    settings = LoaderSettings(requests_in_flight=requests_a_node * nodes, samples_per_request=ROWS, hedge_quantile=1.0)
    names = [f"http://store-{number}:7070" for number in range(nodes)]
    plan = plan_requests
    if by_owners:
        owners = BlockOwners.of(Blocks(data="s3://photos", samples=count), dict.fromkeys(names, 1.0))
        plan = OwnedRequests(lambda: owners, lambda rows: rows, request_rows=ROWS, max_rows=1 << 20).plan
    window = Window(plan(table, order, places, one_way(ROWS, 8)), settings, nodes=nodes)
    turns, free, asked, arriving, moved = LoadBalancer(nodes), [0.0] * nodes, Counter(), [], 0
    now = 0.0
    while not window.is_done:
        for ask in window.asks(now):
            first = [names.index(name) for name in ask.nodes]
            node = turns.order(now, first)[0]
            turns.begin_request(node, now)
            moved += first[:1] not in ([], [node])
            asked[node] += len(ask.samples)
            free[node] = max(now + WAY_S, free[node])
            free[node] += pad_rows(len(ask.samples)) / rates[node](free[node])
            heapq.heappush(arriving, (free[node] + WAY_S, ask.number, node, ask))
        now, _, node, ask = heapq.heappop(arriving)
        turns.end_request(node, now, rows=len(ask.samples))
        window.take_rows(ask, FeatureBatch(ids=ask.samples.ids, tensors=(np.zeros((len(ask.samples), 1)),)))
        window.finish(ask, now)
        while window.take() is not None:
            pass
    return now, asked, moved


def alike(nodes):
    return [lambda _: RATE] * nodes


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_an_epoch_by_owners_takes_at_most_a_fiftieth_longer_than_by_turns(nodes):
    count = 2304 * nodes
    by_owners, _, moved = epoch_s(count, alike(nodes))
    by_turns, _, _ = epoch_s(count, alike(nodes), by_owners=False)
    assert moved == 0, "where the next epoch would not look for it"
    assert by_owners <= 1.02 * by_turns
    assert by_owners <= 1.03 * count / nodes / RATE


def test_a_beginning_asks_every_node_at_once():
    _, asked, _ = epoch_s(8 * 2 * ROWS, alike(8), by_owners=False)
    assert set(asked.values()) == {2 * ROWS}


def test_two_requests_a_node_keep_all_busy_and_one_does_not():
    count, nodes = 8 * 1152, 8
    ideal_s = count / nodes / RATE
    assert epoch_s(count, alike(nodes), requests_a_node=2)[0] < 1.05 * ideal_s
    assert epoch_s(count, alike(nodes), requests_a_node=1)[0] > 1.08 * ideal_s


@pytest.mark.parametrize("rates", [(50, 25), (50, 5), (5, 50), (50, 50, 50, 5), (50,) * 7 + (10,)])
def test_nodes_with_nothing_to_do_take_what_a_slower_one_owns(rates):
    count = 2304 * len(rates)
    took_s, asked, _ = epoch_s(count, [lambda _, rate=rate: rate for rate in rates])
    assert sum(asked.values()) == count
    assert took_s <= 1.1 * count / sum(rates)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_node_that_becomes_ten_times_slower_or_faster_is_asked_for_what_it_can_do(factor):
    changes_s, count = 20.0, 4608
    rates = [lambda _: RATE, lambda now: RATE * (factor if now >= changes_s else 1.0)]
    took_s, _, _ = epoch_s(count, rates)
    ideal_s = changes_s + (count - 2 * RATE * changes_s) / (RATE + factor * RATE)
    assert took_s <= 1.2 * ideal_s


def test_a_node_whose_first_answer_takes_long_gets_its_part_again():
    count, first_s = 8 * 1152, 20.0
    rates = [*alike(3), lambda now: RATE if now > 1.0 else ROWS / first_s]
    took_s, asked, _ = epoch_s(count, rates)
    assert took_s <= 1.15 * (count / RATE + first_s) / 4
    assert asked[3] > 0.6 * count / 4


def test_a_short_difference_moves_nothing():
    """A second epoch finds what nodes keep in milliseconds; what another node was asked for it would compute again."""
    _, _, moved = epoch_s(2304, [lambda _: 20 * RATE, lambda _: 10 * RATE])
    assert moved == 0
