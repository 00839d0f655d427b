"""Lines that users of PyTorch, Hugging Face and Lightning write from memory: each works, or is told what to write."""

import copy
import io
import pickle
import warnings
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split
from torchvision import transforms as v1
from torchvision.transforms import v2

import frostline as fl
from frostline.core.errors import DataNotFound, ModelError, SampleError, SettingError, UnknownLayer
from support.images import CLASSES, image_folder

pytestmark = pytest.mark.promise("equal")

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SCALED = v2.Compose(
    [
        v2.ToImage(),
        v2.Resize(36),
        v2.CenterCrop(32),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=MEAN, std=STD),
    ]
)
# A sum in float32 in another order; and one level of 255 where a tensor, and not an image, is scaled.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"), per_class=4)


@pytest.fixture(scope="module")
def quick():
    """Steps that make small samples."""
    return fl.preprocess.from_transform(SCALED)


class Small(nn.Module):
    """A network with a part to freeze."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(32, 3)

    def forward(self, images):
        return self.fc(self.stem(images).flatten(1))


@pytest.fixture
def job(photos, quick):
    model = fl.freeze(Small(), until="stem", input_shape=(3, 32, 32))
    with fl.offload(model, photos, preprocess=quick) as job:
        job.model = model
        yield job


def guards(model):
    return vars(model)["_forward_pre_hooks"]


def opened(photos, transform, rows=4):
    """The first samples as torchvision's data set has them."""
    data = torchvision.datasets.ImageFolder(photos, transform=transform)
    return torch.stack([torch.as_tensor(data[row][0]) for row in range(rows)])


# What works as it is written.


def test_a_batch_of_a_loader_unpacks_to_pixels_and_labels(photos, quick):
    for x, y in fl.loader(photos, batch_size=4, preprocess=quick):
        assert x.shape == (4, 3, 32, 32)
        assert y.dtype == torch.int64
    assert y.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("kind", ["loader", "arrays"])
def test_a_batch_is_asked_by_the_names_that_other_libraries_have(photos, quick, kind):
    with fl.offload(None, photos, preprocess=quick) as job:
        batch = next(iter(getattr(job, kind)(4)))
    for name in ("images", "image", "pixel_values", "x", "inputs"):
        assert batch[name] is getattr(batch, name) is batch.features
    assert batch["labels"] is batch["label"] is batch[1] is batch.labels
    assert batch[0] is batch.features
    assert dict(batch) == {name: batch[name] for name in ("features", "labels", "ids")}
    assert len(batch) == 4
    with pytest.raises(KeyError, match="did you mean features"):
        batch["fetures"]
    with pytest.raises(AttributeError, match="a batch has no 'nothing_at_all'; it has features, labels, ids"):
        batch.nothing_at_all  # noqa: B018
    assert copy.copy(pickle.loads(pickle.dumps(batch))).ids.tolist() == batch.ids.tolist()


def test_a_batch_on_another_device_is_still_one_of_images(photos, quick):
    batch = next(iter(fl.loader(photos, batch_size=4, preprocess=quick))).to("cpu")
    assert batch.images.shape == (4, 3, 32, 32)


def test_a_batch_of_activations_has_no_images_and_says_what_it_has(job):
    batch = next(iter(job.loader(4)))
    for name in ("images", "pixel_values"):
        with pytest.raises(AttributeError, match=rf"no {name}: .* job\.head\(batch\.features\)"):
            getattr(batch, name)
    x, y = batch
    assert job.head(x).shape == (len(y), 3)


def test_a_data_set_with_targets_unpacks_to_them(photos, quick):
    data = fl.Dataset(photos, targets="label")
    (_, batch_targets), (_, target) = next(iter(fl.loader(data, batch_size=4, preprocess=quick))), data[0]
    assert batch_targets.tolist() == [target] * 4 == [0] * 4


def test_an_index_of_a_data_set_gives_a_sample_and_its_label(photos):
    data = fl.Dataset(photos)
    image, label = data[0]
    assert (image.shape, image.dtype, label) == ((3, 224, 224), np.float32, 0)
    assert data[-1][1] == data[np.int64(11)][1] == 2
    first = next(iter(fl.loader(photos, batch_size=1)))
    assert np.array_equal(first.images[0].numpy(), image), "as a loader gives it"
    with pytest.raises(IndexError, match=r"index 12 is out of range: .* has 12 samples"):
        data[12]


def test_a_sample_is_asked_by_the_names_that_other_libraries_have(photos):
    data = fl.Dataset(photos, transform=SCALED)
    sample = data[11]
    assert (sample["label"], sample["target"]) == (sample[1], sample[-1]) == (2, 2)
    assert sample["image"] is sample["pixel_values"] is sample[0] is sample[:1][0]
    assert dict(pickle.loads(pickle.dumps(sample)))["label"] == 2
    with pytest.raises(KeyError, match="no 'caption': write image, label = data"):
        sample["caption"]
    loader = DataLoader(
        data, batch_size=4, collate_fn=lambda rows: {"labels": torch.tensor([row["label"] for row in rows])}
    )
    assert next(iter(loader))["labels"].tolist() == [0] * 4


def test_a_batch_is_asked_whether_it_holds_something_as_a_dictionary_is(photos, quick, job):
    batch = next(iter(fl.loader(photos, batch_size=4, preprocess=quick)))
    held = {name: name in batch for name in ("labels", "images", "x", "targets", "target", "mixed", "caption", 0)}
    assert [name for name, is_held in held.items() if is_held] == ["labels", "images", "x", "target"]
    assert batch.target is batch.labels, "as it unpacks"
    assert "images" not in next(iter(job.loader(4))), "they are activations"


def test_a_data_set_is_iterated_and_sliced(photos):
    data = fl.Dataset(photos, transform=SCALED)
    assert [label for _, label in data] == [0] * 4 + [1] * 4 + [2] * 4
    assert [label for _, label in data[3:6]] == [0, 1, 1]
    assert data["train"] if "train" in data.splits else len(data[:2]) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_goes_into_pytorchs_own_data_loader(photos, workers):
    loader = DataLoader(fl.Dataset(photos, transform=SCALED), batch_size=5, num_workers=workers)
    batches = list(loader)
    assert [len(y) for _, y in batches] == [5, 5, 2]
    assert torch.equal(torch.cat([x for x, _ in batches]), opened(photos, SCALED, rows=12))


def test_a_data_set_without_a_transform_makes_batches_of_images_of_any_size(photos):
    x, y = next(iter(DataLoader(fl.Dataset(photos), batch_size=3, shuffle=True)))
    assert (tuple(x.shape), len(y)) == ((3, 3, 224, 224), 3)


def test_parts_of_a_data_set_as_pytorch_makes_them(photos):
    data = fl.Dataset(photos, transform=SCALED)
    train, held_out = random_split(data, [9, 3])
    assert len(next(iter(DataLoader(train, batch_size=9)))[1]) == len(train)
    assert len(held_out) == 3
    assert Subset(data, [0, 11])[1][1] == 2


