"""Graphs made at random out of operators' schemas: what a node takes, it can run. ``make fuzz`` tries more of them."""

import pytest

from support.graph_fuzz import fuzzed

pytestmark = pytest.mark.promise("bounded")

GRAPHS = 150


def test_no_accepted_graph_ends_its_process_or_exceeds_its_memory():
    became, findings = fuzzed(0, GRAPHS)
    assert findings == []
    assert sum(became.values()) == GRAPHS
    assert became["ran"] > GRAPHS // 4
    assert became["refused: UnsafeArtifact"] > GRAPHS // 10
