"""A node's page: what it shows, how it is kept up to date, and what may be changed there.

A node's page for people, as text and in a real browser that reads a real node over HTTP.

Answers that go on: what is sent is made once for all who may see the same, and viewers are few.

Changing tenants of a node on its page, by keyboard, in a real browser.
"""

import json
import re
import threading
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from html import unescape
from types import SimpleNamespace
from unittest.mock import Mock

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import frostline as fl
from frostline.control.messages import Bottleneck, ControlledStage, JobActivity, NodeFailures, PlanOutline
from frostline.control.shares import Amounts
from frostline.core.audit import AuditLog
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import Overloaded, Unauthenticated
from frostline.node import Node
from frostline.node.http.app import make_app
from frostline.node.http.connection_guard import Rounds
from frostline.node.http.operations import TrainingRoutes
from frostline.node.http.pages import Dashboard, LiveAnswers
from frostline.node.http.requests import MadeOnce, Turns
from support.browser import a_browser
from support.nodes import artifact_of, make_images, preprocess, request, served, small_network, until
from support.pages import (
    HAS_FIGURES,
    HAS_TITLE,
    axe_findings,
    figures,
    found_by_axe,
    may_only_ask_its_server,
    needed_browser,
    opened,
    seen,
    sign_in,
    tells_readers_of_screens,
    typed_over,
    typed_token,
    with_axe,
)
from support.tenants import header, tenant, token_of

PAGE = Dashboard().text
MEMORY = 128 << 20


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 8)


@contextmanager
def a_node(images, **settings):
    with Node(NodeSettings(memory_bytes=MEMORY, **settings), (images.as_uri(),)) as node, served(node) as url:
        yield str(url)


def work(url, images, headers=None):
    """Samples of a frozen network, and the same once more."""
    digest, body = artifact_of(small_network())
    httpx.put(f"{url}/v1/prefixes/{digest}", content=body, headers=headers).raise_for_status()
    message = request(images, 2, digest)
    for _ in range(2):
        httpx.post(f"{url}/v1/features", json=message.to_json(), headers=headers).raise_for_status()


def test_the_page_may_do_nothing_but_ask_its_node(images):
    with Node(NodeSettings(memory_bytes=MEMORY), (images.as_uri(),)) as node, TestClient(make_app(node)) as client:
        answer = client.get("/")
    may_only_ask_its_server(answer)


def test_readers_of_screens_are_told_what_everything_is():
    tells_readers_of_screens(PAGE)


def test_a_browser_shows_what_the_api_says_without_an_error(tmp_path, images):
    with a_node(images) as url:
        work(url, images)
        page = seen(tmp_path, url)
        said, health = (httpx.get(f"{url}/v1/{name}").json() for name in ("statistics", "health"))
    shown = figures(page.stdout)
    assert said["totals"]["samples"] == 16
    for name in ("samples", "bytes_sent", "bytes_read", "cache_hits", "finished", "refused_busy", "failed"):
        assert shown[name] == said["totals"][name], name
    for name in ("requests_in_progress", "waiting_for_device", "prefixes", "devices_in_service"):
        assert shown[name] == said[name], name
    assert 0 < shown["uptime_s"] <= said["uptime_s"]
    for name, pool in said["memory"].items():
        assert re.search(rf'data-name="{name}".*?<data value="{pool["reserved_bytes"]}">', page.stdout, re.DOTALL)
    assert '<main id="figures">' in page.stdout
    assert "Live, every second." in page.stdout
    assert f"{health['hardware']} · {len(health['cores'])} cores" in page.stdout
    assert "CONSOLE" not in page.stderr


