"""Decides how deep a window is and how many requests are under way, while it runs. Pure: no clock, no threads."""

from frostline.tuning.chosen import rule_of
from frostline.tuning.feedback import Following
from frostline.tuning.prisma import Prisma
from frostline.tuning.rule import Steady, TuningRule
from frostline.tuning.values import Look, NewBounds, Setting

__all__ = ("Following", "Look", "NewBounds", "Prisma", "Setting", "Steady", "TuningRule", "rule_of")
