"""Changes of a control plane over HTTP: who may make them, what is answered, and that they outlive the process."""

import hashlib
import json
import logging
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice

import httpx
import pytest

from frostline.control.messages import ControlAnswer, ControlledStage
from frostline.control.settings import ControlledJob, ControlTenant
from frostline.control.shares import Amounts
from support.control_planes import Clock, control_plane

CAPACITY = {"bytes_per_s": 1000.0, "requests": 64.0}


def tenant(name, **rights):
    return ControlTenant(name=name, token_sha256=hashlib.sha256(f"{name}-token".encode()).hexdigest(), **rights)


TENANTS = tenant("ann", sees_all=True, may_change=True), tenant("bob"), tenant("eve", sees_all=True)
JOBS = (ControlledJob(name="night", tenant="bob", weight=2.0),)


def header(name):
    return {"Authorization": f"Bearer {name}-token"}


def patch(url, path, body, name="ann", **options):
    body = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.patch(f"{url}{path}", headers=header(name), timeout=200, **body, **options)


def view(url, name):
    return httpx.get(f"{url}/v1/view", headers=header(name), timeout=200).json()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with control_plane(tmp_path_factory.mktemp("plane"), Clock(), tenants=TENANTS, jobs=JOBS, **CAPACITY) as (url, _):
        stage = ControlledStage(stage="w", job="day")
        report = stage.report(Amounts()).to_json()
        answer = httpx.post(f"{url}/v1/stages", json=report, headers=header("bob"), timeout=200).json()
        stage.take(ControlAnswer.from_json(answer), 0.0)
        yield url


def test_a_change_answers_what_holds_now_and_the_view_shows_it(url):
    answer = patch(url, "/v1/tenants/bob", {"weight": 3})
    assert (answer.status_code, answer.json()) == (200, {"tenant": "bob", "weight": 3, "changed": ["weight"]})
    answer = patch(url, "/v1/jobs/bob/day", {"priority": 2, "ends_at": "2030-01-01T00:00:00Z", "work_bytes": 1e6})
    assert answer.json()["changed"] == ["ends_at", "priority", "work_bytes"]
    assert patch(url, "/v1/capacity", {"requests": 8}).json() == {
        "capacity": {"bytes_per_s": 1000, "requests": 8},
        "changed": ["requests"],
    }
    seen = view(url, "ann")
    assert (seen["may_change"], view(url, "eve")["may_change"]) == (True, False)
    assert seen["capacity"]["requests"] == 8
    [job] = seen["jobs"]
    assert (job["priority"], job["ends_at_s"]) == (2, 1893456000)
    assert {entry["tenant"]: entry["weight"] for entry in seen["tenants"]} == {"ann": 1, "bob": 3, "eve": 1}
    assert [event["kind"] for event in view(url, "bob")["events"]] == ["joined", "changed", "changed"]
    assert [event["tenant"] for event in seen["events"]] == ["bob", "bob", "bob", None]


