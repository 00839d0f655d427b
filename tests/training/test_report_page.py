"""The report's page, as text and in a real browser."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from frostline.core import Skipped
from frostline.training.page import render_page
from frostline.training.report import PlanReport, Whereabouts
from support.reports import a_cut, a_plan, a_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
HOSTILE = (
    "</text></svg><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">$\\alpha$&\x07"
)


class Elements(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.attributes = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


def browse(tmp_path, page, *options):
    browser = next(filter(None, map(shutil.which, (os.environ.get("FROSTLINE_BROWSER") or "", *NAMES))), None)
    if browser is None:
        pytest.skip("no Chromium here: see scripts/browser.sh")
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    command = [browser, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", *options, path.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout


def a_hostile_report():
    cuts = (a_cut(0, of=1), a_cut(1, of=1, name=HOSTILE, rejected=HOSTILE))
    return a_report(
        model=HOSTILE,
        data=f"file:///{HOSTILE}",
        classes=(HOSTILE,),
        plan=PlanReport(cut=1, candidates=cuts),
        stages={HOSTILE: 1.0},
        where=(Whereabouts(part=HOSTILE, where=HOSTILE),),
        skipped=(Skipped(id=7, object=HOSTILE, reason=HOSTILE),),
        settings={HOSTILE: [HOSTILE]},
        versions={HOSTILE: HOSTILE},
    )


def test_the_page_asks_for_nothing_from_outside():
    page = render_page(a_report(data="photos"))
    elements = Elements(page)
    assert not {"script", "link", "img", "iframe", "object", "image", "base"} & set(elements.tags)
    assert not re.search(r"https?:|//[a-z]|@import", page)
    assert all(value.startswith("#") for name, value in elements.attributes if name in {"href", "xlink:href", "src"})
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_every_reference_within_the_page_has_its_target_once():
    page = render_page(a_report())
    ids = Elements(page).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"#|url\(#|aria-labelledby=\")([^\")]+)", page)) <= set(ids)


def test_colours_are_the_page_s_own_in_light_and_dark():
    page = render_page(a_report())
    assert "var(--store)" in page
    assert not re.search(r"(fill|stroke): #", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_hostile_names_are_shown_as_text():
    page = render_page(a_hostile_report())
    elements = Elements(page)
    assert not {"script", "img"} & set(elements.tags)
    assert not [name for name, _ in elements.attributes if name.startswith("on")]


@pytest.mark.parametrize(
    "report",
    [
        a_report(losses=(), epoch_losses=(), val_losses=(), val_accuracies=(), val_accuracy=None, epochs=0),
        a_report(plan=PlanReport(cut=0, candidates=()), stages={}, where=(), skipped=(), classes=()),
        a_report(wire_bytes=0, baseline_wire_bytes=0, seconds=0.0, interrupted=True),
        a_report(losses=(float("nan"), float("inf"), 1.0), epoch_losses=(float("nan"),)),
        a_report(epochs=1, val_losses=(0.5,), val_accuracies=(0.5,), epoch_losses=(1.0,)),
        a_report(plan=a_plan(90)),
    ],
    ids=["nothing learned", "nothing known", "interrupted", "diverged", "one epoch", "90 cuts"],
)
def test_every_kind_of_run_has_a_page(report):
    assert render_page(report).rstrip().endswith("</html>")


def test_a_browser_shows_the_figures_and_every_cut(tmp_path):
    dom = browse(tmp_path, render_page(a_report(plan=a_plan(60))), "--dump-dom")
    for words in ("83.7 %", "41.7 s", "5.48 MB", "611 MB", "112 ×", "glass/broken 7.jpg", "the image ends too early"):
        assert words in dom
    assert all(dom.count(f"blocks.{number}.bn2") >= 2 for number in range(2, 61))


def test_a_browser_runs_nothing_that_a_name_brings(tmp_path):
    dom = browse(tmp_path, render_page(a_hostile_report()), "--dump-dom")
    assert "<title>taken" not in dom
    assert "<script" not in dom


def test_a_browser_draws_the_page(tmp_path):
    picture = tmp_path / "page.png"
    browse(tmp_path, render_page(a_report()), f"--screenshot={picture}", "--window-size=1200,1600")
    from PIL import Image

    with Image.open(picture) as image:
        assert image.size == (1200, 1600)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
