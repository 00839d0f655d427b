from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import REFERENCE
from frostline.engines.choice import FLOAT32_ERROR, choose, interpolate_seconds, may_use
from frostline.planning.situation import ACCURACIES
from frostline.profiles import PRECISIONS, Trial

TRIALS = (
    Trial(engine=REFERENCE, precision="fp32", cut=9, seconds=0.020),
    Trial(engine="compiled", precision="fp32", cut=9, seconds=0.016, error=1e-6),
    Trial(engine="halved", precision="bf16", cut=9, seconds=0.008, error=0.004),
    Trial(engine="eighths", precision="int8", cut=9, seconds=0.004, error=0.05),
    Trial(engine="absent", precision="fp32", cut=9, why_not="openvino is not installed"),
)


def engine(trials, accuracy):
    return choose(trials, accuracy).engine


@pytest.mark.parametrize(
    ("accuracy", "chosen"),
    [
        ("exact", REFERENCE), ("float32", "compiled"), ("fp16", "compiled"), ("bf16", "halved"), ("int8", "eighths"),
        (0.1, "eighths"), (0.01, "halved"), (1e-5, "compiled"), (0.0, REFERENCE),
    ],
)  # fmt: skip
def test_the_fastest_engine_that_the_accuracy_allows_is_chosen(accuracy, chosen):
    assert engine(TRIALS, accuracy) == chosen


def test_every_engine_that_is_not_used_says_why():
    trials = {trial.engine: trial.why_not for trial in choose(TRIALS, 0.01).trials}
    assert trials["halved"] is None
    assert trials["absent"] == "openvino is not installed"
    assert "0.05 at cut 9, and accuracy allows 0.01" in trials["eighths"]
    assert "slower: 50 samples/s, and halved gives 125" in trials[REFERENCE]


def test_a_gain_within_the_noise_leaves_the_reference():
    barely = replace(TRIALS[1], seconds=0.0195)
    assert engine((TRIALS[0], barely), 0.1) == REFERENCE


def test_an_engine_must_be_exact_enough_at_every_cut_at_which_it_was_tried():
    earlier = replace(TRIALS[2], cut=4, error=0.02)
    assert engine((*TRIALS, earlier), 0.01) == "compiled"
    assert engine((*TRIALS, earlier), 0.02) == "halved"


def test_uses_no_engine_that_failed_at_some_cut():
    failed = Trial(engine="halved", precision="bf16", cut=4, why_not="two tensors cross")
    assert engine((*TRIALS, failed), "bf16") == "compiled"


def test_an_error_that_the_precision_does_not_explain_is_a_broken_engine():
    broken = (TRIALS[0], replace(TRIALS[1], error=0.01), replace(TRIALS[2], error=0.9))
    assert engine(broken, "bf16") == REFERENCE
    assert "more than fp32 explains" in choose(broken, "bf16").trials[1].why_not


@given(
    st.lists(
        st.tuples(st.sampled_from(PRECISIONS), st.floats(1e-6, 1), st.floats(0, 1), st.integers(1, 3)), max_size=6
    ),
    st.one_of(st.sampled_from(ACCURACIES), st.floats(0, 1)),
)
def test_chooses_an_allowed_engine_never_slower_than_the_reference(figures, accuracy):
    tried = [
        Trial(engine=f"e{number}", precision=precision, cut=3, seconds=seconds, error=error)
        for number, (precision, seconds, error, _) in enumerate(figures)
    ]
    reference = Trial(engine=REFERENCE, precision="fp32", cut=3, seconds=0.01)
    choice = choose([reference, *tried], accuracy)
    used = [trial for trial in choice.trials if trial.why_not is None]
    assert [item.engine for item in used] == [choice.engine]
    assert used[0].seconds <= reference.seconds
    assert used[0].engine == REFERENCE or may_use(used[0].precision, accuracy)
    assert used[0].error <= accuracy if isinstance(accuracy, float) else True


def test_float32_takes_what_another_order_of_sums_explains_and_nothing_coarser():
    at, above = (replace(TRIALS[1], error=error) for error in (FLOAT32_ERROR, FLOAT32_ERROR * 1.01))
    assert engine((TRIALS[0], at), "float32") == "compiled"
    assert engine((TRIALS[0], above), "float32") == REFERENCE
    assert engine((TRIALS[0], replace(TRIALS[2], error=0.0)), "float32") == REFERENCE
    assert engine((TRIALS[0], at), "exact") == REFERENCE


@given(st.data(), st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_interpolated_seconds_are_the_measured_ones_and_lie_between_them(data, steps):
    reference = [sum(steps[:end]) for end in range(len(steps))]
    last = len(reference) - 1
    places = sorted({*data.draw(st.sets(st.integers(0, last))), last})
    ours = sorted(data.draw(st.lists(st.floats(0, 1), min_size=len(places), max_size=len(places))))
    measured = dict(zip(places, ours, strict=True))
    seconds = interpolate_seconds(reference, measured)
    assert len(seconds) == len(reference)
    for place, second in enumerate(seconds):
        assert second == measured.get(place, second)
        assert 0 <= second <= max(ours) * (1 + 1e-9)


def test_an_engine_twice_as_fast_everywhere_is_interpolated_so():
    assert interpolate_seconds([0.0, 1.0, 2.0, 4.0], {3: 2.0}) == (0.0, 0.5, 1.0, 2.0)
    assert interpolate_seconds([0.0, 1.0, 2.0, 4.0], {1: 0.9, 3: 2.0}) == pytest.approx((0.0, 0.9, 0.9 + 1.1 / 3, 2.0))
