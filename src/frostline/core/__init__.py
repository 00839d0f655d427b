"""The nouns: samples, features and the frozen graph, as plain values."""

from frostline.core.features import FeatureBatch, PackedTensor, Skipped
from frostline.core.graph import Cut, Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.levels import Levels
from frostline.core.readings import CELLS, OBJECTS, READINGS, URLS, read_as
from frostline.core.routes import EXACT, FLOAT32, REFERENCE, Route
from frostline.core.samples import Samples, SampleTable, Targets, View

__all__ = (
    "CELLS",
    "EXACT",
    "FLOAT32",
    "OBJECTS",
    "READINGS",
    "REFERENCE",
    "URLS",
    "Cut",
    "Dim",
    "FeatureBatch",
    "Graph",
    "GraphNode",
    "Levels",
    "PackedTensor",
    "Ref",
    "Route",
    "SampleTable",
    "Samples",
    "Skipped",
    "Targets",
    "TensorSpec",
    "Token",
    "View",
    "read_as",
)