def test_it_follows_a_job_that_runs(tmp_path, images):
    with a_node(images) as url:
        work(url, images)
        before, ends = httpx.get(f"{url}/v1/statistics").json(), threading.Event()

        def run():
            while not ends.is_set():
                work(url, images)

        job = threading.Thread(target=run)
        job.start()
        try:
            page = seen(tmp_path, url)
        finally:
            ends.set()
            job.join()
        after = httpx.get(f"{url}/v1/statistics").json()
    shown = figures(page.stdout)
    assert before["totals"]["samples"] <= shown["samples"] <= after["totals"]["samples"]
    assert before["totals"]["samples"] < after["totals"]["samples"]
    # All runs are of the same rows.
    assert shown["rows_a_run"] == pytest.approx(after["totals"]["rows_run"] / after["totals"]["runs"])
    assert len(re.findall(r"[\d.]+,[\d.]+", re.findall(r'<polyline id="line" points="([^"]*)"', page.stdout)[0])) >= 2
    assert "CONSOLE" not in page.stderr


ACTIVITY = JobActivity(
    epoch=1,
    taken=6,
    epoch_samples=8,
    samples=14,
    samples_per_s=3.5,
    stall_share=0.25,
    wire_bytes=2_000,
    saved_bytes=5e6,
    saved_s=90.0,
    retries=3,
    nodes=(NodeFailures(node="http://<b>a", samples=9, retries=1, failures=2, trouble="it is silent"),),
    bottleneck=Bottleneck(held_back_by="the link", says="held back by <b>the link</b>", gain=2.0),
    plan=PlanOutline(names=("encoded", "<i>pixels</i>", "layer1"), nbytes=(900, 3000, 40), cut=1, codec="fp16"),
)


def reported(url, headers=None):
    """A job as one of another process would report it."""
    report = ControlledStage(stage="w", job="night").report(Amounts(), activity=ACTIVITY)
    httpx.post(f"{url}/v1/stages", json=report.to_json(), headers=headers, timeout=60).raise_for_status()


def of_job(dom, name):
    """The figures of a job's card, and the card."""
    [card] = re.findall(rf'<article [^>]*data-name="{name}".*?</article>', dom, re.DOTALL)
    found = re.findall(r'<data class="(?:job_)?(\w+)" value="([^"]*)">', card)
    return {name: float(value) for name, value in found}, card


def test_a_job_that_runs_is_shown_as_the_api_says_with_its_plan_along_the_network(tmp_path, images):
    data, settings = fl.Dataset(images.as_uri()), LoaderSettings(control=None, samples_per_request=2)
    with (
        a_node(images) as url,
        fl.offload(None, data, preprocess=preprocess(), near=url, settings=settings) as job,
    ):
        batches = iter(job.loader(2, epoch=4))
        next(batches)
        ask = f"{url}/v1/view"
        until(lambda: (jobs := httpx.get(ask).json()["jobs"]) and jobs[0]["activity"]["bottleneck"])
        [said] = httpx.get(ask).json()["jobs"]
        page = seen(tmp_path, url)
        batches.close()
    shown, card = of_job(page.stdout, f"everybody/{said['job']}")
    activity = said["activity"]
    assert (shown["taken"], shown["samples"], shown["processes"]) == (2, 2, 1)
    assert "epoch 4" in card
    assert "2 of 8 samples" in card
    assert 'role="progressbar"' in card
    assert 'aria-valuenow="25.0"' in card
    assert activity["bottleneck"]["says"] in unescape(card)
    assert card.count("<rect") == len(activity["plan"]["names"]) == 2
    assert f"cut after {activity['plan']['names'][0]}" in card
    assert "CONSOLE" not in page.stderr


def test_of_a_node_with_tenants_it_shows_nothing_until_a_token_is_typed(tmp_path, images):
    with a_node(images, tenants=(tenant("ann"),)) as url:
        page = seen(tmp_path, url)
    assert '<form id="ask">' in page.stdout
    assert '<main id="figures" hidden="">' in page.stdout
    assert "type the token" in page.stdout
    assert "ann" not in re.sub(r"<script>.*?</script>", "", page.stdout, flags=re.DOTALL).split("<body>")[1]


