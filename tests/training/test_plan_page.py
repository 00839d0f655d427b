"""The plan's page, as text and in a real browser."""

import re

import pytest

from frostline.core.units import in_percent, in_rate
from frostline.planning import POLICIES, table
from frostline.training.report.drawing import PlanView, cuts_plot, rates_plot
from frostline.training.report.plan_page import render_plan_page
from frostline.training.what_if import ALL_POLICIES, MeasuredSituation, Question, WhatIf, answer
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
from support.plans import a_free_situation, a_plan, a_situation

WHAT_IF = Question(policy=ALL_POLICIES, what_if=WhatIf(bandwidth=125e6, nodes=2, epochs=10))


def a_page(situation=None, question=None, *, every=False, fallback=None, **asked):
    about = {"data": "photos/waste", "model": "timm:resnet18", "until": "features", "near": None, "seed": 0, **asked}
    measured = MeasuredSituation(
        asked=about, at="2026-11-21T09:30:00+00:00", situation=situation or a_situation(), fallback=fallback
    )
    return render_plan_page(answer(measured, question or Question()), every=every)


@pytest.fixture(scope="module")
def page():
    return a_page(question=WHAT_IF)


def test_the_page_asks_for_nothing_from_outside(page):
    assert asks_for_nothing(page)


def test_every_reference_within_the_page_has_its_target_once(page):
    assert has_every_target_once(page)


def test_colours_are_the_page_s_own_in_light_and_dark(page):
    assert has_colours_of_its_own(page)


def test_hostile_names_are_shown_as_text():
    hostile = a_situation(3, names={1: HOSTILE}, refused=HOSTILE)
    assert runs_nothing(
        a_page(hostile, data=f"s3://{HOSTILE}", model=HOSTILE, until=HOSTILE, near=HOSTILE, fallback=HOSTILE)
    )


@pytest.mark.parametrize(
    "situation",
    [
        a_free_situation(),
        a_situation(1),
        a_situation(90),
        a_situation(refused="the node has no memory for the network"),
        a_situation(same_host=True, keeps_features=True, epochs=5),
        a_situation(memory_bytes=220_000_000, accuracy=0.01),
    ],
    ids=["no bound", "pixels alone", "90 cuts", "refused", "one machine", "little memory"],
)
def test_every_kind_of_situation_has_a_page(situation):
    assert a_page(situation).rstrip().endswith("</html>")


def test_the_page_says_mixture_bottleneck_prices_and_reasons():
    page, plan = a_page(), a_plan()
    shares = [in_percent(item.share) for item in plan.mixture]
    gains = [in_percent(price / 10) for _, price in plan.prices]
    reasons = {candidate.rejected for candidate in table(plan).candidates if candidate.rejected}
    assert len(shares) == 2
    for words in (*shares, *gains, *reasons, in_rate(plan.samples_per_s), "holds the job back", plan.bottleneck):
        assert words in page


def test_a_question_s_answer_is_on_the_page(page):
    for words in (*POLICIES, "a link of 125 MB/s instead of 5.00 MB/s", "2 nodes", "10 epochs"):
        assert words in page


def test_the_table_has_every_codec_only_where_it_is_asked_for():
    assert a_page(every=True).count("is lossy") > 24
    assert "is lossy" not in a_page()


def test_a_browser_shows_every_cut(tmp_path):
    dom = browse(tmp_path, a_page(a_situation(60)), "--dump-dom")
    assert all(dom.count(f"blocks.{number}.bn2") >= 2 for number in range(2, 61))
    assert "<script" not in dom


def test_a_browser_draws_the_page(tmp_path, page):
    size, colours = picture_of(tmp_path, page)
    assert size == (1200, 1600)
    assert colours > 50


@pytest.mark.parametrize("cuts", [2, 24])
def test_no_label_of_a_drawing_lies_on_another_in_a_browser(tmp_path, cuts):
    said = overlapping_labels(tmp_path, a_page(a_situation(cuts)))
    assert said["found"] == []
    assert said["labels"] > 15


def test_the_cuts_worth_a_look_come_before_the_others_which_are_folded():
    page, plan = a_page(), a_plan()
    first, folded = page.split("<details>")
    count = len(table(plan).candidates)
    assert folded.split("</details>")[0].count('<th scope="row"') == count - len(PlanView.of(plan).rows)
    assert all(way.candidate.name in first.split('<h2 id="table">')[1] for way in PlanView.of(plan).ways)
    assert 4 <= len(PlanView.of(plan).rows) <= 7
    assert "<details>" not in a_page(a_situation(1))


def test_a_rate_without_a_bound_and_a_large_multiple_are_said_plainly():
    page = a_page(a_free_situation(), question=WHAT_IF)
    assert "no bound samples/s" not in page
    assert not re.search(r"\de\+\d", a_page(a_situation(encoded_bytes=30_000_000)))


def test_lines_that_lie_on_each_other_are_drawn_as_one():
    bandwidths, rates = (
        [1e6, 1e7, 1e8],
        {"best": [1.0, 5.0, 9.0], "freeze": [1.0, 5.0, 9.0], "baseline": [1.0, 2.0, 3.0]},
    )
    drawn = rates_plot(bandwidths, rates, measured=1e7)
    assert ">best, freeze<" in drawn
    assert ">baseline<" in drawn
    assert ">freeze<" not in drawn


def test_rates_within_a_decade_stand_between_ticks():
    drawn = rates_plot([1e6, 1e7], {"best": [18.0, 18.0], "baseline": [5.9, 5.9]}, measured=1e6)
    assert all(f">{tick}<" in drawn for tick in ("5", "10", "20"))


def test_bars_of_memory_begin_at_zero():
    drawn = cuts_plot(a_plan(6))
    assert ">0 B<" in drawn
