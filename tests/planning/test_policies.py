"""The published rules, each against its formula and on small tables that were worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given

from frostline.planning import POLICIES, Link, make_plan
from frostline.planning.candidates import RULES
from support.situations import MB, profile, situation, situations

# Cuts: encoded, pixels, a thin early layer, a thick one, the frost line.
WIRES = (0, 600_000, 20_000, 40_000, 5_000)
SECONDS = (0.0, 0.002, 0.006, 0.010, 0.020)
GBIT = 125 * MB


def network(**changes):
    return situation(wires=WIRES, seconds=SECONDS, **changes)


def cut_of(policy, job):
    return make_plan(job, policy).cut


def link(bytes_per_s):
    return Link(bytes_per_s=bytes_per_s, round_trip_s=0.0)


def test_all_rules_have_a_name():
    assert POLICIES == (
        "best", "baseline", "all_in_store", "freeze", "min_bytes", "neurosurgeon", "hapi_v1", "hapi_v3",
    )  # fmt: skip


def test_the_baseline_ships_encoded_samples():
    plan = make_plan(network(), "baseline")
    assert (plan.cut, plan.policy, plan.samples_per_s) == (0, "baseline", pytest.approx(50))
    assert plan.reason.startswith("the rule baseline takes cut 0 (layer0), 50 samples/s, held back by the trainer cpu")
    assert plan.candidates[4].rejected == "the rule baseline takes cut 0 (layer0)"


def test_freeze_takes_the_frost_line_whatever_it_costs():
    slow = network(store=profile([10 * second for second in SECONDS], hardware="slow"))
    assert cut_of("freeze", slow) == 4


def test_all_in_the_store_trains_there_and_nothing_crosses():
    plan = make_plan(network(link=link(1000), head_s=0.005), "all_in_store")
    assert (plan.cut, plan.samples_per_s) == (4, pytest.approx(1 / 0.025))
    assert (plan.chosen.wire_bytes_per_sample, plan.chosen.trainer_s, plan.bottleneck) == (0, 0.0, "store cpu")


def test_the_fewest_bytes_may_be_the_encoded_ones():
    assert cut_of("min_bytes", network()) == 4
    assert cut_of("min_bytes", network(encoded_bytes=4_000)) == 0


def test_neurosurgeon_adds_up_what_others_overlap():
    """The sums are 25 ms at cut 0 and 20.25 ms at the frost line, while overlapping would halve both."""
    job = network(encoded_bytes=100_000, link=link(20 * MB))
    assert cut_of("neurosurgeon", job) == 4
    slower = replace(job, store=profile([1.3 * second for second in SECONDS], hardware="slow"))
    # 25 ms at cut 0, 7.8 + 1 + 14 = 22.8 ms at cut 2, 26.25 ms at the frost line.
    assert cut_of("neurosurgeon", slower) == 2


@given(situations())
def test_neurosurgeon_is_the_least_latency(given_situation):
    plan = make_plan(given_situation, "neurosurgeon")
    cuts = [candidate for candidate in plan.candidates if candidate.codec == "exact" and candidate.is_possible]
    assert latency(plan.chosen) == min(map(latency, cuts))


def latency(one):
    return (one.store_s + one.trainer_s + one.link_s) * 100


@given(situations())
def test_hapi_v3_is_the_least_time_of_its_pipeline_or_the_baseline(given_situation):
    plan = make_plan(given_situation, "hapi_v3")
    cuts = [candidate for candidate in plan.candidates if candidate.codec == "exact" and candidate.is_possible]
    best = min(cuts, key=lambda cut: (pipelined(cut), cut.cut))
    assert plan.cut == (0 if cuts[0].samples_per_s > best.samples_per_s else best.cut)


def pipelined(one, iterations=100):
    store_s, trainer_s, link_s = one.store_s, one.trainer_s, one.link_s
    return store_s + (max(store_s, trainer_s) + link_s) * (iterations - 1) + link_s + trainer_s


def test_hapi_v3_overlaps_store_and_trainer_but_not_the_link():
    # 5 ms of link at cut 0 come on top of 20 ms at the trainer; cut 3 halves the work: 10 + 2 ms.
    assert cut_of("hapi_v3", network(link=link(20 * MB))) == 3
    # Twice the link: cut 3 has 10 + 1 ms, cut 2 14 + 0.5 ms.
    assert cut_of("hapi_v3", network(link=link(40 * MB))) == 3
    # A hundredth: every byte counts, and the frost line has the fewest.
    assert cut_of("hapi_v3", network(link=link(0.2 * MB))) == 4


def test_hapi_v3_goes_back_to_a_baseline_that_is_faster():
    """With S = 30, C = 20 and N = 5 ms at cut 0 it sees 35 ms there and 32 at cut 1, but overlapped 30 beat 31."""
    job = situation(
        wires=(0, 20_000), seconds=(0.0, 0.002), encoded_bytes=100_000, link=link(20 * MB),
        store=profile((0.030, 0.031)), trainer=profile((0.0, 0.020), hardware="other"),
    )  # fmt: skip
    assert cut_of("hapi_v3", job) == 0
    assert pipelined(make_plan(job).candidates[1]) < pipelined(make_plan(job).candidates[0])


def remembering(*, rest, batch_bytes=MB, **changes):
    """A network whose trainer needs ``rest`` bytes a sample from each cut on."""
    return network(
        store=profile(SECONDS, per_sample=batch_bytes), trainer=profile(SECONDS, rest=rest), **changes
    )  # fmt: skip


def test_hapi_v1_takes_the_earliest_thin_layer_that_saves_memory():
    rest = (MB, MB, MB // 2, MB // 4, 0)
    # 20 kB and 5 kB times 2500 pass in a second of 1 Gbit/s, 40 kB times 2500 do too; cut 2 is the earliest.
    assert cut_of("hapi_v1", remembering(rest=rest, link=link(GBIT))) == 2
    # A tenth of that: only the frost line is thin enough.
    assert cut_of("hapi_v1", remembering(rest=rest, link=link(GBIT / 10))) == 4


def test_hapi_v1_passes_over_a_layer_that_saves_no_memory():
    rest = (MB, MB, MB, MB // 4, 0)
    assert cut_of("hapi_v1", remembering(rest=rest, link=link(GBIT))) == 3


def test_hapi_v1_takes_the_smallest_output_where_no_layer_will_do():
    assert cut_of("hapi_v1", remembering(rest=0, link=link(GBIT))) == 4
    assert cut_of("hapi_v1", remembering(rest=(MB,) * 4 + (0,), link=link(1000))) == 4


def test_hapi_v1_compares_with_the_networks_input_too():
    """A layer with more bytes than the pixels is no candidate however fast the link is."""
    job = situation(
        wires=(0, 600_000, 800_000, 5_000), seconds=SECONDS[:4], link=link(100 * GBIT),
        trainer=profile(SECONDS[:4], rest=(MB, MB, MB // 2, 0)),
    )  # fmt: skip
    assert cut_of("hapi_v1", job) == 3


def test_hapi_v1_ships_encoded_samples_only_where_there_is_no_layer():
    assert cut_of("hapi_v1", network(encoded_bytes=1)) == 4
    assert cut_of("hapi_v1", situation(wires=(0, 9), seconds=(0.0, 0.1))) == 0


@pytest.mark.parametrize("policy", RULES)
def test_a_rule_whose_cut_the_node_cannot_run_ships_encoded_samples(policy):
    plan = make_plan(network(refused="the node has too little memory"), policy)
    assert plan.cut == 0
    if policy in ("freeze", "all_in_store"):
        assert f"the rule {policy} takes cut 4 (layer4), which cannot be used (the node has" in plan.reason


@pytest.mark.parametrize("policy", RULES)
def test_published_rules_choose_one_cut_and_no_codec(policy):
    plan = make_plan(network(), policy)
    assert (len(plan.mixture), plan.route.codec) == (1, "exact")
    assert sum(price for _, price in plan.prices) == 1
