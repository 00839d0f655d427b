"""The order in blocks: every sample once, neighbours read together and handed out apart, in little memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import OrderMismatch, SettingError
from frostline.ordering import BlockOrder, BlockShuffle, OrderState, Resumed, Shard

seeds = st.integers(0, (1 << 63) - 1)
some_blocks = st.builds(BlockShuffle, samples=st.integers(1, 40), mixed=st.integers(1, 12))


def whole(order):
    return order.at(np.arange(len(order)))


def state_of(order, position, ahead=()):
    return OrderState(
        manifest="m",
        order=order.name,
        seed=order.seed,
        epoch=order.epoch,
        position=position,
        samples=len(order),
        batch_size=4,
        last="keep",
        ahead=ahead,
    )


@given(size=st.integers(0, 3000), seed=seeds, epoch=seeds, blocks=some_blocks)
def test_every_row_has_exactly_one_position(size, seed, epoch, blocks):
    rows = whole(BlockOrder(size=size, seed=seed, epoch=epoch, blocks=blocks))
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(size))


@given(size=st.integers(1, 1 << 62), seed=seeds, blocks=some_blocks, data=st.data())
def test_rows_of_a_huge_epoch_lie_within_it_and_differ(size, seed, blocks, data):
    start = data.draw(st.integers(0, size))
    positions = np.arange(start, min(size, start + 100))
    rows = BlockOrder(size=size, seed=seed, epoch=1, blocks=blocks).at(positions)
    assert len(np.unique(rows)) == len(positions)
    assert np.all((rows >= 0) & (rows < size))


@given(size=st.integers(1, 800), seed=seeds, blocks=some_blocks, data=st.data())
def test_positions_are_the_same_however_they_are_asked_for(size, seed, blocks, data):
    order = BlockOrder(size=size, seed=seed, epoch=2, blocks=blocks)
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=50)), np.int64)
    assert np.array_equal(order.at(positions), whole(order)[positions])


@given(size=st.integers(1, 2000), seed=seeds, blocks=some_blocks)
def test_forms_a_group_of_several_runs_of_neighbours_around_the_listing(size, seed, blocks):
    order = BlockOrder(size=size, seed=seed, epoch=0, blocks=blocks)
    rows, groups = whole(order), order.groups_at(np.arange(size))
    for group in np.unique(groups).tolist():
        found = np.sort(rows[groups == group])
        runs = 1 + int((np.diff(found) > 1).sum())
        assert runs <= blocks.mixed + 2  # the short block is one more, and the ring's seam divides one
        assert len(found) <= blocks.group


@given(size=st.integers(1, 600), world_size=st.integers(1, 4), blocks=some_blocks, data=st.data())
def test_from_any_sample_ranks_of_any_number_take_exactly_the_rest(size, world_size, blocks, data):
    order = BlockOrder(size=size, seed=3, epoch=1, blocks=blocks)
    position = data.draw(st.integers(0, size))
    ahead = (
        tuple(sorted(data.draw(st.sets(st.integers(position + 1, size - 1), max_size=5))))
        if position < size - 1
        else ()
    )
    resumed = Resumed(order=order, state=state_of(order, position, ahead))
    shards = [
        Shard(size=size, batch_size=3, start=resumed.start, rank=rank, world_size=world_size, last="uneven")
        for rank in range(world_size)
    ]
    rest = [resumed.at(shard.positions(0, len(shard))) for shard in shards]
    before = np.concatenate([order.at(np.arange(position)), order.at(np.array(ahead, np.int64))])
    assert np.array_equal(np.sort(np.concatenate([before, *rest])), np.arange(size))


def test_neighbours_come_apart_where_many_blocks_are_mixed():
    order = BlockOrder(size=100_000, seed=1, epoch=0, blocks=BlockShuffle(samples=16, mixed=64))
    place = np.empty(100_000, np.int64)
    place[whole(order)] = np.arange(100_000)
    distance = np.abs(np.diff(place))
    assert np.median(distance) > 250  # of 1,024 that are mixed: two places of a group are 300 apart at the median
    batches = place // 64
    assert np.mean(batches[1:] == batches[:-1]) < 0.08  # 64 of 1,024


def test_other_epochs_cut_the_blocks_elsewhere():
    first, second = (
        whole(BlockOrder(size=1000, seed=1, epoch=epoch, blocks=BlockShuffle(samples=10, mixed=1))) for epoch in (0, 1)
    )
    together = [{frozenset(item.tolist()) for item in rows[:1000].reshape(-1, 10)} for rows in (first, second)]
    assert not together[0] & together[1]


def test_the_order_never_changes_between_versions():
    order = BlockOrder(size=23, seed=7, epoch=3, blocks=BlockShuffle(samples=1, mixed=9))
    found = [18, 11, 10, 21, 4, 1, 6, 9, 8, 7, 2, 0, 22, 20, 5, 12, 3, 17, 15, 13, 19, 16, 14]
    assert whole(order).tolist() == found
    large = BlockOrder(size=10**9 + 7, seed=7, epoch=3, blocks=BlockShuffle())
    assert large.at(np.arange(5) * 10**8).tolist() == [443953523, 255814758, 282011775, 163327174, 325659845]


def test_an_epochs_first_groups_are_smaller():
    order = BlockOrder(size=10_000, seed=7, epoch=3, blocks=BlockShuffle(samples=10, mixed=100))
    _, counts = np.unique(order.groups_at(np.arange(10_000)), return_counts=True)
    assert counts.tolist() == [80, 160, 320, 640, *[1000] * 8, 800]
    few = BlockOrder(size=50, seed=7, epoch=3, blocks=BlockShuffle(samples=5, mixed=4))
    assert few.groups_at(np.array([0, 19, 20, 40])).tolist() == [0, 0, 1, 2]


def test_an_order_of_a_hundred_million_samples_takes_constant_memory():
    order = BlockOrder(size=100_000_007, seed=1, epoch=5, blocks=BlockShuffle())
    tracemalloc.start()
    try:
        starts = np.linspace(0, len(order) - 4096, 20, dtype=np.int64).tolist()
        rows = np.concatenate([order.at(np.arange(start, start + 4096)) for start in starts])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) > 20 * 4095
    assert peak < 4_000_000


def test_a_state_of_other_blocks_is_refused():
    order = BlockOrder(size=100, seed=0, epoch=0, blocks=BlockShuffle(samples=8, mixed=4))
    other = BlockOrder(size=100, seed=0, epoch=0, blocks=BlockShuffle(samples=4, mixed=8))
    with pytest.raises(OrderMismatch, match="'blocks of 8, 4 mixed', and this loader's is 'blocks of 4, 8 mixed'"):
        state_of(order, 5).require(state_of(other, 0))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"mixed": 0}, {"samples": 1 << 20, "mixed": 1 << 20}])
def test_refuses_invalid_blocks_by_name(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        BlockShuffle(**wrong)
