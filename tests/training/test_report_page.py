"""The report's page, as text and in a real browser."""

import re
from dataclasses import replace

import pytest

from frostline.core import REFERENCE, Skipped
from frostline.core.events import Replanned
from frostline.core.units import in_percent
from frostline.profiles import Trial
from frostline.training.report.page import render_page
from frostline.training.report.report import RouteUsage, WorkLocation
from frostline.transport import NodeUse
from support.pages import (
    HOSTILE,
    asks_for_nothing,
    browse,
    has_colours_of_its_own,
    has_every_target_once,
    overlapping_labels,
    picture_of,
    runs_nothing,
)
from support.plans import a_costless_plan, a_plan
from support.reports import a_report


def a_long_report(epochs=100, steps_per_epoch=400):
    """Of a training that went on until nothing was gained, with the best head long before its end."""
    losses = tuple(1 / (1 + step / 500) + 0.2 * (step % 7) for step in range(epochs * steps_per_epoch))
    val_losses = tuple(0.4 + 0.001 * abs(epoch - 60) for epoch in range(epochs))
    return a_report(
        losses=losses,
        epochs=epochs,
        head_epoch=61,
        epoch_losses=tuple(1 / (1 + epoch) + 0.6 for epoch in range(epochs)),
        val_losses=val_losses,
        val_accuracies=tuple(1.2 - loss for loss in val_losses),
        val_accuracy=0.8,
        held_out="20 % of each class, which also chose the epoch: a little optimistic",
        setup_s=3.2,
        first_step_s=4.56,
    )


def a_hostile_report():
    return a_report(
        model=HOSTILE,
        data=f"file:///{HOSTILE}",
        classes=(HOSTILE,),
        plan=a_plan(1, names={1: HOSTILE}, refused=HOSTILE),
        fallback=HOSTILE,
        ways=(RouteUsage(cut=1, codec=HOSTILE, name=HOSTILE, samples=1),),
        replans=(Replanned(at_s=1.0, samples=1, before=HOSTILE, after=HOSTILE, reason=HOSTILE),),
        stages={HOSTILE: 1.0},
        where=(WorkLocation(part=HOSTILE, where=HOSTILE),),
        nodes=(NodeUse(url=HOSTILE, trouble=HOSTILE),),
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
    shares = [in_percent(item.share) for item in a_plan().mixture]
    for words in (*shares, "73.8 samples/s", "70.1 samples/s", "0.0062", "the link carries 5.00 MB/s"):
        assert words in page


def test_the_page_says_what_each_of_several_nodes_did_and_what_failed():
    nodes = (
        NodeUse(url="http://a:7070", requests=4_321, samples=98_765, retries=17),
        NodeUse(url="http://b:7070", requests=29, samples=31, failures=23, damaged=5, trouble="it is silent <b>"),
    )
    page = render_page(a_report(nodes=nodes))
    for words in ("http://a:7070", "98,765", "4,321", "17", "http://b:7070", "23", "it is silent &lt;b&gt;"):
        assert words in page
    assert "What each node did" not in render_page(a_report(nodes=()))


def test_the_page_of_a_run_without_a_measured_plan_says_where_to_find_one():
    page = render_page(a_report(plan=None))
    assert "frostline plan" in page
    assert '<h2 id="cuts">' not in page


def test_the_page_shows_the_engines_that_were_tried_what_they_lose_and_why_not():
    trials = (
        Trial(engine=REFERENCE, precision="fp32", cut=24, seconds=0.02, why_not="is slower"),
        Trial(engine="halved", precision="bf16", cut=24, seconds=0.008, error=0.0042),
        Trial(engine="<b>absent", precision="fp32", cut=24, why_not="openvino is not installed"),
    )
    plan = replace(a_plan(), engine="halved", trials=trials)
    page = render_page(a_report(plan=plan, engine="halved", engine_error=0.0042, codec_error=0.0))
    for words in ("halved ran the frozen layers", "0.0042", "125", "openvino is not installed", "&lt;b&gt;absent"):
        assert words in page
    assert "Nothing was lost" not in page
    assert "Engines that the node tried" not in render_page(a_report())


def test_draws_a_hundred_epochs_as_small_as_five_and_highlights_the_kept_one():
    long, short = render_page(a_long_report()), render_page(a_report())
    assert len(long) < len(short) + 100_000
    [table] = re.findall(r"<thead><tr><th scope=\"col\">epoch</th>.*?</table>", long, re.DOTALL)
    rows = re.findall(r"<tr[^>]*><th scope=\"row\">(\d+)", table)
    assert len(rows) <= 14
    assert {"1", "61", "100"} <= set(rows)
    assert re.findall(r"<tr class=\"chosen\"><th scope=\"row\">(\d+)", table) == ["61"]


def test_the_page_says_what_was_held_out_and_what_set_up_took():
    page = render_page(a_long_report())
    for words in ("which also chose the epoch", "The head of epoch 61 was kept", "3.20 s", "4.56 s", "100 epochs"):
        assert words in page
    assert "was kept" not in render_page(a_report(head_epoch=5))


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


@pytest.mark.parametrize("report", [a_report(), a_long_report()], ids=["short", "long"])
def test_no_label_of_a_drawing_lies_on_another_in_a_browser(tmp_path, report):
    said = overlapping_labels(tmp_path, render_page(report))
    assert said["found"] == []
    assert said["labels"] > 30


def test_set_up_and_waiting_are_shown_inside_the_whole_time():
    page = render_page(a_report(seconds=40.0, setup_s=10.0, stall_s=20.0))
    [bar] = re.findall(r"<h3>The whole 40.0 s</h3>\s*<div class=\"shares\"[^>]*>(.*?)</div>", page, re.DOTALL)
    assert re.findall(r"width: ([0-9.]+)%", bar) == ["25.00", "50.00", "25.00"]
    for words in (
        "set-up 10.0 s (25.0 %)",
        "waiting for batches 20.0 s (50.0 %)",
        "scoring and saving 10.0 s (25.0 %)",
    ):
        assert words in page
