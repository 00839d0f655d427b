"""Predictions find the rows of their samples near where the last ones stood, whatever the size of the data set."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from frostline.training.predict import next_rows


class Watched:
    """Ids of a table, and the longest stretch of them that was looked at."""

    def __init__(self, ids):
        self.ids, self.longest = ids, 0

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, rows):
        found = self.ids[rows]
        self.longest = max(self.longest, len(found))
        return found


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=1), st.integers(1, 7), st.data())
def test_rows_are_those_of_the_ids_also_where_samples_are_left_out(ids, size, data):
    ids = np.array(ids)
    kept = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    begin, found = 0, []
    for place in range(0, len(kept), size):
        rows = next_rows(ids, ids[kept[place : place + size]], begin)
        begin = int(rows[-1]) + 1
        found.extend(rows.tolist())
    assert found == kept.tolist()


def test_of_a_long_table_a_batch_looks_at_a_stretch_alone():
    ids = Watched(np.random.default_rng(0).permutation(1_000_000))
    kept = np.delete(np.arange(500_000, 500_064), [3, 7, 8])
    assert next_rows(ids, ids.ids[kept], 500_000).tolist() == kept.tolist()
    assert ids.longest <= 128