@contextmanager
def a_node_with_copies(monkeypatch, images, copies, **settings):
    """A node that gives copies of its page too, which no policy forbids to run a test's script."""

    def with_copies(node, routes):
        app = make_app(node, routes)
        for path, page in copies.items():
            app.routes.insert(0, Route(path, lambda _, page=page: HTMLResponse(page)))
        return app

    monkeypatch.setattr("frostline.node.http.server.make_app", with_copies)
    with a_node(images, **settings) as url:
        yield url


def test_with_a_token_it_shows_the_tenant_s_shares_against_its_weight(tmp_path, images, monkeypatch):
    page = typed_token(PAGE, token_of("ann"))
    tenants = (tenant("ann", weight=3.0), tenant("bob", weight=1.0))
    with a_node_with_copies(monkeypatch, images, {"/typed": page}, tenants=tenants) as url:
        work(url, images, header("ann"))
        said = seen(tmp_path, f"{url}/typed", until=HAS_FIGURES).stdout
    [row] = re.findall(r'<tr data-name="ann">(.*?)</tr>', said)
    assert [unescape(cell) for cell in re.findall(r">([^<>]+)</t[hd]>", row)][:3] == ["ann", "3", "–"]
    assert 'value="16"' in said
    assert token_of("ann") not in re.sub(r"<script>.*?</script>", "", said, flags=re.DOTALL)


def test_axe_finds_nothing_of_weight(tmp_path, images, monkeypatch):
    with a_node_with_copies(monkeypatch, images, {"/copy": with_axe(PAGE)}) as url:
        work(url, images)
        reported(url)
        said = seen(tmp_path, f"{url}/copy", until=HAS_TITLE).stdout
        scheme, passed, bad = found_by_axe(said)
    shown, card = of_job(said, "everybody/night")
    assert shown == {
        "taken": 6,
        "samples_per_s": 3.5,
        "stall_share": 0.25,
        "processes": 1,
        "samples": 14,
        "wire_bytes": 2000,
        "saved": 5e6,
        "retries": 3,
    }
    failed = "3 requests made again · http://<b>a: 2 failed, 1 taken over from others, in trouble: it is silent"
    assert failed in unescape(re.sub(r"</?data[^>]*>", "", card))
    assert "held back by &lt;b&gt;the link&lt;/b&gt;" in card
    assert "<title>&lt;i&gt;pixels&lt;/i&gt;: 3.00 kB</title>" in card
    assert re.findall(r'<rect class="(\w+)"', card) == ["store", "store", "trainer"]
    assert (figures(said)["saved_bytes"], figures(said)["saved_s"]) == (5e6, 90)
    assert '<div hidden=""><dt>by the prices' in said, "nobody said a price"
    assert (scheme, bad) == ("light", [])
    assert passed > 10


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_a_phone_or_a_laptop(tmp_path, images, monkeypatch, width):
    measuring = (
        "setInterval(() => { const inner = document.querySelector('iframe').contentWindow;"
        "if (inner.document.getElementById('samples')?.value) document.title ="
        " `wide ${inner.document.documentElement.scrollWidth} of ${inner.innerWidth}`; }, 50)"
    )
    frame = f'<iframe src="/copy" width="{width}" height="900"></iframe><script>{measuring}</script>'
    with a_node_with_copies(monkeypatch, images, {"/copy": PAGE, "/framed": frame}) as url:
        work(url, images)
        reported(url)
        said = seen(tmp_path, f"{url}/framed", until=HAS_TITLE).stdout
    assert f"<title>wide {width} of {width}</title>" in said


BOTH = "text/event-stream, application/json"


class Made:
    def __init__(self):
        self.count = 0

    async def __call__(self, rights):
        self.count += 1
        return json.dumps({"rights": rights, "count": self.count}).encode()


class Viewer:
    """One viewer, without a socket."""

    def __init__(self):
        self.sent, self.gone, self.has_three = [], anyio.Event(), anyio.Event()

    async def send(self, message):
        self.sent.append(message)
        if len(self.events()) == 3:
            self.has_three.set()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def events(self):
        bodies = [message["body"] for message in self.sent if message.get("body")]
        return [json.loads(body.removeprefix(b"data: ")) for body in bodies]


