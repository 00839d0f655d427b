"""Which positions a rank and its workers take: each once, in the same steps whatever the ranks, resumed anywhere."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.ordering import Order, Shard

sizes = st.integers(0, 300)
batches = st.integers(1, 9)
worlds = st.integers(1, 5)
counts_of_workers = st.integers(1, 4)
policies = st.sampled_from(["keep", "drop", "pad", "uneven"])


def shards(workers=1, **terms):
    """Of every rank, those of its workers; None where the terms cannot be kept."""
    try:
        return [
            [Shard(rank=rank, worker=worker, workers=workers, **terms) for worker in range(workers)]
            for rank in range(terms["world_size"])
        ]
    except SettingError:
        assert terms.get("last", "keep") == "keep"
        return None


def steps_of(rank_shards):
    """The positions that one rank takes in each step, its workers taking turns."""
    shard = rank_shards[0]
    found = []
    done = [0] * len(rank_shards)
    for step in range(shard.steps):
        worker = step % len(rank_shards)
        rows = shard.rows_in(step)
        assert rank_shards[worker].row_of(step // len(rank_shards)) == done[worker]
        found.append(rank_shards[worker].positions(done[worker], done[worker] + rows).tolist())
        done[worker] += rows
    assert done == [len(shard) for shard in rank_shards]
    return found


@given(size=sizes, batch_size=batches, world_size=worlds, workers=counts_of_workers, last=policies, data=st.data())
def test_over_ranks_and_workers_each_position_comes_exactly_once(size, batch_size, world_size, workers, last, data):
    start = data.draw(st.integers(0, size))
    terms = {"size": size, "batch_size": batch_size, "start": start, "world_size": world_size, "last": last}
    if (all_ranks := shards(workers, **terms)) is None:
        return
    taken = [position for rank in all_ranks for step in steps_of(rank) for position in step]
    shard = all_ranks[0][0]
    expected = list(range(start, size))
    if last == "drop":
        expected = expected[: shard.steps * batch_size * world_size]
        assert size - start - len(expected) < batch_size * world_size
    repeats = len(taken) - len(expected)
    assert 0 <= repeats < (world_size if last == "pad" else 1)
    expected += [position % size for position in range(size, size + repeats)]
    assert sorted(taken) == sorted(expected)


@given(size=sizes, batch_size=batches, world_size=worlds, last=policies)
def test_every_rank_takes_as_many_steps_as_the_others_unless_told_otherwise(size, batch_size, world_size, last):
    all_ranks = shards(size=size, batch_size=batch_size, world_size=world_size, last=last)
    if all_ranks is None:
        return
    taken = [steps_of(rank) for rank in all_ranks]
    counts = {len(steps) for steps in taken}
    assert max(counts) - min(counts) <= (1 if last == "uneven" else 0)
    assert all(1 <= len(step) <= batch_size for steps in taken for step in steps)
    if last in ("drop", "pad"):
        assert all({len(steps[number]) for steps in taken} == {len(taken[0][number])} for number in range(min(counts)))


@given(size=sizes, world_size=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_steps_have_the_same_samples_for_any_number_of_ranks(size, world_size):
    def union(ranks):
        all_ranks = shards(size=size, batch_size=12 // ranks, world_size=ranks, last="uneven")
        found = [steps_of(rank) for rank in all_ranks]
        return [
            sorted(position for steps in found if number < len(steps) for position in steps[number])
            for number in range(max(map(len, found)))
        ]

    assert union(world_size) == union(1)


@given(
    size=sizes, before=st.tuples(batches, worlds), after=st.tuples(batches, worlds, counts_of_workers), data=st.data()
)
def test_a_run_stopped_after_any_step_goes_on_with_any_number_of_ranks_and_workers(size, before, after, data):
    batch_size, world_size = before
    first = shards(size=size, batch_size=batch_size, world_size=world_size, last="uneven")
    stopped = data.draw(st.integers(0, first[0][0].steps))
    taken = [position for rank in first for step in steps_of(rank)[:stopped] for position in step]
    position = first[0][0].after(stopped)
    batch_size, world_size, workers = after
    rest = shards(workers, size=size, batch_size=batch_size, start=position, world_size=world_size, last="uneven")
    taken += [position for rank in rest for step in steps_of(rank) for position in step]
    assert sorted(taken) == list(range(size))


@given(size=sizes, batch_size=st.integers(2, 9), world_size=worlds, data=st.data())
def test_all_ranks_have_the_same_position_after_a_step(size, batch_size, world_size, data):
    first = shards(size=size, batch_size=batch_size, world_size=world_size)
    if first is None:
        return
    stopped = data.draw(st.integers(0, first[0][0].steps))
    (position,) = {rank[0].after(stopped) for rank in first}
    taken = [place for rank in first for step in steps_of(rank)[:stopped] for place in step]
    assert sorted(taken) == list(range(position))


@given(size=st.integers(1, 300), batch_size=batches, world_size=worlds, workers=counts_of_workers, last=policies)
def test_rows_are_the_same_however_many_are_asked_for(size, batch_size, world_size, workers, last):
    all_ranks = shards(workers, size=size, batch_size=batch_size, world_size=world_size, last=last)
    for shard in (item for rank in all_ranks or [] for item in rank):
        whole = shard.positions(0, len(shard))
        middle = len(shard) // 3
        assert whole.tolist() == [*shard.positions(0, middle).tolist(), *shard.positions(middle, len(shard)).tolist()]


def test_fills_a_last_step_with_rows_of_the_one_before():
    steps = [steps_of(rank) for rank in shards(size=25, batch_size=4, world_size=3)]
    assert [[len(step) for step in rank] for rank in steps] == [[4, 4, 1], [4, 3, 1], [4, 3, 1]]
    assert sorted(position for rank in steps for position in rank[2]) == [22, 23, 24]


def test_repeats_fill_the_last_step_from_the_epochs_beginning():
    all_ranks = shards(size=10, batch_size=3, world_size=4, last="pad")
    assert [steps_of(rank) for rank in all_ranks] == [[[0, 4, 8]], [[1, 5, 9]], [[2, 6, 0]], [[3, 7, 1]]]


def test_samples_for_only_some_ranks_are_refused_with_what_to_choose():
    with pytest.raises(SettingError, match=r"1 samples are left .* of 4 ranks.*last='pad', 'drop' or 'uneven'"):
        Shard(size=9, batch_size=1, world_size=4)
    with pytest.raises(SettingError, match="3 samples are left"):
        Shard(size=3, batch_size=8, world_size=4)
    assert Shard(size=0, batch_size=8, world_size=4).steps == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": -1},
        {"start": 11},
        {"batch_size": 0},
        {"world_size": 0},
        {"rank": 2},
        {"workers": 0},
        {"worker": 1},
        {"last": "some"},
    ],
)
def test_refuses_an_invalid_shard_by_name(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        Shard(**{"size": 10, "batch_size": 2, "world_size": 2, **wrong})


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (-1, 2), (3, 2)])
def test_rows_beyond_the_shard_are_refused(start, stop):
    with pytest.raises(IndexError):
        Shard(size=10, batch_size=2, world_size=2).positions(start, stop)


def test_a_hundred_million_samples_are_ordered_and_shared_out_in_constant_memory():
    order = Order(size=100_000_000, seed=1, epoch=2)
    tracemalloc.start()
    try:
        shard = Shard(size=len(order), batch_size=256, world_size=7, rank=3, worker=1, workers=5, start=12_345_678)
        starts = np.linspace(0, len(shard) - 4096, 20, dtype=np.int64).tolist()
        rows = np.concatenate([order.at(shard.positions(start, start + 4096)) for start in starts])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(np.unique(rows)) == 20 * 4096
    assert peak < 4_000_000
