"""Questions to a measured situation: what if something were otherwise, and what would other rules do."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import SettingError
from frostline.planning import POLICIES, make_plan
from frostline.training.what_if import ALL_POLICIES, MeasuredSituation, Question, WhatIf, answer, relative_speed
from support.plans import a_costless_plan, a_plan, a_situation

ASKED = {"data": "s3://photos/waste", "model": "timm:resnet18"}


def ask(situation, question):
    return answer(MeasuredSituation(asked=ASKED, at="2026-11-21T09:30:00+00:00", situation=situation), question)


def test_no_question_is_answered_by_the_best_plan_of_what_was_measured():
    given_situation = a_situation()
    found = ask(given_situation, Question())
    assert found.plan == make_plan(given_situation)
    assert (found.as_measured, found.what_if, found.rules) == (None, (), ())
    assert not Question().is_asked


what_ifs = st.builds(
    WhatIf,
    bandwidth=st.none() | st.floats(5e6, 1e10),
    store_speed=st.none() | st.floats(1, 100),
    trainer_speed=st.none() | st.floats(1, 100),
    nodes=st.none() | st.integers(1, 64),
    epochs=st.none() | st.integers(1, 100),
)


@given(what_ifs)
def test_more_of_anything_is_never_slower_beyond_the_noise(what_if):
    found = ask(a_situation(6), Question(what_if=what_if))
    before = found.as_measured or found.plan
    assert found.plan.samples_per_s >= 0.95 * before.samples_per_s
    assert len(found.what_if) == sum(item is not None for item in (
        what_if.bandwidth, what_if.store_speed, what_if.trainer_speed, what_if.nodes, what_if.epochs
    ))  # fmt: skip


def test_shows_assumed_figures_beside_measured_ones():
    what_if = WhatIf(bandwidth=125e6, store_speed=0.5, trainer_speed=2, nodes=4, epochs=1)
    assert ask(a_situation(), Question(what_if=what_if)).what_if == (
        "a link of 125 MB/s instead of 5.00 MB/s",
        "a store side 0.5 times as fast",
        "a trainer 2 times as fast",
        "4 nodes",
        "1 epoch",
    )


def test_later_epochs_come_from_the_cache():
    kept = a_situation(keeps_features=True, head_s=0.001)
    found = ask(kept, Question(what_if=WhatIf(epochs=10)))
    assert found.plan.later_samples_per_s == pytest.approx(1000)
    assert relative_speed(found.plan, found.as_measured) > 5


def test_shows_every_rule_beside_the_best_one():
    found = ask(a_situation(), Question(policy=ALL_POLICIES))
    assert [rule.policy for rule in found.rules] == list(POLICIES)
    assert found.plan == found.rules[0]
    assert all(relative_speed(rule, found.plan) <= 1.06 for rule in found.rules)


def test_a_cut_and_a_codec_may_be_looked_at():
    found = ask(a_situation(accuracy="int8"), Question(cut=5, codec="int8"))
    assert (found.plan.policy, found.plan.cut, found.plan.route.codec) == ("fixed", 5, "int8")
    with pytest.raises(SettingError, match="no cut 99"):
        ask(a_situation(), Question(cut=99))


def test_an_answer_is_plain_json():
    question = Question(policy=ALL_POLICIES, what_if=WhatIf(bandwidth=1e6))
    value = json.loads(json.dumps(ask(a_situation(), question).to_json(), allow_nan=False))
    assert value["asked"] == ASKED
    assert value["what_if"] == ["a link of 1.00 MB/s instead of 5.00 MB/s"]
    assert value["as_measured"]["relative"] > 1
    assert [item["policy"] for item in value["rules"]] == list(POLICIES)
    assert value["candidates"]
    assert "candidates" not in value["rules"][0]


def test_a_rate_without_bound_has_nothing_beside_it():
    assert relative_speed(a_costless_plan(), a_plan()) is None
    assert relative_speed(a_plan(), a_costless_plan()) is None
