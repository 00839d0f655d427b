"""What a control plane divides reaches Prometheus, in the words of the page, and each tenant has its own."""

import hashlib
import json
from urllib.request import ProxyHandler, Request, build_opener

from prometheus_client.parser import text_string_to_metric_families

from frostline.control.messages import ControlAnswer, ControlledStage, JobActivity
from frostline.control.settings import ControlTenant
from frostline.control.shares import Amounts
from support.control_planes import Clock, control_plane
from support.dashboards import check_queries
from support.metric_pages import listed, scraped
from support.tenants import header, token_of

SAID = JobActivity(epoch_samples=20, samples=12, stall_share=0.5, saved_bytes=-3.0)
DIRECT = build_opener(ProxyHandler({}))


def tenant(name, *, sees_all):
    return ControlTenant(name=name, token_sha256=hashlib.sha256(token_of(name).encode()).hexdigest(), sees_all=sees_all)


def reported(url, stage, name, **report):
    body = json.dumps(stage.report(Amounts(), **report).to_json()).encode()
    with DIRECT.open(Request(f"{url}/v1/stages", body, header(name)), timeout=30) as answer:
        stage.take(ControlAnswer.from_json(json.load(answer)), 0.0)


def samples(url, name):
    with DIRECT.open(Request(f"{url}/v1/metrics", headers=header(name)), timeout=30) as answer:
        text = answer.read().decode()
    assert scraped(text) == listed("frostline_control_")
    assert check_queries("frostline_control_", text) > 2
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


def test_shares_of_stages_and_bytes_of_jobs_are_there_for_whoever_may_see_them(tmp_path):
    tenants = (tenant("ann", sees_all=True), tenant("bob", sees_all=False))
    ann, bob = ControlledStage(stage="a", job="x"), ControlledStage(stage="b", job="y")
    clock = Clock()
    with control_plane(tmp_path, clock, tenants=tenants, bytes_per_s=1000) as (url, _):
        for _ in range(6):
            clock.now_s += 1
            reported(url, ann, "ann")
            reported(url, bob, "bob", moved_bytes=77, activity=SAID)
        all_of_it, own = samples(url, "ann"), samples(url, "bob")
    assert all_of_it["frostline_control_capacity", "bytes_per_s"] == 1000
    assert all_of_it["frostline_control_held", "bytes_per_s"] == 1000
    assert all_of_it["frostline_control_share", "a", "ann", "bytes_per_s", "x"] == 500
    assert all_of_it["frostline_control_moved_bytes_total", "bob", "y"] == 77
    assert all_of_it["frostline_control_samples_total", "bob", "y"] == 12
    assert all_of_it["frostline_control_stall_share", "bob", "y"] == 0.5
    assert all_of_it["frostline_control_saved_bytes", "bob", "y"] == -3
    assert not [key for key in own if "ann" in key], "bob sees his own alone"
    assert own["frostline_control_share", "b", "bob", "bytes_per_s", "y"] == 500
