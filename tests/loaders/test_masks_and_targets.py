"""Masks beside declared targets: a table of images, masks and numbers, through jobs to the losses of plain loops."""

import copy
import io
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import SettingError
from frostline.node.process import start_node
from frostline.ordering import Order
from support import masks
from support.images import tiny_preprocess
from support.signals import array_bytes

ROWS = 12
SCORES = [0.25 * row for row in range(ROWS)]
TARGETS = ("mask", "score", fl.MultiLabel(column="tags"))
TAGS = [["a"] if row % 2 else ["a", "b"] for row in range(ROWS)]


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture
def table(tmp_path):
    """Grey pictures, of which number n has the mask n everywhere, and the score n / 4."""
    columns = {
        "image": [array_bytes(np.full((40, 40), 20 * row, np.uint8)) for row in range(ROWS)],
        "mask": [array_bytes(np.full((40, 40), row, np.uint16)) if row != 4 else None for row in range(ROWS)],
        "score": SCORES,
        "tags": TAGS,
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=5)
    return tmp_path / "x.parquet"


def loading(table, targets=TARGETS, **changes):
    settings = LoaderSettings(samples_per_request=4, device_batch=8, skip_allowance=0.1, **changes)
    return fl.offload(None, fl.Dataset(table, targets=targets), preprocess=tiny_preprocess(), settings=settings)


def rows_of(batch):
    """Which rows came, by their masks, which must be one number each."""
    found = batch.targets["mask"].flatten(1)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}])
def test_a_batch_has_masks_and_columns_by_their_names(table, options):
    with loading(table) as job:
        seen = []
        for batch in job.loader(5, **options):
            rows = rows_of(batch)
            assert list(batch.targets) == ["mask", "score", "tags"]
            assert batch.targets["mask"].shape == (len(rows), 32, 32)
            assert batch.targets["mask"].dtype == torch.int64
            assert batch.targets["score"].tolist() == [SCORES[row] for row in rows]
            assert batch.targets["tags"].tolist() == [[1.0, float(row % 2 == 0)] for row in rows]
            brightness = 64 * batch.features.flatten(1).mean(1) + 127
            assert torch.allclose(brightness / 20, torch.tensor(rows, dtype=torch.float32), atol=0.1)
            seen += rows
        assert sorted(seen) == [row for row in range(ROWS) if row != 4], "the sample without a mask is left out"
        assert [skipped.reason for skipped in job.statistics().skipped] == ["it has no mask"]


def test_kept_features_keep_masks_and_later_epochs_move_nothing(table):
    with loading(table) as job:
        first = [(rows_of(batch), batch.targets["score"].tolist()) for batch in job.loader(5, shuffle=True)]
        moved = job.statistics().wire_bytes
        assert [(rows_of(batch), batch.targets["score"].tolist()) for batch in job.loader(5, shuffle=True)] == first
        assert job.statistics().wire_bytes == moved
        assert job.statistics().from_cache == ROWS - 1


def test_the_mask_alone_is_what_a_data_set_with_masks_gives_undeclared(table):
    with loading(table, "mask") as job, loading(table, None) as other:
        for batch, expected in zip(job.loader(5), other.loader(5), strict=True):
            assert batch.targets.equal(expected.targets)


def test_other_targets_alone_fetch_no_masks(table):
    with loading(table, ["score"]) as job:
        assert [batch.targets["score"].tolist() for batch in job.loader(ROWS)] == [SCORES]
    with loading(table) as job:
        assert all(batch.targets is None for batch in job.loader(5, targets=False))


