"""The control plane's state: whatever happens to messages, the end is the same, and nothing is given twice."""

import math
import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frostline.control.app import ControlPlane, steady_clock
from frostline.control.messages import ControlledStage, StageReport
from frostline.control.settings import ControlledJob, ControlSettings, ControlTenant
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.core.errors import BadRequest, Overloaded

pytestmark = pytest.mark.promise("apart", mended="a number in one report held the shares of all tenants for good")

BYTES = 1000.0
NOTHING = Amounts.of([0.0] * len(Amounts().row))


def plane(**changes):
    given = {"capacity": Amounts(bytes_per_s=BYTES, requests=64.0), "lease_s": 10.0, **changes}
    return ControlState(ControlSettings(**given), now_s=0.0)


def tenants(**weights):
    return tuple(
        ControlTenant(name=name, token_sha256=f"{number:064x}", weight=weight)
        for number, (name, weight) in enumerate(weights.items())
    )


def stage(name, job=None):
    return ControlledStage(stage=name, job=job or name)


def exchange(state, stage, now_s, *, demand=None, tenant="everybody", moved=0):
    stage.take(state.receive(tenant, stage.report(demand or Amounts(), moved), now_s), now_s)
    return stage.in_force.bytes_per_s if stage.version else 0.0


def settle(state, stages, now_s, rounds=4, **options):
    for number in range(rounds):
        shares = [exchange(state, each, now_s + number, **options) for each in stages]
    return shares


def test_the_first_stage_gets_all_and_a_second_half():
    state, first, second = plane(), stage("a"), stage("b")
    assert exchange(state, first, 0.0) == BYTES
    assert settle(state, [first, second], 1.0) == [500, 500]


def test_a_newcomer_waits_until_others_say_that_they_hold_less():
    state, first, second = plane(), stage("a"), stage("b")
    exchange(state, first, 0.0)
    assert exchange(state, second, 0.1) == 0, "the first may be using all of it"
    exchange(state, first, 1.0)
    assert exchange(state, second, 1.5) == 0, "it was answered less, and may not have heard"
    exchange(state, first, 2.0)
    assert exchange(state, second, 2.5) == 500


def test_a_repeated_report_gets_the_same_answer_and_changes_nothing():
    state, only = plane(), stage("a")
    report = only.report(Amounts(bytes_per_s=10.0))
    first = state.receive("everybody", report, 0.0)
    records = state.records
    assert state.receive("everybody", report, 5.0) == first
    assert state.records == records


def test_an_older_report_or_answer_changes_nothing():
    state, only = plane(), stage("a")
    old, new = only.report(Amounts(bytes_per_s=1.0)), only.report(Amounts(bytes_per_s=2.0))
    late = state.receive("everybody", new, 0.0)
    state.receive("everybody", old, 0.1)
    assert state.records[0].report == new
    only.take(replace(late, version=7), 0.0)
    assert not only.take(late, 0.1)
    assert only.version == 7


def test_the_share_of_a_stage_that_ends_is_free_at_once():
    state, first, second = plane(), stage("a"), stage("b")
    settle(state, [first, second], 0.0)
    state.receive("everybody", first.report(Amounts(), has_ended=True), 5.0)
    assert exchange(state, second, 5.5) == BYTES


def test_the_share_of_a_silent_stage_is_its_own_for_a_lease_and_no_longer():
    state, first, second = plane(), stage("a"), stage("b")
    settle(state, [first, second], 0.0)
    assert settle(state, [second], 4.0, rounds=9) == [500]
    assert settle(state, [second], 14.0, rounds=2) == [BYTES]
    assert first.bounds(100.0).bytes_per_s == 500, "it keeps its last settings for ever"
    assert settle(state, [first, second], 20.0) == [500, 500]


