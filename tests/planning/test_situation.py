"""Situations: what makes no sense is refused, files keep them whole, and questions change only what they name."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.planning import Link, Situation, make_plan, vary
from frostline.planning.candidates import options
from support.situations import MB, codec, profile, situation, situations

SECONDS = (0.0, 0.002, 0.01)


@given(situations())
def test_a_situation_survives_a_file(given_situation):
    again = Situation.from_json(json.loads(json.dumps(given_situation.to_json(), allow_nan=False)))
    assert again == given_situation
    assert make_plan(again) == make_plan(given_situation)


def test_a_link_without_bound_survives_a_file():
    job = situation(link=Link(bytes_per_s=math.inf, round_trip_s=0.0), refused="too large", accuracy=0.01)
    assert Situation.from_json(json.loads(json.dumps(job.to_json(), allow_nan=False))) == job


@pytest.mark.parametrize("value", [{}, {"cuts": []}, {**situation().to_json(), "more": 1}])
def test_refuses_a_situation_of_another_shape(value):
    with pytest.raises((KeyError, TypeError)):
        Situation.from_json(value)


@pytest.mark.parametrize("bytes_per_s", [0, -1.0, math.nan])
def test_a_link_without_speed_is_a_users_mistake(bytes_per_s):
    with pytest.raises(SettingError, match="bytes_per_s must be above 0"):
        Link(bytes_per_s=bytes_per_s, round_trip_s=0.1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"nodes": 0}, "nodes must be at least 1, not 0"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"head_s": -0.1}, "head_s must be at least 0"),
        (
            {"accuracy": "fp61"},
            "accuracy is one of exact, float32, fp16, bf16, int8 or a relative error.*did you mean fp16",
        ),
        ({"accuracy": -0.1}, "accuracy as a relative error must be at least 0"),
        ({"accuracy": math.inf}, "at least 0 and finite, not inf"),
    ],
)
def test_a_figure_that_makes_no_sense_is_a_users_mistake(changes, sentence):
    with pytest.raises(SettingError, match=sentence):
        situation(**changes)


@given(situations())
def test_an_empty_question_changes_nothing(given_situation):
    assert make_plan(vary(given_situation)) == make_plan(given_situation)


def test_each_question_changes_what_it_names():
    codecs = (codec(2, "lz4", 4_000, encode_s=0.004, decode_s=0.002),)
    job = situation(
        store=profile(SECONDS, read_s=0.002, codecs=codecs), trainer=profile(SECONDS, codecs=codecs), head_s=0.01
    )  # fmt: skip
    asked = vary(job, bandwidth=MB, store_speed=2, trainer_speed=10, nodes=2, epochs=7)
    one = next(option.candidate for option in options(asked) if option.candidate.codec == "lz4")
    assert (one.store_s, one.link_s, one.trainer_s) == pytest.approx(((0.002 + 0.01 + 0.004) / 4, 0.004, 0.0012))
    assert (asked.epochs, asked.nodes, asked.link.round_trip_s) == (7, 2, job.link.round_trip_s)


def test_a_side_assumed_faster_counts_as_other_hardware_on_one_machine():
    job = situation(same_host=True)
    shared = [option.seconds["shared machine"] for option in options(vary(job, store_speed=2))]
    assert shared == pytest.approx([0.01, 0.009, 0.005])
    alike = vary(job, store_speed=2, trainer_speed=2)
    assert [option.seconds["shared machine"] for option in options(alike)] == pytest.approx([0.005, 0.005, 0.005])


@given(situations(), st.floats(0.01, 100))
def test_a_world_that_is_faster_altogether_has_the_same_mixture(given_situation, times):
    bandwidth = given_situation.link.bytes_per_s * times
    before = make_plan(given_situation)
    after = make_plan(vary(given_situation, bandwidth=bandwidth, store_speed=times, trainer_speed=times))
    assert after.samples_per_s == pytest.approx(before.samples_per_s * times, rel=1e-4)


@given(situations(), st.floats(0.1, 10), st.floats(0.1, 10))
def test_questions_may_be_asked_one_after_another(given_situation, first, second):
    twice = vary(vary(given_situation, store_speed=first), trainer_speed=second)
    once = vary(given_situation, store_speed=first, trainer_speed=second)
    assert make_plan(twice).samples_per_s == pytest.approx(make_plan(once).samples_per_s, rel=1e-4)


@pytest.mark.parametrize("name", ["store_speed", "trainer_speed"])
def test_an_invalid_speed_is_a_user_error(name):
    with pytest.raises(SettingError, match=f"{name} is how many times as fast as measured"):
        vary(situation(), **{name: 0})


def test_a_profile_that_lacks_a_cut_is_our_mistake():
    with pytest.raises(AssertionError, match=r"does not have the cuts \[2\]"):
        replace(situation(), trainer=profile(SECONDS[:2]))


@given(situations())
def test_two_machines_like_the_one_measured_on_are_never_slower_together(given_situation):
    apart = vary(given_situation, separate_machines=True)
    assert not apart.same_host
    assert make_plan(apart, noise=0).samples_per_s >= (1 - 1e-6) * make_plan(given_situation, noise=0).samples_per_s
