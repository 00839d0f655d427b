"""Graphs made at random out of operators' schemas: what a node takes, it can run. ``make fuzz`` tries more of them."""

import pytest

from support.graph_fuzz import fuzzed

pytestmark = pytest.mark.promise("bounded")

GRAPHS = 150


def test_no_graph_that_is_taken_ends_its_process_or_takes_more_memory_than_was_reckoned():
    became, findings = fuzzed(0, GRAPHS)
    assert findings == []
    assert sum(became.values()) == GRAPHS
    assert became["ran"] > GRAPHS // 4
    assert became["refused: UnsafeArtifact"] > GRAPHS // 10
