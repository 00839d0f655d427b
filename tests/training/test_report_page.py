"""The report's page, as text and in a real browser."""

from dataclasses import replace

import pytest

from frostline.core import REFERENCE, Skipped
from frostline.core.amounts import in_percent
from frostline.events import Replanned
from frostline.profiles import Trial
from frostline.training.page import render_page
from frostline.training.report import WayTaken, Whereabouts
from support.pages import (
    HOSTILE,
    asks_for_nothing,
    browse,
    has_colours_of_its_own,
    has_every_target_once,
    picture_of,
    runs_nothing,
)
from support.plans import a_costless_plan, a_plan
from support.reports import a_report


def a_hostile_report():
    return a_report(
        model=HOSTILE,
        data=f"file:///{HOSTILE}",
        classes=(HOSTILE,),
        plan=a_plan(1, names={1: HOSTILE}, refused=HOSTILE),
        fallback=HOSTILE,
        ways=(WayTaken(cut=1, codec=HOSTILE, name=HOSTILE, samples=1),),
        replans=(Replanned(at_s=1.0, samples=1, before=HOSTILE, after=HOSTILE, reason=HOSTILE),),
        stages={HOSTILE: 1.0},
        where=(Whereabouts(part=HOSTILE, where=HOSTILE),),
        skipped=(Skipped(id=7, object=HOSTILE, reason=HOSTILE),),
        settings={HOSTILE: [HOSTILE]},
        versions={HOSTILE: HOSTILE},
    )


def test_the_page_asks_for_nothing_from_outside():
    assert asks_for_nothing(render_page(a_report(data="photos")))


def test_every_reference_within_the_page_has_its_target_once():
    assert has_every_target_once(render_page(a_report()))


def test_colours_are_the_page_s_own_in_light_and_dark():
    assert has_colours_of_its_own(render_page(a_report()))


def test_hostile_names_are_shown_as_text():
    assert runs_nothing(render_page(a_hostile_report()))


@pytest.mark.parametrize(
    "report",
    [
        a_report(losses=(), epoch_losses=(), val_losses=(), val_accuracies=(), val_accuracy=None, epochs=0),
        a_report(stages={}, where=(), skipped=(), classes=(), ways=(), replans=()),
        a_report(plan=a_costless_plan(), predicted_samples_per_s=None, measured_samples_per_s=None, codec_error=0.0),
        a_report(wire_bytes=0, baseline_wire_bytes=0, seconds=0.0, interrupted=True),
        a_report(losses=(float("nan"), float("inf"), 1.0), epoch_losses=(float("nan"),)),
        a_report(epochs=1, val_losses=(0.5,), val_accuracies=(0.5,), epoch_losses=(1.0,)),
        a_report(plan=a_plan(90)),
    ],
    ids=["nothing learned", "nothing known", "no bound", "interrupted", "diverged", "one epoch", "90 cuts"],
)
def test_every_kind_of_run_has_a_page(report):
    assert render_page(report).rstrip().endswith("</html>")


def test_the_page_says_how_the_samples_came_and_what_was_lost():
    page = render_page(a_report())
    shares = [in_percent(one.share) for one in a_plan().mixture]
    for words in (*shares, "73.8 samples/s", "70.1 samples/s", "0.0062", "the link carries 5.00 MB/s"):
        assert words in page


def test_the_page_shows_the_engines_that_were_tried_what_they_lose_and_why_not():
    trials = (
        Trial(engine=REFERENCE, precision="fp32", cut=24, seconds=0.02, why_not="is slower"),
        Trial(engine="halved", precision="16-bit", cut=24, seconds=0.008, error=0.0042),
        Trial(engine="<b>absent", precision="fp32", cut=24, why_not="openvino is not installed"),
    )
    plan = replace(a_plan(), engine="halved", trials=trials)
    page = render_page(a_report(plan=plan, codec_error=0.0))
    for words in ("halved ran the frozen layers", "0.0042", "125", "openvino is not installed", "&lt;b&gt;absent"):
        assert words in page
    assert "Nothing was lost" not in page
    assert "Engines that the node tried" not in render_page(a_report())


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
    size, colours = picture_of(tmp_path, render_page(a_report()))
    assert size == (1200, 1600)
    assert colours > 50
