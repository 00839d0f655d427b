"""A file that is a data set by its name, on disk and in a bucket; and images that lie in no folder."""

import gzip
import os
import shutil
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline.core import errors
from frostline.core.errors import AccessDenied, DataNotFound, EmptyDataset, ObjectNotFound
from frostline.stores.open import open_store
from support.bucket_peer import bucket_peer
from support.formats import tar_of
from support.listing_nodes import listing_node
from support.nodes import jpeg

IMAGES = {f"{number}.jpg": jpeg(number) for number in range(6)}


def _files():
    """Three data sets of the same images, each as one file, and the images of the list."""
    names = list(IMAGES)
    tar = tar_of([(f"{'ab'[row % 2]}/{name}", IMAGES[name]) for row, name in enumerate(names)])
    sink = pa.BufferOutputStream()
    table = {"image": list(IMAGES.values()), "label": [row % 2 for row in range(len(names))]}
    pq.write_table(pa.table(table), sink)
    lines = ["path,label", *(f"images/{name},{'ab'[row % 2]}" for row, name in enumerate(names))]
    files = {
        "x.tar": tar,
        "x.tar.gz": gzip.compress(tar),
        "x.tgz": gzip.compress(tar),
        "x.parquet": sink.getvalue().to_pybytes(),
        "x.csv": "\n".join(lines).encode(),
    }
    return {**files, **{f"images/{name}": data for name, data in IMAGES.items()}}


FILES = _files()
NAMES = ("x.tar", "x.tar.gz", "x.tgz", "x.parquet", "x.csv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    for name, data in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)
    return path


def encoded(data, **options):
    """Every sample's bytes, as a plain loader gives them."""
    with fl.offload(None, data, preprocess=fl.preprocess.imagenet(32), **options) as job:
        return {
            int(id): features for batch in job.loader(4) for id, features in zip(batch.ids, batch.features, strict=True)
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_a_data_set_by_its_name(folder, name):
    data = fl.Dataset(folder / name)
    assert len(data) == len(IMAGES)
    assert sorted(np.unique(data.samples.labels)) == [0, 1]
    assert len(encoded(data)) == len(IMAGES)
    assert data.manifest.found is False
    assert fl.Dataset(folder / name).manifest.found is True
    assert len(fl.Dataset(folder / name, relist=False)) == len(IMAGES)
    assert not [path for path in folder.rglob("*") if ".frostline" in path.parts]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_in_a_bucket_too_which_need_not_list(name, monkeypatch):
    with bucket_peer() as peer:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        peer.objects |= {f"deep/{key}": data for key, data in FILES.items()}
        data = fl.Dataset(f"s3://photos/deep/{name}?endpoint={peer.url}")
        assert len(data) == len(encoded(data)) == len(IMAGES)
        assert not [target for method, target in peer.seen if method == "GET" and "prefix=" in target]
        assert set(peer.objects) == {f"deep/{key}" for key in FILES}, "nothing is written beside it"


def test_a_change_of_the_file_is_a_change_of_the_data(tmp_path):
    (tmp_path / "x.tar").write_bytes(FILES["x.tar"])
    before = fl.Dataset(tmp_path / "x.tar")
    assert len(before) == len(IMAGES)
    (tmp_path / "x.tar").write_bytes(tar_of([("a/1.jpg", IMAGES["1.jpg"]), ("b/2.jpg", IMAGES["2.jpg"])]))
    after = fl.Dataset(tmp_path / "x.tar")
    assert len(after) == 2
    assert after.digest != before.digest


def test_a_folder_called_like_a_table_is_a_folder(tmp_path):
    (tmp_path / "x.parquet").mkdir()
    (tmp_path / "x.parquet" / "part-0.parquet").write_bytes(FILES["x.parquet"])
    assert len(fl.Dataset(tmp_path / "x.parquet")) == len(IMAGES)
    store = open_store(f"memory://{uuid.uuid4()}/x.parquet")
    store.write("part-0.parquet", FILES["x.parquet"])
    assert len(fl.Dataset(store.url)) == len(IMAGES)


def test_what_lies_beside_the_file_is_not_there(folder):
    place = f"memory://{uuid.uuid4()}"
    for name in ("x.tar", "secret.txt"):
        open_store(place).write(name, b"0123456789")
    (folder / "secret.txt").write_bytes(b"0123456789")
    for url in (f"{place}/x.tar", str(folder / "x.tar")):
        store = open_store(url)
        assert [entry.object for entry in store.list()] == ["x.tar"]
        for use in (
            lambda store=store: store.read("secret.txt", 0, 1),
            lambda store=store: store.describe("secret.txt"),
        ):
            with pytest.raises(ObjectNotFound, match=r"no object .secret.txt. in x\.tar"):
                use()
        with pytest.raises(AccessDenied, match="is a single file"):
            store.write("other", b"")


def test_a_node_serves_the_file_alone(folder):
    with listing_node(folder / "x.tar") as node:
        url = node.url
        data = fl.Dataset(folder / "x.tar", near=url)
        assert len(encoded(data, near=url)) == len(IMAGES)
        with pytest.raises(errors.BadRequest, match="does not serve"):
            len(fl.Dataset(folder / "x.parquet", near=url))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing.tar", "there is no file"),
        ("x.tar.xz", "compressed as a whole"),
        ("x.txt", r"those that end in \.arrow, \.csv, \.parquet, \.tar, \.tar\.gz, \.tgz are data sets"),
    ],
)
def test_a_file_that_is_none_is_refused_with_one_sentence(tmp_path, name, sentence):
    if name != "nothing.tar":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataNotFound, match=sentence) as caught:
        len(fl.Dataset(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_pipe_of_that_name_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(DataNotFound, match="is no regular file"):
        len(fl.Dataset(tmp_path / "x.tar"))


def test_images_in_no_folder_are_samples_without_classes(tmp_path):
    for name, data in IMAGES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("-")
    (tmp_path / ".hidden.jpg").write_bytes(b"-")
    data = fl.Dataset(tmp_path)
    assert list(data.names) == sorted(IMAGES)
    assert data.classes == ()
    assert len(encoded(data)) == len(IMAGES)
    with pytest.raises(errors.DataError, match=r"has a label: class folders such as cats/1.jpg say them"):
        data.selection.require_classes(2, data.url)


def test_images_in_no_folder_beside_those_in_class_folders_are_passed_over_as_before(tmp_path):
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        shutil.copy(__file__, tmp_path / folder / "1.jpg")
    (tmp_path / "loose.jpg").write_bytes(b"-")
    assert list(fl.Dataset(tmp_path).names) == ["cat/1.jpg", "dog/1.jpg"]


def test_an_empty_folder_is_refused_with_one_sentence(tmp_path):
    with pytest.raises(
        EmptyDataset, match=r"holds no images or sounds, in class folders \(such as cats/1.jpg\) or in none"
    ):
        len(fl.Dataset(tmp_path))
