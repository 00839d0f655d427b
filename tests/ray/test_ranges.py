"""Tasks have neighbouring rows, all rows are in one of them, and no block of an owner is divided."""

from hypothesis import given
from hypothesis import strategies as st

from frostline.ray.tasks import row_ranges


@given(rows=st.integers(0, 20_000), tasks=st.integers(0, 300), min_rows=st.integers(1, 1_000))
def test_every_row_is_in_one_task_and_tasks_are_large_enough(rows, tasks, min_rows):
    found = row_ranges(rows, tasks, min_rows=min_rows)
    assert [row for some in found for row in some] == list(range(rows))
    assert len(found) <= max(1, tasks)
    assert all(len(some) >= min_rows for some in found[:-1])
    assert all(some.start % 64 == 0 for some in found)


def test_large_data_is_divided_as_it_is_asked_for():
    assert [len(some) for some in row_ranges(1000, 4, min_rows=1)] == [256, 256, 256, 232]
