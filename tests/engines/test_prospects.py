"""Which engines are worth a trial: those that a processor has instructions for, and that a job wins back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import REFERENCE
from frostline.engines.catalog import OFFERS
from frostline.engines.choice import Prospect, missing_ability, prospects, too_coarse, trial_refusal

NAMES = [offer.name for offer in OFFERS]
ON_CPU = [name for name in NAMES if name not in ("onnxruntime-cuda", "tensorrt", "torch-fp16")]


def names(*abilities, offers=ON_CPU):
    return [prospect.engine for prospect in prospects(offers, abilities)]


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
        assert "no instructions for bfloat16" in missing_ability(name, ["avx2"])
        assert missing_ability(name, [has]) is None
    assert missing_ability(REFERENCE, []) is None


def test_the_best_prospect_comes_first_and_the_processor_decides_which_that_is():
    assert names("avx2", offers=["torch-channels-last", "onnxruntime", "openvino"])[0] == "openvino"
    assert names("avx2", "avx512_vnni", "avx512_bf16")[:2] == ["openvino-int8", "onnxruntime-int8"]
    assert names("avx2", "amx_bf16", offers=["openvino-int8", "openvino-bf16"])[0] == "openvino-bf16"
    assert names("cuda", offers=NAMES)[0] == "tensorrt"


def prospect(speed_up=2.0, ready_s=6.0):  # and four for a process of its own
    return Prospect(engine="some", speed_up=speed_up, ready_s=ready_s)


def test_a_trial_must_save_more_than_it_takes():
    # Each sample is expected to take 20 ms less; a trial takes 10 s and 200 runs of 20 ms.
    assert trial_refusal(prospect(), reference_s=0.04, best_s=0.04, samples=701) is None
    why_not = trial_refusal(prospect(), reference_s=0.04, best_s=0.04, samples=699)
    assert why_not == "was not tried: that takes about 14.0 s, and it would save this job 14.0 s"


def test_a_trial_may_take_a_twentieth_of_the_job_whether_it_pays_or_not():
    slow = prospect(speed_up=1.06, ready_s=0.8)
    samples = 100_000
    assert trial_refusal(slow, reference_s=0.001, best_s=0.001, samples=samples) is None
    assert trial_refusal(prospect(speed_up=1.06, ready_s=1e4), reference_s=0.001, best_s=0.001, samples=samples)
    assert trial_refusal(slow, reference_s=0.001, best_s=0.001, samples=20_000) is not None
    spent = trial_refusal(
        prospect(speed_up=1.06, ready_s=4.5), reference_s=0.001, best_s=0.001, samples=samples, spent_s=5
    )
    assert spent is None or "was not tried" in spent


def test_a_trial_must_beat_the_best_engine_so_far():
    assert trial_refusal(prospect(), reference_s=0.04, best_s=0.04, samples=None) is None
    why_not = trial_refusal(prospect(), reference_s=0.04, best_s=0.02, samples=None)
    assert why_not == "was not tried: it is not expected to be faster than what was found"


def test_an_engine_that_rounds_more_than_a_tolerance_allows_is_not_tried():
    assert too_coarse("bf16", 0.001)
    assert too_coarse("int8", 0.001)
    assert too_coarse("bf16", 0.01) is None
    assert too_coarse("fp32", 0.0) is None
    assert too_coarse("int8", "float32") is None  # of names `may_use` tells


def test_tries_quick_engines_within_the_nodes_process():
    offers = ["openvino", "torch-compiled"]
    apart, here = (
        {prospect.engine: prospect for prospect in prospects(offers, ["avx2"], here=is_here)}
        for is_here in (False, True)
    )
    assert here["openvino"].is_here
    assert not here["torch-compiled"].is_here
    assert here["torch-compiled"] == apart["torch-compiled"]
    assert here["openvino"].trial_s(0.03) < apart["openvino"].trial_s(0.03) / 2
    job = {"reference_s": 0.01, "best_s": 0.01, "samples": 1000}
    assert trial_refusal(here["openvino"], **job) is None
    assert trial_refusal(apart["openvino"], **job) is not None


@given(st.integers(0, 10**6), st.floats(1e-4, 1), st.booleans())
def test_a_trial_is_worth_it_only_where_it_is_won_back_or_takes_a_twentieth(samples, reference_s, here):
    for item in prospects(ON_CPU, ["avx2", "avx512_vnni"], here=here):
        saved_s = samples * reference_s * (1 - 1 / item.speed_up)
        is_cheap = item.trial_s(reference_s) <= max(saved_s, 0.05 * samples * reference_s)
        is_worth = trial_refusal(item, reference_s=reference_s, best_s=reference_s, samples=samples) is None
        assert not is_worth or is_cheap


def test_a_job_that_ends_in_a_moment_tries_nothing():
    one = prospects(["openvino"], ["avx2"], here=True)[0]
    assert trial_refusal(one, reference_s=0.01, best_s=0.01, samples=300) is not None
