"""Decides how deep a window is and how many requests are under way, while it runs. Pure: no clock, no threads."""

from frostline.tuning.auto import AutoTuning, rule_of
from frostline.tuning.periods import NewBounds, Observation, Setting, Steady, TuningRule
from frostline.tuning.prisma import Prisma

__all__ = ("AutoTuning", "NewBounds", "Observation", "Prisma", "Setting", "Steady", "TuningRule", "rule_of")
