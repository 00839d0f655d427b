"""Changing tenants of a node on its page, by keyboard, in a real browser."""

import httpx
import pytest

from frostline.core.config import NodeSettings
from frostline.node import Node
from support.browser import a_browser
from support.nodes import served
from support.pages import axe_findings, needed_browser, opened, sign_in, typed_over
from support.tenants import header, tenant, token_of

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