MADE_TENSORS = {
    "v2": SCALED,
    "v1": v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "squeezed": v1.Compose([v1.Resize((32, 32), v1.InterpolationMode.BICUBIC), v1.ToTensor()]),
    "nested": v2.Compose([v2.Compose([v2.Resize(36), v2.CenterCrop(32)]), v2.PILToTensor(), v2.ToDtype(torch.float32)]),
    "sequential": nn.Sequential(v2.PILToTensor(), v2.CenterCrop(32), v2.ConvertImageDtype(torch.float32)),
    "weights": torchvision.models.ResNet18_Weights.DEFAULT.transforms(),
}


@pytest.mark.parametrize("name", MADE_TENSORS)
def test_a_transform_of_torchvision_runs_at_the_node_and_gives_what_it_gives(photos, name):
    transform = MADE_TENSORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of it runs here
        batch = next(iter(fl.loader(photos, batch_size=4, transform=transform)))
    assert torch.allclose(batch.images, opened(photos, transform), atol=ROUNDING)
    assert fl.preprocess.from_transform(transform).shape == tuple(batch.images.shape[1:])


def test_transforms_of_timm_are_said_in_steps(photos):
    import timm

    plain = timm.data.create_transform(32, is_training=False, crop_pct=0.9)
    batch = next(iter(fl.loader(photos, batch_size=4, transform=plain)))
    assert torch.allclose(batch.images, opened(photos, plain), atol=ROUNDING)
    steps = fl.preprocess.from_transform(timm.data.create_transform(32, is_training=True)).steps
    assert [type(step).__name__ for step in steps] == [
        "Decode",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ColorJitter",
        "Normalize",
    ]


def test_a_processor_of_transformers_is_said_in_steps(photos):
    import transformers as hf

    processor = hf.ViTImageProcessor(size={"height": 32, "width": 32})
    expected = opened(photos, lambda image: processor(image, return_tensors="pt")["pixel_values"][0])
    batch = next(iter(fl.loader(photos, batch_size=4, transform=processor)))
    assert torch.allclose(batch["pixel_values"], expected, atol=0.02), "its own pixels are rounded to levels"
    assert torch.equal(torch.as_tensor(fl.Dataset(photos, transform=processor)[0][0]), expected[0])


REST = {
    "an image is left": (
        v1.Compose([v1.Resize(36), v1.CenterCrop(32), v1.RandomInvert(1.0), v1.ToTensor()]),
        "Resize, CenterCrop run at the node, and RandomInvert, ToTensor here",
    ),
    "pixels are left": (
        v2.Compose([v2.PILToTensor(), v2.CenterCrop(32), v2.RandomInvert(1.0), v2.ToDtype(torch.float32, scale=True)]),
        "PILToTensor, CenterCrop run at the node, and RandomInvert, ToDtype here",
    ),
    "a tensor is left": (
        v1.Compose([v1.CenterCrop(32), v1.ToTensor(), v1.Lambda(torch.neg)]),
        "CenterCrop, ToTensor run at the node, and Lambda here",
    ),
    "no size is known": (
        v1.Compose([v1.Resize(36), v1.RandomRotation((90, 90)), v1.CenterCrop(32), v1.ToTensor()]),
        "all of transform .*Resize, RandomRotation.* runs here",
    ),
    "a function": (
        lambda image: torch.from_numpy(np.array(image.resize((20, 10)))).permute(2, 0, 1),
        "all of transform .*lambda.* runs here",
    ),
    "whole numbers": (v2.Compose([v2.CenterCrop(32), v2.PILToTensor()]), "making a tensor here"),
}


@pytest.mark.parametrize("name", REST)
def test_what_no_step_says_runs_here_for_each_sample_and_the_job_says_which(photos, name):
    transform, says = REST[name]
    with pytest.warns(UserWarning, match=says):
        job = fl.offload(None, photos, transform=transform)
    with job:
        batch = next(iter(job.loader(4)))
        assert job.where[-1][1] == "trainer, for each sample"
    expected = opened(photos, transform)
    assert batch.images.dtype == expected.dtype
    assert torch.allclose(batch.images.float(), expected.float(), atol=ROUNDING)


def test_a_map_comes_behind_the_rest_of_a_transform_and_keeps_its_generator(photos):
    def add(sample, rng):
        return replace(sample, features=sample.features + np.float32(rng.random()))

    transform, _ = REST["an image is left"]
    with pytest.warns(UserWarning, match="RandomInvert"):
        loader = fl.loader(photos, batch_size=4, transform=transform, map=add)
    first, again = next(iter(loader)).images, next(iter(loader)).images
    shift = first - opened(photos, transform)
    assert torch.equal(first, again)
    assert torch.allclose(shift, shift[:, :1, :1, :1].expand_as(shift), atol=1e-6)
    assert len(set(shift[:, 0, 0, 0].tolist())) == 4


def test_the_transform_of_a_data_set_is_that_of_its_jobs(photos):
    data = fl.Dataset(photos, transform=SCALED)
    assert next(iter(fl.loader(data, batch_size=4))).images.shape[1:] == (3, 32, 32)
    model = fl.freeze(Small(), until="stem", input_shape=(3, 32, 32))
    with fl.offload(model, data) as job:
        assert next(iter(job.loader(4))).features.shape[1:] == job.frost_line.shapes[0]


@pytest.mark.parametrize("transform", [SCALED, MADE_TENSORS["v1"]])
def test_a_network_takes_a_path_and_a_transform(photos, transform):
    model = fl.freeze(Small(), until="stem", input_shape=(3, 32, 32))
    with fl.offload(model, str(photos), transform=transform) as job, torch.no_grad():
        scores = job.head(next(iter(job.loader(4))).features)
        assert torch.allclose(scores, model(opened(photos, transform)), atol=1e-4)


def test_drop_last_leaves_out_what_fills_no_batch(photos, quick):
    assert len(fl.loader(photos, batch_size=5, preprocess=quick, drop_last=True)) == 2
    assert len(fl.loader(photos, batch_size=5, preprocess=quick, drop_last=False)) == 3
    with pytest.raises(SettingError, match="drop_last=True is last='drop', and last='pad' was given too"):
        fl.loader(photos, batch_size=5, preprocess=quick, drop_last=True, last="pad")


def test_a_data_set_is_asked_as_torchvisions_and_sklearns_users_ask(photos):
    data = fl.Dataset(photos, transform=SCALED)
    theirs = torchvision.datasets.ImageFolder(photos)
    assert data.class_to_idx == theirs.class_to_idx
    assert data.targets.tolist() == theirs.targets == [0] * 4 + [1] * 4 + [2] * 4
    assert np.bincount(data.targets, minlength=len(data.classes)).tolist() == [4, 4, 4]
    for train, held_out in StratifiedKFold(4, shuffle=True, random_state=0).split(np.zeros(len(data)), data.targets):
        assert np.bincount(data.take(train).targets).tolist() == [3, 3, 3]
        assert sorted(data.take(held_out).targets.tolist()) == [0, 1, 2]
    weights = 1 / np.bincount(data.targets)[data.targets]
    drawn = DataLoader(data, batch_size=6, sampler=WeightedRandomSampler(weights.tolist(), len(data)))
    assert [len(labels) for _, labels in drawn] == [6, 6]


def test_declared_targets_are_given_as_they_are_in_a_batch(photos):
    data = fl.Dataset(photos, targets=["label"])
    assert data.targets["label"].tolist() == fl.Dataset(photos).targets.tolist()


