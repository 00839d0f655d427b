"""The report as a value."""

import json
import math

import pytest

from frostline.jobs.statistics import sum_uses
from frostline.transport import NodeUse
from support.plans import a_costless_plan, a_plan
from support.reports import a_report


def test_a_report_is_plain_json_with_every_promised_field():
    value = json.loads(json.dumps(a_report().to_json(), allow_nan=False))
    promised = {
        "val_accuracy", "losses", "seconds", "samples", "epochs", "wire_bytes", "baseline_wire_bytes", "plan",
        "stall_s", "skipped", "bytes_ratio", "stall_share", "stages", "where", "interrupted", "ways", "accuracy",
        "codec_error", "replans", "setup_s", "first_step_s", "head_epoch", "held_out",
        "predicted_samples_per_s", "measured_samples_per_s", "fallback",
    }  # fmt: skip
    assert promised <= value.keys()
    assert {"cut", "codec", "mixture", "bottleneck", "prices", "candidates"} <= value["plan"].keys()
    columns = {"cut", "codec", "link_s", "wire_bytes_per_sample", "store_s", "trainer_s", "memory_bytes", "rejected"}
    assert all(columns <= candidate.keys() for candidate in value["plan"]["candidates"])


def test_a_loss_that_is_not_finite_becomes_null():
    value = a_report(losses=(1.0, math.nan, math.inf), val_accuracy=math.nan).to_json()
    assert value["losses"] == [1.0, None, None]
    assert value["val_accuracy"] is None


def test_the_ratio_is_how_many_times_fewer_bytes_crossed():
    assert a_report(wire_bytes=10, baseline_wire_bytes=460).bytes_ratio == 46
    assert a_report(wire_bytes=0).bytes_ratio is None
    assert a_report(wire_bytes=405_000, baseline_wire_bytes=0).bytes_ratio is None, "a run that made no step"


def test_the_share_of_stalls_is_of_the_time_after_set_up():
    assert a_report(seconds=45.0, setup_s=5.0, stall_s=10.0).stall_share == 0.25
    assert a_report(seconds=40.0, stall_s=10.0).stall_share == 0.25
    assert a_report(seconds=0.0, stall_s=0.0).stall_share == 0


def test_reports_the_whole_plan_and_its_changes():
    value = json.loads(json.dumps(a_report().to_json(), allow_nan=False))
    assert value["plan"] == a_plan().to_json()
    assert sum(item["share"] for item in value["plan"]["mixture"]) == pytest.approx(1)
    assert value["ways"][1] == {"cut": 24, "codec": "sparse", "name": "blocks.24.bn2", "samples": 421}
    assert value["replans"][0]["at_s"] == 12.3
    assert (value["accuracy"], value["codec_error"]) == ("int8", 0.0062)
    assert (value["predicted_samples_per_s"], value["measured_samples_per_s"]) == (73.8, 70.1)


def test_a_rate_without_bound_becomes_null():
    assert a_report(plan=a_costless_plan()).to_json()["plan"]["samples_per_s"] is None


def test_nodes_of_a_run_in_stages_have_the_sums_of_all_and_the_trouble_of_the_last():
    first = (NodeUse(url="a", requests=2, samples=8, failures=1, trouble="it is silent"), NodeUse(url="b", retries=1))
    second = (NodeUse(url="a", requests=3, samples=9, damaged=1, unreadable=2), NodeUse(url="c", requests=1))
    assert sum_uses([first, second]) == (
        NodeUse(url="a", requests=5, samples=17, failures=1, damaged=1, unreadable=2),
        NodeUse(url="b", retries=1),
        NodeUse(url="c", requests=1),
    )
