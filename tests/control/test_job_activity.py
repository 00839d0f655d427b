"""What jobs say of themselves: read within bounds, kept where a report does not repeat it, and summed for each job."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from frostline.control.messages import (
    Bottleneck,
    ControlledStage,
    JobActivity,
    NodeFailures,
    PlanOutline,
    Prices,
    RecentRates,
    StageReport,
    savings,
    summarise_job,
)
from frostline.control.settings import ControlSettings, ControlTenant
from frostline.control.shares import Amounts
from frostline.control.state import ControlState, view_of
from frostline.core import Cut, Route
from frostline.core.declared import read_declared
from frostline.core.errors import BadRequest, SettingError
from frostline.core.events import BatchDelivered, EpochStarted, WaitingForRows
from frostline.datasets import Dataset
from frostline.jobs.activity import ActivityMeter, PassProgress, failures_of, outline_of, saved_bytes
from frostline.transport import NodeUse, TransportStatistics
from support.images import image_folder

PLAN = PlanOutline(names=("encoded", "pixels", "layer1"), nbytes=(900, 3000, 40), cut=2, codec="fp16")
SLOW = Bottleneck(held_back_by="the link", says="held back by the link", gain=2.5)
ACTIVITY = JobActivity(
    epoch=3,
    taken=40,
    epoch_samples=100,
    samples=340,
    samples_per_s=12.5,
    stall_share=0.25,
    wire_bytes=20_000,
    saved_bytes=-1.5,
    saved_s=-0.5,
    retries=2,
    nodes=(NodeFailures(node="http://a:7070", samples=300, retries=1, failures=4, trouble="it is silent"),),
    bottleneck=SLOW,
    plan=PLAN,
)


def plain(activity):
    return json.loads(json.dumps(activity.to_json()))


def test_what_a_job_keeps_counts_once_as_in_its_report(tmp_path):
    data = Dataset(image_folder(tmp_path, per_class=2), cache=tmp_path / "cache")
    stored = data.samples.encoded_bytes
    done = SimpleNamespace(samples=5 * len(data), from_cache=4 * len(data), stall_s=0.0, retries=0)
    meter = ActivityMeter(
        PassProgress(print),
        SimpleNamespace(statistics=lambda: done),
        SimpleNamespace(statistics=lambda: TransportStatistics(bytes_received=100)),
        SimpleNamespace(situation=None, shares={Route(1): 1.0}),
        (cut(0, 0), cut(1, 3000)),
        data,
    )
    said = meter()
    assert (said.saved_bytes, said.samples) == (stored - 100, 5 * len(data))


@pytest.mark.parametrize("activity", [ACTIVITY, JobActivity(), ACTIVITY.abbreviate()])
def test_what_is_said_is_read_again(activity):
    assert read_declared(JobActivity, plain(activity), "an activity") == activity


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("taken", -1),
        ("taken", True),
        ("taken", 1.5),
        ("samples", 2**60),
        ("samples_per_s", math.inf),
        ("samples_per_s", math.nan),
        ("samples_per_s", -1),
        ("stall_share", 1.01),
        ("saved_bytes", "1"),
        ("saved_s", -1e300),
        ("more", 1),
        ("bottleneck", {"held_back_by": "x", "says": "y"}),
        ("bottleneck", {"held_back_by": "x", "says": "y" * 513, "gain": 1}),
        ("bottleneck", {"held_back_by": "x\n", "says": "y", "gain": 1}),
        ("bottleneck", {"held_back_by": "x", "says": "y", "gain": math.inf}),
        ("bottleneck", ["x"]),
        ("plan", {"names": ["a"] * 65, "nbytes": [1] * 65, "cut": 0, "codec": "exact"}),
        ("plan", {"names": ["a" * 65], "nbytes": [1], "cut": 0, "codec": "exact"}),
        ("plan", {"names": ["a", "b"], "nbytes": [1], "cut": 0, "codec": "exact"}),
        ("plan", {"names": ["a"], "nbytes": [1], "cut": 1, "codec": "exact"}),
        ("plan", {"names": [], "nbytes": [], "cut": 0, "codec": "exact"}),
        ("plan", {"names": "a", "nbytes": [1], "cut": 0, "codec": "exact"}),
        ("retries", -1),
        ("nodes", [{"node": "a"}] * 5),
        ("nodes", [{"node": "a" * 129}]),
        ("nodes", [{"node": "a", "trouble": "\n"}]),
        ("nodes", [{"samples": 1}]),
    ],
)
def test_refuses_what_a_stranger_may_not_say(field, value):
    with pytest.raises(BadRequest):
        read_declared(JobActivity, {**plain(ACTIVITY), field: value}, "an activity")
    with pytest.raises(BadRequest):
        StageReport.from_json({"stage": "a", "job": "b", "sequence": 1, "activity": {field: value}})


def test_the_longest_that_may_be_said_fits_a_report():
    longest = PlanOutline(names=("n" * 64,) * 64, nbytes=(2**52,) * 64, cut=63, codec="c" * 64)
    nodes = (NodeFailures(node="×" * 128, samples=2**52, retries=2**52, failures=2**52, trouble="t" * 128),) * 4
    activity = replace(ACTIVITY, plan=longest, bottleneck=replace(SLOW, says="×" * 512), nodes=nodes)
    report = StageReport(stage="s" * 128, job="j" * 128, sequence=2**52, activity=activity)
    assert len(json.dumps(report.to_json())) < 16 << 10


def test_rates_are_those_of_the_last_seconds_alone():
    rates = RecentRates(seconds=10.0)
    assert rates.take(0.0, 0, 0.0) == (0.0, 0.0)
    assert rates.take(1.0, 100, 0.5) == (100.0, 0.5)
    for second in range(2, 40):
        rate, share = rates.take(float(second), 100 + 10 * (second - 1), 0.5)
    assert rate == pytest.approx(10.0)
    assert share == 0.0
    assert rates.take(40.0, 490, 60.0)[1] == 1.0, "a wait longer than the last seconds is all of them"


def cut(number, nbytes):
    return Cut(
        number=number, name=f"b{number}", after=number, tensors=(), shapes=(), dtypes=(), bytes_per_sample=nbytes
    )


def test_an_outline_has_the_encoded_size_first_and_the_way_of_most_samples():
    found = outline_of([cut(0, 0), cut(1, 300), cut(2, 20)], 99.6, {Route(0): 0.3, Route(2, "fp16"): 0.7})
    assert found == PlanOutline(names=("b0", "b1", "b2"), nbytes=(100, 300, 20), cut=2, codec="fp16")


@pytest.mark.parametrize("used", [0, 1, 77, 149])
def test_of_a_network_with_many_cuts_both_ends_and_the_one_in_use_are_drawn(used):
    found = outline_of([cut(number, number) for number in range(150)], 5.0, {Route(used): 1.0})
    assert 60 <= len(found.names) <= 64
    assert (found.names[0], found.names[-1], found.names[found.cut]) == ("b0", "b149", f"b{used}")
    assert list(found.nbytes[1:]) == sorted(found.nbytes[1:])


def test_progress_is_that_of_the_pass_that_began_last():
    told = []
    progress = PassProgress(told.append)
    for event in (
        EpochStarted(epoch=1, samples=10),
        BatchDelivered(epoch=1, samples=4, from_cache=0, stall_s=0.0),
        EpochStarted(epoch=2, samples=8),
        BatchDelivered(epoch=1, samples=4, from_cache=0, stall_s=0.0),
        BatchDelivered(epoch=2, samples=3, from_cache=0, stall_s=0.0),
        WaitingForRows(requests_in_flight=1),
        WaitingForRows(requests_in_flight=1),
    ):
        progress(event)
    assert (progress.epoch, progress.taken, progress.samples, progress.waited_s) == (2, 3, 8, 2.0)
    assert len(told) == 7


def test_ranks_and_workers_add_up_and_the_one_that_waits_longest_says_why():
    fast = replace(ACTIVITY, stall_share=0.75, bottleneck=replace(SLOW, says="the slow rank"), saved_s=None)
    parent = JobActivity(wire_bytes=5, plan=PLAN)
    late = replace(ACTIVITY, epoch=2, taken=99)
    found = summarise_job([parent, ACTIVITY, fast, late], [ACTIVITY], None)
    assert (found["epoch"], found["taken"], found["epoch_samples"]) == (3, 80, 200)
    assert found["samples"] == 4 * 340
    assert found["wire_bytes"] == 4 * 20_000 + 5
    assert found["samples_per_s"] == 37.5
    assert found["stall_share"] == pytest.approx((0.25 + 0.75 + 0.25) / 3)
    assert found["bottleneck"]["says"] == "the slow rank"
    assert found["saved"] == {"bytes": -6.0, "seconds": -1.5, "money": None}
    assert (found["processes"], found["retries"]) == (4, 4 * 2)
    assert found["nodes"] == [
        {"node": "http://a:7070", "samples": 4 * 300, "retries": 4, "failures": 4 * 4, "trouble": "it is silent"}
    ]
    assert summarise_job([], [ACTIVITY], None) is None


def test_nodes_that_failed_have_the_sums_of_all_processes_those_in_trouble_first():
    uses = [NodeUse(url=f"http://{name}", requests=9, samples=8) for name in "abcdef"]
    uses[1] = replace(uses[1], failures=9)
    uses[4] = replace(uses[4], failures=1, trouble="no connection\n" * 20)
    uses[5] = replace(uses[5], retries=3)
    said = failures_of(uses)
    assert [node.node for node in said] == ["http://e", "http://b", "http://f"], "and none of those that are well"
    assert (said[0].trouble[:14], len(said[0].trouble)) == ("no connection ", 128)
    assert len(failures_of([replace(use, failures=1) for use in uses])) == 4
    other = (NodeFailures(node="http://b", samples=2, failures=1), NodeFailures(node="http://g", retries=1))
    gone = (NodeFailures(node="http://g", failures=5, trouble="it was silent"),)
    found = summarise_job([JobActivity(nodes=said), JobActivity(nodes=other)], [JobActivity(nodes=gone)], None)
    assert [(node["node"], node["samples"], node["failures"], node["retries"]) for node in found["nodes"]] == [
        ("http://e", 8, 1, 0),
        ("http://b", 10, 10, 0),
        ("http://g", 0, 5, 1),
        ("http://f", 8, 0, 3),
    ]
    assert [bool(node["trouble"]) for node in found["nodes"]] == [True, False, False, False], "an end is no trouble"


def test_money_is_that_of_bytes_and_of_hours_where_the_bandwidth_is_known():
    prices = Prices(per_gb=0.5, per_trainer_hour=36.0, currency="EUR")
    known = JobActivity(saved_bytes=2e9, saved_s=100.0)
    assert savings([known, JobActivity(saved_bytes=2e9)], prices)["money"] == pytest.approx(2.0 + 1.0)
    assert savings([JobActivity(saved_bytes=2e9)], prices) == {"bytes": 2e9, "seconds": None, "money": 1.0}
    for wrong in ({"currency": "ninechars"}, {"currency": "\n"}, {"per_gb": -1.0}, {"per_trainer_hour": math.nan}):
        with pytest.raises(SettingError):
            Prices(**wrong)


def test_saved_bytes_are_those_of_the_stored_samples_less_what_crossed():
    assert saved_bytes(10, 100.0, 250) == 750
    assert saved_bytes(1, 100.0, 250) == -150


def seen(state, tenant=None):
    return view_of(state, tenant, 0.0)


def test_the_view_keeps_what_reports_do_not_repeat():
    tenants = tuple(ControlTenant(name=name, token_sha256=f"{number:064x}") for number, name in enumerate("ab"))
    state = ControlState(ControlSettings(capacity=Amounts(), tenants=tenants), now_s=0.0)
    first, second = ControlledStage(stage="w", job="night"), ControlledStage(stage="w", job="day")
    state.receive("a", first.report(Amounts(), activity=ACTIVITY), 0.0)
    state.receive("a", first.report(Amounts(), activity=replace(ACTIVITY.abbreviate(), samples=400)), 1.0)
    state.receive("b", second.report(Amounts(), activity=replace(ACTIVITY, saved_bytes=100.0)), 1.0)
    [night, day] = seen(state)["jobs"]
    assert night["activity"]["samples"] == 400
    assert night["activity"]["plan"]["names"] == PLAN.names
    assert night["activity"]["bottleneck"]["gain"] == 2.5
    assert day["activity"]["saved"]["bytes"] == 100.0
    assert "activity" not in seen(state)["stages"][0]
    state.receive("b", second.report(Amounts(), activity=replace(ACTIVITY, saved_bytes=100.0), has_ended=True), 2.0)
    assert [job["job"] for job in seen(state)["jobs"]] == ["night"]
    assert seen(state)["saved"]["bytes"] == 98.5
    assert seen(state, "a")["saved"]["bytes"] == -1.5
    assert seen(state, "b")["jobs"] == []


def test_a_stage_that_says_nothing_of_a_job_has_no_activity():
    state = ControlState(ControlSettings(capacity=Amounts()), now_s=0.0)
    state.receive("everybody", ControlledStage(stage="n", job="n", kind="node").report(Amounts()), 0.0)
    assert seen(state)["jobs"][0]["activity"] is None
    assert seen(state)["saved"] == {"bytes": 0, "seconds": None, "money": None}