def test_a_data_set_is_divided_as_those_of_hugging_face(photos):
    data = fl.Dataset(photos, transform=SCALED)
    assert data.select(range(10)).targets.tolist() == [0] * 4 + [1] * 4 + [2] * 2
    assert (
        data.select([11, 0, -1]).targets.tolist() == data.take(torch.tensor([11, 0, 11])).targets.tolist() == [2, 0, 2]
    )
    assert (len(data.take(3)), len(data.take(99)), len(data.take(0)), len(data.select([]))) == (3, 12, 0, 0)
    shuffled = data.shuffle(seed=0)
    assert shuffled.targets.tolist() != data.targets.tolist()
    assert sorted(shuffled.samples.ids) == sorted(data.samples.ids)
    assert shuffled.samples.ids.tolist() == data.shuffle(seed=0).samples.ids.tolist()
    assert shuffled.samples.ids.tolist() != data.shuffle(seed=1).samples.ids.tolist()
    assert shuffled.select(range(5))[0][1] == shuffled.targets[0], "the transform and the order stay"
    for size in (0.25, 3):
        parts = data.train_test_split(test_size=size, seed=0)
        assert {name: part.targets.tolist() for name, part in parts.items()} == {
            "train": [0, 0, 0, 1, 1, 1, 2, 2, 2],
            "test": [0, 1, 2],
        }
    table = data.to_pandas()
    assert table["label"].tolist() == data.targets.tolist()
    assert list(table.columns) == list(data.columns)


@pytest.mark.parametrize("rows", [[0.5], [["a"]], [[0, 1]], "nothing", lambda row: True])
def test_what_are_no_rows_is_refused(photos, rows):
    with pytest.raises(SettingError):
        fl.Dataset(photos).select(rows)


@pytest.mark.parametrize("rows", [[12], [0, -13], np.array([1 << 40])])
def test_rows_that_there_are_not_are_refused_at_once(photos, rows):
    with pytest.raises(IndexError, match=r"out of range: .* has 12 samples"):
        fl.Dataset(photos).select(rows)


@pytest.mark.parametrize("size", [0, 1.0, 12, 40, -0.5])
def test_a_size_that_leaves_nothing_to_train_or_to_test_is_refused(photos, size):
    with pytest.raises(SettingError, match="test_size is a share below 1 or fewer than the 12 samples"):
        fl.Dataset(photos).train_test_split(size)


def test_the_transform_of_a_data_set_is_set_afterwards(photos):
    data = fl.Dataset(photos)
    other = data.with_transform(SCALED)
    assert (data[0][0].shape, other[0][0].shape) == ((3, 224, 224), (3, 32, 32))
    data.transform = SCALED
    assert data[0][0].shape == data.take(2)[1][0].shape == (3, 32, 32)
    with pytest.raises(SettingError, match="transform takes a transform"):
        data.transform = 3


def test_parts_that_pytorch_makes_go_into_our_own_loaders(photos):
    data = fl.Dataset(photos, transform=SCALED)
    train, held_out = random_split(data, [0.75, 0.25], generator=torch.Generator().manual_seed(0))
    for part in (train, held_out, Subset(train, [0, 2])):
        (batch,) = fl.loader(part, batch_size=12)
        assert batch.labels.tolist() == [label for _, label in part]
    (batch,) = fl.loader(ConcatDataset([held_out, Subset(data, [0])]), batch_size=12)
    assert len(batch) == 4
    with fl.offload(None, data) as job:
        assert len(job.loader(4, data=held_out).dataset) == len(held_out) == 3
    with pytest.raises(SettingError, match="data takes a Dataset, a path or a URL, not list: write their paths"):
        fl.loader([1, 2, 3], batch_size=2)


def test_a_loader_is_asked_as_pytorchs_is(photos, quick):
    loader = fl.loader(photos, batch_size=5, preprocess=quick)
    assert (loader.batch_size, len(loader), len(loader.dataset), loader.num_workers) == (5, 3, 12, 0)
    x, y = next(iter(loader))
    assert (len(x), len(y)) == (5, 5)
    correct = sum((y >= 0).sum().item() for _, y in loader)
    assert correct / len(loader.dataset) == 1.0


def test_a_loader_made_anew_for_each_pass_says_once_that_the_order_is_the_same(job):
    def passed(**options):
        return [tuple(batch.ids.tolist()) for batch in job.loader(5, shuffle=True, **options)]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        numbered = [passed(epoch=epoch) for epoch in (0, 1, 0, 1)]
        assert sum(len(batch) for _ in range(2) for batch in job.loader(5)) == 24, "and nobody shuffles these"
        first = passed()
        assert not said, "numbers were given, or there was one pass"
        assert first == passed() == passed() == numbered[0] != numbered[1]
    (warning,) = said
    assert "call loader.set_epoch(epoch) before each pass, or make a loader with epoch=epoch" in str(warning.message)
    assert job, "it is asked for no length where it is asked whether it is there"


def test_the_names_of_a_batchs_samples_are_found_as_a_hint_says(photos, quick):
    data = fl.Dataset(photos)
    batch = next(iter(fl.loader(data, batch_size=4, preprocess=quick, shuffle=True)))
    names = dict(zip(data.samples.ids.tolist(), data.names, strict=True))
    found = [names[number] for number in batch.ids.tolist()]
    assert [data.class_to_idx[name.partition("/")[0]] for name in found] == batch.labels.tolist()


def test_the_head_is_saved_and_loaded_as_any_module(job):
    job.head.train()
    optimizer = torch.optim.AdamW(job.head.parameters(), lr=1e-3)
    x, y = next(iter(job.loader(4)))
    nn.functional.cross_entropy(job.head(x), y).backward()
    optimizer.step()
    assert sum(p.numel() for p in job.head.parameters() if p.requires_grad) == 32 * 3 + 3
    file = io.BytesIO()
    torch.save(job.head.state_dict(), file)
    file.seek(0)
    other = Small()
    left = other.load_state_dict(torch.load(file, weights_only=True), strict=False)
    assert (left.unexpected_keys, [name for name in left.missing_keys if name.startswith("fc")]) == ([], [])
    assert torch.equal(other.fc.weight, job.model.fc.weight)
    whole = Small()
    whole.load_state_dict(job.model.state_dict())
    assert torch.equal(whole(torch.ones(1, 3, 32, 32)), job.model(torch.ones(1, 3, 32, 32)))


