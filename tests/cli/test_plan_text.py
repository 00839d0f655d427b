"""A plan on a terminal: the table first, and what matters most at the end."""

from frostline.cli.plan import print_answer
from frostline.planning import POLICIES, table
from frostline.training.what_if import ALL_POLICIES, MeasuredSituation, Question, WhatIf, answer
from support.plans import a_situation


def printed(capsys, question=None, *, every=False, fallback=None, **changes):
    asked = {"data": "s3://photos/[waste]", "model": "timm:resnet18"}
    measured = MeasuredSituation(
        asked=asked, at="2026-11-21T09:30:00+00:00", situation=a_situation(6, **changes), fallback=fallback
    )
    found = answer(measured, question or Question())
    print_answer(found, every=every)
    return found, capsys.readouterr().out


def test_every_row_of_the_table_is_one_line_and_the_reason_comes_last(capsys):
    found, text = printed(capsys)
    lines = [line.split() for line in text.splitlines()]
    for row in table(found.plan).rows:
        assert [word for cell in row for word in cell.split()] in lines
    assert "timm:resnet18 on s3://photos/[waste]" in text
    assert text.rstrip().endswith(f"{found.plan.reason}.")


def test_all_codecs_are_shown_only_where_they_are_asked_for(capsys):
    assert printed(capsys, every=True)[1].count("int8") > 5
    assert "int8" not in printed(capsys)[1]


def test_a_what_if_ends_with_what_changes(capsys):
    found, text = printed(capsys, Question(what_if=WhatIf(bandwidth=125e6)))
    assert "what if: a link of 125 MB/s instead of 5.00 MB/s" in text
    *_, rate, ways = text.rstrip().splitlines()
    assert "times as many as in the situation as it was measured" in rate
    assert ways.startswith("from ")
    assert f"cut {found.plan.cut} " in ways.partition(" to ")[2]


def test_every_rule_has_a_row(capsys):
    _, text = printed(capsys, Question(policy=ALL_POLICIES))
    names = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert [name for name in names if name in POLICIES] == list(POLICIES)


def test_reports_a_network_that_is_cut_between_its_modules(capsys):
    _, text = printed(capsys, fallback="it branches on values")
    assert "not cut as it stands: it branches on values" in text
