"""The verb ``plan``: measure every cut of a network on real samples, choose, and show what would be chosen if."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from frostline.cli.options import as_json, command, job_options
from frostline.cli.show import ProgressBar, print_json, print_table, say
from frostline.cli.units import BANDWIDTH, BYTES, TIMES
from frostline.core.errors import OutOfSpace, SettingError
from frostline.core.system import imports_stay
from frostline.core.units import in_bytes, in_percent, in_rate, in_samples_per_s, in_seconds
from frostline.planning import POLICIES, Plan, Situation, engines, table
from frostline.planning.replanning import mixture_in_words
from frostline.training.run_config import make_folder, write_text
from frostline.training.settings import JobSettings
from frostline.training.what_if import (
    ALL_POLICIES,
    MeasuredSituation,
    Question,
    WhatIf,
    WhatIfPlan,
    answer,
    find,
    keep,
    recent_situation,
    relative_speed,
)

__all__ = ("plan", "print_answer")


def print_answer(answer: WhatIfPlan, *, every: bool) -> None:
    """Print a plan on stdout.

    Args:
        answer: the answer to show.
        every: True shows a row for each codec of each cut, not only the best one.
    """
    plan, link = answer.plan, answer.plan.link
    made = table(plan, every=every)
    words = {made.columns.index(name) for name in ("after", "codec", "why")}
    asked = answer.measured.asked
    print_table(f"{asked['model']} on {asked['data']}", made.columns, made.rows, left=words)
    # What matters most comes last, where a long table leaves it in sight.
    say(f"link: {in_bytes(link.bytes_per_s)}/s, round trip {in_seconds(link.round_trip_s)}; figures are per sample")
    for line in engines(plan):
        say(line)
    if answer.measured.fallback:
        say(f"not cut as it stands: {answer.measured.fallback}")
    if answer.rules:
        _print_rules(answer)
    if answer.what_if:
        say(f"what if: {'; '.join(answer.what_if)}")
    say(f"{plan.reason}.")
    if answer.as_measured is not None:
        _print_as_measured(answer, answer.as_measured)


def _print_as_measured(answer: WhatIfPlan, before: Plan) -> None:
    """Say what changes against the situation as it was measured."""
    share = relative_speed(answer.plan, before)
    beside = "" if share is None else f", {share:.2f} times as many as in the situation as it was measured"
    say(f"{in_samples_per_s(answer.plan.mean_samples_per_s)}{beside}")
    say(f"from {_ways(before, answer.situation)} to {_ways(answer.plan, answer.situation)}")


def _print_rules(answer: WhatIfPlan) -> None:
    rows = []
    for rule in answer.rules:
        share = relative_speed(rule, answer.plan)
        rows.append(
            (
                rule.policy,
                in_rate(rule.mean_samples_per_s),
                "-" if share is None else in_percent(share),
                rule.bottleneck,
                _ways(rule, answer.situation),
            )
        )
    columns = ("rule", "samples/s", "of the best", "held back by", "ways")
    print_table("Every rule, in the same situation", columns, rows, left=(0, 3, 4))


def _ways(plan: Plan, situation: Situation) -> str:
    return mixture_in_words({part.route: part.share for part in plan.mixture}, situation.cuts)


@command(epilog="Example: frostline plan --data photos/ --model torchvision:resnet18 --until layer3")
@job_options
@click.option(
    "--policy",
    "rule",
    type=click.Choice((*POLICIES, ALL_POLICIES)),
    default=POLICIES[0],
    show_default=True,
    help="Rule that chooses the cut; 'all' compares every rule with the best one.",
)
@click.option(
    "--bandwidth",
    type=BANDWIDTH,
    metavar="RATE",
    help="Assume a link with this bandwidth: 1Gbit, 100Mbit, 12MB.",
)
@click.option(
    "--store-speed",
    type=TIMES,
    metavar="TIMES",
    help="Assume a node that is this many times as fast, such as 0.5 or 2.",
)
@click.option(
    "--trainer-speed",
    type=TIMES,
    metavar="TIMES",
    help="Assume a trainer that is this many times as fast, such as 0.5 or 2.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Assume this many nodes beside the data, which share the work.",
)
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", help="Assume a job of this many epochs.")
@click.option(
    "--trainer-memory",
    type=BYTES,
    metavar="SIZE",
    help="Assume this much memory at the trainer for the frozen layers that run there.",
)
@click.option(
    "--separate-machines",
    is_flag=True,
    help="Assume that node and trainer have a machine each, like the one that was measured.",
)
@click.option("--measure", is_flag=True, help="Measure again before answering.")
@click.option("--all", "every", is_flag=True, help="Show every codec of every cut, not only the best one.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File to which the plan is drawn as an HTML page.",
)
@as_json
def plan(
    job: JobSettings, rule: str, measure: bool, every: bool, html: Path | None, as_json: bool, **what_if: Any
) -> None:
    """Show where a network is best cut, and the cost of every cut.

    Node and trainer run the network on a few samples, a few samples cross the link, and the seconds, bytes and memory
    are measured. The measurement is kept: what-if questions (--policy, --cut, or another bandwidth, speed, memory,
    number of nodes or epochs) are answered from the latest one without running anything.
    """
    if html is not None:
        make_folder(html.parent)
    question = Question(policy=rule, cut=job.cut, codec=job.codec, what_if=WhatIf(**what_if))
    measured = None if measure or not question.is_asked else find(job)
    if measured is None:
        measured = _measure(job, is_needed=question.is_asked and not measure)
    else:
        say(f"from what was measured at {measured.at}; --measure measures again", err=True)
    answered = answer(measured, question)
    if as_json:
        print_json(answered.to_json())
    else:
        print_answer(answered, every=every)
    if html is not None:
        _draw(answered, html, every=every)


def _draw(answered: WhatIfPlan, html: Path, *, every: bool) -> None:
    from frostline.training.report.plan_page import render_plan_page

    write_text(html, render_plan_page(answered, every=every))
    say(f"drawn in {html}", err=True)


def _measure(job: JobSettings, *, is_needed: bool) -> MeasuredSituation:
    """Measure, and keep what was found for later questions."""
    with imports_stay():
        from frostline.training.setup import measure_first, set_up

    if is_needed:
        say("nothing was measured for this yet: measuring once", err=True)
    # What is asked of a situation is not asked of the job that measures it: it runs nothing.
    bare = replace(job, cut=None, codec=None)
    with ProgressBar() as progress, set_up(measure_first(bare), progress) as setup:
        situation, fallback = setup.job.situation, setup.job.fallback
    assert situation is not None, "a job with a network has a situation"
    measured = recent_situation(bare, situation, fallback=fallback)
    try:
        keep(measured)
    except (OutOfSpace, SettingError) as error:
        say(f"the measurement is not kept for later questions: {error}", err=True)
    return measured