def test_the_trainer_of_transformers_takes_a_data_set(photos, tmp_path):
    import transformers as hf

    def collate(samples):
        return {
            "pixel_values": torch.stack([torch.as_tensor(x) for x, _ in samples]),
            "labels": torch.tensor([y for _, y in samples]),
        }

    config = hf.ViTConfig(
        image_size=32,
        patch_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    args = hf.TrainingArguments(tmp_path, max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True)
    model = hf.ViTForImageClassification(config)
    data = fl.Dataset(photos, transform=SCALED)
    assert hf.Trainer(model, args, train_dataset=data, data_collator=collate).train().global_step == 2


def test_parts_of_a_data_set_are_added_as_pytorchs_are(photos):
    data = fl.Dataset(photos)
    assert (data[:2] + data[10:]).targets.tolist() == [0, 0, 2, 2]


def test_a_path_may_begin_at_the_users_home(photos, monkeypatch):
    monkeypatch.setenv("HOME", str(photos.parent))
    assert len(fl.Dataset(f"~/{photos.name}")) == len(fl.Dataset(photos)) == 12


def test_rows_are_taken_by_lists_and_arrays_of_their_numbers(photos):
    data = fl.Dataset(photos)
    for rows in ([2, 0], np.array([2, 0]), torch.tensor([2, 0])):
        assert list(data[rows].names) == [data.names[2], data.names[0]]


# What is refused says what to write.


ATTRIBUTES = {
    "features": "write data.classes",
    "column_names": "write data.columns",
    "num_rows": r"write len\(data\)",
    "filter": r"write data.select\(\"label == 'cat'\"\)",
    "map": r"write loader\(data, batch_size=32, map=function\)",
    "set_transform": r"write data.transform = transform",
    "with_format": "batches are tensors, so leave with_format out",
    "imgs": r"write zip\(data.names, data.targets\)",
    "skip": r"write data\[100:\]",
    "batch": r"write loader\(data, batch_size=32, shuffle=True\)",
    "loader": r"write loader\(data, batch_size=32, shuffle=True\)",
    "dataloaders": r"write loader\(data, batch_size=32, shuffle=True\)",
    "sample": r"write data.shuffle\(seed=0\).take\(5\)",
    "value_counts": r"write numpy.bincount\(data.targets\)",
    "interleave": r"write data=Mixture\(parts=",
    "union": "did you mean concatenate",
    "ids": "write data.samples.ids",
    "repeat": r"epochs\(range\(10\)\)",
    "limit": r"write data.take\(100\)",
    "clases": "did you mean classes",
}


# By what is asked: the names that users of other libraries ask it for, and a part of the line that they are told.
LINES = {
    "job": {
        "backbone": "the network is your own model; job.head is its trained part",
        "parameters": r"write model.parameters\(\)",
        "eval": r"write job.head.eval\(\)",
        "fit": r"write for x, y in job.loader\(batch_size=32",
        "save": r"write torch.save\(job.head.state_dict\(\)",
        "train_dataloader": r"write job.loader\(batch_size=32, shuffle=True\)",
        "val_loader": r"write job.loader\(batch_size=32, data=held_out\)",
        "extract": "run frostline extract --data photos",
        "shutdown": "did you mean close",
        "stats": "did you mean statistics",
        "summary": "did you mean explain",
        "batch_size": r"write job.loader\(batch_size=32, shuffle=True\)",
        "configure_optimizers": r"write for x, y in job.loader\(batch_size=32",
        "modules": "the head is the module: write job.head",
        "to": r"write model.to\(device\)",
        "forward": r"write job.head\(batch.features\)",
        "classes": "write job.data.classes",
        "evaluate": r"write job.head\(x\).argmax\(1\) == y for x, y in job.loader\(batch_size=32, data=held_out",
        "test_loader": r"data=held_out\), of train, held_out = job.data.split\(0.2\)",
        "history": r"write print\(job.explain\(\)\)",
        "load_state_dict": r"write job.head.load_state_dict\(torch.load",
        "compile": r"write model.classifier.compile\(\)",
        "seed": r"write job.loader\(batch_size=32, shuffle=True\)",
        "batches": r"write job.loader\(batch_size=32, shuffle=True\)",
        "optimizer": "the loop is yours",
        "wait": "the loop is yours",
        "progress": r"write print\(job.explain\(\)\)",
    },
    "loader": {
        "take": r"write itertools.islice\(loader, 10\)",
        "repeat": r"write for loader in loader.epochs\(range\(10\)\)",
        "shuffle": r"loader\(data, batch_size=32, shuffle=...\)",
        "prefetch": "leave prefetch out",
        "cuda": r"write batch = batch.to\(device\)",
        "drop_last": "drop_last=True",
        "as_numpy_iterator": r"job.arrays\(32\)",
        "one_batch": r"write batch = next\(iter\(loader\)\)",
        "vocab": "write data.classes",
        "n": r"write len\(loader\)",
        "seed": r"loader\(data, batch_size=32, seed=...\)",
        "images": "write for x, y in loader",
        "unbatched": r"write loader\(data, batch_size=1\)",
        "train": r"write model.train\(\)",
        "iter_torch_batches": r"write loader\(data, batch_size=32",
    },
    "batch": {
        "values": "write x, y = batch",
        "shape": r"write len\(batch\), or batch.features.shape",
        "half": r"write batch.features.half\(\)",
        "numpy": r"job.arrays\(32\)",
        "embeddings": "did you mean features",
        "paths": r"write names = dict\(zip\(data.samples.ids.tolist\(\), data.names\)\)",
        "cpu": r'write batch.to\("cpu"\)',
    },
    "frostline": {
        "fit": "or run frostline train",
        "Trainer": r"write for x, y in job.loader\(",
        "ImageDataLoaders": r"write loader\(",
        "image_dataset_from_directory": r"write loader\(",
        "read_images": r"write loader\(",
        "create_dataset": 'write Dataset\\("photos"\\)',
        "create_model": r"write timm.create_model\(",
        "unfreeze": r"write layer.requires_grad_\(True\), and job.refreeze",
        "connect": r"write offload\(model",
        "prepare": r"write offload\(model",
        "serve": "run frostline serve --data-root",
        "predict": "run frostline predict --run RUN",
        "seed_everything": "write seed=0 of a loader",
        "plan": "run frostline plan --data photos",
        "embeddings": "run frostline extract --data photos",
        "WebLoader": r'write loader\("s3://bucket/shards"',
        "CombinedStreamingDataset": r"write data=Mixture\(parts=",
        "merge_datasets": r"write cats \+ dogs",
        "concatenate_datasets": r"write cats \+ dogs",
        "train_test_split": r"write data.train_test_split\(test_size=0.2\)",
        "augment": r"write transform=v2.Compose",
        "ingest": "run frostline ingest",
        "set_verbosity": "write on_event=print",
        "save": r"write torch.save\(job.head.state_dict",
        "from_pretrained": r"write timm.create_model\(",
        "FrostlineError": "write frostline.errors.FrostlineError",
    },
    "preprocess": {
        "clip": r"write preprocess.from_transform\(",
        "Grayscale": r"preprocess.from_transform\(",
        "imagnet": "did you mean imagenet",
    },
    "Dataset": {
        "from_folder": r'write Dataset\("photos"\)',
        "from_pandas": r"write table.to_parquet\(",
        "from_generator": r"write table.to_parquet\(",
    },
    "data": {
        "cast_column": r"write data.column\(name\)",
        "labels": "did you mean targets",
        "map_batches": r"write loader\(data, batch_size=32, map=function\)",
        "groupby": "did you mean split_by",
        "push_to_hub": "frostline ingest photos copy --format parquet",
        "show_batch": r"look at data\[0\]",
        "describe": "did you mean statistics",
        "decode": r"write loader\(data, batch_size=32, map=function\)",
        "to_tuple": r"write loader\(data, batch_size=32, map=function\)",
        "batched": r"write loader\(data, batch_size=32, shuffle=True\)",
        "with_epoch": r"epochs\(range\(10\)\)",
        "where": r"write data.select\(\"label == 'cat'\"\)",
        "iloc": r"write data\[:100\]",
        "int2str": r"write data.classes\[0\]",
        "cardinality": r"write len\(data\)",
        "k_fold": r"write data.take\(rows\), .* StratifiedKFold",
        "cleanup_cache_files": "data is read where it lies",
        "add_item": "write one into the folder",
        "sort_values": r"write data.take\(numpy.argsort\(data.targets\)\)",
        "cache": r"LoaderSettings\(cache_bytes=",
        "head": r"write data.take\(5\)",
        "show": r"look at data\[0\]",
        "shard": r"write ranks=Ranks\(rank=0, world_size=2\) of a loader, or data\[0::2\]",
        "zzz": "a Dataset has no 'zzz'$",
    },
}


@pytest.mark.parametrize("owner", LINES)
def test_names_of_other_libraries_are_refused_with_the_line_to_write(photos, quick, job, owner):
    data = fl.Dataset(photos)
    loader = fl.loader(data, batch_size=4, preprocess=quick)
    asked = {"job": job, "loader": loader, "batch": next(iter(loader)), "frostline": fl, "data": data}
    asked |= {"preprocess": fl.preprocess, "Dataset": fl.Dataset}
    for name, line in LINES[owner].items():
        with pytest.raises(AttributeError, match=line):
            getattr(asked[owner], name)


CALLS = {
    "fl.loader(photos, batch_size=4, img_size=224)": "preprocess=frostline.preprocess.imagenet",
    "fl.loader(photos, batch_size=4, validation_split=0.2)": r"write train, held_out = data.split\(0.2\)",
    "fl.loader(photos, batch_size=4, label_mode='categorical')": "one_hot",
    "fl.loader(photos, batch_size=4, rank=0)": r"ranks=Ranks\(rank=0, world_size=2\)",
    "fl.loader(photos, batch_size=4, class_weights=[1])": "did you mean weights",
    "fl.loader(photos, batch_size=4, token='x')": r"write settings=LoaderSettings\(token=...\)",
    "fl.loader(photos, batch_size=4, cache_dir='x')": r"write settings=LoaderSettings\(cache_folder=...\)",
    "fl.loader(photos, batch_size=4, shuffle_buffer_size=1000)": r"shuffle=BlockShuffle\(samples=16\)",
    "fl.loader(photos, batch_size=4, shuffle_seed=9)": "did you mean seed",
    "fl.loader(photos, batch_size=4, batch_tfms=[])": "write augment=function",
    "fl.loader(photos, batch_size=4, item_tfms=[])": r"write transform=v2.Compose\(\[...\]\)",
    "fl.loader(photos, batch_size=4, mixup=0.2)": r"augment=FeatureMixup\(alpha=0.2\)",
    "fl.loader(photos, batch_size=4, handler=print)": r"LoaderSettings\(max_skipped_fraction=0.01\)",
    "fl.loader(photos, batch_size=4, epochs=10)": r"loader\(...\).epochs\(range\(10\)\)",
    "fl.loader(photos, batch_size=4, predownload=100)": r"LoaderSettings\(window_bytes=1 << 28\)",
    "fl.loader(photos, batch_size=4, max_samples=100)": r"write data.take\(100\)",
    "fl.loader(photos, batch_size=4, dtype=torch.float16)": "in the loop",
    "fl.loader(photos, batch_size=4, transform=[SCALED])": r"not list: write torchvision.transforms.v2.Compose\(\[",
    "fl.loader(photos, batch_size=4, transform={'train': SCALED})": "not dict: give one of them to each loader",
    "fl.loader(photos, batch_size=4, weights='balanced')": r"not 'balanced': write weights={name: 1 / n for name, n",
    "fl.loader(photos, batch_size=4, augment=True)": r"augment takes a function of a batch and its view, .* not True",
    "fl.loader(photos, batch_size=4, augment=v2.RandomHorizontalFlip())": "images are augmented by transform=",
    "fl.loader(photos, batch_size=4, augment=lambda batch: batch)": r"write def augment\(batch, view\)",
    "fl.loader(photos, batch_size=4, preprocess=fl.preprocess.imagenet)": r"write imagenet\(224\)",
    "fl.Dataset('gcs://bucket/photos')": "not gcs://: write gs://",
    "fl.Dataset(photos, format='csv')": "did you mean urls",
    "data.split(0.8, 0.2)": "seed takes a whole number, not 0.2",
    "data.split(test_size=0.2)": r"write data.split\(0.2\), the share to hold out",
    "fl.BlockShuffle(1000)": r"write BlockShuffle\(samples=16, mixed=64\)",
    "fl.BlockShuffle(block_size=1000)": "write samples=16",
    "fl.FeatureNoise(std=0.1)": "write share=0.1",
    "fl.FeatureMixup(0.2)": r"write FeatureMixup\(alpha=0.2\)",
    "fl.TenantSettings(name='ann', priority=2)": "write weight=2.0",
    "fl.preprocess.audio(1.0, sr=16_000)": "write sample_rate=16_000",
    "fl.offload(model, data, on_event=True)": "on_event takes a function of an event, such as print, not True",
    "fl.loader(photos, batch_size=-4)": "batch_size must be at least",
    "fl.Dataset(photos, shuffle=True)": r"write loader\(data, batch_size=32, shuffle=True\)",
    "fl.Dataset(remote='s3://bucket/photos', local='/tmp/p')": "data is read where it lies",
    "fl.Dataset('s3://bucket/train-{000000..000099}.tar')": "give their folder, s3://bucket, and all of them",
    "fl.Dataset('https://host/train-{000000..000099}.tar')": "give a file of their URLs",
    "fl.Dataset(str(photos) + '/{a,b}').names": "name a folder without wildcards",
    "fl.LoaderSettings(cache='10GB')": "write cache_bytes=1 << 30 for memory, and cache_folder=",
    "fl.LoaderSettings(timeout=3)": "write deadline_s=120",
    "fl.NodeSettings(port=7070)": "write frostline serve --listen 0.0.0.0:7070",
    "fl.Recipe(epochs=3, lr=1e-3)": "did you mean learning_rate",
    "fl.Recipe(loss='bce')": "write frostline train --loss",
    "fl.Ranks(0, 2)": r"write Ranks\(rank=0, world_size=2\)",
    "fl.Mixture([data, data])": r"write Mixture\(parts=\[cats, dogs\], ratios=\[3, 1\]\)",
    "fl.preprocess.imagenet(224, train=True)": "write augment=True",
    "fl.offload(model, data, optimizer=None)": "the loop is yours",
    "fl.offload(model, data, val_data=data)": r"write job.loader\(batch_size=32, data=held_out\)",
    "fl.offload(model, data, timeout=3)": r"write settings=LoaderSettings\(deadline_s=120",
    "fl.offload(model, data, near=('localhost', 7070))": r"near takes a node's address, .* not \('localhost', 7070\)",
    "fl.offload(model, data, preprocess=224)": r"not 224: write frostline.preprocess.imagenet\(224\)",
    "fl.offload(model, data, accuracy=torch.float16)": "not torch.float16: write accuracy='fp16'",
    "fl.offload(model, data, epochs='3')": "epochs takes a whole number, not '3'",
    "fl.offload(model, data, epochs=0)": "epochs must be at least 1, not 0",
    "fl.offload(model, data, cut='stem')": "cut takes a whole number or None, not 'stem'",
    "fl.freeze(model, until='stem', input_shape=32)": r"the shape of one sample, not 32: write \(3, 224, 224\)",
    "fl.freeze(model, until='stem', input_shape=torch.zeros(1, 3, 32, 32))": r"not Tensor: write \(3, 32, 32\)",
    "fl.freeze(model, until='stem', input_shape=(1, 3, 32, 32))": r"without the batch: write input_shape=\(3, 32, 32\)",
    "fl.freeze('timm:resnet18', until='layer4')": r"write timm.create_model\('resnet18'",
    "data.shuffle(buffer_size=100)": r"^Dataset.shuffle\(\) .* leave buffer_size out",
    "data.train_test_split(0.2, shuffle=False)": r"data\[:80\] and data\[80:\] divide in order",
    "data['train', 'test']": "indexed by a number, a slice, a list of numbers or the name of a split, not tuple",
    "data[1.5]": "indexed by a number, a slice, a list of numbers or the name of a split, not 1.5",
    "iter(job)": r"write for x, y in job.loader\(batch_size=32",
    "len(job)": r"write len\(job.loader\(batch_size=32\)\) for batches, or len\(job.data\)",
    "job[0]": r"write job.data\[0\], or next\(iter\(job.loader",
    "next(iter(DataLoader(job)))": r"a job is no data set: write len\(job.loader",
    "job.loader(4, batch_sampler=[[0, 1]])": r"write batch_size=32 with shuffle=True, or with data=data.take\(rows\)",
    "job.loader(4, map=v2.CenterCrop(8))": r"CenterCrop takes an image: write transform=v2.Compose\(\[...\]\)",
    "fl.offload(model, data, freeze='stem')": r"write offload\(freeze\(model, until=\"layer4\"\), data\)",
    "fl.offload(model, data, transform=v1.ToTensor())": r"ToTensor of transform leaves .*Resize\(256\), CenterCrop",
    "fl.offload(model, data, transform=v1.Compose([v1.Resize(36), v1.ToTensor()]))": "Resize of transform leaves",
    "fl.offload(model, data, transform=lambda image: image)": "<lambda> of transform cannot run before frozen layers",
    "fl.loader(torchvision.datasets.ImageFolder(photos, transform=SCALED), batch_size=4)": "and transform=data.tran",
    "job.loader(4, split='train')": r"write data=job.data\[\"train\"\]",
    "job.train(epochs=3)": r"write job.train\(Recipe\(epochs=3",
    "next(iter(job.loader(4))).to(dtype=torch.float16)": r"write x = batch.features.to\(dtype=...\)",
    "fl.loader(photos, batch_size=4, multiprocessing=True)": "'multiprocessing'$",
    "fl.loader(photos)": r"missing a required argument: 'batch_size'; write loader\(\"photos\", batch_size=32",
    "fl.loader([photos], batch_size=4)": "not list: write their paths into list.csv",
    "fl.Dataset([photos])": "url takes a path or a URL, not list: write their paths",
    "fl.loader(torchvision.datasets.ImageFolder(photos), batch_size=4)": "not ImageFolder: give its folder, '.*photos",
    "fl.offload(model, DataLoader([1]))": "not DataLoader: batches are made here, so give what the loader reads",
    "fl.offload(photos, model)": "model takes a torch.nn.Module, not PosixPath|the network comes first",
    "fl.offload(model, data, until='stem')": r"write offload\(freeze\(model, until=\"layer4\"\), data\)",
    "fl.offload(model, data, batch_size=4)": r"write job.loader\(batch_size=32",
    "fl.offload(model, data, device='cuda')": r"write model.to\(device\) before",
    "fl.offload(model, data, port=7070)": 'write near="http://store-1:7070"',
    "fl.offload('resnet18', data)": r"a torch.nn.Module, not 'resnet18': write timm.create_model\('resnet18'",
    "fl.freeze('resnet18', until='layer4')": r"a torch.nn.Module, not 'resnet18': write timm.create_model\('resnet18'",
    "fl.freeze(model)": r"missing a required argument: 'until'; write freeze\(model, until=\"layer4\"\)",
    "fl.freeze(model, until='stem', input_size=(3, 32, 32))": r"write input_shape=\(3, 224, 224\)",
    "fl.preprocess.imagenet(224, mean=[0.5] * 3)": r"transform=v2.Compose\(\[..., v2.Normalize",
    "fl.preprocess.text('bert-base-uncased')": "transformers.AutoTokenizer.from_pretrained",
    "fl.Dataset(photos / '*.jpg').names": "name a folder without wildcards",
    "fl.Dataset(photos.with_name(photos.name.replace('ph', 'f'))).names": r"no folder .*/fotos\d+; did you mean photos",
    "fl.Dataset(photos, label_column='class')": "did you mean label",
    "fl.Dataset(photos, storage_options={})": "leave storage_options out",
    "data['image']": r"'image' is no split: write image, label = data\[0\], or loader\(data, batch_size=32\)",
    "data['circle']": r"'circle' is no split but a class: write data.select\(\"label == 'circle'\"\)",
    "data.split([0.8, 0.2])": r"write data.split\(0.2\), or data.split\({",
    "data.train_test_split(0.2, stratify_by_column='label')": r"^Dataset.train_test_split\(\) .* leave stratify_by",
    "job.loader(data, batch_size=4)": r"multiple values for argument 'batch_size'; write job.loader\(batch_size=32",
    "job.loader(4, epochs=3)": r"write for loader in job.epochs\(32, range\(10\)\)",
    "job.train()": r"write job.head.train\(\) for train mode",
    "job.head(next(iter(job.loader(4))))": r"the head was called with a batch: write job.head\(batch.features\)",
    "job.model(next(iter(job.loader(4))))": r"write job.head\(batch.features\) in the loop, in place of model\(batch\)",
    "job.loader(4).dataset[0]": r"samples are those of Dataset\(...\)\[0\]",
    "next(iter(job.loader(4))).to(torch.float16)": r"write x = batch.features.to\(torch.float16\)",
    "job(next(iter(job.loader(4))).features)": r"a job is no module: write job.head\(batch.features\)",
    "fl.Dataset(photos, photos)": r'too many positional arguments; write Dataset\("photos"\)',
    "fl.Dataset(root=photos)": r'write Dataset\("photos"\)',
    "fl.Dataset({'train': photos})": "not dict: give each of its parts by itself",
    "fl.Dataset(io.BytesIO())": "not BytesIO: give the name of the file",
    "fl.Dataset(photos, subsample=0.1)": r"write data.take\(100\)",
    "fl.Dataset(photos, item_loader=None)": "leave item_loader out",
    "fl.Dataset(photos, shardshuffle=True)": "leave shardshuffle out",
    "fl.loader(torch.utils.data.TensorDataset(torch.zeros(2)), batch_size=2)": "not TensorDataset: samples are read",
    "data + photos": r"not PosixPath: write Dataset\(...\)",
    "data.column('lable')": r"only id, .*; did you mean label\?$",
    "data.select(lambda sample: True)": r"not function: write data.select\(\"label == 'cat'\"\)",
    "fl.offload(model, data, settings={'cache_bytes': 0})": r"not dict: write LoaderSettings\(cache_bytes=...\)",
    "fl.offload(Small, data)": r"not type: write Small\(\)$",
    "fl.freeze(model.state_dict(), until='stem')": "give the network whose weights these are",
    "fl.freeze(model, until='layer4')": "has no layer 'layer4'; it has stem, fc, features$",
    "fl.preprocess.imagenet(224, augment='randaugment')": "augment takes True or False, not 'randaugment'",
    "fl.loader(photos, batch_size=4, transform=torchvision.models.ResNet18_Weights.DEFAULT)": (
        r"write .*V1.transforms\(\)$"
    ),
    "fl.loader(photos, batch_size=4, transform=torchvision.models.ResNet18_Weights.DEFAULT.transforms)": (
        r"makes a transform: write weights.transforms\(\)"
    ),
    "fl.loader(photos, batch_size=4, transform=v1.ToTensor)": r"ToTensor makes a transform: write ToTensor\(...\)",
    "fl.loader(photos, batch_size=4, transform=timm.data.create_transform)": r"write timm.data.create_transform\(224\)",
    "fl.loader(photos, batch_size=4, transform={'input_size': 224})": r"write timm.data.create_transform\(\*\*config\)",
    "setattr(data, 'targets', [0] * 12)": r"targets are the data's: .* Dataset\(url, targets=...\)",
    "fl.NodeSettings(gpu=True)": "did you mean device",
    "job.loader(4)[0]": r"write next\(iter\(loader\)\), or Dataset\(...\)\[0\] for a sample",
    "data.samples[0]": r"samples are columns: write data\[0\] for a sample and its label, or data.names\[0\]",
    "data[:4].samples[0]": r"samples are columns: write data\[0\]",
    "[path for path, _ in data.samples]": r"samples are columns: write data\[0\]",
    "data.samples.paths": r"^a SampleTable has no 'paths': write zip\(data.names, data.targets\)",
}


def test_a_call_that_does_not_fit_is_refused_with_the_one_to_write(photos, job):
    import timm

    given = {
        **globals(),
        "timm": timm,
        "photos": photos,
        "job": job,
        "model": job.model,
        "data": fl.Dataset(photos),
    }
    for call, line in CALLS.items():
        with pytest.raises((AttributeError, TypeError, SettingError, ModelError, DataNotFound), match=line):
            eval(call, given)


@pytest.mark.parametrize("has_model", [True, False])
def test_a_closed_job_hands_out_nothing_that_it_has_kept(photos, quick, has_model):
    model = fl.freeze(Small(), until="stem", input_shape=(3, 32, 32)) if has_model else None
    with fl.offload(model, photos, preprocess=quick) as job:
        loader = job.loader(4)
        assert sum(len(batch) for batch in loader) == 4 * len(CLASSES), "all of it is kept from now on"
    for take in (lambda: next(iter(loader)), lambda: job.loader(4), lambda: job.arrays(4), lambda: job.row_reader(4)):
        with pytest.raises(SettingError, match=r"this job is closed: take its batches before job.close\(\)"):
            take()
    assert job.statistics().samples == 4 * len(CLASSES)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_what_a_data_set_lacks_is_refused_with_the_line_to_write(photos, name):
    with pytest.raises(AttributeError, match=f"^a Dataset has no '{name}'.*{ATTRIBUTES[name]}"):
        getattr(fl.Dataset(photos), name)


def test_a_column_that_is_asked_for_like_a_split_is_told_from_one(photos):
    with pytest.raises(SettingError, match=r"'label' is no split but a column: write data.column\('label'\)"):
        fl.Dataset(photos)["label"]


def test_a_data_set_is_copied_and_pickled_and_asked_for_what_notebooks_look_for(photos):
    data = fl.Dataset(photos)
    assert len(copy.deepcopy(data)) == len(pickle.loads(pickle.dumps(data))) == 12
    assert not hasattr(data, "_ipython_canary_method_should_not_exist_")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("random_split", r"data.split\(0.2\)"),
        ("load_from_disk", "write Dataset"),
        ("transforms", "did you mean preprocess"),
    ],
)
def test_the_modules_that_other_libraries_have_lead_to_ours(name, says):
    with pytest.raises(AttributeError, match=says):
        getattr(fl, name)


