"""What every way costs on each resource, and which ways are not allowed."""

import math
from dataclasses import replace

import pytest
from hypothesis import given

from frostline.core import REFERENCE, Route
from frostline.planning import Link, explain, make_plan
from frostline.planning.candidates import in_store, options, resources
from frostline.profiles import Trial
from support.situations import LOSSLESS, MB, codec, profile, situation, situations

SECONDS = (0.0, 0.002, 0.01)


def seconds(given_situation, cut, codec="exact"):
    return next(
        dict(option.seconds) for option in options(given_situation) if option.candidate.route == Route(cut, codec)
    )


def candidate(given_situation, cut, codec="exact"):
    return next(option.candidate for option in options(given_situation) if option.candidate.route == Route(cut, codec))


def test_decoding_is_paid_by_the_side_that_does_it():
    job = situation()
    assert seconds(job, 0) == pytest.approx({"store cpu": 0.0, "link": 0.001, "trainer cpu": 0.01})
    assert seconds(job, 1) == pytest.approx({"store cpu": 0.002, "link": 0.006, "trainer cpu": 0.008})
    assert seconds(job, 2) == pytest.approx({"store cpu": 0.01, "link": 5e-5, "trainer cpu": 0.0})


def test_reading_from_the_store_is_paid_by_the_node_at_every_cut():
    job = situation(store=profile(SECONDS, read_s=0.003))
    assert [option.candidate.store_s for option in options(job)] == pytest.approx([0.003, 0.005, 0.013])


def test_the_head_is_paid_by_the_trainer_at_every_cut():
    job = situation(head_s=0.004)
    assert [option.candidate.trainer_s for option in options(job)] == pytest.approx([0.014, 0.012, 0.004])


def test_several_nodes_share_the_work_beside_the_store():
    job = situation(store=profile(SECONDS, read_s=0.002), nodes=4)
    assert seconds(job, 2) == pytest.approx({"store cpu": 0.003, "link": 5e-5, "trainer cpu": 0.0})


def test_an_accelerator_runs_and_its_processor_decodes():
    job = situation(
        store=profile(SECONDS, device="cuda", codecs=(codec(2, "lz4", 3_000, encode_s=0.005, decode_s=0.001),)),
        trainer=profile(SECONDS, device="cuda"),
        head_s=0.02,
    )
    assert resources(job) == ("store cpu", "store accelerator", "link", "trainer cpu", "trainer accelerator")
    assert list(seconds(job, 0).values()) == pytest.approx([0.0, 0.0, 0.001, 0.002, 0.028])
    assert list(seconds(job, 1).values()) == pytest.approx([0.002, 0.0, 0.006, 0.0, 0.028])
    assert list(seconds(job, 2, "lz4").values()) == pytest.approx([0.007, 0.008, 3e-5, 0.001, 0.02])


def test_the_processors_of_one_machine_are_one_resource():
    job = situation(same_host=True, store=profile(SECONDS, device="cuda"), trainer=profile(SECONDS, hardware="other"))
    assert resources(job) == ("shared machine", "store accelerator", "link")
    assert list(seconds(job, 1).values()) == pytest.approx([0.010, 0.0, 0.006])


def test_noise_between_measurements_decides_nothing_on_one_machine():
    noisy = profile((0.0, 0.001, 0.007))  # the same work, measured 30 % faster
    job = situation(trainer=noisy, same_host=True)
    assert all(option.seconds["shared machine"] == pytest.approx(0.01) for option in options(job))


def test_on_one_machine_other_hardware_keeps_its_own_profile():
    faster = profile((0.0, 0.0001, 0.0002), hardware="faster")
    job = situation(trainer=faster, same_host=True)
    assert [option.seconds["shared machine"] for option in options(job)] == pytest.approx([0.0002, 0.0021, 0.01])


def test_noise_never_makes_what_is_left_cheaper_than_nothing():
    job = situation(trainer=profile((0.0, 0.002, 0.012, 0.010)), store=profile((0,) * 4), wires=(0, 9, 9, 9))
    assert candidate(job, 2).trainer_s == 0.0


