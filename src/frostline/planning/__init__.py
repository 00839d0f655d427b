"""The plan: which share of the samples takes which cut and codec, why, and what more of each resource would give."""

from frostline.planning.candidates import ALL_IN_STORE, POLICIES, Candidate
from frostline.planning.plan import Plan, Share, TextTable, engines, explain, make_plan, plan_at_cut, table
from frostline.planning.replanning import vary
from frostline.planning.situation import Link, Situation

__all__ = (
    "ALL_IN_STORE",
    "POLICIES",
    "Candidate",
    "Link",
    "Plan",
    "Share",
    "Situation",
    "TextTable",
    "engines",
    "explain",
    "make_plan",
    "plan_at_cut",
    "table",
    "vary",
)