@pytest.mark.parametrize("name", ["num_workers", "persistent_workers", "worker_init_fn"])
def test_workers_are_refused_with_how_reading_ahead_is_had(photos, job, name):
    for function, called in ((partial(fl.loader, photos), "loader"), (job.loader, "Job.loader")):
        says = rf"^{called}\(\) got .* '{name}': threads read ahead by themselves, so leave {name} out"
        with pytest.raises(TypeError, match=says):
            function(batch_size=4, **{name: 2})


INSTEAD = {
    "collate_fn": "map=function, or each batch by augment=function",
    "prefetch_factor": r"settings=LoaderSettings\(window_bytes=",
    "pin_memory": r"settings=LoaderSettings\(pin_memory=True\)",
    "sampler": r"shuffle=True, seed=0 and epoch=0; weights=\[",
    "indices": r"data=data.take\(rows\) gives rows in an order of your own",
    "generator": "seed=0 and epoch=0",
    "transforms": "did you mean transform",
    "node_url": 'write near="http://store-1:7070"',
    "dataset": "did you mean data",
    "shufle": "did you mean shuffle",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_arguments_of_other_loaders_are_refused_with_what_to_write(photos, name):
    with pytest.raises(TypeError, match=rf"^loader\(\) got .* '{name}'.*{INSTEAD[name]}"):
        fl.loader(photos, batch_size=4, **{name: 1})


def test_the_fields_words_lead_to_ours_whatever_is_called(photos):
    with pytest.raises(TypeError, match=r'^offload\(\) got .* \'node_url\'; write near="http://store-1:7070"'):
        fl.offload(Small(), photos, node_url="http://there")
    with pytest.raises(TypeError, match=r'^freeze\(\) got .* \'freeze_until\'; write freeze\(model, until="layer4"\)'):
        fl.freeze(Small(), freeze_until="stem")
    with pytest.raises(TypeError, match=r"^Dataset\(\) got .* \'split\': .*Dataset\(\"photos\"\)\[\"train\"\]"):
        fl.Dataset(photos, split="train")
    with pytest.raises(AttributeError, match=r'no attribute \'freeze_until\'; write freeze\(model, until="layer4"\)'):
        fl.freeze_until  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'DataLoader'; write loader\("):
        fl.DataLoader  # noqa: B018
    with pytest.raises(SettingError, match="give near='http://there'"):
        fl.offload(Small(), photos, node="http://there")
    assert not hasattr(fl, "__wrapped__")


def test_what_is_given_in_another_form_is_refused_with_the_form_to_write(photos, job):
    model = Small()
    with pytest.raises(SettingError, match="until takes the name of a layer, not the layer: write until='stem'"):
        fl.freeze(model, until=model.stem)
    with pytest.raises(UnknownLayer, match=r"no layer 'featurs'; did you mean features\?$"):
        fl.freeze(nn.Sequential(OrderedDict(features=nn.Conv2d(3, 2, 1), head=nn.Conv2d(2, 2, 1))), until="featurs")
    with pytest.raises(SettingError, match="near takes a node's address, such as http://store-1:7070, or"):
        fl.offload(model, photos, near=True)
    for nobody in ("", []):
        with pytest.raises(SettingError, match="leave it out, and a node begins here"):
            fl.offload(model, photos, near=nobody)
    for size in (-1, 0):
        with pytest.raises(SettingError, match=f"batch_size must be at least 1, not {size}"):
            job.loader(size)
    for network in (fl.preprocess.imagenet, fl.preprocess.efficientnet_lite):
        with pytest.raises(SettingError, match="size takes a whole number, not '224'"):
            network("224")
    with pytest.raises(TypeError, match=r"^Job.loader\(\) got .* 'transform': .* in offload\(model, data, tra"):
        job.loader(4, transform=SCALED)
    with pytest.raises(SettingError, match=r"a batch of \d+ samples does not fit into memory .*: give a smaller"):
        next(iter(job.loader(1 << 40)))
    batch = next(iter(job.loader(4)))
    with pytest.raises(ModelError, match=r"called with a batch: write job\.head\(batch\.features\)"):
        job.head(**batch)
    with pytest.raises(AttributeError, match=r'a batch has no \'cuda\': write batch = batch.to\("cuda"\)'):
        batch.cuda()
    with pytest.raises(ModelError, match=r"\[2, 3, 9, 9\] do not fit the frost line: give batch.features"):
        job.head(torch.zeros(2, 3, 9, 9))


def test_the_whole_network_called_with_features_is_told_of_the_head(job):
    batch = next(iter(job.loader(4)))
    with pytest.raises(ModelError, match=r"write job\.head\(batch\.features\) in the loop, in place of model\("):
        job.model(batch.features)
    assert job.model(torch.zeros(2, 3, 32, 32)).shape == (2, 3), "samples are taken as ever"


def test_features_changed_like_pixels_are_changed_behind_the_frozen_layers(job, photos, quick):
    batch = next(iter(job.loader(4)))
    given, pixels = batch.features.clone(), next(iter(fl.loader(photos, batch_size=4, preprocess=quick))).images
    assert torch.allclose(given, job.model.stem(pixels).flatten(1), atol=ROUNDING)
    with pytest.raises((TypeError, ValueError)):
        v2.functional.normalize(batch.features, MEAN, STD)
    batch.features.sub_(0.5).div_(0.25)
    assert torch.equal(job.head(batch.features), job.model.fc((given - 0.5) / 0.25))
    assert torch.equal(next(iter(job.loader(4))).features, given), (
        "the next pass has them as the frozen layers gave them"
    )


def test_a_network_is_unguarded_in_its_copies_its_files_and_behind_its_job(job):
    features = next(iter(job.loader(4))).features
    file = io.BytesIO()
    torch.save(job.model, file)
    file.seek(0)
    assert b"frostline.models" not in file.getvalue(), "it is loaded where there is no Frostline"
    for copied in (copy.deepcopy(job.model), torch.load(file, weights_only=False)):
        assert copied(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
        with pytest.raises(RuntimeError, match="conv2d"):
            copied(features)
    job.close()
    assert not guards(job.model)


def test_a_guarded_network_is_frozen_anew_and_cut_again_like_any_other(job, photos, quick):
    job.refreeze()
    with fl.offload(job.model, photos, preprocess=quick) as other:
        assert len(guards(job.model)) == 2
        ours, theirs = (next(iter(each.loader(4))).features for each in (job, other))
        assert torch.equal(ours, theirs)
    assert len(guards(job.model)) == 1


def test_a_transform_that_no_step_says_is_refused_in_front_of_frozen_layers(photos):
    transform, _ = REST["an image is left"]
    with pytest.raises(SettingError, match=r"RandomInvert of transform cannot .*imagenet\(224, augment=True\)"):
        fl.offload(Small(), photos, transform=transform)
    with pytest.raises(SettingError, match=r"ends with an image of Pillow: end it with ToTensor\(\)"):
        fl.offload(Small(), photos, transform=v2.Compose([v2.Resize(36), v2.CenterCrop(32)]))


def test_a_loader_whose_transform_gives_images_says_how_to_end_it(photos):
    with pytest.warns(UserWarning, match="Resize"):
        loader = fl.loader(photos, batch_size=4, transform=v1.Resize(36))
    with pytest.raises(SettingError, match=r"transform gives Image, .* end it with ToTensor\(\)"):
        next(iter(loader))


def test_what_is_no_transform_and_what_is_given_twice_is_refused(photos, quick):
    with pytest.raises(SettingError, match=r"transform takes a transform of torchvision or timm.* not int"):
        fl.Dataset(photos, transform=3)
    for function in (lambda image, label: (image, label), lambda: None):
        with pytest.raises(SettingError, match=r"an image alone, which <lambda> does not take.* as map="):
            fl.loader(photos, batch_size=4, transform=function)
    with pytest.raises(SettingError, match="preprocess and transform say the same thing"):
        fl.loader(photos, batch_size=4, preprocess=quick, transform=SCALED)
    with pytest.raises(SettingError, match="give a transform as transform="):
        fl.loader(photos, batch_size=4, preprocess=SCALED)


def test_a_module_of_the_face_shows_its_public_names_alone():
    assert dir(fl.preprocess) == sorted(fl.preprocess.__all__)


def test_random_steps_are_a_loaders(photos):
    data = fl.Dataset(photos, transform=fl.preprocess.imagenet(32, augment=True))
    with pytest.raises(SettingError, match=r"write frostline\.loader\(data, batch_size=32, shuffle=True, epoch=0\)"):
        data[0]
    assert next(iter(fl.loader(data, batch_size=2))).images.shape == (2, 3, 32, 32)


def test_a_sample_that_cannot_be_decoded_is_named(tmp_path):
    for name in CLASSES[:2]:
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 40)).save(tmp_path / name / "whole.jpg")
    (tmp_path / CLASSES[0] / "broken.jpg").write_bytes((tmp_path / CLASSES[0] / "whole.jpg").read_bytes()[:300])
    with pytest.raises(SampleError, match=r"circle/broken\.jpg: "):
        fl.Dataset(tmp_path)[0]


def test_a_path_given_with_a_node_on_another_machine_is_listed_by_that_node(photos, quick, shared_node, monkeypatch):
    monkeypatch.setattr("frostline.datasets.source.is_loopback", lambda url: False)
    monkeypatch.setattr(
        "frostline.datasets.source.load_manifest", lambda *_, **__: pytest.fail("listed at the trainer")
    )
    model = fl.freeze(Small(), until="stem", input_shape=(3, 32, 32))
    with fl.offload(model, str(photos), preprocess=quick, near=shared_node.url) as job:
        assert sum(len(batch) for batch in job.loader(batch_size=4)) == 4 * len(CLASSES)
    loader = fl.loader(str(photos), batch_size=4, preprocess=quick, near=[shared_node.url])
    assert sum(len(batch) for batch in loader) == 4 * len(CLASSES)
