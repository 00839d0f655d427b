"""Owners of blocks: the same for everybody, balanced by speed, and few blocks move when nodes come and go."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.client.owners import MAX_SLOTS, BlockOwners, Blocks, as_steps, max_excess

LARGE = Blocks(data="s3://photos/train", samples=2_000_000)

names = st.integers(0, 10**6).map("http://store-{}:7070".format)
speeds = st.sampled_from([0.5, 1.0, 2.0**0.25, 2.0])
some_nodes = st.dictionaries(names, speeds, min_size=1, max_size=9)
some_blocks = st.builds(Blocks, data=st.sampled_from(["s3://a", "s3://b"]), samples=st.integers(1, 40_000))


def alike(count, first=0):
    return {f"http://store-{number}:7070": 1.0 for number in range(first, first + count)}


def owner_names(owners):
    return np.array(owners.nodes)[owners.owners]


def moved(before, after):
    """Slots that have another owner, as a multiple of the fewest that could."""
    lost = ~np.isin(owner_names(before), after.nodes)
    is_new = ~np.isin(after.nodes, before.nodes)
    weights = np.array(after.weights)
    fewest = max(lost.sum(), len(lost) * weights[is_new].sum() / weights.sum())
    return (owner_names(before) != owner_names(after)).sum() / fewest


def loads(found):
    """The slots that each node owns."""
    return np.bincount(found.owners, minlength=len(found.nodes))


@given(some_blocks, some_nodes)
def test_no_node_owns_more_than_its_bound_and_every_slot_has_an_owner(blocks, nodes):
    found = BlockOwners.of(blocks, nodes)
    assert loads(found).sum() == blocks.slots
    assert (loads(found) <= found.bounds).all()
    exact = blocks.slots * np.array(found.weights) / sum(found.weights)
    assert (found.bounds <= (1 + max_excess(len(found.nodes))) * exact + 2).all()


@given(some_blocks, some_nodes, some_nodes)
def test_owners_depend_on_who_is_there_and_not_on_who_came_when(blocks, before, after):
    expected = BlockOwners.of(blocks, after)
    found = BlockOwners.of(blocks, before).redistribute(after)
    assert found.nodes == expected.nodes
    assert found.weights == expected.weights
    for name in ("owners", "nearest", "costs"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@given(some_blocks, some_nodes, st.randoms())
def test_owners_do_not_depend_on_the_order_in_which_nodes_are_named(blocks, nodes, random):
    items = list(nodes.items())
    random.shuffle(items)
    assert np.array_equal(BlockOwners.of(blocks, dict(items)).owners, BlockOwners.of(blocks, nodes).owners)


@given(some_blocks, some_nodes, st.integers(0, 10**9))
def test_the_second_owner_is_another_node(blocks, nodes, row):
    row %= blocks.samples
    found = BlockOwners.of(blocks, nodes)
    (owner,) = found.of_rows(np.array([row]))
    second = found.second(row)
    assert second is None if len(nodes) == 1 else second not in (None, owner)
    assert second is None or 0 <= second < len(nodes)


@given(some_blocks, st.integers(0, 10**9))
def test_rows_of_a_block_have_one_owner(blocks, number):
    first = number % blocks.samples // blocks.rows * blocks.rows
    rows = np.arange(first, min(first + blocks.rows, blocks.samples))
    assert 16 <= blocks.rows <= 64
    assert len(set(BlockOwners.of(blocks, alike(5)).of_rows(rows).tolist())) == 1


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 16])
def test_a_node_more_or_less_moves_at_most_a_fifth_more_blocks_than_it_must(count):
    before = BlockOwners.of(LARGE, alike(count))
    assert moved(before, before.redistribute(alike(count + 1))) <= 1.2
    assert moved(before, before.redistribute(alike(count - 1, first=1))) <= 1.2


@settings(max_examples=20)
@given(st.dictionaries(names, speeds, min_size=3, max_size=9), names)
def test_nodes_of_any_speed_come_and_go_for_at_most_a_fifth_more(nodes, new):
    more = {**nodes, new: 1.0}
    less = {name: speed for name, speed in more.items() if name != new}
    assert moved(BlockOwners.of(LARGE, less), BlockOwners.of(LARGE, more)) <= 1.2
    assert moved(BlockOwners.of(LARGE, more), BlockOwners.of(LARGE, less)) <= 1.2


@pytest.mark.parametrize("count", [2, 5, 8, 16])
def test_of_few_nodes_none_owns_a_fiftieth_more_than_its_share(count):
    found = BlockOwners.of(LARGE, alike(count))
    assert loads(found).max() <= 1.02 * loads(found).mean()
    assert max_excess(count) < max_excess(100) < max_excess(1000) == max_excess(2000)


def test_where_one_node_is_lost_its_blocks_go_to_their_second_owners():
    before = BlockOwners.of(LARGE, alike(5))
    after = before.redistribute(alike(4, first=1))
    rows = np.arange(0, LARGE.samples, 1009)
    lost = [int(row) for row in rows if before.nodes[before.of_rows(np.array([row]))[0]] not in after.nodes]
    second = [before.nodes[before.second(row)] for row in lost]
    assert len(lost) > 300
    now = [after.nodes[number] for number in after.of_rows(np.array(lost))]
    assert np.mean([then == new for then, new in zip(second, now, strict=True)]) > 0.99


def test_a_node_of_twice_the_speed_owns_twice_as_much():
    found = BlockOwners.of(LARGE, {**alike(3), "http://fast:7070": 2.0})
    owned = dict(zip(found.nodes, loads(found), strict=True))
    assert owned["http://fast:7070"] / owned["http://store-0:7070"] == pytest.approx(2, rel=0.1)


def test_two_data_sets_are_spread_differently():
    one, other = (BlockOwners.of(Blocks(data=data, samples=2_000_000), alike(4)) for data in ("s3://a", "s3://b"))
    assert np.mean(one.owners == other.owners) == pytest.approx(1 / 4, abs=0.05)


def test_a_table_stays_small_whatever_the_data_set_has():
    blocks = Blocks(data="s3://web", samples=10**10)
    assert blocks.slots == MAX_SLOTS
    assert blocks.slots_of(np.array([0, 63, 64, 10**10 - 1])).tolist()[:3] == [0, 0, 1]


def test_speeds_are_told_apart_by_steps_and_small_changes_change_nothing():
    measured = {"a": 100.0, "b": 104.0, "c": 196.0, "d": 0.0}
    found = as_steps(measured, {})
    assert found == {"a": 1.0, "b": 1.0, "c": 2.0, "d": 1.0}
    assert as_steps({**measured, "a": 91.0, "c": 180.0}, found) == found
    assert as_steps({"a": 50.0, "b": 100.0, "c": 200.0}, {}) == {"a": 0.5, "b": 1.0, "c": 2.0}
