"""Declared targets and functions of samples in loops: each batch has what the table says of its own samples."""

import io
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
from frostline.core.config import LoaderSettings
from frostline.core.errors import DataError, SettingError
from frostline.loaders import WorkerLoader
from support.images import tiny_preprocess
from support.matrices import sampled

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
def folder(tmp_path_factory):
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
def test_targets_are_those_of_their_samples_in_every_order(folder, options):
    with opened(folder, ALL) as job:
        make = job.arrays if "encoded" in options else job.loader
        assert check(job, make(BATCH, **options)) == {"last": 8, "weights": 40}.get(
            next((name for name in ("last", "weights") if name in options), ""), ROWS
        )


def test_gives_tensors_and_a_single_column_without_a_dictionary(folder):
    with opened(folder, "score") as job:
        batch = next(iter(job.loader(BATCH)))
        assert (batch.targets.dtype, batch.targets.shape) == (torch.float32, (BATCH,))
        assert batch.labels.tolist() == [-1] * BATCH
        assert batch.to("meta").targets.device.type == "meta"
    with opened(folder, "boxes") as job:
        batch = next(iter(job.loader(BATCH)))
        assert [(part.dtype, part.shape) for part in batch.targets] == [(torch.int64, (row, 4)) for row in range(4)]
        assert [part.device.type for part in batch.to("meta").targets] == ["meta"] * 4
    with opened(folder, ["vector", "caption"]) as job:
        arrays = next(iter(job.arrays(BATCH)))
        assert (arrays.targets["vector"].dtype, arrays.targets["vector"].shape) == (np.float32, (BATCH, 3))
        assert arrays.targets["caption"] == ["picture 0", "picture 1", "picture 2", "picture 3"]
        arrays.targets["vector"][:] = 0  # it is the loop's own


def test_parts_mixtures_and_a_loader_without_targets(folder):
    with opened(folder, ALL) as job:
        train, held = job.data.split(0.3, seed=1)
        assert check(job, job.loader(BATCH, data=held, shuffle=True)) == len(held)
        blend = fl.Mixture(parts=(train, held), ratios=(2, 1))
        assert check(job, job.loader(BATCH, data=blend, shuffle=True)) > 0
        assert next(iter(job.loader(BATCH, targets=False))).targets is None
    with opened(folder, ()) as job:
        assert next(iter(job.loader(BATCH))).targets is None
        with pytest.raises(SettingError, match="declared to have no targets"):
            job.loader(BATCH, targets=True)


def test_a_run_that_was_stopped_goes_on_with_the_targets_of_what_is_left(folder):
    with opened(folder, "caption", settings=LoaderSettings(slack=0)) as job:
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
def test_workers_give_the_same_targets_and_mapped_samples(folder, start):
    with opened(folder, ALL, settings=LoaderSettings(slack=0)) as job:
        options = {"shuffle": True, "epoch": 2, "map": noisy}
        one = list(job.loader(BATCH, **options))
        several = list(WorkerLoader(job.loader(BATCH, **options), 2, start=start))
        assert check(job, several) == ROWS
        assert [batch.ids.tolist() for batch in several] == [batch.ids.tolist() for batch in one]
        assert all(torch.equal(a.features, b.features) for a, b in zip(one, several, strict=True))


def test_ranks_and_epochs_map_a_sample_alike_and_epochs_differ(folder):
    with opened(folder, "score") as job:

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


def test_a_function_may_change_everything_of_a_sample_but_its_id(folder):
    def changed(sample):
        targets = {"half": sample.target["boxes"][:1], "twice": sample.target["score"] * 2}
        targets["boxes"] = sample.target["boxes"][:1]
        del targets["half"]
        return replace(sample, features=sample.features[:, ::2, ::2], label=7, target=targets)

    with opened(folder, ["score", "boxes"]) as job:
        plain_batches, batches = list(job.loader(BATCH)), list(job.loader(BATCH, map=changed))
        for before, after in zip(plain_batches, batches, strict=True):
            assert torch.equal(after.features, before.features[:, :, ::2, ::2])
            assert after.labels.tolist() == [7] * len(after)
            assert torch.equal(after.targets["twice"], before.targets["score"] * 2)
            assert plain(after.targets["boxes"]) == [boxes[:1] for boxes in plain(before.targets["boxes"])]


def test_encoded_samples_are_decoded_by_a_function_of_the_user(folder):
    with opened(folder, "count") as job:
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
def test_samples_that_make_no_batch_are_refused_with_a_sentence(folder, function, said):
    with opened(folder, "score") as job, pytest.raises(SettingError, match=said):
        list(job.loader(ROWS, map=function))


def test_refuses_a_map_that_is_no_function_and_passes_on_its_errors(folder):
    def broken(sample):
        raise KeyError("mine")

    with opened(folder, "score") as job:
        for function in (3, lambda: None, lambda a, b, c: a):
            with pytest.raises(SettingError, match="map"):
                job.loader(BATCH, map=function)
        with pytest.raises(KeyError, match="mine"):
            list(job.loader(BATCH, map=broken))
        lambdas = job.loader(BATCH, map=lambda sample: sample)
        with pytest.raises(SettingError, match="map cannot go to worker processes that are spawned"):
            list(DataLoader(lambdas, batch_size=None, num_workers=1, multiprocessing_context="spawn"))
        assert len(list(DataLoader(lambdas, batch_size=None, num_workers=1, multiprocessing_context="fork"))) == 6


def test_a_node_lists_the_targets_and_they_are_those_of_the_table(folder, shared_node):
    data = fl.Dataset(folder, targets=ALL, near=shared_node.url)
    with fl.offload(None, data, preprocess=PIXELS, near=shared_node.url) as job:
        assert check(job, job.loader(BATCH, shuffle=True)) == ROWS


def test_values_that_are_missing_are_refused_before_anything_is_read(folder, tmp_path):
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
def test_a_head_learns_what_a_plain_loop_of_pytorch_learns(folder, task):
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

    with fl.offload(network, fl.Dataset(folder, targets=declared), preprocess=PIXELS, accuracy="exact") as job:
        order = [batch.ids.tolist() for batch in job.arrays(BATCH, shuffle=True, seed=4)]
        ours = losses(((batch.features, batch.targets) for batch in job.loader(BATCH, shuffle=True, seed=4)), job.head)
    with opened(folder, ()) as job:
        pixels = by_id(job.loader(BATCH))
        row = {id: place for place, id in enumerate(job.data.samples.ids.tolist())}
    network.load_state_dict(state)
    values = torch.tensor(TABLE["score"] if task == "regression" else [[float(tag in tags) for tag in "abc"]
                          for tags in TABLE["tags"]])  # fmt: skip
    batches = ((torch.stack([pixels[id] for id in ids]), values[[row[id] for id in ids]]) for ids in order)
    theirs = losses(batches, network)
    assert len(ours) == 6
    assert np.allclose(ours, theirs, rtol=1e-6, atol=0)
