"""A real control plane: it checks what untrusted clients say, survives a kill, and lets each tenant see its own."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from frostline.control.app import ControlPlane, make_control_app
from frostline.control.messages import ControlAnswer, ControlledStage
from frostline.control.settings import read_control_settings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.control.store import RecordStore
from frostline.core.errors import SettingError
from frostline.wire.connection import address_of
from support.control_planes import Clock, control_plane

COMMAND = (sys.executable, "-P", "-c", "from frostline.cli import main; main()")
PLAIN = "[capacity]\nbytes_per_s = 1000\nrequests = 64\n"


def token_of(name):
    return hashlib.sha256(name.encode()).hexdigest()


TENANTS = PLAIN + "".join(
    f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{token_of(name + "-token")}"\nweight = {weight}\nsees_all = {sees}\n'
    for name, weight, sees in (("ann", 3, "true"), ("bob", 1, "false"))
)


@contextmanager
def serving(folder, text=PLAIN, port=0):
    """A control plane in a process of its own; gives its URL and the process."""
    config = folder / "control.toml"
    config.write_text(text)
    command = [*COMMAND, "control", "--json", "--config", str(config)]
    command += ["--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            yield json.loads(process.stdout.readline())["url"], process
        finally:
            process.kill()


def sent(url, path, body=None, token=None):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def exchange(url, stage, token=None, **report):
    status, body = sent(url, "/v1/stages", stage.report(Amounts(), **report).to_json(), token)
    assert status == 200, body
    stage.take(ControlAnswer.from_json(body), 0.0)
    return stage.in_force.bytes_per_s


def settled(url, stages, token=None):
    for _ in range(4):
        shares = [exchange(url, stage, token) for stage in stages]
    return shares


def test_reports_of_one_tenant_do_not_wait_for_all_of_another(tmp_path, monkeypatch):
    order, plain = [], ControlPlane.receive

    def slow(plane, tenant, report):
        time.sleep(0.003)
        order.append(tenant)
        return plain(plane, tenant, report)

    monkeypatch.setattr(ControlPlane, "receive", slow)
    config = tmp_path / "control.toml"
    config.write_text(TENANTS)
    settings = read_control_settings(config)

    async def run():
        with closing(RecordStore(tmp_path / "plane.state")) as store:
            app = make_control_app(ControlPlane(ControlState(settings, now_s=0.0), store))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:

                async def report(tenant, number):
                    body = ControlledStage(stage=f"s{number}", job="a").report(Amounts()).to_json()
                    headers = {"Authorization": f"Bearer {tenant}-token"}
                    assert (await client.post("/v1/stages", json=body, headers=headers)).status_code == 200

                async with anyio.create_task_group() as group:
                    for number in range(40):
                        group.start_soon(report, "ann", number)
                    group.start_soon(report, "bob", 0)

    anyio.run(run)
    assert order.index("bob") <= 3
    assert len(order) == 41


def test_it_divides_and_survives_a_kill(tmp_path):
    first, second = ControlledStage(stage="a", job="a"), ControlledStage(stage="b", job="b")
    with serving(tmp_path) as (url, process):
        assert settled(url, [first, second]) == [500, 500]
        before = sent(url, "/v1/view")[1]
        process.send_signal(signal.SIGKILL)
    with serving(tmp_path, port=int(url.rpartition(":")[2])) as (again, _):
        assert again == url
        after = sent(url, "/v1/view")[1]
        assert after["held"] == before["held"] == {"bytes_per_s": 1000, "requests": 64}
        assert [stage["answered"] for stage in after["stages"]] == [stage["answered"] for stage in before["stages"]]
        assert exchange(url, ControlledStage(stage="c", job="c")) == 0, "others hold everything"
        assert exchange(url, first) == pytest.approx(1000 / 3)


@pytest.fixture(scope="module")
def with_tenants(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("tenants"), TENANTS) as (url, _):
        yield url


def test_tenants_share_by_weight_and_see_their_own(with_tenants):
    ann, bob = ControlledStage(stage="a", job="x"), ControlledStage(stage="a", job="x")
    for _ in range(4):
        shares = [exchange(with_tenants, ann, "ann-token"), exchange(with_tenants, bob, "bob-token")]
    assert shares == [750, 250]
    seen = {name: sent(with_tenants, "/v1/view", token=f"{name}-token")[1] for name in ("ann", "bob")}
    assert {stage["tenant"] for stage in seen["ann"]["stages"]} == {"ann", "bob"}
    assert {stage["tenant"] for stage in seen["bob"]["stages"]} == {"bob"}
    assert seen["bob"]["held"] is None


def test_a_stage_that_reports_does_not_wait_for_views(tmp_path, monkeypatch):
    begun, go = threading.Event(), threading.Event()

    def slow_view(*_, **__):
        begun.set()
        assert go.wait(60)
        return {}

    monkeypatch.setattr(ControlPlane, "view", slow_view)
    with (
        control_plane(tmp_path, Clock(), bytes_per_s=1000.0) as (url, _),
        ThreadPoolExecutor(1) as threads,
    ):
        viewer = threads.submit(sent, url, "/v1/view")
        assert begun.wait(60)
        try:
            assert exchange(url, ControlledStage(stage="a", job="a")) == 1000
        finally:
            go.set()
        assert viewer.result(60) == (200, {})


def test_strangers_are_refused_before_anything_is_read(with_tenants):
    for path, body in (("/v1/stages", b"{"), ("/v1/view", None), ("/v1/health", None)):
        status, answer = sent(with_tenants, path, body, token="wrong")
        assert status == 401
        assert "FROSTLINE_TOKEN" in answer["message"]
        assert "wrong" not in answer["message"]


REPORT = {"stage": "a", "job": "b", "sequence": 1}


@pytest.mark.parametrize("path", ["/v1/view", "/v1/health", "/v1/metrics", "/v1/stages"])
def test_a_parameter_of_an_address_that_nobody_reads_is_refused(with_tenants, path):
    found, answer = sent(with_tenants, f"{path}?tenent=a", REPORT if path == "/v1/stages" else None, "bob-token")
    assert (found, "the address has no field 'tenent'" in answer["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 10_000, 400, "not JSON"),
        (b" " * 20_000, 413, "at most 16,384 bytes"),
        ([], 400, "a report must be an object"),
        ({"stage": "a", "job": "b"}, 400, "sequence is missing: a report must have it"),
        ({**REPORT, "more": 1}, 400, "a report has no field 'more'"),
        ({**REPORT, "stage": "../x"}, 400, "stage must be a name"),
        ({**REPORT, "sequence": True}, 400, "sequence must be a whole number"),
        ({**REPORT, "kind": "x"}, 400, "kind must be one of"),
        ({**REPORT, "demand": {"bytes_per_s": -1}}, 400, "bytes_per_s must be a finite number"),
        (b'{"stage": "a", "job": "b", "sequence": 1, "demand": {"bytes_per_s": NaN}}', 400, "finite number"),
        (b'{"stage": "a", "job": "b", "sequence": 1, "demand": {"bytes_per_s": 1e999}}', 400, "finite number"),
        ({**REPORT, "demand": {"gold": 1}}, 400, "demand has no field 'gold'"),
    ],
)
def test_reports_that_make_no_sense_are_refused_by_their_field(with_tenants, body, status, said):
    found, answer = sent(with_tenants, "/v1/stages", body, "bob-token")
    assert (found, said in answer["message"]) == (status, True), answer


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("capacity = 3", "capacity must be a table"),
        (PLAIN + "gold = 1", "capacity has no field 'gold'"),
        ("more = 1", "unknown field 'more'"),
        ('policies = ["luck"]', "policies must be some of deadlines, priorities, max_min, proportional"),
        ("lease_s = 0.1", "lease_s must be at least 1"),
        ('[[job]]\nname = "a"\ntenant = "carl"', "there is no tenant carl"),
        ('[[job]]\nname = "a"\nends_at = 2030-01-01T00:00:00Z', "needs work_bytes"),
        ('[[job]]\nname = "a"\nends_at = 2030-01-01T00:00:00Z\nwork_bytes = 1.0', "a bytes_per_s to divide"),
        (PLAIN + '[[job]]\nname = "a"\nends_at = 3', "ends_at of a job must be a date and time"),
        ('[[job]]\nname = "a"\nweight = 0', "weight of job a must be from 0.001 to 1000"),
        ('[[tenant]]\nname = "a"', "lacks a field"),
        ('[[tenant]]\nname = "a"\ntoken_sha256 = "secret"', "64 small hexadecimal digits"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_their_field(tmp_path, text, said):
    path = tmp_path / "control.toml"
    path.write_text(text)
    with pytest.raises(SettingError) as refused:
        read_control_settings(path)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_of_jobs_and_tenants_is_read(tmp_path):
    path = tmp_path / "control.toml"
    job = '[[job]]\nname = "night"\ntenant = "ann"\nends_at = 2030-01-01T00:00:00Z\nwork_bytes = 5_000_000_000\n'
    path.write_text('policies = ["deadlines", "priorities"]\n' + TENANTS + job)
    settings = read_control_settings(path)
    assert settings.weights == {"ann": 3, "bob": 1}
    assert settings.jobs[0].ends_at_s == 1893456000


def test_it_listens_beyond_this_machine_for_tenants_alone(tmp_path):
    (tmp_path / "control.toml").write_text(PLAIN)
    command = [*COMMAND, "control", "--config", str(tmp_path / "control.toml")]
    done = subprocess.run([*command, "--listen", "0.0.0.0:0"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "[[tenant]] in --config, or start it with --allow-anonymous" in done.stderr


def test_a_file_that_is_no_state_is_refused(tmp_path):
    (tmp_path / "control.toml").write_text(PLAIN)
    (tmp_path / "control.state").write_text("something else, which is longer than a header of SQLite" * 100)
    command = [*COMMAND, "control", "--config", str(tmp_path / "control.toml")]
    done = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "cannot keep the state in" in done.stderr


def resident(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def plan_of(number):
    """An activity of nearly 16 KiB, with names that JSON may write at six times their length."""
    return {"plan": {"names": [f"{number}-{place}-" + "\u00e9" * 55 for place in range(64)],
                     "nbytes": [number] * 64, "cut": 3, "codec": "raw"}}  # fmt: skip


def pages_of(url):
    """All pages of the view, and the size of the largest."""
    at, largest, found = {"jobs": 0, "stages": 0}, 0, []
    while any(place is not None for place in at.values()):
        query = "&".join(f"{name}={10**8 if place is None else place}" for name, place in at.items())
        answer = httpx.get(f"{url}/v1/view?{query}", timeout=60, headers={"Accept-Encoding": "identity"})
        largest, page = max(largest, len(answer.content)), answer.json()
        found.append(page)
        at = page["next"]
    return found, largest


def test_the_view_of_any_reports_is_bounded(tmp_path):
    count = 700
    with serving(tmp_path) as (url, process):
        with httpx.Client(base_url=url, timeout=60) as client:
            for number in range(count):
                report = {"stage": f"s{number}", "job": f"j{number}", "sequence": 1, "activity": plan_of(number)}
                body = json.dumps(report, ensure_ascii=False).encode()
                assert client.post("/v1/stages", content=body).status_code == 200
        pages, largest = pages_of(url)
        assert largest < 2 << 20
        assert [job["job"] for page in pages for job in page["jobs"]] == [f"j{number}" for number in range(count)]
        assert [stage["stage"] for page in pages for stage in page["stages"]] == [
            f"s{number}" for number in range(count)
        ]
        assert all(page["counts"] == {"jobs": count, "stages": count} for page in pages)
        packed = httpx.get(f"{url}/v1/view", timeout=60)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.json()["jobs"] == pages[0]["jobs"]
        before = resident(process.pid)
        with ExitStack() as stack:
            for _ in range(60):
                peer = stack.enter_context(closing(socket.socket()))
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.connect(address_of(url))
                peer.sendall(b"GET /v1/view HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
            for _ in range(5):
                began_s = time.monotonic()
                assert httpx.get(f"{url}/v1/health", timeout=10).status_code == 200
                assert time.monotonic() - began_s < 5.0
            assert resident(process.pid) - before < 96 << 20
        assert httpx.get(f"{url}/v1/metrics", timeout=60).text.count("frostline_control_moved_bytes_total{") == count


@pytest.mark.parametrize("query", ["jobs=-1", "stages=x", "jobs=1e9", "jobs=99999999999", "all=1"])
def test_what_is_no_page_of_a_view_is_refused(with_tenants, query):
    assert sent(with_tenants, f"/v1/view?{query}", token="ann-token")[0] == 400