def asked(accept, coding=""):
    headers = [(b"accept", accept.encode()), (b"accept-encoding", coding.encode())]
    return Request({"type": "http", "headers": headers})


@asynccontextmanager
async def watching(live, rights, count):
    """Viewers that each have been sent three events."""
    viewers = [Viewer() for _ in range(count)]
    async with anyio.create_task_group() as group:
        for viewer in viewers:
            answer = await live.answer(asked(BOTH), rights)
            group.start_soon(answer, {}, viewer.receive, viewer.send)
        for viewer in viewers:
            await viewer.has_three.wait()
        yield viewers
        for viewer in viewers:
            viewer.gone.set()


def test_it_is_made_once_for_all_viewers_with_the_same_rights():
    async def run():
        made = Made()
        live = LiveAnswers(made, period_s=0.05)
        async with watching(live, "all", 5) as viewers:
            events = max((viewer.events() for viewer in viewers), key=len)
            assert made.count <= len(events) + 1
            assert live.viewers == 5
        assert live.viewers == 0

    anyio.run(run)


def test_too_many_viewers_are_given_it_once_or_refused_and_places_become_free():
    async def run():
        made = Made()
        live = LiveAnswers(made, max_viewers=1, period_s=0.01)
        async with watching(live, "all", 1):
            once = await live.answer(asked(BOTH), "all")
            assert once.media_type == "application/json"
            assert json.loads(once.body)["rights"] == "all"
            with pytest.raises(Overloaded, match="ask for JSON each second"):
                await live.answer(asked("text/event-stream"), "all")
        async with watching(live, "own", 1) as [viewer]:
            assert viewer.events()[0]["rights"] == "own"

    anyio.run(run)


def test_each_tenant_is_sent_events_whatever_others_have_taken():
    async def run():
        live = LiveAnswers(Made(), max_viewers=2, period_s=0.01)
        async with watching(live, "ann", 2), watching(live, "bob", 1) as [viewer]:
            assert viewer.events()[0]["rights"] == "bob"
            for tenant in ("ann", "bob"):
                with pytest.raises(Overloaded, match="3 viewers are sent events already"):
                    await live.answer(asked("text/event-stream"), tenant)
        with pytest.raises(Overloaded):
            await LiveAnswers(Made(), 0).answer(asked("text/event-stream"), "ann")

    anyio.run(run)


def test_calls_of_one_asker_wait_for_each_other_and_nobody_else_for_them():
    async def run():
        turns, order, go = Turns(1), [], threading.Event()

        async def ask(asker):
            await turns.run(asker, lambda: go.wait(30) and order.append(asker))

        async with anyio.create_task_group() as group:
            for _ in range(1024):
                group.start_soon(ask, "ann")
            await checkpoint()
            group.start_soon(ask, "bob")
            await checkpoint()
            with pytest.raises(Overloaded, match="1,024 requests of yours wait already"):
                await ask("ann")
            go.set()
        assert order.index("bob") <= 2
        assert len(order) == 1025
        await ask("ann")  # whose line is empty again

    anyio.run(run)


def test_what_one_tenant_asks_for_at_once_keeps_no_figures_from_another(tmp_path, monkeypatch):
    settings = NodeSettings(memory_bytes=128 << 20, tenants=(tenant("ann"), tenant("bob")))
    go, plain = threading.Event(), Node.statistics

    def slow(node, account, *page):
        assert account.name == "bob" or go.wait(30)
        return plain(node, account, *page)

    monkeypatch.setattr(Node, "statistics", slow)

    async def run():
        found, are_refused = [], anyio.Event()
        with Node(settings, (tmp_path.as_uri(),)) as node:
            transport = httpx.ASGITransport(make_app(node))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:

                async def ask(route):
                    found.append((await client.get(route, headers=header("ann"))).status_code)
                    if len(found) == 8:
                        are_refused.set()

                async with anyio.create_task_group() as group:
                    for route in 20 * ["/v1/metrics", "/v1/statistics"]:
                        group.start_soon(ask, route)
                    with anyio.fail_after(30):
                        await are_refused.wait()
                        assert found == 8 * [429], "16 of each wait"
                        for route in ("/v1/metrics", "/v1/statistics"):
                            assert (await client.get(route, headers=header("bob"))).status_code == 200
                    go.set()
            assert Counter(found) == {429: 8, 200: 32}

    anyio.run(run)