class Forgets:
    def write(self, changed, events, changes):
        pass


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 86400.0 * 400])
def test_a_clock_that_is_set_anew_ends_no_lease_and_keeps_none(jump_s):
    """The machine's clock jumps; the seconds that pass beside it are those of the leases."""
    passed, wall = [0.0], [1_700_000_000.0]
    clock = steady_clock(lambda: wall[0] + passed[0], lambda: 77.0 + passed[0])
    state = ControlState(plane().settings, now_s=clock())
    served, first, second = ControlPlane(state, Forgets(), clock), stage("a"), stage("b")

    def told(each):
        each.take(served.receive("everybody", each.report(Amounts(), 0)), clock())
        return each.in_force.bytes_per_s if each.version else 0.0

    assert told(first) == BYTES
    wall[0] += jump_s
    for passed[0] in (1.0, 5.0, 9.0):
        assert told(second) == 0, "the first may be using all of it"
    passed[0] = 11.0
    assert told(second) == BYTES, "nothing was heard of the first for a lease"


def test_a_share_of_nothing_ends_with_its_lease_so_that_no_job_stops():
    state, first, second = plane(), stage("a"), stage("b")
    exchange(state, first, 0.0)
    exchange(state, second, 0.0)
    assert second.bounds(9.0).bytes_per_s == 0
    assert second.bounds(11.0) == Amounts(requests=1.0)


def test_a_stage_that_never_gives_back_holds_others_for_one_lease():
    state, first, second = plane(), stage("a"), stage("b")
    exchange(state, first, 0.0)
    for now_s in range(1, 14):
        state.receive("everybody", first.report(Amounts()), float(now_s))
        first.version = 1
        share = exchange(state, second, now_s + 0.5)
    assert share == 500


def test_a_stranger_that_claims_to_hold_everything_takes_nothing_from_others():
    state, first = plane(), stage("a")
    exchange(state, first, 0.0)
    claim = StageReport(stage="x", job="x", sequence=1, version=9, in_force=Amounts())
    state.receive("everybody", claim, 0.1)
    assert state.held.bytes_per_s == BYTES
    assert state.records[0].held[1] == BYTES


@pytest.mark.parametrize("version", [1, 9, 2**31])
def test_what_nobody_was_given_is_held_by_nobody(version):
    state, first = plane(), stage("a")
    claim = StageReport(stage="x", job="x", sequence=1, version=version, in_force=Amounts(), demand=NOTHING)
    for number in range(3):
        answer = state.receive("everybody", replace(claim, stage=f"x{number}"), 0.0)
        assert (answer.version, answer.settings.bytes_per_s) == (version + 1, 0)
    assert exchange(state, first, 0.1) == BYTES


def test_settings_of_a_version_that_was_never_given_are_refused():
    state = plane()
    with pytest.raises(BadRequest, match="was given no settings of version"):
        state.receive("everybody", StageReport(stage="x", job="x", sequence=1, version=2**52), 0.0)
    assert state.records == []
    exchange(state, known := stage("a"), 0.0)
    with pytest.raises(BadRequest, match="was given no settings of version"):
        state.receive("everybody", replace(known.report(Amounts()), version=2**52), 0.0)
    assert exchange(state, known, 1.0) == BYTES


def test_whoever_comes_back_after_a_lease_claims_no_more_than_it_was_given():
    state, first, second = plane(), stage("a"), stage("b")
    settle(state, [first, second], 0.0)
    state.receive("everybody", first.report(Amounts(), has_ended=True), 4.0)
    state.receive("everybody", second.report(Amounts(), has_ended=True), 4.0)
    back = replace(second.report(NOTHING), in_force=Amounts())
    state.receive("everybody", back, 4.1)
    assert state.held.bytes_per_s <= 500


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 7, 2**31, 2**52]), st.sampled_from([0.0, 3.0, 2.0**52])),
        max_size=12,
    )
)
@settings(deadline=None)
def test_no_numbers_of_a_client_move_what_others_are_given(claims):
    quiet, loud = plane(tenants=tenants(ann=1.0, eve=1.0)), plane(tenants=tenants(ann=1.0, eve=1.0))
    here, there, wanted = stage("a"), stage("a"), Amounts(bytes_per_s=2.0)
    for number, (name, version, amount) in enumerate(claims):
        told = StageReport(
            stage=f"e{name}",
            job="e",
            sequence=2**40 + number,
            version=version,
            in_force=Amounts(bytes_per_s=amount),
            demand=wanted,
        )
        quiet.receive("eve", replace(told, version=0, in_force=Amounts(bytes_per_s=0.0)), float(number))
        with suppress(BadRequest):
            loud.receive("eve", told, float(number))
        exchange(quiet, here, number + 0.5, tenant="ann")
        exchange(loud, there, number + 0.5, tenant="ann")
        assert there.version <= len(claims) + 1
    assert settle(loud, [there], 20.0, tenant="ann") == [BYTES - loud_of(loud)]
    restored = ControlState(loud.settings, loud.records, now_s=30.0)
    exchange(restored, there, 30.0, tenant="ann")
    assert there.version <= len(claims) + 8


