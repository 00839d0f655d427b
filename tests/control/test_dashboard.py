"""A control plane's page for people, in a real browser that reads a real control plane over HTTP."""

import hashlib
import re
from html import unescape

import httpx
import pytest
from starlette.responses import HTMLResponse
from starlette.routing import Route

import support.control_planes as planes
from frostline.control.app import make_control_app
from frostline.control.messages import ControlAnswer, ControlledStage, JobActivity, PlanOutline, Prices
from frostline.control.settings import ControlledJob, ControlTenant
from frostline.control.shares import Amounts
from frostline.node.http.pages import Dashboard
from support.control_planes import Clock, control_plane
from support.pages import (
    HAS_FIGURES,
    HAS_TITLE,
    HOSTILE,
    IS_DARK,
    figures,
    found_by_axe,
    may_only_ask_its_server,
    seen,
    tells_readers_of_screens,
    typed_token,
    with_axe,
)

PAGE = Dashboard("frostline.control").text
CAPACITY = {"bytes_per_s": 1000.0, "compute_s_per_s": 2.0}
INF = float("inf")


def tenant(name, weight, *, sees_all=False):
    digest = hashlib.sha256(f"{name}-token".encode()).hexdigest()
    return ControlTenant(name=name, token_sha256=digest, weight=weight, sees_all=sees_all)


TENANTS = tenant("ann", 3.0, sees_all=True), tenant("bob", 1.0)
JOBS = (
    ControlledJob(name="night", tenant="ann", weight=2.0),
    ControlledJob(name="late", tenant="bob", ends_at_s=1100.0, work_bytes=1e9),
)


PLAN = PlanOutline(names=("encoded", "pixels", "layer1"), nbytes=(900, 3000, 40), cut=2, codec="fp16")
ACTIVITY = JobActivity(epoch_samples=100, taken=50, saved_bytes=2e9, saved_s=100.0, plan=PLAN)


def reports(url, clock, *, moved=0, headers=None):
    """A window of each tenant's job and a node report; nothing changes any more after three rounds."""
    stages = [
        ("ann", ControlledStage(stage="w1", job="night"), Amounts(compute_s_per_s=0.0)),
        ("bob", ControlledStage(stage="w2", job="late"), Amounts(compute_s_per_s=0.0)),
        ("ann", ControlledStage(stage="n1", job="nodes", kind="node"), Amounts(bytes_per_s=0.0)),
    ]
    for _ in range(3):
        clock.now_s += 1
        for name, stage, demand in stages:
            said = stage.report(demand, moved, used=Amounts(compute_s_per_s=0.25), activity=ACTIVITY).to_json()
            sent = {"Authorization": f"Bearer {name}-token"} if headers is None else headers
            answer = httpx.post(f"{url}/v1/stages", json=said, headers=sent, timeout=60).raise_for_status()
            stage.take(ControlAnswer.from_json(answer.json()), 0.0)


def rows(dom, table):
    """Cells of a table's rows, by the rows' names."""
    [body] = re.findall(rf'<tbody id="{table}">(.*?)</tbody>', dom, re.DOTALL)
    found = re.findall(r'<tr data-name="([^"]*)">(.*?)</tr>', body, re.DOTALL)
    return {name: [unescape(cell) for cell in re.findall(r">([^<>]*)</t[hd]>", row)] for name, row in found}


def test_the_page_may_do_nothing_but_ask_its_control_plane(tmp_path):
    with control_plane(tmp_path, Clock(), **CAPACITY) as (url, _):
        may_only_ask_its_server(httpx.get(url))


def test_readers_of_screens_are_told_what_everything_is():
    tells_readers_of_screens(PAGE)


