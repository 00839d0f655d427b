"""Decides how deep a window is and how many requests are under way, while it runs. Pure: no clock, no threads."""

from frostline.tuning.chosen import rule_of
from frostline.tuning.feedback import Following
from frostline.tuning.prisma import Prisma
from frostline.tuning.rule import Rule, Steady
from frostline.tuning.values import Change, Look, Setting

__all__ = ("Change", "Following", "Look", "Prisma", "Rule", "Setting", "Steady", "rule_of")