def test_a_codec_is_packed_at_the_store_and_unpacked_at_the_trainer():
    job = situation(
        store=profile(SECONDS, codecs=(codec(2, "lz4", 2_500.4, encode_s=0.001, decode_s=0.9),)),
        trainer=profile(SECONDS, codecs=(codec(2, "lz4", 99, encode_s=0.9, decode_s=0.002),)),
    )
    assert seconds(job, 2, "lz4") == pytest.approx({"store cpu": 0.011, "link": 2.5004e-5, "trainer cpu": 0.002})
    assert candidate(job, 2, "lz4").wire_bytes_per_sample == 2500


def test_a_codec_unmeasured_at_the_trainer_costs_what_it_does_at_the_store():
    job = situation(store=profile(SECONDS, codecs=(codec(2, "lz4", 2_500, encode_s=0.001, decode_s=0.003),)))
    assert candidate(job, 2, "lz4").trainer_s == pytest.approx(0.003)


def test_plans_no_codec_that_was_not_measured():
    job = situation(
        store=profile(SECONDS, codecs=(codec(2, "lz4", 2_500),)),
        trainer=profile(SECONDS, codecs=(codec(1, "lz4", 2_500), codec(2, "zstd", 2_500))),
    )
    found = [(option.candidate.cut, option.candidate.codec) for option in options(job)]
    assert found == [(0, "exact"), (1, "exact"), (2, "exact"), (2, "lz4")]


def test_encoded_samples_go_as_they_are():
    job = situation(store=profile(SECONDS, codecs=(codec(0, "zstd", 10), codec(0, "exact", 10))))
    found = [option.candidate for option in options(job) if option.candidate.cut == 0]
    assert [(item.codec, item.wire_bytes_per_sample) for item in found] == [("exact", 100_000)]


def test_the_exact_codec_costs_what_was_measured_and_ships_the_cut():
    job = situation(store=profile(SECONDS, codecs=(codec(2, "exact", 5_100, encode_s=0.001, decode_s=0.002),)))
    one = candidate(job, 2)
    assert (one.store_s, one.trainer_s) == (pytest.approx(0.011), pytest.approx(0.002))
    assert one.wire_bytes_per_sample == 5_000


@pytest.mark.parametrize(
    ("accuracy", "allowed"),
    [
        ("exact", {"exact", "lz4"}),
        ("float32", {"exact", "lz4"}),
        ("fp16", {"exact", "lz4", "fp16", "fp16+sparse"}),
        ("bf16", {"exact", "lz4", "fp16", "fp16+sparse", "bf16"}),
        ("int8", {"exact", "lz4", "fp16", "fp16+sparse", "bf16", "int8+sparse+zstd"}),
        (0.002, {"exact", "lz4", "fp16", "fp16+sparse", "bf16"}),
        (0.0, {"exact", "lz4"}),
    ],
)
def test_only_codecs_that_the_accuracy_allows_are_possible(accuracy, allowed):
    measured = {"lz4": 0.0, "fp16": 2e-4, "fp16+sparse": 2e-4, "bf16": 0.002, "int8+sparse+zstd": 0.006}
    codecs = tuple(codec(2, name, 1_000, error=error) for name, error in measured.items())
    found = options(situation(store=profile(SECONDS, codecs=codecs), accuracy=accuracy))
    assert {item.candidate.codec for item in found if item.candidate.cut == 2 and item.candidate.is_possible} == allowed


def test_a_lossy_codec_says_what_it_loses():
    job = situation(store=profile(SECONDS, codecs=(codec(2, "int8", 1_250, error=0.0061),)))
    assert candidate(job, 2, "int8").rejected == "is lossy (error 0.0061), and accuracy is 'float32'"
    assert (
        candidate(replace(job, accuracy=0.001), 2, "int8").rejected
        == "has an error of 0.0061, and accuracy allows 0.001"
    )


def test_an_error_that_is_not_known_is_not_allowed():
    job = situation(store=profile(SECONDS, codecs=(codec(2, "fp16", 1_250, error=math.nan),)), accuracy=0.5)
    assert not candidate(job, 2, "fp16").is_possible
    assert make_plan(job).to_json()["candidates"][3]["error"] is None


def test_a_cut_that_does_not_fit_the_memory_is_rejected_with_its_reason():
    job = situation(store=profile(SECONDS, per_sample=20 * MB), memory_bytes=100 * MB)
    assert candidate(job, 2).rejected == (
        "needs 161 MB at the node for 8 samples, the budget is 100 MB; raise the node's memory_bytes"
    )