def loud_of(state):
    """What the other tenant's stages were given."""
    return sum(record.settings[1] for record in state.records if record.tenant == "eve")


def test_whoever_comes_back_after_a_lease_holds_what_it_is_given_again():
    state, first, second = plane(), stage("a"), stage("b")
    state.receive("everybody", first.report(Amounts()), 0.0)  # the answer is lost
    exchange(state, second, 11.0)
    state.receive("everybody", second.report(Amounts(), has_ended=True), 12.0)
    assert exchange(state, first, 13.0) == BYTES
    assert state.held.bytes_per_s == BYTES
    assert exchange(state, stage("c"), 13.5) == 0


def test_stages_that_are_forgotten_leave_those_after_them_what_they_have():
    state = plane(max_stages=40, tenants=tenants(ann=1.0))
    there = [stage(f"s{number}", job=f"j{number % 3}") for number in range(40)]
    settle(state, there, 0.0, tenant="ann")
    for number in range(60):
        ended, newcomer = there.pop(0), stage(f"n{number}", job=f"n{number}")
        state.receive("ann", ended.report(Amounts(), has_ended=True), 4.0 + number)
        there.append(newcomer)
        shares = settle(state, there, 4.0 + number, rounds=1, tenant="ann")
    shares = settle(state, there, 64.0, tenant="ann")
    assert shares == pytest.approx([BYTES / 40] * 40)
    assert {record.report.stage for record in state.records} == {f"n{number}" for number in range(20, 60)}


def test_settings_come_back_from_the_stages_where_the_state_is_lost():
    state, first, second = plane(), stage("a"), stage("b")
    settle(state, [first, second], 0.0)
    lost = plane()
    assert exchange(lost, first, 5.0) == 500 or lost.held.bytes_per_s <= BYTES
    assert settle(lost, [first, second], 6.0) == [500, 500]


def test_stages_keep_what_they_have_where_the_state_is_restored():
    state, first, second = plane(), stage("a"), stage("b")
    settle(state, [first, second], 0.0)
    restored = ControlState(state.settings, state.take_touched().values(), now_s=100.0)
    assert restored.held.bytes_per_s == BYTES
    assert exchange(restored, stage("c"), 100.0) == 0
    assert exchange(restored, first, 100.1) == pytest.approx(BYTES / 3)


def test_a_deadline_counts_what_all_stages_of_its_job_moved():
    job = ControlledJob(name="night", ends_at_s=100.0, work_bytes=20_000.0)
    state = plane(jobs=(job,))
    first, second, other = stage("a", "night"), stage("b", "night"), stage("c")
    for now_s in range(4):
        settle(state, [first, second], float(now_s), rounds=1, moved=1000)
        share = exchange(state, other, float(now_s))
    needed = (20_000 - 2000) / (97 - 3)
    assert share == pytest.approx(
        BYTES - needed - (first.in_force.bytes_per_s + second.in_force.bytes_per_s - needed), rel=0.05
    )
    assert first.in_force.bytes_per_s + second.in_force.bytes_per_s == pytest.approx(needed, rel=0.05)


