"""Arrays in class folders, tars and Parquet files, classified by a network with frozen layers, as a plain loop does."""

import numpy as np
import pytest
import torch

from frostline import Dataset, LoaderSettings, NodeSettings, freeze, loader, offload, preprocess
from frostline.core.events import SampleSkipped
from support.signals import (
    UNTIL,
    job_losses,
    plain_losses,
    rows_by_id,
    small_network,
    some_arrays,
    write_arrays,
)

SHAPE = (3, 40)
SMALL = NodeSettings(memory_bytes=1 << 29, device_batch=8)
STILL = LoaderSettings(follow=False)


def declared():
    return preprocess.array(SHAPE)


def frozen():
    return freeze(small_network(SHAPE[0]), UNTIL, input_shape=declared().inputs)


@pytest.mark.parametrize("kind", ["folders", "tar", "parquet"])
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_losses_of_the_head_are_those_of_a_plain_loop(tmp_path, kind, cut):
    arrays, labels = some_arrays(shape=SHAPE)
    column = write_arrays(tmp_path / "data", kind, arrays, labels)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache", column=column)
    with offload(frozen(), data, preprocess=declared(), cut=cut, settings=STILL, node=SMALL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data, kind), (0, 1))
    np.testing.assert_allclose(losses, plain_losses(frozen(), arrays, labels, orders), atol=1e-5, rtol=0)
    assert sorted(row for rows in orders[: len(orders) // 2] for row in rows) == list(range(len(arrays)))


@pytest.fixture(scope="module")
def node(shared_node, tmp_path_factory):
    """A node in a process of its own, the folder that it serves, and what lies there."""
    folder = tmp_path_factory.mktemp("served")
    arrays, labels = some_arrays(shape=SHAPE)
    write_arrays(folder, "folders", arrays, labels)
    return shared_node.url, folder, arrays, labels


@pytest.mark.parametrize("cut", [None, 1, -1])
def test_a_node_reads_arrays_and_the_second_epoch_moves_no_bytes(node, tmp_path, cut):
    url, folder, arrays, labels = node
    data = Dataset(folder, cache=tmp_path)
    cut = freeze_line(data) if cut == -1 else cut
    with offload(frozen(), data, preprocess=declared(), near=url, cut=cut, settings=STILL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0,))
        received = job.statistics().wire_bytes
        assert received > 0
        more, later = job_losses(job, rows_by_id(data), (1,))
        assert job.statistics().wire_bytes == received
    meant = plain_losses(frozen(), arrays, labels, [*orders, *later])
    np.testing.assert_allclose([*losses, *more], meant, atol=1e-5, rtol=0)


def freeze_line(data):
    with offload(frozen(), data, preprocess=declared(), settings=STILL, node=SMALL) as job:
        return job.frost_line.number


def test_numbers_on_the_node_and_on_the_trainer_are_the_same_to_the_bit(node, tmp_path):
    url, folder, arrays, _ = node
    data = Dataset(folder, cache=tmp_path)
    places = rows_by_id(data)
    with (
        offload(None, data, preprocess=declared(), near=url, settings=STILL) as far,
        offload(None, data, preprocess=declared(), settings=STILL, node=SMALL) as near,
    ):
        for job in (far, near):
            for batch in job.loader(8):
                for id, features in zip(batch.ids.tolist(), batch.features, strict=True):
                    assert features.numpy().tobytes() == arrays[places[id]].tobytes()


def test_passes_whole_numbers_to_a_network_unchanged(tmp_path):
    class Embedded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(20, 6)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, words):
            return self.head(self.words(words).mean(1))

    draw = np.random.default_rng(0)
    arrays, labels = [draw.integers(0, 20, 9).astype(np.int16) for _ in range(16)], [row % 2 for row in range(16)]
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    data, made = Dataset(tmp_path / "data", cache=tmp_path / "cache"), preprocess.array((9,), "int64")
    model, twin = (freeze(Embedded(), "words", input_shape=made.inputs) for _ in range(2))
    with offload(model, data, preprocess=made, settings=STILL, node=SMALL) as job:
        assert job.fallback is None
        losses, orders = job_losses(job, rows_by_id(data), (0,))
    meant = plain_losses(twin, [array.astype(np.int64) for array in arrays], labels, orders)
    np.testing.assert_allclose(losses, meant, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cut", [0, 1])
def test_an_array_of_another_shape_is_skipped_and_named(tmp_path, cut):
    arrays, labels = some_arrays(rows=8, shape=SHAPE)
    write_arrays(tmp_path / "data", "folders", [*arrays[:7], arrays[7].T], labels)
    events, settings = [], LoaderSettings(skip_allowance=0.5, follow=False)
    data = Dataset(tmp_path / "data", cache=tmp_path / "cache")
    asked = {"preprocess": declared(), "settings": settings, "node": SMALL, "observe": events.append}
    with offload(frozen(), data, cut=cut, **asked) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 7
    skipped = next(event for event in events if isinstance(event, SampleSkipped))
    assert skipped.object == "1/007.npy"
    assert "has the shape [40, 3], and the preprocessing says [3, 40]" in skipped.reason


def test_a_job_without_a_model_gives_arrays(tmp_path):
    arrays, labels = some_arrays(rows=8, shape=(5,))
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    batch = next(iter(loader(Dataset(tmp_path / "data", cache=tmp_path), 8, preprocess=preprocess.array((5,)))))
    assert batch.features.shape == (8, 5)
    assert batch.features.dtype == torch.float32
