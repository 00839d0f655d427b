"""Renders a plan as one page that needs nothing else: no script, no request, by day, by night and on paper."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from frostline.core.units import in_bytes, in_samples_per_s, in_seconds
from frostline.planning import Plan, Situation, make_plan, vary
from frostline.planning.replanning import mixture_in_words
from frostline.training.report.drawing import PlanView, rates_plot, render
from frostline.training.what_if import WhatIfPlan, relative_speed

__all__ = ("last_part", "render_plan_page")

# Rules to draw beside the best one: everything here, everything there, and the fewest bytes are what people try.
_DRAWN = ("best", "baseline", "freeze", "neurosurgeon")
# The drawn bandwidths reach this many times below and above the plan's own.
_REACH = 100
_BANDWIDTHS = 25
_AS_MEASURED = "as measured"


def render_plan_page(answer: WhatIfPlan, *, every: bool = False) -> str:
    """The whole page as HTML.

    Args:
        answer: the answer to show.
        every: True if the table has a row for every codec of every cut.
    """
    plan, situation, asked = answer.plan, answer.situation, answer.measured.asked
    view = PlanView.of(plan, memory_bytes=situation.memory_bytes, every=every)
    return render(
        "plan",
        {
            "title": f"{asked['model']} on {last_part(asked['data'])}",
            "answer": answer,
            "asked": asked,
            "measured_at": answer.measured.at.replace("T", " ").replace("+00:00", " UTC"),
            "change": None if answer.as_measured is None else relative_speed(plan, answer.as_measured),
            "view": view,
            "gain": _gain(plan, view.encoded.samples_per_s),
            "comparisons": _comparisons(answer),
            "rates": "" if math.isinf(plan.link.bytes_per_s) else _rates(situation),
            "situation": _in_words(situation),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A table's row about another plan; ``share`` is of the fastest row."""

    name: str
    samples_per_s: float
    share: float
    relative: float | None
    bottleneck: str
    ways: str
    is_chosen: bool


def _comparisons(answer: WhatIfPlan) -> list[_Comparison]:
    named = [(rule.policy, rule) for rule in answer.rules] or [("this plan", answer.plan)]
    if answer.as_measured is not None:
        named.append((_AS_MEASURED, answer.as_measured))
    if len(named) == 1:
        return []
    maximum = max((plan.mean_samples_per_s for _, plan in named), default=1.0)
    return [
        _Comparison(
            name=name,
            samples_per_s=plan.mean_samples_per_s,
            share=1.0 if math.isinf(maximum) else plan.mean_samples_per_s / maximum,
            relative=relative_speed(plan, answer.plan),
            bottleneck=plan.bottleneck,
            ways=mixture_in_words({way.route: way.share for way in plan.mixture}, answer.situation.cuts),
            is_chosen=plan.policy == answer.plan.policy and name != _AS_MEASURED,
        )
        for name, plan in named
    ]


def _rates(situation: Situation) -> str:
    middle = situation.link.bytes_per_s
    bandwidths = np.geomspace(middle / _REACH, middle * _REACH, _BANDWIDTHS).tolist()
    others = [vary(situation, bandwidth=bandwidth) for bandwidth in bandwidths]
    rates = {name: [make_plan(other, name).samples_per_s for other in others] for name in _DRAWN}
    return rates_plot(bandwidths, rates, measured=middle)


def _gain(plan: Plan, plain_samples_per_s: float) -> float | None:
    if math.isinf(plan.samples_per_s) or math.isinf(plain_samples_per_s):
        return None
    return plan.samples_per_s / plain_samples_per_s


def _in_words(situation: Situation) -> Mapping[str, str]:
    link, frost_line = situation.link, situation.cuts[-1].number
    said = {
        "link": f"{in_bytes(link.bytes_per_s)}/s, round trip {in_seconds(link.round_trip_s)}",
        "encoded image": in_bytes(situation.encoded_bytes),
        "store side": f"{situation.store.hardware}, {_rate_of(situation.store.cuts[frost_line].seconds)}",
        "trainer": f"{situation.trainer.hardware}, {_rate_of(situation.trainer.cuts[frost_line].seconds)}",
        "one machine": "yes: both sides share its cores" if situation.same_host else "no",
        "nodes": str(situation.nodes),
        "memory of a node": in_bytes(situation.memory_bytes),
        "epochs": f"{situation.epochs}{', features kept in between' if situation.keeps_features else ''}",
        "accuracy": str(situation.accuracy),
    }
    return {**said, "refused": situation.refused} if situation.refused else said


def _rate_of(seconds: float) -> str:
    """How many samples a second a side alone would bring to the frost line."""
    return f"{in_samples_per_s(1 / seconds)} to the frost line" if seconds > 0 else "no time at all"


def last_part(url: str) -> str:
    """The end of a URL or path, to name it in a title."""
    return re.split(r"[/\\]", url.rstrip("/\\"))[-1] or url
