"""The nouns: samples, features and the frozen graph, as plain values."""

from frostline.core.features import (
    EXACT,
    FLOAT32,
    LOSSY,
    REFERENCE,
    FeatureBatch,
    Levels,
    PackedTensor,
    Route,
    Skipped,
)
from frostline.core.graph import Cut, Dim, Graph, GraphNode, Ref, TensorSpec, Token
from frostline.core.samples import CELLS, OBJECTS, READINGS, URLS, Samples, SampleTable, Targets, View, read_as

__all__ = (
    "CELLS",
    "EXACT",
    "FLOAT32",
    "LOSSY",
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
