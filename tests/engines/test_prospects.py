"""Which engines are worth a trial: those that a processor has instructions for, and that a job wins back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import REFERENCE
from frostline.engines.catalog import OFFERS
from frostline.engines.prospects import (
    CHEAPEST_TRIAL_S,
    Prospect,
    not_worth,
    prospects,
    too_coarse,
    trial_budget_s,
    unequipped,
)

NAMES = [one.name for one in OFFERS]
ON_CPU = [name for name in NAMES if name not in ("onnxruntime-cuda", "tensorrt", "torch-fp16")]


def names(*abilities, offers=ON_CPU):
    return [one.engine for one in prospects(offers, abilities)]


def test_every_engine_beside_the_reference_has_a_prior():
    assert set(names("cuda", offers=NAMES)) <= set(NAMES) - {REFERENCE}
    for name in set(NAMES) - {REFERENCE}:
        assert name in names("cuda", "avx512_bf16", "avx2", offers=NAMES)


@pytest.mark.parametrize("has", ["amx_bf16", "avx512_bf16", "bf16"])
def test_bfloat16_is_tried_only_where_the_processor_has_instructions_for_it(has):
    in_bf16 = {"openvino-bf16", "torch-bf16", "torch-compiled-bf16"}
    assert not in_bf16 & set(names("avx2", "avx512_vnni"))
    assert in_bf16 <= set(names("avx2", has))
    for name in in_bf16:
        assert "no instructions for bfloat16" in unequipped(name, ["avx2"])
        assert unequipped(name, [has]) is None
    assert unequipped(REFERENCE, []) is None


def test_the_best_prospect_comes_first_and_the_processor_decides_which_that_is():
    assert names("avx2", offers=["torch-channels-last", "onnxruntime", "openvino"])[0] == "openvino"
    assert names("avx2", "avx512_vnni", "avx512_bf16")[:2] == ["openvino-int8", "onnxruntime-int8"]
    assert names("avx2", "amx_bf16", offers=["openvino-int8", "openvino-bf16"])[0] == "openvino-bf16"
    assert names("cuda", offers=NAMES)[0] == "tensorrt"


def prospect(speed_up=2.0, ready_s=10.0):
    return Prospect(engine="some", speed_up=speed_up, ready_s=ready_s)


def test_a_trial_must_save_more_than_it_takes():
    # Each sample is expected to take 20 ms less; a trial takes 10 s and 200 runs of 20 ms.
    assert not_worth(prospect(), reference_s=0.04, best_s=0.04, samples=701) is None
    why_not = not_worth(prospect(), reference_s=0.04, best_s=0.04, samples=699)
    assert why_not == "was not tried: that takes about 14.0 s, and it would save this job 14.0 s"


def test_a_trial_may_take_a_twentieth_of_the_job_whether_it_pays_or_not():
    slow = prospect(speed_up=1.06, ready_s=1.0)
    samples = 100_000
    assert not_worth(slow, reference_s=0.001, best_s=0.001, samples=samples) is None
    assert not_worth(prospect(speed_up=1.06, ready_s=1e4), reference_s=0.001, best_s=0.001, samples=samples)
    assert not_worth(slow, reference_s=0.001, best_s=0.001, samples=20_000) is not None
    spent = not_worth(prospect(speed_up=1.06, ready_s=4.5), reference_s=0.001, best_s=0.001, samples=samples, spent_s=5)
    assert spent is None or "was not tried" in spent


def test_what_was_found_must_be_beaten_also_where_trials_need_not_pay():
    assert not_worth(prospect(), reference_s=0.04, best_s=0.04, samples=None) is None
    why_not = not_worth(prospect(), reference_s=0.04, best_s=0.02, samples=None)
    assert why_not == "was not tried: it is not expected to be faster than what was found"


def test_an_engine_that_rounds_more_than_a_tolerance_allows_is_not_tried():
    assert too_coarse("bf16", 0.001)
    assert too_coarse("int8", 0.001)
    assert too_coarse("bf16", 0.01) is None
    assert too_coarse("fp32", 0.0) is None
    assert too_coarse("int8", "float32") is None  # of names `may_use` tells


@given(st.integers(0, 10**9), st.floats(0, 1e6))
def test_a_job_never_allows_trials_more_than_they_may_save_it(samples, samples_per_s):
    budget_s = trial_budget_s(samples, samples_per_s)
    predicted_s = samples / samples_per_s if samples_per_s else 0.0
    assert 0 <= budget_s <= predicted_s / 2
    assert budget_s == 0 or budget_s >= CHEAPEST_TRIAL_S


def test_a_job_that_ends_soon_tries_nothing():
    assert trial_budget_s(300, 31) == 0
    assert trial_budget_s(100_000, 31) > 60
