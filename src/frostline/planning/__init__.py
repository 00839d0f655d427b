"""The plan: which share of the samples takes which cut and codec, why, and what more of each resource would give."""

from frostline.planning.candidates import Candidate
from frostline.planning.choice import fixed, make_plan
from frostline.planning.plan import Plan, Share
from frostline.planning.policies import ALL_IN_STORE, POLICIES
from frostline.planning.situation import Link, Situation
from frostline.planning.text import TextTable, engines, explain, table
from frostline.planning.whatif import vary

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
    "fixed",
    "make_plan",
    "table",
    "vary",
)
