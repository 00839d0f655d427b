"""Masks and declared targets of a batch belong to its features, whatever way those took.

Segmentation through a job: the masks of a batch belong to its features, whatever way those took.

Declared targets and functions of samples in loops: each batch has what the table says of its own samples.

Masks beside declared targets: a table of images, masks and numbers, through jobs to the losses of plain loops.
"""

import copy
import io
import uuid
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, SettingError, TooManySkipped
from frostline.datasets.copy.repack import repack
from frostline.loaders import WorkerLoader
from frostline.node import Node
from frostline.node.process import start_node
from frostline.ordering import Order
from support import masks
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import tiny_preprocess
from support.matrices import sampled
from support.nodes import served
from support.signals import array_bytes

NODE = NodeSettings(memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def folder(photographs, tmp_path_factory):
    return masks.photographs_with_masks(photographs, tmp_path_factory.mktemp("segmentation") / "data")


@pytest.fixture(scope="module")
def segmenter():
    torch.manual_seed(2)
    return fl.freeze(masks.Segmenter().train(), "backbone", input_shape=(3, masks.SIDE, masks.SIDE))


def trained(model, url, preprocess, near=None, epochs=2, settings=None):
    with fl.offload(copy.deepcopy(model), fl.Dataset(url), preprocess=preprocess, near=near, settings=settings) as job:
        return masks.through(job, epochs=epochs)


@pytest.mark.parametrize("preprocess", [masks.MIDDLE, masks.RANDOM], ids=["middle", "random"])
def test_a_decoder_learns_through_a_node_what_it_learns_from_files(folder, segmenter, preprocess, shared_node):
    data = fl.Dataset(folder)
    twin = copy.deepcopy(segmenter)
    ours = trained(segmenter, folder, preprocess, shared_node.url)
    plain = masks.losses(twin, folder, data, preprocess, epochs=2)
    assert len(ours) == 6
    assert ours == plain
    assert plain[-1] < plain[0]


def test_the_losses_from_s3_are_those_from_a_folder(folder, segmenter, s3, monkeypatch):
    s3.put_folder(folder, "segmentation")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert trained(segmenter, "s3://segmentation", masks.RANDOM) == trained(segmenter, folder, masks.RANDOM)


def test_the_losses_from_a_table_whose_labels_are_masks_are_those_from_a_folder(folder, segmenter, cql, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    table = f"{KEYSPACE}.segmentation"
    with cql.session() as session:
        session.execute(f"CREATE TABLE {table} (id uuid PRIMARY KEY, name text, label blob, data blob)")
        put = f"INSERT INTO {table} (id, name, label, data) VALUES (%s, %s, %s, %s)"
        for image in sorted((folder / "images").iterdir()):
            (mask,) = (folder / "masks").glob(f"{image.stem}.*")
            session.execute(put, (uuid.uuid4(), f"images/{image.name}", mask.read_bytes(), image.read_bytes()))
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/segmentation?protocol=3"
    data = fl.Dataset(url)
    with start_node((data.url,), NODE) as node:
        ours = trained(segmenter, url, masks.RANDOM, node.url)
    assert ours == trained(segmenter, folder, masks.RANDOM)


@pytest.fixture
def small(tmp_path):
    """Twelve small grey pictures, of which number n has the mask n everywhere."""
    folder = tmp_path / "data"
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for number in range(12):
        np.save(folder / "images" / f"{number:02}.npy", np.full((40, 40), 20 * number, np.uint8))
        np.save(folder / "masks" / f"{number:02}.npy", np.full((40, 40), number, np.uint16))
    return folder


def of(batches):
    """Which masks came, one number a sample; each must be one number."""
    found = [batch.targets.flatten(1) for batch in batches]
    assert all((item == item[:, :1]).all() for item in found)
    return [item[:, 0].tolist() for item in found]


def settings_for(folder, **changes):
    return LoaderSettings(samples_per_request=4, device_batch=8, **changes)


def loading(folder, **changes):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings_for(folder, **changes))


def test_a_plain_loader_gives_masks_beside_pixels(small):
    with loading(small) as job:
        (batch, *_) = job.loader(5)
        assert batch.targets.shape == (5, 32, 32)
        assert batch.targets.dtype == torch.int64
        assert batch.to("cpu").targets.equal(batch.targets)
        assert of(job.loader(5)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
        order = of(job.loader(12, shuffle=True, seed=1))[0]
        assert sorted(order) == list(range(12))
        assert order != sorted(order)


@pytest.mark.parametrize("format", ["original", "webdataset", "parquet"])
def test_masks_belong_to_their_images_in_every_format(small, tmp_path, format):
    repack(fl.Dataset(small), tmp_path / "copy", format, part_bytes=1 << 14, on_event=print)
    with loading(tmp_path / "copy") as job:
        for batch in job.loader(5, shuffle=True, seed=2):
            brightness = 64 * batch.features.flatten(1).mean(1) + 127
            assert torch.allclose(brightness / 20, batch.targets[:, 0, 0].float(), atol=0.1)


def test_a_part_of_the_data_has_its_own_masks(small):
    with loading(small) as job:
        part = fl.Dataset(small).take(np.array([7, 3, 5]))
        assert of(job.loader(2, data=part)) == [[7, 3], [5]]


def test_masks_are_optional(small):
    with loading(small) as job:
        assert all(batch.targets is None for batch in job.loader(5, targets=False))
        with pytest.raises(SettingError, match="FeatureMixup"):
            next(iter(job.loader(5, augment=fl.FeatureMixup())))
        assert all(batch.mixed for batch in job.loader(5, targets=False, augment=fl.FeatureMixup()))


def test_samples_without_masks_have_no_targets(tmp_path):
    (tmp_path / "cat").mkdir()
    np.save(tmp_path / "cat" / "1.npy", np.zeros((40, 40), np.uint8))
    with loading(tmp_path) as job:
        assert next(iter(job.loader(1))).targets is None
        with pytest.raises(SettingError, match="has no masks"):
            job.loader(1, targets=True)


def test_cached_features_keep_their_masks_and_notice_a_changed_one(small, tmp_path):
    kept = {"cache_folder": str(tmp_path / "kept")}
    with loading(small, **kept) as job:
        first = of(job.loader(5, shuffle=True, seed=3))
        assert of(job.loader(5, shuffle=True, seed=3)) == first
        statistics = job.statistics()
        assert statistics.from_cache == 12
    with loading(small, **kept) as job:
        assert of(job.loader(12)) == [list(range(12))]
        assert job.statistics().from_cache == 12
    np.save(small / "masks" / "04.npy", np.full((40, 40), 44, np.uint16))
    with loading(small, **kept) as job:
        assert of(job.loader(12)) == [[0, 1, 2, 3, 44, *range(5, 12)]]
        assert job.statistics().from_cache == 11
        assert all(batch.targets is None for batch in job.loader(5, targets=False))


REASONS = {
    "the mask has 20 x 40 pixels and its image 40 x 40": np.zeros((40, 20), np.uint8),
    "is no mask: one is [H, W] of whole numbers": np.zeros((40, 40, 3), np.uint8),
    "it has no mask": None,
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("over", ["process", "http"])
def test_a_sample_without_a_good_mask_is_left_out_and_named(small, reason, over):
    place = small / "masks" / "05.npy"
    place.unlink()
    if REASONS[reason] is not None:
        np.save(place, REASONS[reason])
    with Node(NodeSettings(device_batch=8), (small.as_uri(),)) as node, served(node) as url:
        near = url if over == "http" else None
        settings = settings_for(small, max_skipped_fraction=0.1)
        data = fl.Dataset(small)
        with fl.offload(None, data, preprocess=tiny_preprocess(), near=near, settings=settings) as job:
            for _ in range(2):
                assert of(job.loader(4)) == [[0, 1, 2, 3], [4, 6, 7, 8], [9, 10, 11]]
            (skipped,) = job.statistics().skipped
            assert reason in skipped.reason
            assert skipped.object.endswith("05.npy")
        with loading(small, max_skipped_fraction=0.0) as job, pytest.raises(TooManySkipped, match=r"05\.npy"):
            list(job.loader(4))


def test_a_mask_that_changes_behind_a_job_is_left_out(small):
    with loading(small) as job:
        np.save(small / "masks" / "05.npy", np.full((40, 40), 9, np.uint16))
        assert of(job.loader(12)) == [[0, 1, 2, 3, 4, *range(6, 12)]]
        (skipped,) = job.statistics().skipped
        assert skipped.object == "masks/05.npy"
        assert "changed" in skipped.reason


def test_leaving_an_epoch_early_leaves_nothing_behind(small):
    with loading(small) as job:
        for _ in range(3):
            next(iter(job.loader(2)))
        assert of(job.loader(12)) == [list(range(12))]


ROWS, BATCH = 22, 4
PIXELS = tiny_preprocess()
ALL = ["score", "count", "vector", "tags", "boxes", "caption"]


def image_bytes(seed):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (18, 20, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def table():
    draw = np.random.default_rng(3)
    return {
        "score": [float(number) for number in draw.normal(size=ROWS).astype(np.float32)],
        "count": draw.integers(-5, 5, ROWS).tolist(),
        "vector": [row.tolist() for row in draw.normal(size=(ROWS, 3)).astype(np.float32)],
        "tags": [sorted(draw.choice(["a", "b", "c"], row % 3, replace=False).tolist()) for row in range(ROWS)],
        "boxes": [draw.integers(0, 9, (row % 4, 4)).tolist() for row in range(ROWS)],
        "caption": [f"picture {row}" for row in range(ROWS)],
    }


TABLE = table()


@pytest.fixture(scope="module")
def folder_of_targets_of_columns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    images = [image_bytes(row) for row in range(ROWS)]
    out = io.BytesIO()
    pq.write_table(pa.table({"image": images, **TABLE}), out)
    (folder / "x.parquet").write_bytes(out.getvalue())
    return folder


def opened(folder, targets, **options):
    return fl.offload(None, fl.Dataset(folder, targets=targets), preprocess=PIXELS, **options)


def rows_of(job, batch):
    row = {id: place for place, id in enumerate(job.data.whole.samples.ids.tolist())}
    return [row[id] for id in batch.ids.tolist()]


def plain(value):
    return [plain(part) for part in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()


def check(job, batches):
    """Each batch has the targets of its own samples; how many samples came."""
    count = 0
    for batch in batches:
        rows = rows_of(job, batch)
        assert list(batch.targets) == ALL
        for name, values in batch.targets.items():
            assert plain(values) == [TABLE[name][row] for row in rows]
        count += len(rows)
    return count


@pytest.mark.parametrize("options", [
    {}, {"shuffle": True, "epoch": 3}, {"shuffle": fl.BlockShuffle(samples=3, mixed=2)},
    {"shuffle": True, "last": "pad", "ranks": fl.Ranks(rank=1, world_size=3)},
    {"weights": [1.0] * ROWS, "num_samples": 40}, {"encoded": True},
])  # fmt: skip
def test_targets_are_those_of_their_samples_in_every_order(folder_of_targets_of_columns, options):
    with opened(folder_of_targets_of_columns, ALL) as job:
        make = job.arrays if "encoded" in options else job.loader
        assert check(job, make(BATCH, **options)) == {"last": 8, "weights": 40}.get(
            next((name for name in ("last", "weights") if name in options), ""), ROWS
        )


def test_gives_tensors_and_a_single_column_without_a_dictionary(folder_of_targets_of_columns):
    with opened(folder_of_targets_of_columns, "score") as job:
        batch = next(iter(job.loader(BATCH)))
        assert (batch.targets.dtype, batch.targets.shape) == (torch.float32, (BATCH,))
        assert batch.labels.tolist() == [-1] * BATCH
        assert batch.to("meta").targets.device.type == "meta"
    with opened(folder_of_targets_of_columns, "boxes") as job:
        batch = next(iter(job.loader(BATCH)))
        assert [(part.dtype, part.shape) for part in batch.targets] == [(torch.int64, (row, 4)) for row in range(4)]
        assert [part.device.type for part in batch.to("meta").targets] == ["meta"] * 4
    with opened(folder_of_targets_of_columns, ["vector", "caption"]) as job:
        arrays = next(iter(job.arrays(BATCH)))
        assert (arrays.targets["vector"].dtype, arrays.targets["vector"].shape) == (np.float32, (BATCH, 3))
        assert arrays.targets["caption"] == ["picture 0", "picture 1", "picture 2", "picture 3"]
        arrays.targets["vector"][:] = 0  # it is the loop's own


def test_parts_mixtures_and_a_loader_without_targets(folder_of_targets_of_columns):
    with opened(folder_of_targets_of_columns, ALL) as job:
        train, held = job.data.split(0.3, seed=1)
        assert check(job, job.loader(BATCH, data=held, shuffle=True)) == len(held)
        blend = fl.Mixture(parts=(train, held), ratios=(2, 1))
        assert check(job, job.loader(BATCH, data=blend, shuffle=True)) > 0
        assert next(iter(job.loader(BATCH, targets=False))).targets is None
    with opened(folder_of_targets_of_columns, ()) as job:
        assert next(iter(job.loader(BATCH))).targets is None
        with pytest.raises(SettingError, match="declared to have no targets"):
            job.loader(BATCH, targets=True)


def test_a_run_that_was_stopped_goes_on_with_the_targets_of_what_is_left(folder_of_targets_of_columns):
    with opened(folder_of_targets_of_columns, "caption", settings=LoaderSettings(max_reorder=0)) as job:
        whole = [caption for batch in job.loader(BATCH, shuffle=True) for caption in batch.targets]
        loader, found = job.loader(BATCH, shuffle=True), []
        for step, batch in enumerate(loader):
            found += batch.targets
            if step == 1:
                break
        again = job.loader(3, shuffle=True)
        again.load_state_dict(loader.state_dict())
        assert found + [caption for batch in again for caption in batch.targets] == whole
        assert sorted(whole) == sorted(TABLE["caption"])


@pytest.mark.parametrize("start", sampled(["fork", "spawn"], usual=("fork",)))
def test_workers_give_the_same_targets_and_mapped_samples(folder_of_targets_of_columns, start):
    with opened(folder_of_targets_of_columns, ALL, settings=LoaderSettings(max_reorder=0)) as job:
        options = {"shuffle": True, "epoch": 2, "map": noisy}
        one = list(job.loader(BATCH, **options))
        several = list(WorkerLoader(job.loader(BATCH, **options), 2, start=start))
        assert check(job, several) == ROWS
        assert [batch.ids.tolist() for batch in several] == [batch.ids.tolist() for batch in one]
        assert all(torch.equal(a.features, b.features) for a, b in zip(one, several, strict=True))


def test_ranks_and_epochs_map_a_sample_alike_and_epochs_differ(folder_of_targets_of_columns):
    with opened(folder_of_targets_of_columns, "score") as job:

        def features(epoch, **options):
            return by_id(job.loader(BATCH, shuffle=True, epoch=epoch, map=noisy, **options))

        whole, other = features(0), features(1)
        assert all(not torch.equal(whole[id], other[id]) for id in whole)
        for rank in range(2):
            shared = features(0, ranks=fl.Ranks(rank=rank, world_size=2))
            assert all(torch.equal(whole[id], row) for id, row in shared.items())
        first, second = (by_id(loader) for loader in job.epochs(BATCH, range(2), shuffle=True, map=noisy))
        assert all(torch.equal(whole[id], row) for id, row in first.items())
        assert all(torch.equal(other[id], row) for id, row in second.items())


def by_id(batches):
    return {id: row for batch in batches for id, row in zip(batch.ids.tolist(), batch.features, strict=True)}


def noisy(sample, rng):
    return replace(sample, features=sample.features + rng.normal(size=sample.features.shape).astype(np.float32))


def test_a_function_may_change_everything_of_a_sample_but_its_id(folder_of_targets_of_columns):
    def changed(sample):
        targets = {"half": sample.target["boxes"][:1], "twice": sample.target["score"] * 2}
        targets["boxes"] = sample.target["boxes"][:1]
        del targets["half"]
        return replace(sample, features=sample.features[:, ::2, ::2], label=7, target=targets)

    with opened(folder_of_targets_of_columns, ["score", "boxes"]) as job:
        plain_batches, batches = list(job.loader(BATCH)), list(job.loader(BATCH, map=changed))
        for before, after in zip(plain_batches, batches, strict=True):
            assert torch.equal(after.features, before.features[:, :, ::2, ::2])
            assert after.labels.tolist() == [7] * len(after)
            assert torch.equal(after.targets["twice"], before.targets["score"] * 2)
            assert plain(after.targets["boxes"]) == [boxes[:1] for boxes in plain(before.targets["boxes"])]


def test_encoded_samples_are_decoded_by_a_function_of_the_user(folder_of_targets_of_columns):
    with opened(folder_of_targets_of_columns, "count") as job:
        sizes = [batch.features.tolist() for batch in job.arrays(BATCH, encoded=True, map=length)]
        assert [size for batch in sizes for size in batch] == job.data.samples.lengths.tolist()


def length(sample):
    return replace(sample, features=np.int64(len(sample.features)))


@pytest.mark.parametrize(("function", "said"), [
    (lambda sample: sample.features, "map gives the sample that it takes"),
    (lambda sample: replace(sample, id=3), "map gives the sample that it takes"),
    (lambda sample: replace(sample, features=sample.features[: 1 + sample.id % 2]), "those of a batch have one shape"),
    (lambda sample: replace(sample, target=None if sample.id % 2 else 1.0), "a target, and others none"),
])  # fmt: skip
def test_samples_that_make_no_batch_are_refused_with_a_sentence(folder_of_targets_of_columns, function, said):
    with opened(folder_of_targets_of_columns, "score") as job, pytest.raises(SettingError, match=said):
        list(job.loader(ROWS, map=function))


def test_refuses_a_map_that_is_no_function_and_passes_on_its_errors(folder_of_targets_of_columns):
    def broken(sample):
        raise KeyError("mine")

    with opened(folder_of_targets_of_columns, "score") as job:
        for function in (3, lambda: None, lambda a, b, c: a):
            with pytest.raises(SettingError, match="map"):
                job.loader(BATCH, map=function)
        with pytest.raises(KeyError, match="mine"):
            list(job.loader(BATCH, map=broken))
        lambdas = job.loader(BATCH, map=lambda sample: sample)
        with pytest.raises(SettingError, match="map cannot go to worker processes that are spawned"):
            list(DataLoader(lambdas, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
        assert len(list(DataLoader(lambdas, batch_size=None, num_workers=1, multiprocessing_context="fork"))) == 6


def test_a_node_lists_the_targets_and_they_are_those_of_the_table(folder_of_targets_of_columns, shared_node):
    data = fl.Dataset(folder_of_targets_of_columns, targets=ALL, near=shared_node.url)
    with fl.offload(None, data, preprocess=PIXELS, near=shared_node.url) as job:
        assert check(job, job.loader(BATCH, shuffle=True)) == ROWS


def test_values_that_are_missing_are_refused_before_anything_is_read(folder_of_targets_of_columns, tmp_path):
    out = io.BytesIO()
    pq.write_table(pa.table({"image": [image_bytes(1)] * 2, "n": [1, None], "f": [0.5, None]}), out)
    (tmp_path / "x.parquet").write_bytes(out.getvalue())
    with opened(tmp_path, "n") as job, pytest.raises(DataError, match="1 of 2 samples have no value in the column 'n'"):
        job.loader(2)
    with opened(tmp_path, "f") as job:
        assert next(iter(job.loader(2))).targets.isnan().tolist() == [False, True]


LOSSES = {
    "regression": ("score", 1, lambda scores, targets: mse_loss(scores[:, 0], targets)),
    "several labels": (fl.MultiLabel(column="tags"), 3, binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("task", LOSSES)
def test_a_head_learns_what_a_plain_loop_of_pytorch_learns(folder_of_targets_of_columns, task):
    declared, outputs, loss_of = LOSSES[task]
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                                  torch.nn.Flatten(), torch.nn.Linear(4, outputs))  # fmt: skip
    state = {name: value.clone() for name, value in network.state_dict().items()}
    network = fl.freeze(network, until="2")

    def losses(batches, head):
        optimizer = torch.optim.SGD((weight for weight in head.parameters() if weight.requires_grad), lr=0.1)
        found = []
        for features, targets in batches:
            loss = loss_of(head(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with fl.offload(
        network, fl.Dataset(folder_of_targets_of_columns, targets=declared), preprocess=PIXELS, accuracy="exact"
    ) as job:
        order = [batch.ids.tolist() for batch in job.arrays(BATCH, shuffle=True, seed=4)]
        ours = losses(((batch.features, batch.targets) for batch in job.loader(BATCH, shuffle=True, seed=4)), job.head)
    with opened(folder_of_targets_of_columns, ()) as job:
        pixels = by_id(job.loader(BATCH))
        row = {id: place for place, id in enumerate(job.data.samples.ids.tolist())}
    network.load_state_dict(state)
    values = torch.tensor(TABLE["score"] if task == "regression" else [[float(tag in tags) for tag in "abc"]
                          for tags in TABLE["tags"]])  # fmt: skip
    batches = ((torch.stack([pixels[id] for id in ids]), values[[row[id] for id in ids]]) for ids in order)
    theirs = losses(batches, network)
    assert len(ours) == 6
    assert np.allclose(ours, theirs, rtol=1e-6, atol=0)


ROWS_OF_MASKS_AND_TARGETS = 12
SCORES = [0.25 * row for row in range(ROWS_OF_MASKS_AND_TARGETS)]
TARGETS = ("mask", "score", fl.MultiLabel(column="tags"))
TAGS = [["a"] if row % 2 else ["a", "b"] for row in range(ROWS_OF_MASKS_AND_TARGETS)]


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture
def table_of_masks_and_targets(tmp_path):
    """Grey pictures, of which number n has the mask n everywhere, and the score n / 4."""
    columns = {
        "image": [array_bytes(np.full((40, 40), 20 * row, np.uint8)) for row in range(ROWS_OF_MASKS_AND_TARGETS)],
        "mask": [
            array_bytes(np.full((40, 40), row, np.uint16)) if row != 4 else None
            for row in range(ROWS_OF_MASKS_AND_TARGETS)
        ],
        "score": SCORES,
        "tags": TAGS,
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=5)
    return tmp_path / "x.parquet"


def loading_of_masks_and_targets(table, targets=TARGETS, **changes):
    settings = LoaderSettings(samples_per_request=4, device_batch=8, max_skipped_fraction=0.1, **changes)
    return fl.offload(None, fl.Dataset(table, targets=targets), preprocess=tiny_preprocess(), settings=settings)


def rows_of_masked(batch):
    """Which rows came, by their masks, which must be one number each."""
    found = batch.targets["mask"].flatten(1)
    assert (found == found[:, :1]).all()
    return found[:, 0].tolist()


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}])
def test_a_batch_has_masks_and_columns_by_their_names(table_of_masks_and_targets, options):
    with loading_of_masks_and_targets(table_of_masks_and_targets) as job:
        seen = []
        for batch in job.loader(5, **options):
            rows = rows_of_masked(batch)
            assert list(batch.targets) == ["mask", "score", "tags"]
            assert batch.targets["mask"].shape == (len(rows), 32, 32)
            assert batch.targets["mask"].dtype == torch.int64
            assert batch.targets["score"].tolist() == [SCORES[row] for row in rows]
            assert batch.targets["tags"].tolist() == [[1.0, float(row % 2 == 0)] for row in rows]
            brightness = 64 * batch.features.flatten(1).mean(1) + 127
            assert torch.allclose(brightness / 20, torch.tensor(rows, dtype=torch.float32), atol=0.1)
            seen += rows
        assert sorted(seen) == [row for row in range(ROWS_OF_MASKS_AND_TARGETS) if row != 4], (
            "the sample without a mask is left out"
        )
        assert [skipped.reason for skipped in job.statistics().skipped] == ["it has no mask"]


def test_kept_features_keep_masks_and_later_epochs_move_nothing(table_of_masks_and_targets):
    with loading_of_masks_and_targets(table_of_masks_and_targets) as job:
        first = [(rows_of_masked(batch), batch.targets["score"].tolist()) for batch in job.loader(5, shuffle=True)]
        moved = job.statistics().wire_bytes
        assert [
            (rows_of_masked(batch), batch.targets["score"].tolist()) for batch in job.loader(5, shuffle=True)
        ] == first
        assert job.statistics().wire_bytes == moved
        assert job.statistics().from_cache == ROWS_OF_MASKS_AND_TARGETS - 1


def test_the_mask_alone_is_what_a_data_set_with_masks_gives_undeclared(table_of_masks_and_targets):
    with (
        loading_of_masks_and_targets(table_of_masks_and_targets, "mask") as job,
        loading_of_masks_and_targets(table_of_masks_and_targets, None) as other,
    ):
        for batch, expected in zip(job.loader(5), other.loader(5), strict=True):
            assert batch.targets.equal(expected.targets)


def test_other_targets_alone_fetch_no_masks(table_of_masks_and_targets):
    with loading_of_masks_and_targets(table_of_masks_and_targets, ["score"]) as job:
        assert [batch.targets["score"].tolist() for batch in job.loader(ROWS_OF_MASKS_AND_TARGETS)] == [SCORES]
    with loading_of_masks_and_targets(table_of_masks_and_targets) as job:
        assert all(batch.targets is None for batch in job.loader(5, targets=False))


def halved(sample):
    return replace(sample, target={**sample.target, "mask": sample.target["mask"] // 2})


def test_a_map_sees_masks_beside_the_other_targets(table_of_masks_and_targets):
    with loading_of_masks_and_targets(table_of_masks_and_targets) as job:
        (batch,) = job.loader(ROWS_OF_MASKS_AND_TARGETS, map=halved)
        assert [2 * row for row in rows_of_masked(batch)] == [
            row - row % 2 for row in range(ROWS_OF_MASKS_AND_TARGETS) if row != 4
        ]
        assert batch.targets["score"].tolist() == [score for row, score in enumerate(SCORES) if row != 4]


def test_masks_that_are_not_there_or_not_decoded_are_refused(table_of_masks_and_targets, tmp_path):
    with (
        loading_of_masks_and_targets(table_of_masks_and_targets) as job,
        pytest.raises(SettingError, match="targets are classes of decoded pixels"),
    ):
        job.arrays(5, encoded=True)
    pq.write_table(pq.read_table(table_of_masks_and_targets).drop(["mask"]), tmp_path / "y.parquet")
    with pytest.raises(SettingError, match="no column 'mask' for targets"):
        _ = fl.Dataset(tmp_path / "y.parquet", targets=["mask", "score"]).target_columns
    with pytest.raises(SettingError, match="no column 'mask' for targets"):
        _ = fl.Dataset(table_of_masks_and_targets, targets=fl.MultiLabel(column="mask")).targets


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
