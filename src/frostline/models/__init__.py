"""Networks: freeze, trace, cut, ship the prefix, keep the head."""

from frostline.models.cutting import CutNetwork, cut_network
from frostline.models.freeze import freeze
from frostline.models.head import Head

__all__ = ("CutNetwork", "Head", "cut_network", "freeze")
