"""The plan: the fastest mixture, one way where that is as fast, and every rejected candidate with its reason."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Route
from frostline.core.errors import SettingError
from frostline.planning import POLICIES, Link, explain, make_plan, plan_at_cut, table, vary
from frostline.planning.candidates import ALL_IN_STORE
from support.situations import MB, codec, profile, situation, situations

SECONDS = (0.0, 0.002, 0.01)
THIN = Link(bytes_per_s=0.1 * MB, round_trip_s=0.05)
FAST = Link(bytes_per_s=1e10, round_trip_s=0.0)
# One cut at the trainer alone, ten times the work at the store alone: together they do more than either.
TWO_SIDES = {"store": profile(SECONDS), "trainer": profile(SECONDS, hardware="other"), "link": FAST}


@given(situations())
def test_nothing_that_is_possible_is_faster_than_the_choice_beyond_the_noise(given_situation):
    plan, exact = make_plan(given_situation), make_plan(given_situation, noise=0)
    possible = [candidate for candidate in plan.candidates if candidate.is_possible]
    assert plan.samples_per_s >= 0.95 * exact.samples_per_s
    assert all(exact.samples_per_s >= (1 - 1e-5) * item.samples_per_s for item in possible)
    used = {item.route for item in (*plan.mixture, *exact.mixture)}
    assert used <= {item.route for item in possible}


@given(situations())
def test_the_optimum_is_never_slower_than_any_rule_that_takes_one_cut(given_situation):
    """Training on the node is no cut: it gives up the trainer."""
    best = make_plan(given_situation, noise=0)
    for name in POLICIES:
        if name != ALL_IN_STORE:
            assert make_plan(given_situation, name).samples_per_s <= best.samples_per_s * (1 + 1e-5)


@given(situations(), st.sampled_from(["bandwidth", "store_speed", "trainer_speed", "nodes"]), st.integers(1, 50))
def test_more_of_anything_never_slows_the_optimum(given_situation, name, times):
    more = given_situation.link.bytes_per_s * times if name == "bandwidth" else times
    more = given_situation.nodes * times if name == "nodes" else more
    before, after = make_plan(given_situation, noise=0), make_plan(vary(given_situation, **{name: more}), noise=0)
    assert after.samples_per_s >= before.samples_per_s * (1 - 1e-5)


@given(situations(), st.integers(0, 100 * MB))
def test_neither_memory_nor_leave_to_lose_accuracy_ever_slows_the_optimum(given_situation, more_bytes):
    freer = replace(given_situation, memory_bytes=given_situation.memory_bytes + more_bytes, accuracy="int8")
    assert make_plan(freer, noise=0).samples_per_s >= make_plan(given_situation, noise=0).samples_per_s * (1 - 1e-5)


@given(situations(), st.floats(1, 1000))
def test_a_faster_link_never_slows_the_plan_beyond_the_noise(given_situation, times):
    slow = make_plan(given_situation)
    fast = make_plan(vary(given_situation, bandwidth=given_situation.link.bytes_per_s * times))
    assert fast.samples_per_s >= 0.95 * slow.samples_per_s


@given(situations())
def test_a_mixture_is_whole_and_all_others_say_why_they_were_not_taken(given_situation):
    for plan in (make_plan(given_situation), make_plan(given_situation, noise=0)):
        assert sum(item.share for item in plan.mixture) == pytest.approx(1)
        assert [item.share for item in plan.mixture] == sorted((item.share for item in plan.mixture), reverse=True)
        assert len(plan.mixture) <= len(plan.prices)
        used = {item.route for item in plan.mixture}
        assert {candidate.route for candidate in plan.candidates if candidate.rejected is None} == used
        assert plan.chosen.route == plan.mixture[0].route


@given(situations(), st.sampled_from(POLICIES))
def test_a_plan_survives_json_and_has_a_table_of_every_cut(given_situation, policy):
    plan = make_plan(given_situation, policy)
    value = json.loads(json.dumps(plan.to_json(), allow_nan=False))
    assert (value["cut"], value["codec"], value["policy"]) == (plan.cut, plan.route.codec, policy)
    keys = {"cut", "codec", "name", "wire_bytes_per_sample", "store_s", "link_s", "trainer_s", "memory_bytes"}
    assert all(keys | {"samples_per_s", "error", "rejected"} <= set(item) for item in value["candidates"])
    made = table(plan)
    assert {row[1] for row in made.rows} == {str(cut.number) for cut in given_situation.cuts}
    assert sum(row[-1] == "chosen" for row in made.rows) == len(plan.mixture)
    assert len(explain(plan).splitlines()) == 4 + len(made.rows)


@given(situations())
def test_prices_sum_to_one_and_the_bottleneck_has_work(given_situation):
    plan = make_plan(given_situation, noise=0)
    assert sum(price for _, price in plan.prices) == pytest.approx(1)
    assert [price for _, price in plan.prices] == sorted((price for _, price in plan.prices), reverse=True)
    assert f"held back by the {plan.bottleneck}" in plan.reason


def test_a_thin_link_takes_the_cut_with_the_fewest_bytes():
    plan = make_plan(situation(link=THIN))
    assert plan.mixture[0].share == 1
    assert plan.cut == 2
    assert plan.samples_per_s == pytest.approx(0.1 * MB / 5_000)
    assert plan.reason == (
        "cut 2 (layer2) is the fastest: 5.00 kB a sample, 20 times fewer than encoded, "
        "20 samples/s, held back by the link; 10 % more bandwidth would give up to 10 %; "
        "training in the store too would give 100 samples/s (policy all_in_store)"
    )


def test_two_sides_that_both_have_time_share_the_samples():
    plan = make_plan(situation(**TWO_SIDES), noise=0)
    assert [(item.route, item.share) for item in plan.mixture] == [
        (Route(0), pytest.approx(0.5, abs=1e-4)),
        (Route(2), pytest.approx(0.5, abs=1e-4)),
    ]
    assert plan.samples_per_s == pytest.approx(200, rel=1e-4)
    assert dict(plan.prices) == pytest.approx({"store cpu": 0.5, "trainer cpu": 0.5, "link": 0}, abs=1e-6)
    assert plan.reason == (
        "50 % of the samples at cut 0 (layer0) and 50 % of the samples at cut 2 (layer2) are together 60 % faster than "
        "any one way for all: 52.5 kB a sample, 200 samples/s, held back by the store cpu; "
        "10 % more store cpu would give up to 5 %, 10 % more trainer cpu 5 %"
    )
    assert plan.candidates[1].rejected == "37 % slower"


def test_takes_the_mixture_with_the_fewest_bytes_of_those_within_two_percent():
    exact, taken = (make_plan(situation(**TWO_SIDES), noise=noise) for noise in (0, 0.05))
    assert 0.98 - 1e-6 <= taken.samples_per_s / exact.samples_per_s < 1
    sizes = {candidate.route: candidate.wire_bytes_per_sample for candidate in exact.candidates}
    ours, theirs = (sum(item.share * sizes[item.route] for item in plan.mixture) for plan in (taken, exact))
    assert ours < theirs


def test_takes_no_mixture_that_gains_less_than_the_noise():
    job = situation(**{**TWO_SIDES, "trainer": profile((0.0, 0.006, 0.3), hardware="slow")})
    assert make_plan(job).mixture[0].share == 1
    assert len(make_plan(job, noise=0).mixture) == 2


def test_takes_the_way_with_the_fewest_bytes_of_nearly_equal_ones():
    nearly = (0.0, 0.002, 0.0098, 0.01)
    sides = {"store": profile(nearly), "trainer": profile((0.0, 50.0, 51.0, 51.0), hardware="slow")}
    plan = make_plan(situation(wires=(0, 600_000, 8_000, 5_000), **sides))
    assert plan.cut == 3
    assert plan.reason.startswith("cut 3 (layer3) ships the fewest bytes of the 2 ways within 5 % of the fastest")
    assert plan.candidates[2].rejected == "as fast within 5 %, with 1.6 times the bytes"


def test_a_codec_is_part_of_the_choice():
    codecs = (codec(2, "sparse+zstd", 1_000, encode_s=0.001, decode_s=0.001), codec(2, "fp16", 2_500, error=1e-4))
    job = situation(store=profile(SECONDS, codecs=codecs), link=THIN)
    plan = make_plan(job)
    assert plan.route == Route(2, "sparse+zstd")
    assert plan.samples_per_s == pytest.approx(90.9, rel=1e-3)
    assert plan.reason.startswith("cut 2 (layer2, sparse+zstd) is the fastest")
    assert "100 times fewer than encoded" in plan.reason


def test_takes_the_fastest_codec_at_the_lightest_cut_on_one_machine():
    """Nobody waits for a byte there, and packing takes the cores that do the rest."""
    codecs = (codec(2, "sparse+zstd", 1_000, encode_s=1e-4, decode_s=1e-4), codec(2, "fp16", 2_500, encode_s=1e-5))
    job = situation(store=profile(SECONDS, codecs=codecs), trainer=profile((0.0, 0.001, 0.007)), link=FAST)
    together = replace(job, same_host=True)
    assert plan_at_cut(job, 2).route == Route(2, "sparse+zstd")
    assert plan_at_cut(together, 2).route == make_plan(together).route == Route(2)
    assert "on one machine its fastest codec is used" in make_plan(together).reason


def test_a_slow_node_on_a_fast_link_ships_the_encoded_samples():
    plan = make_plan(situation(store=profile((0.0, 0.2, 2.0), hardware="slow"), link=FAST))
    assert plan.cut == 0
    assert plan.chosen.trainer_s == pytest.approx(0.01)
    assert "held back by the trainer cpu" in plan.reason


def test_says_where_training_in_the_store_would_be_faster():
    thin = situation(link=THIN)
    assert "training in the store too would give 100 samples/s" in make_plan(thin).reason
    assert "in the store" not in make_plan(situation()).reason
    assert "in the store" not in make_plan(replace(thin, epochs=5, keeps_features=True)).reason
    assert "in the store" not in make_plan(replace(thin, head_s=0.1)).reason


def test_on_one_machine_the_work_is_the_same_wherever_the_cut_is():
    plan = make_plan(situation(trainer=profile((0.0, 0.001, 0.007)), same_host=True))
    assert plan.cut == 2
    assert "held back by the shared machine" in plan.reason


def test_within_one_process_the_link_has_no_bound():
    plan = make_plan(situation(link=Link(bytes_per_s=math.inf, round_trip_s=0.0), same_host=True))
    assert plan.cut == 2
    assert plan.to_json()["link"]["bytes_per_s"] is None
    assert "no bound" in explain(plan)


def test_work_that_costs_nothing_has_no_bound_either():
    nothing = profile((0.0, 0.0, 0.0))
    link = Link(bytes_per_s=math.inf, round_trip_s=0.0)
    plan = make_plan(situation(store=nothing, trainer=nothing, link=link))
    assert plan.samples_per_s == math.inf
    assert plan.cut == 2
    assert {price for _, price in plan.prices} == {0.0}
    value = plan.to_json()
    assert (value["samples_per_s"], value["candidates"][0]["samples_per_s"]) == (None, None)
    assert plan.reason.endswith("nothing holds it back")


def test_later_epochs_come_from_the_cache_and_are_planned_apart():
    job = situation(epochs=10, keeps_features=True, head_s=0.001, link=THIN)
    plan = make_plan(job)
    assert plan.samples_per_s == pytest.approx(20)
    assert plan.later_samples_per_s == pytest.approx(1000)
    assert plan.mean_samples_per_s == pytest.approx(10 / (1 / 20 + 9 / 1000))
    assert plan.reason.endswith("; later epochs come from the cache: 1000 samples/s, 169.5 on average over 10 epochs")


@pytest.mark.parametrize(("changes", "mean"), [({"head_s": 0.0}, 200.0), ({"keeps_features": False}, 20.0)])
def test_the_mean_over_the_epochs_counts_what_the_later_ones_cost(changes, mean):
    job = replace(situation(epochs=10, keeps_features=True, head_s=0.001, link=THIN), **changes)
    assert make_plan(job).mean_samples_per_s == pytest.approx(mean)


@given(situations())
def test_the_mean_lies_between_the_first_and_the_later_epochs(given_situation):
    plan = make_plan(given_situation)
    later = plan.samples_per_s if plan.later_samples_per_s is None else plan.later_samples_per_s
    minimum, maximum = sorted((plan.samples_per_s, later))
    assert minimum * (1 - 1e-9) <= plan.mean_samples_per_s <= maximum * (1 + 1e-9)


def test_the_user_may_name_the_cut():
    plan = plan_at_cut(situation(), 1)
    assert (plan.cut, plan.policy, plan.mixture[0].share) == (1, "fixed", 1.0)
    assert plan.reason.startswith("cut 1 (layer1) was asked for, 125 samples/s, held back by the trainer cpu")
    assert dict(plan.prices) == {"trainer cpu": 1.0, "link": 0.0, "store cpu": 0.0}
    assert plan.candidates[0].rejected == "cut 1 (layer1) was asked for"


def test_the_user_may_name_the_codec_or_leave_it_to_the_plan():
    codecs = (codec(2, "lz4", 3_000), codec(2, "zstd", 1_000, encode_s=0.1))
    job = situation(store=profile(SECONDS, codecs=codecs), link=Link(bytes_per_s=MB, round_trip_s=0))
    assert plan_at_cut(job, 2, "zstd").route == Route(2, "zstd")
    assert plan_at_cut(job, 2).route == Route(2, "lz4")
    assert plan_at_cut(job, 2, "exact").route == Route(2)


@pytest.mark.parametrize(
    ("changes", "cut", "codec_name", "sentence"),
    [
        ({}, 9, None, "no cut 9: this job has cuts 0 to 2"),
        ({}, 2, "lz5", "codec 'lz5' was not measured at cut 2; there are exact, int8"),
        ({}, 2, "int8", r"cut 2 \(layer2, int8\) cannot be used: is lossy .*accuracy is 'float32'"),
        ({"memory_bytes": MB}, 2, None, r"layer2.*needs 9.00 MB.*raise the node's memory_bytes"),
    ],
)
def test_unusable_input_is_a_user_error(changes, cut, codec_name, sentence):
    job = situation(store=profile(SECONDS, codecs=(codec(2, "int8", 1_250, error=0.01),)), **changes)
    with pytest.raises(SettingError, match=sentence):
        plan_at_cut(job, cut, codec_name)


def test_an_unknown_policy_is_a_users_mistake():
    with pytest.raises(SettingError, match="no policy 'bst': it is one of best, baseline"):
        make_plan(situation(), "bst")


def test_the_table_shows_the_best_codec_of_every_cut_and_all_ways_in_use():
    codecs = (codec(1, "fp16", 300_000, error=1e-4), codec(1, "lz4", 500_000), codec(2, "lz4", 4_000))
    job = situation(
        **{
            **TWO_SIDES,
            "store": profile(SECONDS, codecs=codecs),
            "link": Link(bytes_per_s=20 * MB, round_trip_s=0.0015),
        }
    )
    made = table(make_plan(job, noise=0))
    assert made.columns[:4] == ("share", "cut", "after", "codec")
    assert [row[:5] for row in made.rows] == [
        ("50 %", "0", "layer0", "exact", "100 kB"),
        ("", "1", "layer1", "lz4", "500 kB"),
        ("50 %", "2", "layer2", "lz4", "4.00 kB"),
    ]
    text = explain(make_plan(job))
    assert "link: 20.0 MB/s, round trip 1.50 ms" in text.splitlines()


def heavy_at_the_trainer(**changes):
    """What is left of the network takes 64 MB a sample at the trainer before the first block, and 1 MB behind it."""
    trainer = profile((0.0, 0.002, 0.004, 0.01), rest=(64 * MB, 64 * MB, MB, 0), hardware="other")
    sizes = (0, 600_000, 50_000, 50_000)
    seconds = (0.0, 0.002, 0.004, 0.01)
    return situation(sizes, seconds, store=profile(seconds), trainer=trainer, link=FAST, **changes)


def test_plans_no_cut_whose_rest_does_not_fit_the_trainers_memory():
    free, tight = make_plan(heavy_at_the_trainer()), make_plan(heavy_at_the_trainer(trainer_memory_bytes=100 * MB))
    assert all(candidate.is_possible for candidate in free.candidates)
    assert not {share.route.cut for share in tight.mixture} & {0, 1}
    reasons = {candidate.cut: candidate.rejected for candidate in tight.candidates if not candidate.is_possible}
    assert set(reasons) == {0, 1}
    assert all(
        "at the trainer for 32 samples" in reason and "trainer_memory_bytes" in reason for reason in reasons.values()
    )


def test_smaller_runs_at_the_trainer_need_less_of_its_memory():
    tight = heavy_at_the_trainer(trainer_memory_bytes=600 * MB)
    assert not next(item for item in make_plan(tight).candidates if item.cut == 1).is_possible
    assert next(item for item in make_plan(replace(tight, trainer_batch=8)).candidates if item.cut == 1).is_possible


@given(situations(), st.integers(1, 100 * MB))
def test_memory_at_the_trainer_never_slows_the_optimum(given_situation, memory_bytes):
    tight = replace(given_situation, trainer_memory_bytes=memory_bytes)
    assert make_plan(given_situation, noise=0).samples_per_s >= make_plan(tight, noise=0).samples_per_s * (1 - 1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rule_stays_within_the_trainers_memory(policy):
    plan = make_plan(heavy_at_the_trainer(trainer_memory_bytes=100 * MB), policy)
    assert all(share.route.cut >= 2 for share in plan.mixture)


def test_refuses_a_job_that_fits_neither_side_and_names_both_knobs():
    neither = heavy_at_the_trainer(trainer_memory_bytes=MB, memory_bytes=1)
    with pytest.raises(SettingError, match=r"trainer_memory_bytes.*memory_bytes"):
        make_plan(neither)
    with pytest.raises(SettingError, match="trainer_memory_bytes"):
        plan_at_cut(heavy_at_the_trainer(trainer_memory_bytes=MB), 1)
