"""Changing a control plane on its page, by keyboard, in a real browser."""

import hashlib

import httpx
import pytest

from frostline.control.messages import ControlAnswer, ControlledStage
from frostline.control.settings import ControlTenant
from frostline.control.shares import Amounts
from support.browser import a_browser
from support.control_planes import Clock, control_plane
from support.pages import axe_findings, needed_browser, opened, sign_in, typed_over

CAPACITY = {"bytes_per_s": 1000.0, "requests": 64.0}
BUTTONS = "document.querySelectorAll('main button').length"
ALERT = "document.querySelector('dialog [role=alert]')?.textContent"


def tenant(name, **rights):
    return ControlTenant(name=name, token_sha256=hashlib.sha256(f"{name}-token".encode()).hexdigest(), **rights)


TENANTS = tenant("ann", sees_all=True, may_change=True), tenant("bob")


def header(name):
    return {"Authorization": f"Bearer {name}-token"}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    needed_browser()
    with a_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def url(tmp_path):
    with control_plane(tmp_path, Clock(), tenants=TENANTS, **CAPACITY) as (url, _):
        for name in ("ann", "bob"):
            stage = ControlledStage(stage="w", job="night")
            report = stage.report(Amounts()).to_json()
            answer = httpx.post(f"{url}/v1/stages", json=report, headers=header(name), timeout=60).json()
            stage.take(ControlAnswer.from_json(answer), 0.0)
        yield url


def view(url, name="ann"):
    return httpx.get(f"{url}/v1/view", headers=header(name), timeout=60).json()


def test_a_weight_is_changed_in_its_row_and_a_refusal_is_shown_as_the_server_says_it(page, url):
    sign_in(page, url, "ann-token")
    assert opened(page, "tenant bob") == ["Weight"]
    typed_over(page, "weight", "0")
    page.until(ALERT)
    assert page.value(ALERT) == "the weight of tenant bob must be from 0.001 to 1000, not 0"
    before = len(page.errors)
    typed_over(page, "weight", "2.5")
    page.until("!document.querySelector('dialog')")
    assert view(url)["tenants"][1] == {"tenant": "bob", "weight": 2.5, "changed": ["weight"]}
    page.until("document.querySelector('#tenants tr[data-name=\"bob\"] td span').textContent === '2.5'")
    assert page.value("document.activeElement.getAttribute('aria-label')") == "Change tenant bob"
    said = page.until(
        "document.querySelector('#events li span')?.textContent.includes('weight') && at('events').innerText"
    )
    assert "ann changed the weight of tenant bob from 1 to 2.5" in said
    assert page.errors[before:] == []


def test_jobs_and_capacities_are_changed_and_an_empty_field_goes_back_to_the_file(page, url):
    sign_in(page, url, "ann-token")
    labels = opened(page, "job night of bob")
    assert labels[:2] == ["Weight", "Priority"]
    typed_over(page, "priority", "7")
    page.until("!document.querySelector('dialog')")
    assert [job["priority"] for job in view(url)["jobs"]] == [0, 7]
    for words, amount in (("500", 500), (" ", 1000)):
        opened(page, "bytes a second")
        typed_over(page, "bytes_per_s", words)
        page.until("!document.querySelector('dialog')")
        assert view(url)["capacity"]["bytes_per_s"] == amount
        page.until(f"last().capacity.bytes_per_s === {amount}")
    opened(page, "bytes a second")
    page.press("Escape")
    page.until("!document.querySelector('dialog')")
    assert view(url)["changed"] == []


def test_who_may_not_change_is_shown_no_forms_and_its_own_events(page, url):
    sign_in(page, url, "bob-token")
    assert page.value(BUTTONS) == 0
    assert page.value("at('events').innerText").count("joined") == 1
    assert [event["tenant"] for event in view(url, "bob")["events"]] == ["bob"]


@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_of_weight_beside_an_open_form_on_a_phone(page, url, is_dark):
    page.size(360, 740, is_dark=is_dark)
    sign_in(page, url, "ann-token")
    bad, passed = axe_findings(page)
    assert (bad, passed > 10) == ([], True)
    opened(page, "job night of bob")
    bad, passed = axe_findings(page)
    assert (bad, passed > 5) == ([], True)
    assert page.value("document.documentElement.scrollWidth") <= 360
    page.press("Escape")


def test_figures_are_sent_and_asked_for_where_there_are_too_many_viewers(page, url, monkeypatch):
    sign_in(page, url, "bob-token")
    page.until("at('status').textContent === 'Live, every second.'")
    page.visit("about:blank")
    monkeypatch.setattr("frostline.node.http.pages.LiveAnswers.is_full", lambda *_: True)
    sign_in(page, url, "bob-token")
    page.until("at('status').textContent === 'Read every second.' && seen.length > 2")