@pytest.mark.parametrize("path", ["/v1/tenants/bob", "/v1/jobs/bob/night", "/v1/capacity"])
def test_only_a_tenant_with_the_right_may_change_and_it_is_told_in_one_sentence(url, path):
    for name in ("bob", "eve"):
        answer = patch(url, path, {"weight": 3}, name)
        assert answer.status_code == 403
        assert (
            answer.json()["message"]
            == f"tenant {name} may change nothing here: its [[tenant]] has no may_change = true"
        )
    assert patch(url, path, {"weight": 3}, "carl").status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/tenants/carl", {"weight": 3}, 404, "there is no tenant 'carl'"),
        ("/v1/jobs/bob/x", {"weight": 3}, 404, "there is no job 'x' of a tenant 'bob'"),
        ("/v1/jobs/bob/night", {"weight": 1e9}, 400, "the weight of job night must be from 0.001 to 1000"),
        ("/v1/capacity", {"memory_bytes": 5}, 400, "memory_bytes is not divided here"),
        ("/v1/tenants/bob", b"{", 400, "the body is not JSON"),
        ("/v1/tenants/bob", b'{"weight": NaN}', 400, "a finite number"),
        ("/v1/tenants/bob", b'{"weight": 1e999}', 400, "a finite number"),
        ("/v1/tenants/bob", b" " * 5000, 413, "a change has at most 4,096 bytes"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_a_sentence(url, path, body, status, said):
    answer = patch(url, path, body)
    assert answer.status_code == status
    assert said in answer.json()["message"]


def test_without_tenants_nobody_may_change_it(tmp_path):
    with control_plane(tmp_path, Clock(), **CAPACITY) as (url, _):
        answer = httpx.patch(f"{url}/v1/capacity", json={"requests": 8}, timeout=200)
    assert answer.status_code == 403
    assert "has no tenants, so nobody may change it" in answer.json()["message"]


def test_changes_and_events_outlive_the_process_and_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, "frostline.control")
    with control_plane(tmp_path, Clock(), tenants=TENANTS, jobs=JOBS, **CAPACITY) as (url, _):
        for path, body in (("tenants/bob", {"weight": 3}), ("capacity", {"requests": 8})):
            assert patch(url, f"/v1/{path}", body).status_code == 200
        before = view(url, "ann")
    with control_plane(tmp_path, Clock(), tenants=TENANTS, jobs=JOBS, **CAPACITY) as (url, _):
        after = view(url, "ann")
    assert {name: after[name] for name in ("capacity", "tenants", "events")} == {
        name: before[name] for name in ("capacity", "tenants", "events")
    }
    fields = [record.fields for record in caplog.records if record.msg == "control_event"]
    assert [(entry["kind"], entry["tenant"]) for entry in fields] == [("changed", "bob"), ("changed", "all")]
    assert fields[0]["sentence"] == "ann changed the weight of tenant bob from 1 to 3"


def test_the_command_goes_back_to_the_file_where_it_is_told_to(tmp_path):
    with control_plane(tmp_path, Clock(), tenants=TENANTS, jobs=JOBS, **CAPACITY) as (url, _):
        ending = {"ends_at": "2030-01-01T00:00:00Z", "work_bytes": 1e6}
        assert patch(url, "/v1/jobs/bob/night", ending).status_code == 200
    digest = hashlib.sha256(b"bob-token").hexdigest()
    config = f'policies = ["max_min"]\n[[tenant]]\nname = "bob"\ntoken_sha256 = "{digest}"\n'
    (tmp_path / "control.toml").write_text(config)
    command = [sys.executable, "-P", "-c", "from frostline.cli import main; main()", "control", "--json"]
    command += ["--config", "control.toml", "--state", "plane.state", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "what was changed while it ran does not fit --config (see --forget-changes)" in done.stderr
    with subprocess.Popen([*command, "--forget-changes"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            assert view(url, "bob")["changed"] == []
        finally:
            process.kill()


def events_of(answer):
    return (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)


def test_the_view_is_sent_each_second_to_who_accepts_events(url):
    accept = {**header("bob"), "Accept": "text/event-stream"}
    with httpx.stream("GET", f"{url}/v1/view", headers=accept, timeout=200) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        first, second = islice(events_of(answer), 2)
    assert {stage["tenant"] for stage in first["stages"]} == {stage["tenant"] for stage in second["stages"]} == {"bob"}


def test_a_server_ends_though_somebody_is_sent_events(tmp_path):
    accept = {"Accept": "text/event-stream"}
    with ExitStack() as stack:
        with control_plane(tmp_path, Clock(), **CAPACITY) as (url, _):
            answer = stack.enter_context(httpx.stream("GET", f"{url}/v1/view", headers=accept, timeout=200))
            events = events_of(answer)
            assert next(events)["jobs"] == []
        assert len(list(events)) <= 2, "the stream ends as a whole answer does"