def test_what_many_wait_for_is_made_once_more_for_all_of_them():
    async def run():
        made, go, found = [], anyio.Event(), []

        async def make():
            made.append(len(made))
            await go.wait()
            return made[-1]

        once = MadeOnce(make)

        async def get():
            found.append(await once.get())

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(get)
                await anyio.sleep(0.001)
            go.set()
        assert sorted(found) == [0, *[1] * 49]
        assert await once.get() == 2

    anyio.run(run)


def test_each_asker_has_a_part_of_every_round_of_the_event_loop():
    async def run():
        rounds, gone_on = Rounds(2), []
        assert [rounds.take("ann") for _ in range(3)] == [True, True, False]
        for number in range(5):
            rounds.wait("ann", lambda number=number: gone_on.append(number))
        assert rounds.take("bob")
        for count in (2, 4, 5):
            await checkpoint()
            assert len(gone_on) == count
            assert rounds.take("bob"), "whatever waits of another"
            assert not rounds.take("ann") or count == 5
        assert gone_on == [0, 1, 2, 3, 4], "in their order"

    anyio.run(run)


def test_who_does_not_accept_events_is_given_json():
    async def run():
        answer = await LiveAnswers(Made()).answer(asked("*/*"), "all")
        assert json.loads(answer.body) == {"rights": "all", "count": 1}

    anyio.run(run)


def test_what_is_asked_for_meanwhile_is_made_once_more_for_all_and_compressed_once(monkeypatch):
    compressed = []
    monkeypatch.setattr("gzip.compress", lambda body, level: compressed.append(level) or b"small")

    async def run():
        go, count, found = anyio.Event(), 0, []

        async def made(rights):
            nonlocal count
            count += 1
            await go.wait()
            return b"%d" % count

        live = LiveAnswers(made)

        async def ask(coding):
            request = asked("*/*", coding)
            found.append(await live.answer(request, "all"))

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(ask, "br, gzip" if number % 2 else "gzip;q=0")
                await anyio.sleep(0.001)
            go.set()
        assert count == 2, "one was being made when the others were asked for"
        assert {answer.body for answer in found} == {b"1", b"2", b"small"}
        assert len(compressed) == 1
        for answer in found:
            answer.end()

    anyio.run(run)


def test_answers_that_nobody_reads_are_few_and_end(monkeypatch):
    monkeypatch.setattr("frostline.node.http.pages._SILENCE_S", 0.02)

    async def run():
        live = LiveAnswers(Made())
        held = [await live.answer(asked("*/*"), "ann") for _ in range(16)]
        with pytest.raises(Overloaded, match="too many answers"):
            await live.answer(asked("*/*"), "ann")
        held += [await live.answer(asked("*/*"), ("bob", page), "bob") for page in range(16)]
        held.append(await live.answer(asked("*/*"), "cat"))  # of which nobody takes the first
        with pytest.raises(Overloaded, match="too many answers"):
            await live.answer(asked("*/*"), "cat")

        async def send(message):
            if message["type"] == "http.response.body":
                await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            for answer in held:
                group.start_soon(answer, {}, None, send)
        (await live.answer(asked("*/*"), "cat")).end()

    anyio.run(run)