def test_a_deadline_that_cannot_be_kept_is_told_to_the_job_at_once():
    state, only = plane(jobs=(ControlledJob(name="a", ends_at_s=10.0, work_bytes=1e9),)), stage("a")
    answer = state.receive("everybody", only.report(Amounts()), 0.0)
    assert "job a cannot end in time" in answer.notices[0]


def test_one_more_stage_than_allowed_is_refused_and_ended_ones_make_room():
    state = plane(max_stages=2)
    first = stage("a")
    settle(state, [first, stage("b")], 0.0, rounds=1)
    state.take_touched()
    with pytest.raises(Overloaded, match="max_stages"):
        exchange(state, stage("c"), 1.0)
    state.receive("everybody", first.report(Amounts(), has_ended=True), 1.0)
    exchange(state, stage("c"), 1.0)
    assert state.take_touched()["everybody", "a"] is None


def test_no_tenant_takes_the_places_of_another():
    state = plane(max_stages=4, tenants=tenants(ann=1.0, bob=1.0))
    exchange(state, stage("a"), 0.0, tenant="ann")
    exchange(state, stage("b"), 0.0, tenant="ann")
    with pytest.raises(Overloaded, match="tenant ann has 2 stages"):
        exchange(state, stage("c"), 0.0, tenant="ann")
    exchange(state, stage("a"), 0.0, tenant="bob")


def test_a_stage_of_another_tenant_with_the_same_name_is_another_stage():
    state = plane(tenants=tenants(ann=3.0, bob=1.0))
    first, second = stage("a"), stage("a")
    for now_s in range(5):
        shares = [exchange(state, first, now_s, tenant="ann"), exchange(state, second, now_s, tenant="bob")]
    assert shares == [750, 250]


DEMANDS = st.lists(st.one_of(st.floats(0, 2000), st.just(float("inf"))), min_size=1, max_size=6)


# Others were left with a thousandth more than their shares, which was a quarter of the smallest one.
@example([1.5, math.inf, 200.0, math.inf, 200.0, math.inf], random.Random(57))
@given(DEMANDS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_losses_doubles_and_disorder_change_nothing_in_the_end(demands, chance):
    calm, rough = plane(), plane(lease_s=60.0)  # nobody is cut off for a lease
    amounts = [Amounts(bytes_per_s=demand) for demand in demands]
    quiet = [stage(f"s{number}") for number in range(len(demands))]
    shaken = [stage(f"s{number}") for number in range(len(demands))]
    for now_s in range(8):
        for each, demand in zip(quiet, amounts, strict=True):
            exchange(calm, each, float(now_s), demand=demand)
    trouble(rough, shaken, chance)
    for now_s in range(20, 28):
        for each, demand in zip(shaken, amounts, strict=True):
            exchange(rough, each, float(now_s), demand=demand)
    found = [each.in_force.bytes_per_s for each in shaken]
    assert found == pytest.approx([each.in_force.bytes_per_s for each in quiet], rel=5e-3, abs=1e-6)


def trouble(state, stages, chance):
    """Reports and answers that are lost, doubled and late; nothing that is in force ever exceeds the capacity."""
    reports, answers = [], []
    for now_s in range(20):
        for each in stages:
            reports.append((each, each.report(Amounts(bytes_per_s=chance.choice([1.0, 300.0, 5000.0])))))
        chance.shuffle(reports)
        for each, report in [reports.pop() for _ in range(len(reports) * 2 // 3)]:
            for _ in range(chance.choice([0, 1, 1, 2])):
                answers.append((each, state.receive("everybody", report, float(now_s))))
        chance.shuffle(answers)
        for each, answer in [answers.pop() for _ in range(len(answers) * 2 // 3)]:
            if chance.random() < 0.7:
                each.take(answer, float(now_s))
        in_force = sum(each.in_force.bytes_per_s for each in stages if each.version)
        assert in_force <= BYTES * (1 + 1e-9)
        assert state.held.bytes_per_s <= BYTES * (1 + 1e-9)