def test_a_browser_shows_what_the_view_says_without_an_error(tmp_path):
    clock = Clock()
    prices = Prices(per_gb=0.25, per_trainer_hour=36.0, currency="EUR")
    jobs = [ControlledJob(name="night", weight=3.0)]
    with control_plane(tmp_path, clock, jobs=jobs, prices=prices, **CAPACITY) as (url, _):
        reports(url, clock, moved=500, headers={})
        page = seen(tmp_path, url)
        view = httpx.get(f"{url}/v1/view").json()
    shown = figures(page.stdout)
    assert shown["job_count"] == len(view["jobs"]) == 3
    assert shown["stage_count"] == len(view["stages"]) == 3
    assert shown["notice_count"] == 0
    assert shown["saved_bytes"] == view["saved"]["bytes"] == 6e9
    assert shown["saved_s"] == view["saved"]["seconds"] == 300
    assert shown["saved_money"] == view["saved"]["money"] == pytest.approx(1.5 + 3.0)
    assert "4.50 EUR" in page.stdout
    assert page.stdout.count('role="progressbar"') == page.stdout.count("layer1: 40 B") == 3
    for name, given in view["held"].items():
        assert re.search(rf'data-name="{name}".*?<data value="{given:g}">', page.stdout, re.DOTALL), name
    jobs, stages = rows(page.stdout, "jobs"), rows(page.stdout, "stages")
    assert jobs["everybody/night"] == ["night", "everybody", "3", "75.0 %", "–", "–", "750 B", "500 B", "–"]
    assert jobs["everybody/nodes"][3] == "–", "a node moves no bytes of the link"
    for stage in view["stages"]:
        cells = stages[f"{stage['tenant']}/{stage['stage']}"]
        assert cells[:3] == [stage["stage"], stage["job"], stage["kind"]]
    assert stages["everybody/n1"][3:5] == ["devices 2, bytes a second 0 B", "devices 0.25"]
    assert "Live, every second." in page.stdout
    assert "deadlines, then max_min" in page.stdout
    assert "CONSOLE" not in page.stderr


def copy_seen(tmp_path, monkeypatch, page, *options, until=HAS_FIGURES):
    """What a copy of the page shows, which no policy forbids to run a test's script."""

    def with_copy(plane):
        app = make_control_app(plane)
        app.routes.insert(0, Route("/copy", lambda _: HTMLResponse(page)))
        return app

    monkeypatch.setattr(planes, "make_control_app", with_copy)
    clock = Clock()
    with control_plane(tmp_path, clock, tenants=TENANTS, jobs=JOBS, **CAPACITY) as (url, _):
        reports(url, clock)
        return seen(tmp_path, f"{url}/copy", *options, until=until).stdout


def typed(name):
    return typed_token(PAGE, f"{name}-token")


@pytest.mark.parametrize(("colours", "options"), [("light", ()), ("dark", (IS_DARK,))])
def test_axe_finds_nothing_of_weight(tmp_path, monkeypatch, colours, options):
    scheme, passed, bad = found_by_axe(
        copy_seen(tmp_path, monkeypatch, with_axe(typed("ann")), *options, until=HAS_TITLE)
    )
    assert (scheme, bad) == (colours, [])
    assert passed > 10


def test_a_tenant_that_sees_all_is_shown_shares_deadlines_and_what_jobs_are_told(tmp_path, monkeypatch):
    said = copy_seen(tmp_path, monkeypatch, typed("ann"))
    assert rows(said, "tenants")["ann"][:3] == ["ann", "3", "75.0 %"]
    assert set(rows(said, "jobs")) == {"ann/night", "ann/nodes", "bob/late"}
    assert rows(said, "jobs")["bob/late"][-1] == "in 1 min 37 s, 0.0 % done"
    assert "job late cannot end in time" in said
    assert figures(said)["notice_count"] == 1
    assert "ann-token" not in re.sub(r"<script>.*?</script>", "", said, flags=re.DOTALL)


def test_a_tenant_is_shown_its_own_alone(tmp_path, monkeypatch):
    said = copy_seen(tmp_path, monkeypatch, typed("bob"))
    assert set(rows(said, "tenants")) == {"bob"}
    assert set(rows(said, "jobs")) == {"bob/late"}
    assert rows(said, "jobs")["bob/late"][3] == "–", "it does not know what others are due"
    assert "night" not in re.sub(r"<script>.*?</script>", "", said, flags=re.DOTALL)


def test_without_a_token_it_shows_nothing_of_a_control_plane_with_tenants(tmp_path):
    with control_plane(tmp_path, Clock(), tenants=TENANTS, **CAPACITY) as (url, _):
        said = seen(tmp_path, url).stdout
    assert '<form id="ask">' in said
    assert '<main id="figures" hidden="">' in said


@pytest.mark.parametrize("name", ["stage", "job"])
def test_no_name_that_a_stranger_gives_is_markup(tmp_path, name):
    with control_plane(tmp_path, Clock(), **CAPACITY) as (url, _):
        report = {"stage": "a", "job": "b", "sequence": 1, name: HOSTILE}
        assert httpx.post(f"{url}/v1/stages", json=report, timeout=60).status_code == 400
