"""Ranges that are read together: all that was asked for comes back, and what is read in vain is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from frostline.stores.reads import Range, plan_ranges

OBJECT = bytes(range(256)) * 4
ranges = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 124)).map(lambda item: Range(*item)), max_size=40)


def found(plan):
    """The asked ranges, out of what is read."""
    read = [OBJECT[read.offset : read.stop] for read in plan.reads]
    return [read[part.read][part.start : part.start + part.length] if part.length else b"" for part in plan.pieces]


@given(ranges, st.integers(0, 100), st.integers(1, 400))
def test_cuts_requested_ranges_out_of_larger_reads(asked, gap, maximum):
    plan = plan_ranges(asked, max_gap_bytes=gap, max_bytes=maximum)
    assert found(plan) == [OBJECT[request.offset : request.stop] for request in asked]
    assert len(plan.reads) <= len([request for request in asked if request.length])


@given(ranges, st.integers(0, 100), st.integers(1, 400))
def test_no_read_is_larger_than_allowed_or_bridges_more_than_a_gap(asked, gap, maximum):
    plan = plan_ranges(asked, max_gap_bytes=gap, max_bytes=maximum)
    assert all(read.length for read in plan.reads)
    largest = max((request.length for request in asked), default=0)
    wanted = {byte for request in asked for byte in range(request.offset, request.stop)}
    for item in plan.reads:
        assert item.length <= max(maximum, largest)
        idle = "".join("x" if byte in wanted else "-" for byte in range(item.offset, item.stop)).split("x")
        assert max(len(run) for run in idle) <= gap


@given(ranges)
def test_neighbours_that_may_be_joined_are(asked):
    plan = plan_ranges(asked, max_gap_bytes=len(OBJECT), max_bytes=len(OBJECT))
    assert len(plan.reads) <= 1


@given(ranges, st.integers(1, 400))
def test_without_a_gap_nothing_is_read_in_vain(asked, maximum):
    plan = plan_ranges(asked, max_gap_bytes=0, max_bytes=maximum)
    wanted = {byte for request in asked for byte in range(request.offset, request.stop)}
    assert {byte for read in plan.reads for byte in range(read.offset, read.stop)} == wanted
