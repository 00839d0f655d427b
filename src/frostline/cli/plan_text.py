"""What a plan looks like on a terminal: its reason, the table of the cuts, and what it was compared with."""

import click

from frostline.cli.show import print_table
from frostline.core.units import in_bytes, in_percent, in_rate, in_seconds
from frostline.planning import Plan, Situation, engines, table
from frostline.planning.replanning import mixture_in_words
from frostline.training.report.what_if import WhatIfPlan, relative

__all__ = ("print_answer",)


def print_answer(answer: WhatIfPlan, *, every: bool) -> None:
    """Print a plan on stdout.

    Args:
        answer: to show.
        every: one row for each codec of each cut.
    """
    plan, link = answer.plan, answer.plan.link
    made = table(plan, every=every)
    words = {made.columns.index(name) for name in ("after", "codec", "why")}
    asked = answer.measured.asked
    print_table(f"{asked['model']} on {asked['data']}", made.columns, made.rows, left=words)
    # What matters most comes last, where a long table leaves it in sight.
    click.echo(
        f"link: {in_bytes(link.bytes_per_s)}/s, round trip {in_seconds(link.round_trip_s)}; figures are per sample"
    )
    for line in engines(plan):
        click.echo(line)
    if answer.measured.fallback:
        click.echo(f"not cut as it stands: {answer.measured.fallback}")
    if answer.rules:
        _print_rules(answer)
    if answer.what_if:
        click.echo(f"what if: {'; '.join(answer.what_if)}")
    click.echo(f"{plan.reason}.")
    if answer.as_measured is not None:
        _print_as_measured(answer, answer.as_measured)


def _print_as_measured(answer: WhatIfPlan, before: Plan) -> None:
    """Say what changes against the situation as it was measured."""
    share = relative(answer.plan, before)
    beside = "" if share is None else f", {share:.2f} times as many as in the situation as it was measured"
    click.echo(f"{in_rate(answer.plan.mean_samples_per_s)} samples/s{beside}")
    click.echo(f"from {_ways(before, answer.situation)} to {_ways(answer.plan, answer.situation)}")


def _print_rules(answer: WhatIfPlan) -> None:
    rows = []
    for rule in answer.rules:
        share = relative(rule, answer.plan)
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
    return mixture_in_words({one.route: one.share for one in plan.mixture}, situation.cuts)
