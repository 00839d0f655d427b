"""Decides which neighbouring rows each task has."""

__all__ = ("row_ranges",)

# Neighbouring rows of this many have one owner among the nodes, so no task should have half of them.
_BLOCK = 64


def row_ranges(rows: int, tasks: int, *, min_rows: int) -> list[range]:
    """Neighbouring rows for each task, all of them once; of as many tasks as are wanted, or fewer.

    Args:
        rows: how many there are.
        tasks: how many tasks are wanted.
        min_rows: minimum rows of every task but the last.
    """
    each = max(min_rows, -(-rows // max(1, tasks)))
    each = -(-each // _BLOCK) * _BLOCK
    return [range(start, min(rows, start + each)) for start in range(0, rows, each)]
