"""The report as a value."""

import json
import math

from support.reports import a_plan, a_report


def test_a_report_is_plain_json_with_every_promised_field():
    value = json.loads(json.dumps(a_report().to_json(), allow_nan=False))
    promised = {
        "val_accuracy", "losses", "seconds", "samples", "epochs", "wire_bytes", "baseline_wire_bytes", "plan",
        "stalls_s", "skipped", "bytes_ratio", "stall_share", "stages", "where", "interrupted",
    }  # fmt: skip
    assert promised <= value.keys()
    assert {"cut", "candidates"} <= value["plan"].keys()
    columns = {"cut", "wire_bytes_per_sample", "store_s", "trainer_s", "memory_bytes", "rejected"}
    assert all(columns <= candidate.keys() for candidate in value["plan"]["candidates"])


def test_a_loss_that_is_not_finite_becomes_null():
    value = a_report(losses=(1.0, math.nan, math.inf), val_accuracy=math.nan).to_json()
    assert value["losses"] == [1.0, None, None]
    assert value["val_accuracy"] is None


def test_the_ratio_is_how_many_times_fewer_bytes_crossed():
    assert a_report(wire_bytes=10, baseline_wire_bytes=460).bytes_ratio == 46
    assert a_report(wire_bytes=0).bytes_ratio is None


def test_the_share_of_stalls_is_of_the_whole_run():
    assert a_report(seconds=40.0, stalls_s=10.0).stall_share == 0.25
    assert a_report(seconds=0.0, stalls_s=0.0).stall_share == 0


def test_the_plan_knows_its_chosen_candidate():
    plan = a_plan(5)
    assert plan.chosen is plan.candidates[5]
    assert a_report(plan=type(plan)(cut=3, candidates=())).plan.chosen is None
