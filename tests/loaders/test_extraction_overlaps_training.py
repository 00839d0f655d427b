"""A first epoch trains on samples while later ones are extracted, in shuffled order; neither waits for all others."""

from contextlib import closing

import pytest
import torch

from support.images import image_folder
from support.many_nodes import job, some_nodes
from support.nodes import until

COUNT = 96
BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=COUNT // 3, size=(40, 36))


def test_while_the_first_batch_is_trained_all_others_are_extracted_in_shuffled_order(folder, tmp_path):
    with some_nodes(folder, tmp_path, 1) as ([node], urls), job(folder, urls) as running:
        with closing(iter(running.loader(BATCH, shuffle=True, seed=3))) as batches:
            first = next(batches)
            until(lambda: node.statistics().totals.finished >= COUNT // BATCH)  # and the loop takes nothing meanwhile
            found = torch.cat([first.ids, *(batch.ids for batch in batches)]).tolist()
        again = torch.cat([batch.ids for batch in running.loader(BATCH, shuffle=True, seed=3)]).tolist()
    assert found == again != sorted(found)


def test_a_loop_that_is_slow_bounds_what_is_extracted_ahead_by_the_bytes_of_its_window(folder, tmp_path):
    narrow = {"window_bytes": 3 * BATCH * 8 * 15 * 15 * 4, "requests_in_flight": 2}
    nodes = some_nodes(folder, tmp_path, 1)
    with nodes as ([node], urls), job(folder, urls, **narrow) as running:
        batches = iter(running.loader(BATCH, shuffle=True, seed=3))
        next(batches)
        until(lambda: node.statistics().totals.finished >= 2)
        assert node.statistics().totals.finished < COUNT // BATCH
        assert sum(len(batch) for batch in batches) == COUNT - BATCH
