"""HAPI's programme, beside an oracle that tries every choice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import Hapi, QueuedRequest, allot_rows


@st.composite
def requests(draw):
    return [
        QueuedRequest(
            number=number,
            tenant="",
            kind=number,
            rows=draw(st.integers(1, 32)),
            run_rows=32,
            bytes_per_row=draw(st.integers(1, 50)),
            model_bytes=draw(st.integers(0, 500)),
        )
        for number in range(draw(st.integers(1, 4)))
    ]


def needed(chosen, asking):
    return sum(item.bytes_per_row * chosen[item.number] + item.model_bytes for item in asking if item.number in chosen)


def best(asking, free_bytes):
    """The most that any choice uses of the memory for rows, and None where no choice is possible."""
    choices = itertools.product(*(range(8, -(-item.rows // 8) * 8 + 1, 8) for item in asking))
    sums = [sum(item.bytes_per_row * rows for item, rows in zip(asking, choice, strict=True)) for choice in choices]
    room = free_bytes - sum(item.model_bytes for item in asking)
    return max((item for item in sums if item <= room), default=None)


@given(requests(), st.integers(0, 5000))
def test_the_programme_uses_all_the_memory_that_a_choice_could_use_and_never_more(asking, free_bytes):
    chosen = allot_rows(asking, free_bytes)
    assert needed(chosen, asking) <= free_bytes
    assert list(chosen) == [item.number for item in asking[: len(chosen)]]
    assert all(8 <= rows <= 32 and rows % 8 == 0 for rows in chosen.values())
    found = best(asking[: len(chosen)], free_bytes) if chosen else None
    if found is not None:
        used = sum(item.bytes_per_row * chosen[item.number] for item in asking[: len(chosen)])
        assert used == pytest.approx(found, rel=1e-3, abs=1)
    if len(chosen) < len(asking):  # one more would not have fitted, even with the smallest batches
        assert best(asking[: len(chosen) + 1], free_bytes) is None


def test_requests_that_find_no_room_wait_for_the_next_round():
    asking = [
        QueuedRequest(number=number, tenant="", kind=number, rows=16, run_rows=32, bytes_per_row=10, model_bytes=100)
        for number in range(4)
    ]
    rule = Hapi(free_bytes=2 * (100 + 160))
    ran = []
    while asking:
        turn = rule.next(asking, lambda _: 0.0)
        (part,) = turn.parts
        ran.append((part.number, part.rows))
        asking = [
            item
            if item.number != part.number
            else QueuedRequest(
                number=item.number,
                tenant="",
                kind=item.kind,
                rows=item.rows - part.rows,
                run_rows=32,
                bytes_per_row=10,
                model_bytes=100,
            )
            for item in asking
            if item.number != part.number or item.rows > part.rows
        ]
    assert sum(rows for _, rows in ran) == 64
    assert [number for number, _ in ran] == sorted(number for number, _ in ran)
    assert {number for number, _ in ran} == {0, 1, 2, 3}


def test_one_that_never_fits_the_programme_runs_in_the_smallest_batches():
    large = QueuedRequest(number=1, tenant="", kind=1, rows=20, run_rows=32, bytes_per_row=10**9)
    turn = Hapi(free_bytes=1000).next([large], lambda _: 0.0)
    assert (turn.parts[0].rows, turn.rows) == (8, 8)
