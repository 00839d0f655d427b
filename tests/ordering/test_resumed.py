"""Going on where samples were handed out ahead of others: each comes exactly once, in whatever number of ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import OrderMismatch, SettingError
from frostline.ordering import Order, OrderState, Progress, Resumed, Shard

SIZE = 40


def state(position, ahead=(), samples=SIZE):
    return OrderState(
        manifest="m", order="shuffled", seed=3, epoch=1, position=position, samples=samples, batch_size=4, last="keep",
        ahead=tuple(ahead),
    )  # fmt: skip


@st.composite
def states(draw):
    position = draw(st.integers(0, SIZE))
    beyond = draw(st.sets(st.integers(position + 1, SIZE - 1), max_size=9)) if position + 1 < SIZE else ()
    return state(position, sorted(beyond))


@given(states(), st.integers(1, 3), st.sampled_from(["keep", "uneven"]))
def test_the_rest_comes_once_in_order_over_any_number_of_ranks(where, world_size, last):
    order = Order(size=SIZE, seed=3, epoch=1)
    resumed = Resumed(order=order, state=where)
    left = [index for index in range(where.position, SIZE) if index not in where.ahead]
    found = []
    for rank in range(world_size):
        shard = Shard(size=SIZE, batch_size=4, start=resumed.start, rank=rank, world_size=world_size, last="uneven")
        found += resumed.original_positions(shard.positions(0, len(shard))).tolist()
        if world_size == 1:
            assert found == left
    assert sorted(found) == left
    everything = np.arange(SIZE, dtype=np.int64)
    assert sorted(resumed.original_positions(everything)) == everything.tolist()
    assert np.array_equal(resumed.at(everything), order.at(resumed.original_positions(everything)))


def test_a_resumed_order_keeps_its_name_and_is_plain_in_other_epochs():
    order = Order(size=SIZE, seed=3, epoch=1)
    resumed = Resumed(order=order, state=state(2, [5]))
    assert (resumed.name, resumed.seed, resumed.epoch, len(resumed)) == (order.name, 3, 1, SIZE)
    assert resumed.in_epoch(1) is resumed
    assert resumed.in_epoch(2).order == order.in_epoch(2)
    assert resumed.in_epoch(2).start == 0


@given(st.permutations(range(12)), st.sets(st.integers(0, 11), max_size=4), st.integers(1, 5))
def test_progress_is_all_below_a_position_and_what_is_beyond_it(arrivals, unreadable, batch):
    progress, given_so_far, gone = Progress(), set(), set()
    for start in range(0, 12, batch):
        some = arrivals[start : start + batch]
        gone |= set(some)
        given_so_far |= set(some) - unreadable
        missing = min(set(range(13)) - gone)
        progress.give(np.array(sorted(set(some) - unreadable), np.int64), missing)
        assert set(progress.ahead) | {item for item in given_so_far if item < progress.position} == given_so_far
        assert all(index in gone for index in range(progress.position))
        assert progress.position not in given_so_far
    assert (progress.position, progress.ahead) == (12, ())


def test_a_state_with_samples_ahead_survives_saving():
    value = json.loads(json.dumps(state(2, [5, 9]).to_json()))
    assert value["frostline_order"] == 2
    assert OrderState.from_json(value) == state(2, [5, 9])
    assert state(2).to_json()["frostline_order"] == 1
    assert OrderState.from_json(state(2).to_json()) == state(2)


@pytest.mark.parametrize("ahead", [[5, 5], [9, 5], [2], [SIZE], [1]])
def test_positions_ahead_that_make_no_sense_are_refused(ahead):
    with pytest.raises(SettingError, match="ascending"):
        state(2, ahead)
    with pytest.raises(OrderMismatch, match="damaged"):
        OrderState.from_json({**state(2, [5]).to_json(), "ahead": ahead})


@pytest.mark.parametrize("ahead", ["5", [5.0], [True], {"5": 1}, None])
def test_refuses_an_invalid_list_of_positions(ahead):
    with pytest.raises(OrderMismatch, match="'ahead'"):
        OrderState.from_json({**state(2, [5]).to_json(), "ahead": ahead})