def test_takes_a_smaller_device_batch_where_the_profiled_one_does_not_fit():
    one = candidate(situation(memory_bytes=20 * MB), 2)
    assert (one.device_batch, one.memory_bytes) == (16, 17 * MB)


def test_a_node_that_refuses_the_network_leaves_the_encoded_samples():
    job = situation(refused="the node has 1 GB: start it with more --memory")
    assert [option.candidate.rejected for option in options(job)] == [None, job.refused, job.refused]


def test_training_on_the_node_takes_the_head_along_and_nothing_crosses():
    job = situation(store=profile((0.0, 0.004, 0.02)), head_s=0.001)
    one = in_store(job)
    assert dict(one.seconds) == pytest.approx({"store cpu": 0.022, "link": 0.0, "trainer cpu": 0.0})
    assert (one.candidate.wire_bytes_per_sample, one.candidate.cut) == (0, 2)


@given(situations())
def test_a_way_is_as_fast_as_its_busiest_resource_lets_it(given_situation):
    for option in options(given_situation):
        assert option.candidate.samples_per_s == pytest.approx(1 / max(option.seconds.values()))
        assert tuple(option.seconds) == resources(given_situation)
        total = option.candidate.store_s + option.candidate.link_s + option.candidate.trainer_s
        assert sum(option.seconds.values()) == pytest.approx(total)


@given(situations())
def test_every_cut_has_its_exact_codec_and_cut_0_is_always_possible(given_situation):
    found = [option.candidate for option in options(given_situation)]
    exact = [item for item in found if item.codec == "exact"]
    assert [item.cut for item in exact] == [cut.number for cut in given_situation.cuts]
    assert exact[0].is_possible
    assert all(item.is_possible == (item.memory_bytes <= given_situation.memory_bytes) for item in exact[1:])
    assert all(item.is_possible == exact[item.cut].is_possible for item in found if item.codec in LOSSLESS)


def test_within_one_process_the_link_costs_nothing():
    job = situation(link=Link(bytes_per_s=math.inf, round_trip_s=0.0), same_host=True)
    assert [option.candidate.link_s for option in options(job)] == [0.0, 0.0, 0.0]


def with_engine(**changes):
    trials = (
        Trial(engine=REFERENCE, precision="fp32", cut=2, seconds=0.02, why_not="is slower"),
        Trial(engine="halved", precision="bf16", cut=2, seconds=0.008, error=0.004),
    )
    return profile(SECONDS, engine="halved", trials=trials, **changes)


def test_engine_and_codec_together_stay_within_the_accuracy():
    codecs = (codec(1, "fp16", 300_000, error=0.0061), codec(2, "fp16", 2_500, error=0.0061))
    job = situation(store=with_engine(codecs=codecs), accuracy=0.01)
    assert candidate(job, 1, "fp16").is_possible  # the pixels went through no engine
    assert candidate(job, 2).is_possible
    assert (
        candidate(job, 2, "fp16").rejected
        == "has an error of 0.0061 beside the engine's 0.004, and accuracy allows 0.01"
    )
    assert candidate(replace(job, accuracy=0.0102), 2, "fp16").is_possible


def test_tells_sides_with_other_engines_apart_on_one_machine():
    job = situation(store=with_engine(), trainer=profile((0.0, 0.002, 0.03)), same_host=True)
    assert candidate(job, 1).trainer_s == pytest.approx(0.028)
    assert candidate(job, 2).store_s == pytest.approx(0.01)


def test_a_head_trained_in_the_store_is_slowed_by_the_machine_and_not_by_the_engine():
    job = situation(store=with_engine(), trainer=profile((0.0, 0.002, 0.022)), head_s=0.001)
    assert in_store(job).candidate.store_s == pytest.approx(0.01 + 0.001)


def test_a_plan_says_which_engine_runs_what_it_loses_and_why_no_other():
    plan = make_plan(situation(store=with_engine(), accuracy=0.01))
    assert plan.engine == "halved"
    said = explain(plan)
    assert "engine at the node: halved, 125 samples/s alone up to the frost line, error up to 0.004" in said
    assert "not torch-eager: is slower" in said
    assert plan.to_json()["trials"][1]["samples_per_s"] == 125
    assert "engine" not in explain(make_plan(situation()))
