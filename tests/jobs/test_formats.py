"""The same losses from every format and store, and splits that are not mixed unasked.

The same images give the same losses from every format and store, over a node too.

A loop over all of a data set that brings splits is told that it trains on what should score it.
"""

import uuid
import warnings
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import TooManySkipped
from frostline.core.events import SampleSkipped, SamplesLeftOut
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from frostline.node import Node
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess
from frostline.stores.open import open_store
from frostline.testing.formats import Example
from support import formats
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import served

SETTINGS = NodeSettings(device_batch=8)
PUT = {
    "folders": formats.put_folders,
    "webdataset": formats.put_webdataset,
    "parquet": formats.put_parquet,
    "urls": formats.put_urls,
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    root = Path(image_folder(tmp_path_factory.mktemp("images"), per_class=8))
    return [Example(path.stem, path.parent.name, path.read_bytes()) for path in sorted(root.rglob("*.jpg"))]


def losses(data, near=None):
    torch.manual_seed(0)
    model = fl.freeze(Small().train(), until="stem", input_shape=(3, 32, 32))
    seen = []
    with fl.offload(model, data, preprocess=tiny_preprocess(flip=False), near=near, policy="min_bytes") as job:
        optimizer = torch.optim.SGD(job.head.parameters(), lr=0.1)
        for epoch in range(2):
            for batch in job.loader(8, shuffle=True, seed=3, epoch=epoch):
                loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
    return seen


def place(kind, request, tmp_path, monkeypatch):
    if kind == "folder":
        return tmp_path.as_uri()
    if kind == "memory":
        return f"memory://{uuid.uuid4()}"
    server = request.getfixturevalue("s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.make_bucket("alike")
    return f"s3://alike/{uuid.uuid4()}"


@pytest.fixture(scope="module")
def plain(examples):
    url = f"memory://{uuid.uuid4()}"
    formats.put_folders(open_store(url), examples)
    return losses(fl.Dataset(url))


@pytest.mark.parametrize("format", PUT)
@pytest.mark.parametrize("store", ["folder", "memory", "s3"])
def test_a_run_has_the_same_losses_from_every_format_and_store(
    format, store, plain, examples, request, tmp_path, monkeypatch
):
    url = place(store, request, tmp_path, monkeypatch)
    PUT[format](open_store(url), examples)
    data = fl.Dataset(url, format=format)
    assert data.classes == ("circle", "noise", "stripe")
    assert len(plain) == 6
    assert losses(data) == plain


def test_a_run_has_the_same_losses_from_a_table_of_cassandra(plain, examples, cql, tmp_path, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    table = open_store(f"cql://{USER}@{cql.place}/{KEYSPACE}/alike?protocol=3")
    table.create()
    formats.put_table(table, examples)
    data = fl.Dataset(table.url, cache=tmp_path)
    assert data.classes == ("circle", "noise", "stripe")
    assert losses(data) == plain


@pytest.mark.parametrize("format", ["webdataset", "parquet", "urls"])
def test_a_node_elsewhere_reads_them_too(format, plain, examples, tmp_path):
    PUT[format](open_store(str(tmp_path)), examples)
    with Node(SETTINGS, (tmp_path.as_uri(),)) as node, served(node) as near:
        assert losses(fl.Dataset(tmp_path, format=format), near) == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize("format", PUT)
def test_encoded_samples_come_as_they_are_stored(format, examples, tmp_path):
    PUT[format](open_store(str(tmp_path)), examples)
    data = fl.Dataset(tmp_path, format=format)
    with fl.offload(None, data, preprocess=tiny_preprocess()) as job:
        batches = list(job.loader(8))
    assert sum(len(batch.labels) for batch in batches) == len(examples)
    labels = np.concatenate([batch.labels for batch in batches])
    assert sorted(labels.tolist()) == sorted([*range(3)] * 8)


@pytest.mark.parametrize("format", PUT)
def test_objects_that_change_behind_a_job_are_named_and_end_it(format, examples, tmp_path):
    store = open_store(str(tmp_path))
    PUT[format](store, examples)
    data = fl.Dataset(tmp_path, format=format)
    with fl.offload(None, data, preprocess=tiny_preprocess()) as job:
        PUT[format](store, examples[::-1])
        with pytest.raises(TooManySkipped) as caught:
            list(job.loader(8))
    assert "changed" in str(caught.value)


def job_over(folder, on_event=None):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), on_event=on_event)


def folder_with(tmp_path, *splits):
    for split in splits:
        image_folder(tmp_path / split, per_class=2)
    return tmp_path


def test_warns_where_splits_to_train_on_and_to_score_are_read_together(tmp_path):
    with job_over(folder_with(tmp_path, "train", "val")) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.loader(2)
        job.loader(2, data=job.data["train"])
    assert len(caught) == 1
    assert "splits train, val mixed" in str(caught[0].message)
    assert "data=job.data['train']" in str(caught[0].message)


def test_says_nothing_where_there_is_nothing_to_score(tmp_path):
    happened = []
    with job_over(image_folder(tmp_path / "images", per_class=2), happened.append) as job:
        job.loader(2)
    assert not [event for event in happened if type(event).__name__ == "SetupWarning"]


PNG = b"\x89PNG"
WHOLE = (CenterCrop(48), Normalize(mean=(0.0,) * 3, std=(1.0,) * 3))


def turned_images():
    """Images of 40 x 32 pixels, one for each way in which EXIF data turns them, and one of 16 bits."""
    rng = np.random.default_rng(4)
    for orientation in range(1, 9):
        exif, sink = Image.Exif(), BytesIO()
        exif[0x0112] = orientation
        Image.fromarray(rng.integers(0, 256, (32, 40, 3), np.uint8)).save(sink, "JPEG", exif=exif)
        yield sink.getvalue()
    sink = BytesIO()
    Image.fromarray(rng.integers(0, 65536, (32, 40)).astype(np.uint16)).save(sink, "PNG")
    yield sink.getvalue()


def seen_by(image):
    """What a loop of one's own has of an image: a square as large as the whole, many bits scaled by 65,535."""
    if image.mode.startswith("I"):
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    ground = Image.new("RGB", (48, 48))
    ground.paste(image.convert("RGB"), ((48 - image.width) // 2, (48 - image.height) // 2))
    return np.asarray(ground).transpose(2, 0, 1).astype(np.float32)


def put_turned(root, kind, images):
    """The images as class folders, as ``datasets`` saves them, or as it writes Parquet files."""
    if kind == "folders":
        for number, data in enumerate(images):
            path = root / "a" / f"{number}{'.png' if data.startswith(PNG) else '.jpg'}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        return
    rows = {"image": [{"bytes": data, "path": None} for data in images], "label": [0] * len(images)}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a"])})
    saved = datasets.Dataset.from_dict(rows, features=features)
    if kind == "saved":
        saved.save_to_disk(root)
    else:
        saved.to_parquet(root / "x.parquet")


def pixels_by_id(loader):
    batches = list(loader)
    ids = torch.cat([batch.ids for batch in batches]).tolist()
    rows = torch.cat([batch.features for batch in batches]).numpy()
    return dict(zip(ids, rows, strict=True))


@pytest.mark.parametrize("kind", ["folders", "saved", "parquet"])
def test_pixels_are_those_of_the_users_own_loader_whoever_decodes_them(tmp_path, shared_node, kind):
    images = list(turned_images())
    put_turned(tmp_path, kind, images)
    if kind == "folders":
        expected = [seen_by(Image.open(BytesIO(data))) for data in images]
    else:
        reader = datasets.Image()
        expected = [seen_by(reader.decode_example({"bytes": data, "path": None})) for data in images]
    preprocess = Preprocess(steps=(Decode(value_range=(0, 65535)), *WHOLE))
    data = fl.Dataset(tmp_path)
    order = np.argsort([int(Path(name).stem) for name in data.names])
    by_place = dict(zip(data.samples.ids[order].tolist(), expected, strict=True))

    def check(found):
        assert found.keys() == by_place.keys()
        for id, row in found.items():
            assert np.array_equal(row, by_place[id])

    for cut in (0, 1):  # decoded by the trainer, and by the node
        with fl.offload(None, data, preprocess=preprocess, near=shared_node.url, cut=cut) as job:
            check(pixels_by_id(job.loader(4)))
            check(pixels_by_id(DataLoader(job.loader(4), batch_size=None, num_workers=1)))
    with fl.offload(None, data, preprocess=preprocess) as job:
        check(pixels_by_id(job.loader(4, preprocess=preprocess)))
    with (
        start_io(Upstream(roots=(str(tmp_path),), node=SETTINGS)) as service,
        fl.offload(None, data, preprocess=preprocess, near=service.url) as job,
    ):
        check(pixels_by_id(job.loader(4)))
    # What is declared goes before what the data's own reader does.
    stored = Preprocess(steps=(Decode(orientation="stored", value_range=(0, 65535)), *WHOLE))
    found = pixels_by_id(fl.loader(data, 4, preprocess=stored))
    for id, image in zip(data.samples.ids[order].tolist(), images, strict=True):
        assert np.array_equal(found[id], seen_by(Image.open(BytesIO(image))))


@pytest.mark.parametrize("format", PUT)
def test_a_sample_that_cannot_be_read_is_told_by_its_name_in_every_format(format, examples):
    url = f"memory://{uuid.uuid4()}"
    PUT[format](open_store(url), [*examples[:7], *(Example(name, "blob", b"no image") for name in ("odd", "other"))])
    data, told = fl.Dataset(url), []
    broken = {name for name, size in zip(data.names, data.samples.lengths, strict=True) if size == len(b"no image")}
    settings = LoaderSettings(max_skipped_fraction=0.5)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings, on_event=told.append) as job:
        assert sum(len(batch.ids) for batch in job.loader(4)) == 7
        assert {sample.object for sample in job.statistics().skipped} == broken
    assert {event.object for event in told if isinstance(event, SampleSkipped)} == broken
    assert all(name in next(event.reason for event in told if isinstance(event, SamplesLeftOut)) for name in broken)
    with fl.offload(None, data, preprocess=tiny_preprocess()) as job, pytest.raises(TooManySkipped) as refused:
        list(job.loader(4))
    assert any(f"the last is {name} " in str(refused.value) for name in broken)
