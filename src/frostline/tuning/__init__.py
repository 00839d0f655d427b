"""Decides how deep a window is and how many requests are under way, while it runs. Pure: no clock, no threads."""

from frostline.tuning.feedback import Following, rule_of
from frostline.tuning.prisma import Prisma
from frostline.tuning.values import Look, NewBounds, Setting, Steady, TuningRule

__all__ = ("Following", "Look", "NewBounds", "Prisma", "Setting", "Steady", "TuningRule", "rule_of")