def halved(sample):
    return replace(sample, target={**sample.target, "mask": sample.target["mask"] // 2})


def test_a_map_sees_masks_beside_the_other_targets(table):
    with loading(table) as job:
        (batch,) = job.loader(ROWS, map=halved)
        assert [2 * row for row in rows_of(batch)] == [row - row % 2 for row in range(ROWS) if row != 4]
        assert batch.targets["score"].tolist() == [score for row, score in enumerate(SCORES) if row != 4]


def test_masks_that_are_not_there_or_not_decoded_are_refused(table, tmp_path):
    with loading(table) as job, pytest.raises(SettingError, match="targets are classes of decoded pixels"):
        job.arrays(5, encoded=True)
    pq.write_table(pq.read_table(table).drop(["mask"]), tmp_path / "y.parquet")
    with pytest.raises(SettingError, match="no column 'mask' for targets"):
        _ = fl.Dataset(tmp_path / "y.parquet", targets=["mask", "score"]).targets
    with pytest.raises(SettingError, match="no column 'mask' for targets"):
        _ = fl.Dataset(table, targets=fl.MultiLabel(column="mask")).targets


class TwoHeads(torch.nn.Module):
    """A decoder to classes of pixels, and a number of the whole image."""

    def __init__(self):
        super().__init__()
        segmenter = masks.Segmenter()
        self.backbone, self.last, self.decoder = segmenter.backbone, segmenter.last, segmenter.decoder
        self.number = torch.nn.Linear(80, 1)

    def forward(self, pixels):
        features = self.backbone(pixels)
        scores = self.last(torch.relu(self.decoder(features)))
        pixels = torch.nn.functional.interpolate(scores, size=(masks.SIDE, masks.SIDE), mode="bilinear")
        return pixels, self.number(torch.tanh(features.mean((2, 3))))[:, 0]


def step(network, optimizer, inputs, classes, numbers):
    pixels, number = network(inputs)
    loss = torch.nn.functional.cross_entropy(pixels, classes, ignore_index=255)
    loss = loss + torch.nn.functional.mse_loss(number, numbers)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def photographs_in_a_table(photographs, tmp_path):
    """Photographs with masks by their brightness and a score of each, as a folder and as a table."""
    folder = masks.photographs_with_masks(photographs, tmp_path / "data", count=10)
    names = sorted(path.name for path in (folder / "images").iterdir())
    images = [(folder / "images" / name).read_bytes() for name in names]
    classes = [np.asarray(masks.classes_of(Image.open(io.BytesIO(data)))) for data in images]
    scores = [float(np.asarray(Image.open(io.BytesIO(data)).convert("L")).mean()) / 255 for data in images]
    columns = {"image": images, "mask": [png(found) for found in classes], "score": scores}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=4)
    return folder, names, scores


def plain_losses(model, folder, names, scores, epochs):
    """The loop of one's own, on files."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.01)
    found = []
    for epoch in range(epochs):
        order = Order(size=len(names), seed=0, epoch=epoch).indices(0, len(names))
        for start in range(0, len(order), 4):
            some = order[start : start + 4].tolist()
            pixels = np.empty((len(some), *masks.MIDDLE.shape), np.float32)
            for place, row in enumerate(some):
                data = (folder / "images" / names[row]).read_bytes()
                masks.decode_into(masks.MIDDLE, data, pixels[place], id=0, view=None)
            classes = [masks.mask_of(folder, names[row], masks.MIDDLE, 0, None) for row in some]
            classes = torch.from_numpy(np.stack(classes).astype(np.int64))
            numbers = torch.tensor([scores[row] for row in some])
            found.append(step(model, optimizer, torch.from_numpy(pixels), classes, numbers))
    return found


@pytest.mark.parametrize("over", ["process", "http"])
def test_a_network_of_two_tasks_learns_what_it_learns_in_a_plain_loop(photographs, tmp_path, over):
    folder, names, scores = photographs_in_a_table(photographs, tmp_path)
    torch.manual_seed(2)
    model = fl.freeze(TwoHeads().train(), "backbone", input_shape=(3, masks.SIDE, masks.SIDE))
    expected = plain_losses(copy.deepcopy(model), folder, names, scores, epochs=2)
    with start_node((tmp_path.as_uri(),), NodeSettings(memory_bytes=1 << 30)) as node:
        data = fl.Dataset(tmp_path / "x.parquet", targets=["mask", "score"])
        near = node.url if over == "http" else None
        with fl.offload(model, data, preprocess=masks.MIDDLE, near=near, accuracy="exact") as job:
            optimizer = torch.optim.SGD(job.head.parameters(), 0.01)
            ours = [
                step(job.head, optimizer, batch.features, batch.targets["mask"], batch.targets["score"])
                for epoch in range(2)
                for batch in job.loader(4, shuffle=True, seed=0, epoch=epoch)
            ]
    # The mean over pixels is summed in the order of memory, which is another one for features that crossed.
    assert ours == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    assert len(ours) == 6