def test_results_that_nobody_reads_are_few_and_end(tmp_path):
    result = tmp_path / "result"
    result.write_bytes(bytes(100_000))
    trainings = Mock(result=lambda name, account: result.open("rb"))
    limiter = anyio.CapacityLimiter(2)
    routes = TrainingRoutes(
        trainings, limiter, ask=lambda asks: asks["who"], length=None, chunks=None, audit=AuditLog(None)
    )

    def one(name):
        scope = {"type": "http", "method": "GET", "path_params": {"id": "a"}, "who": SimpleNamespace(name=name)}
        return routes.fetch_or_stop(Request(scope))

    async def run():
        held = [await one("ann") for _ in range(16)]
        with pytest.raises(Overloaded, match="16 results are being sent to you"):
            await one("ann")
        held.append(await one("bob"))
        viewer = Viewer()
        sent = []

        async def send(message):
            sent.append(message.get("body", b""))

        for answer in held:
            await answer({"type": "http"}, viewer.receive, send)
        assert b"".join(sent) == bytes(100_000 * 17)
        await (await one("ann"))({"type": "http"}, viewer.receive, send)

    anyio.run(run)


def test_a_viewer_that_takes_nothing_is_left(monkeypatch):
    monkeypatch.setattr("frostline.node.http.pages._SILENCE_S", 0.02)

    async def run():
        live, viewer = LiveAnswers(Made(), period_s=0.01), Viewer()

        async def send(message):
            if message["type"] == "http.response.body":
                await anyio.sleep_forever()

        answer = await live.answer(asked(BOTH), "all")
        await answer({}, viewer.receive, send)
        assert live.viewers == 0

    anyio.run(run)


@pytest.mark.promise("apart", mended="whoever was sent events was sent them for ever, though its token had run out")
@pytest.mark.parametrize("end", ["other rights", "no token"])
def test_events_end_where_whoever_is_sent_them_may_see_them_no_more(end):
    async def run():
        live, viewer, now = LiveAnswers(Made(), period_s=0.01), Viewer(), ["all"]

        def again():
            if now[0] is None:
                raise Unauthenticated("that token has run out")
            return now[0]

        answer = await live.answer(asked(BOTH), "all", again=again)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(answer, {}, viewer.receive, viewer.send)
                await viewer.has_three.wait()
                now[0] = "its own" if end == "other rights" else None
        assert live.viewers == 0
        assert {event["rights"] for event in viewer.events()} == {"all"}
        assert viewer.sent[-1]["more_body"] is False

    anyio.run(run)


TENANTS = tenant("ann", sees_all=True, may_change=True), tenant("bob", requests=4)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    needed_browser()
    with a_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    settings = NodeSettings(memory_bytes=96 << 20, tenants=TENANTS)
    with Node(settings, (tmp_path_factory.mktemp("data").as_uri(),)) as node, served(node) as url:
        yield str(url)


def test_weight_and_quotas_are_changed_in_a_row_by_who_may(page, url):
    sign_in(page, url, token_of("ann"))
    before = len(page.errors)
    labels = opened(page, "tenant bob")
    assert labels[:3] == ["Weight", "Requests at once", "Device seconds a second"]
    assert page.value("document.getElementById('change_requests').value") == "4"
    assert axe_findings(page)[0] == []
    typed_over(page, "requests", " ")
    page.until("!document.querySelector('dialog')")
    opened(page, "tenant bob")
    typed_over(page, "weight", "2.5")
    page.until("!document.querySelector('dialog')")
    page.until("document.querySelector('#tenants tr[data-name=bob] td span').textContent === '2.5'")
    said = httpx.get(f"{url}/v1/statistics", headers=header("ann"), timeout=60).json()["tenants"]["bob"]
    assert (said["weight"], said["quotas"]["requests"]) == (2.5, None)
    assert page.errors[before:] == []
    opened(page, "tenant bob")
    typed_over(page, "work_bytes", "none")
    page.until("document.querySelector('dialog [role=alert]').textContent.startsWith('work_bytes takes a whole')")


def test_who_may_not_change_is_shown_no_forms(page, url):
    sign_in(page, url, token_of("bob"))
    assert page.value("document.querySelectorAll('main button').length") == 0
    page.until("at('status').textContent === 'Live, every second.'")
