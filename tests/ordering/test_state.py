"""States, recorded orders and handshakes: kept whole, and refused with a sentence where they do not fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import OrderMismatch, SettingError
from frostline.ordering import Order, OrderState, ReadingPlan, RecordedOrder, Replay, check_agreement

STATE = OrderState(
    manifest="3f" * 32, order="shuffled", seed=1, epoch=2, position=30, samples=100, batch_size=8, last="keep"
)
numbers = st.integers(0, 2**63 - 1)


@st.composite
def states(draw):
    samples = draw(numbers)
    return OrderState(
        manifest=draw(st.text("0123456789abcdef", max_size=64)),
        order=draw(st.sampled_from(["shuffled", "listed", "weighted " + "a" * 32])),
        seed=draw(numbers),
        epoch=draw(numbers),
        position=draw(st.integers(0, samples)),
        samples=samples,
        batch_size=draw(st.integers(1, 2**63 - 1)),
        last=draw(st.sampled_from(["keep", "drop", "pad", "uneven"])),
    )


@given(state=states())
def test_a_state_is_the_same_after_json(state):
    assert OrderState.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(state=states(), world_size=st.integers(1, 2**32 - 1), data=st.data())
def test_terms_are_the_same_after_the_wire(state, world_size, data):
    terms = ReadingPlan(state=state, rank=data.draw(st.integers(0, world_size - 1)), world_size=world_size)
    assert len(terms.to_bytes()) == 256
    assert ReadingPlan.from_bytes(terms.to_bytes(), at=0) == terms


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"frostline_order": 3}, "newer Frostline .schema 3, and this one reads up to 2"),
        ({"frostline_order": None}, "no state of a loader"),
        ({"frostline_order": True}, "no state of a loader"),
        ({"position": 101}, "position 101 lies beyond the 100 samples"),
        ({"position": "three"}, "damaged: position|damaged"),
        ({"position": 1.5}, "'position' is missing or makes no sense"),
        ({"seed": -1}, "damaged: seed"),
        ({"manifest": 7}, "damaged: manifest"),
        ({"max_reorder": 3}, "a state of a loader has no field 'max_reorder'"),
        ({"manifest": "f" * 65}, "damaged: manifest"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused_with_a_sentence(changed, said):
    with pytest.raises(OrderMismatch, match=said):
        OrderState.from_json({**STATE.to_json(), **changed})


def test_names_what_a_state_lacks():
    value = STATE.to_json()
    del value["epoch"]
    with pytest.raises(OrderMismatch, match="'epoch' is missing"):
        OrderState.from_json(value)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"manifest": "77" * 32}, "other samples .manifest 3f3f3f3f3f3f, and this loader's is 777777777777"),
        ({"seed": 5}, "saved with seed 1, and this loader has seed 5: make it with seed=1"),
        ({"order": "listed"}, "in the order 'shuffled', and this loader's is 'listed'"),
        ({"samples": 200}, "100 samples, and this loader's 200"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_what_to_do(other, said):
    with pytest.raises(OrderMismatch, match=said):
        STATE.require(replace(STATE, **other))


def test_a_state_fits_a_loader_of_another_epoch_batch_size_and_end():
    STATE.require(replace(STATE, epoch=7, position=0, batch_size=32, last="drop"))
    assert not STATE.is_over
    assert replace(STATE, position=100).is_over


def test_a_state_beyond_its_epoch_cannot_be_made():
    with pytest.raises(SettingError, match="beyond"):
        replace(STATE, position=101)


def records(count, **differing):
    """Of so many ranks; ``differing`` says by rank what it has another of."""
    return [
        ReadingPlan(state=replace(STATE, **differing.get(f"rank{rank}", {})), rank=rank, world_size=count).to_bytes()
        for rank in range(count)
    ]


def test_ranks_that_are_about_to_read_the_same_agree():
    check_agreement(records(1))
    check_agreement(records(5))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 9}, "the seed differs: rank 0 has 1, rank 2 has 9"),
        ({"epoch": 3}, "the epoch differs: rank 0 has 2, rank 2 has 3"),
        ({"manifest": "00" * 32}, "the manifest of the samples differs: rank 0 has 3f3f.*, rank 2 has 0000"),
        ({"order": "listed"}, "the kind of order .* rank 2 has listed"),
        ({"batch_size": 16}, "the batch size .* rank 0 has 8, rank 2 has 16"),
        ({"position": 8}, "the position .* rank 2 has 8"),
        ({"samples": 99}, "the number of samples .* rank 2 has 99"),
        ({"last": "drop"}, "the last batch .* rank 2 has drop"),
        ({"ahead": (50, 60)}, "what was handed out ahead of others .* differs"),
    ],
)
def test_ranks_that_differ_are_refused_with_what_differs_and_where(other, said):
    with pytest.raises(OrderMismatch, match=said):
        check_agreement(records(4, rank2=other))


def test_many_ranks_that_differ_are_counted_rather_than_listed():
    with pytest.raises(OrderMismatch, match="rank 8 has 5, and 11 more differ"):
        check_agreement(records(20, **{f"rank{rank}": {"seed": 5} for rank in range(1, 20)}))


def test_two_processes_with_one_rank_are_refused():
    (one,) = records(1)
    with pytest.raises(OrderMismatch, match="process 0 of 2 takes itself for rank 0 of 1"):
        check_agreement([one, one])


def test_another_version_and_garbage_are_refused_by_rank():
    first, second = records(2)
    newer = bytearray(second)
    newer[8] = 3
    for record, said in (
        (bytes(newer), "rank 1 runs another version of Frostline .schema 3, and 2 here"),
        (b"\0" * 256, "rank 1 answered with something else"),
        (second[:100], "rank 1 answered with something else"),
        (second[:20] + b"\xff" * 200 + second[220:], "rank 1 answered with something that makes no sense"),
    ):
        with pytest.raises(OrderMismatch, match=said):
            check_agreement([first, record])


@given(count=st.integers(0, 200), max_reorder=st.sampled_from([0, 1, 40, 200]), data=st.data())
def test_a_recorded_order_is_replayed_exactly_from_its_file(count, max_reorder, data):
    order = Order(size=200, seed=1, epoch=2)
    positions = np.arange(200)
    keys = positions + np.array(data.draw(st.lists(st.integers(0, max_reorder), min_size=200, max_size=200)))
    happened = positions[np.argsort(keys, kind="stable")][:count]
    state = replace(STATE, samples=200, position=count, order=order.name)
    read = RecordedOrder.from_bytes(RecordedOrder(state=state, positions=happened).to_bytes())
    assert read.state == state
    replay = Replay(recorded=read, order=order)
    assert len(replay) == count
    assert np.array_equal(replay.at(np.arange(count)), order.at(happened))


def test_a_recorded_order_with_little_slack_takes_a_byte_a_sample():
    positions = np.arange(100_000) ^ 1
    recorded = RecordedOrder(state=replace(STATE, samples=100_000), positions=positions)
    assert len(recorded.to_bytes()) < 101_000


def test_a_recorded_order_that_is_damaged_or_foreign_is_refused():
    whole = RecordedOrder(state=STATE, positions=np.arange(30)[::-1].copy()).to_bytes()
    for file, said in ((whole[:-1], "damaged"), (whole[:60] + b"x" + whole[61:], "damaged"), (b"else", "no recorded")):
        with pytest.raises(OrderMismatch, match=said):
            RecordedOrder.from_bytes(file)


@pytest.mark.parametrize("positions", [[0, 0], [100], [-1]])
def test_positions_twice_or_outside_the_epoch_are_no_recorded_order(positions):
    with pytest.raises(OrderMismatch, match="recorded order"):
        RecordedOrder(state=STATE, positions=np.array(positions))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (Order(size=100, seed=2, epoch=2), "seed 1"),
        (Order(size=100, seed=1, epoch=3), "epoch 2"),
        (Order(size=100, seed=1, epoch=2, shuffle=False), "order shuffled"),
        (Order(size=99, seed=1, epoch=2), "samples 100"),
    ],
)
def test_does_not_replay_a_record_of_another_order(order, said):
    with pytest.raises(OrderMismatch, match=f"recorded with {said}"):
        Replay(recorded=RecordedOrder(state=STATE, positions=np.arange(30)), order=order)


def test_a_replay_is_of_its_own_epoch_and_has_a_name_of_its_own():
    order = Order(size=100, seed=1, epoch=2)
    one, other = (
        Replay(recorded=RecordedOrder(state=STATE, positions=positions), order=order)
        for positions in (np.arange(30), np.arange(30)[::-1].copy())
    )
    assert one.in_epoch(2) is one
    assert len({one.name, other.name, order.name}) == 3
    with pytest.raises(OrderMismatch, match="epoch 2 was recorded"):
        one.in_epoch(3)


@pytest.mark.parametrize(("rank", "world_size", "name"), [(2, 2, "rank"), (-1, 2, "rank"), (0, 1 << 32, "world_size")])
def test_what_no_rank_can_be_about_to_read_is_refused_by_name(rank, world_size, name):
    ReadingPlan(state=STATE, rank=1, world_size=2)
    ReadingPlan(state=STATE, rank=0, world_size=(1 << 32) - 1)
    with pytest.raises(SettingError, match=f"{name} must lie from 0 to"):
        ReadingPlan(state=STATE, rank=rank, world_size=world_size)
