"""The nouns: samples, features and the frozen graph, as plain values."""

from frostline.core.features import FeatureBatch, Skipped
from frostline.core.graph import Cut, Dim, Graph, Node, Ref, Token
from frostline.core.samples import Samples, View

__all__ = ("Cut", "Dim", "FeatureBatch", "Graph", "Node", "Ref", "Samples", "Skipped", "Token", "View")
