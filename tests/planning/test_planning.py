"""The plan: which cut, why, and every rejected candidate."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Cut
from frostline.errors import SettingError
from frostline.planning import Link, Situation, choose, explain, fixed
from frostline.profiles import CutCost, Profile

MB = 1_000_000


def cut(number, wire):
    return Cut(
        number=number, name=f"layer{number}", after=number - 2, tensors=("x",), shapes=((1,),), dtypes=("float32",),
        bytes_per_sample=wire,
    )  # fmt: skip


def profile(seconds, *, hardware="cpu", per_sample=MB, read_s=0.0):
    costs = tuple(
        CutCost(number=number, seconds=one, spread_s=0.0, fixed_bytes=MB, bytes_per_sample=per_sample)
        for number, one in enumerate(seconds)
    )
    return Profile(hardware=hardware, host="h", engine="torch", device_batch=32, read_s=read_s, cuts=costs)


def situation(wires=(0, 600_000, 5_000), seconds=(0.0, 0.002, 0.01), **changes):
    base = Situation(
        cuts=tuple(cut(number, wire) for number, wire in enumerate(wires)),
        encoded_bytes=100_000,
        store=profile(seconds),
        trainer=profile(seconds),
        link=Link(bytes_per_s=100 * MB, round_trip_s=0.001),
        same_host=False,
        memory_bytes=1000 * MB,
    )
    return replace(base, **changes)


seconds_lists = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6)


@st.composite
def situations(draw):
    count = draw(st.integers(1, 6))

    def rising():
        steps = draw(st.lists(st.floats(1e-6, 0.1), min_size=count, max_size=count))
        return [sum(steps[:end]) for end in range(1, count + 1)]

    return situation(
        wires=(0, *draw(st.lists(st.integers(1, 10**7), min_size=count - 1, max_size=count - 1))),
        seconds=rising(),
        encoded_bytes=draw(st.floats(1, 1e7)),
        trainer=profile(rising(), hardware=draw(st.sampled_from(["cpu", "gpu"]))),
        link=Link(bytes_per_s=draw(st.floats(1e3, 1e10)), round_trip_s=0.1),
        same_host=draw(st.booleans()),
        memory_bytes=draw(st.integers(1, 100 * MB)),
    )


@given(situations())
def test_no_candidate_is_faster_than_the_choice_beyond_the_noise(given_situation):
    plan = choose(given_situation)
    budget = given_situation.memory_bytes
    possible = [one for one in plan.candidates if one.cut == 0 or one.memory_bytes <= budget]
    assert plan.chosen in possible
    assert all(plan.chosen.samples_per_s >= 0.95 * one.samples_per_s for one in possible)


@given(situations())
def test_every_cut_is_a_candidate_and_cut_0_never_lacks_memory(given_situation):
    plan = choose(given_situation)
    assert [one.cut for one in plan.candidates] == [one.number for one in given_situation.cuts]
    assert "budget" not in (plan.candidates[0].rejected or "")
    assert all(
        one.rejected is not None for one in plan.candidates[1:] if one.memory_bytes > given_situation.memory_bytes
    )


@given(situations(), st.floats(1, 1000))
def test_a_faster_link_never_slows_the_plan_nor_ships_less(given_situation, times):
    link = given_situation.link
    faster = replace(given_situation, link=replace(link, bytes_per_s=link.bytes_per_s * times))
    slow, fast = choose(given_situation), choose(faster)
    assert fast.chosen.samples_per_s >= 0.95 * slow.chosen.samples_per_s
    assert fast.chosen.wire_bytes_per_sample >= slow.chosen.wire_bytes_per_sample
    assert all(b.samples_per_s >= a.samples_per_s for a, b in zip(slow.candidates, fast.candidates, strict=True))


@given(situations())
def test_a_plan_survives_json_and_has_a_table_of_every_cut(given_situation):
    plan = choose(given_situation)
    value = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert value["cut"] == plan.cut
    keys = {"cut", "name", "wire_bytes_per_sample", "store_s", "trainer_s", "memory_bytes", "samples_per_s", "rejected"}
    assert all(keys <= set(one) for one in value["candidates"])
    lines = explain(plan).splitlines()
    assert sum(one.startswith(">") for one in lines) == 1
    assert len(lines) == 4 + len(plan.candidates)


def test_a_thin_link_takes_the_cut_with_the_fewest_bytes():
    plan = choose(situation(link=Link(bytes_per_s=0.1 * MB, round_trip_s=0.05)))
    assert plan.cut == 2
    assert plan.chosen.samples_per_s == pytest.approx(0.1 * MB / 5_000)
    assert "held back by the link" in plan.reason
    assert "20 times fewer than encoded" in plan.reason


def test_more_bytes_than_encoded_are_called_more():
    assert "600 kB a sample, 6 times more than encoded" in choose(situation()).reason


def test_a_slow_node_on_a_fast_link_ships_the_encoded_samples():
    plan = choose(
        situation(store=profile((0.0, 0.02, 0.2), hardware="slow"), link=Link(bytes_per_s=1e10, round_trip_s=0))
    )
    assert plan.cut == 0
    assert plan.chosen.trainer_s == pytest.approx(0.01)
    assert "held back by the trainer" in plan.reason


def test_decoding_is_paid_by_the_side_that_does_it():
    zero, pixels, line = choose(situation()).candidates
    assert (zero.store_s, zero.trainer_s) == (0.0, 0.01)
    assert (pixels.store_s, pixels.trainer_s) == (0.002, pytest.approx(0.008))
    assert (line.store_s, line.trainer_s) == (0.01, 0.0)


def test_reading_from_the_store_is_paid_by_the_node_at_every_cut():
    plan = choose(situation(store=profile((0.0, 0.002, 0.01), read_s=0.003)))
    assert [one.store_s for one in plan.candidates] == pytest.approx([0.003, 0.005, 0.013])


def test_on_one_machine_noise_between_two_measurements_decides_nothing():
    noisy = profile((0.0, 0.001, 0.007))  # the same work, measured 30 % faster
    plan = choose(situation(trainer=noisy, same_host=True))
    assert plan.cut == 2
    assert all(one.store_s + one.trainer_s == pytest.approx(0.01) for one in plan.candidates)
    assert "held back by the shared machine" in plan.reason


def test_on_one_machine_other_hardware_keeps_its_own_profile():
    gpu = profile((0.0, 0.0001, 0.0002), hardware="gpu")
    assert choose(situation(trainer=gpu, same_host=True, link=Link(bytes_per_s=1e10, round_trip_s=0))).cut == 0


def test_a_cut_that_does_not_fit_the_memory_is_rejected_with_its_reason():
    plan = choose(situation(store=profile((0.0, 0.002, 0.01), per_sample=20 * MB), memory_bytes=100 * MB))
    assert plan.cut == 0
    assert plan.candidates[2].rejected == "needs 161 MB at the node for 8 samples, the budget is 100 MB"


def test_a_smaller_device_batch_is_taken_where_the_profiled_one_does_not_fit():
    plan = choose(situation(memory_bytes=20 * MB))
    assert (plan.candidates[2].device_batch, plan.candidates[2].memory_bytes) == (16, 17 * MB)


def test_the_user_may_name_the_cut():
    plan = fixed(situation(), 1)
    assert (plan.cut, plan.policy) == (1, "fixed")
    assert "was asked for" in plan.reason


def test_a_named_cut_that_is_not_there_is_a_users_mistake():
    with pytest.raises(SettingError, match="no cut 9: this job has cuts 0 to 2"):
        fixed(situation(), 9)


def test_a_named_cut_that_does_not_fit_is_a_users_mistake():
    with pytest.raises(SettingError, match=r"layer2.*needs 9 MB.*raise the node's memory_bytes"):
        fixed(situation(memory_bytes=MB), 2)


def test_within_one_process_the_link_has_no_bound():
    plan = choose(situation(link=Link(bytes_per_s=math.inf, round_trip_s=0.0), same_host=True))
    assert plan.cut == 2
    assert plan.to_json()["link"]["bytes_per_s"] is None
    assert "no bound" in explain(plan)


def test_work_that_costs_nothing_has_no_bound_either():
    plan = choose(situation(seconds=(0.0, 0.0, 0.0), link=Link(bytes_per_s=math.inf, round_trip_s=0.0)))
    assert plan.chosen.samples_per_s == math.inf
    assert plan.to_json()["candidates"][0]["samples_per_s"] is None


def test_a_link_without_speed_is_a_users_mistake():
    with pytest.raises(SettingError, match="above 0"):
        Link(bytes_per_s=0, round_trip_s=0.1)


@given(situations())
def test_every_cut_but_the_chosen_one_says_why_it_was_not_taken(given_situation):
    plan = choose(given_situation)
    assert [one.cut for one in plan.candidates if one.rejected is None] == [plan.cut]
