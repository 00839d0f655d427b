"""Jobs over stores: objects that change, stores that hang, trainers without credentials, several stores in turns.

A job does what it was told about objects that change behind its manifest, and never uses them.

A store that says nothing: the job's own deadline ends the wait, whatever the environment would allow.

Trainers that have no credentials for a store: the node beside it lists, reads and computes.

Parts that take turns by ratio may lie in different stores: here a folder and a bucket of a real S3 server.
"""

import csv
import io
import json
import os
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import AccessDenied, DataChanged, StoreError, StoreUnavailable
from frostline.datasets.dataset import roots_of
from frostline.node import Node
from frostline.node.process import start_node
from frostline.stores.cql.writer import TableSample
from frostline.stores.open import open_store
from support.bucket_peer import bucket_peer
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.formats import tar_of
from support.images import image_folder, tiny_preprocess
from support.matrices import sampled
from support.nodes import served

COUNT = 12
SETTINGS = LoaderSettings(samples_per_request=4, device_batch=8, max_skipped_fraction=0.2)


def array(value):
    file = io.BytesIO()
    np.save(file, np.full((40, 40), value, np.uint8))
    return file.getvalue()


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch):
    """Twelve grey pictures, of which number n is as bright as n tens."""
    if request.param == "folder":
        found = open_store(str(tmp_path))
    else:
        server = request.getfixturevalue("s3")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.make_bucket("changing")
        found = open_store(f"s3://changing/{uuid.uuid4()}")
    for number in range(COUNT):
        found.write(f"{'even' if number % 2 == 0 else 'odd'}/{number:02}.npy", array(10 * number))
    return found


def job_on(data, **options):
    return fl.offload(None, data, preprocess=tiny_preprocess(), settings=SETTINGS, **options)


def seen(batches):
    """How bright the pictures were, in tens."""
    return sorted(round(float(feature.mean()) * 6.4 + 12.7) for batch in batches for feature in batch.features)


def test_leaves_out_changed_objects_and_goes_on(store):
    data = fl.Dataset(store.url)
    with job_on(data) as job:
        store.write("even/04.npy", array(250))
        assert seen(job.loader(4)) == [0, 1, 2, 3, *range(5, COUNT)]
        (skipped,) = job.statistics().skipped
        assert skipped.changed
        assert skipped.object == "even/04.npy"


@pytest.mark.parametrize("over", ["process", "http"])
def test_changed_objects_end_a_job_that_refuses_them(store, over):
    data = fl.Dataset(store.url, on_change="refuse")
    assert len(data) == COUNT
    # A local tier would give the second job what was listed.
    settings = NodeSettings(device_batch=8, local_tier_bytes=0)
    with Node(settings, (store.url,)) as node, served(node) as url:
        where = {"near": url} if over == "http" else {"node": settings}
        with job_on(data, **where) as job:
            assert seen(job.loader(4)) == list(range(COUNT))
        store.write("even/04.npy", array(250))
        with (
            job_on(data, **where) as job,
            pytest.raises(
                DataChanged, match=r"even/04\.npy is not what it was.*on_change='rebuild' .*--on-change rebuild"
            ),
        ):
            list(job.loader(4))


def test_reads_the_data_as_it_is_when_the_job_begins(store):
    data = fl.Dataset(store.url, on_change="rebuild")
    train, held_out = data.split(0.5, seed=1)
    number = next(int(name[-6:-4]) for name in train.names)
    name = next(name for name in train.names if name.endswith(f"{number:02}.npy"))
    store.write(name, array(200))
    store.write("odd/13.npy", array(130))
    with job_on(data) as job:
        assert job.data.digest != data.digest
        assert seen(job.loader(4)) == sorted({*range(COUNT), 13, 20} - {number})
        here = seen(job.loader(4, data=train))
        assert 20 in here
        assert sorted([*here, *seen(job.loader(4, data=held_out))]) == sorted({*range(COUNT), 20} - {number})
        assert not job.statistics().skipped


def test_never_in_the_middle_of_an_epoch(store):
    data = fl.Dataset(store.url, on_change="rebuild")
    with job_on(data) as job:
        before = job.data.digest
        store.write("odd/11.npy", array(250))
        for _ in range(2):
            assert seen(job.loader(4)) == list(range(COUNT - 1))
        assert job.data.digest == before
        assert [sample.object for sample in job.statistics().skipped] == ["odd/11.npy"]
    with job_on(data) as job:
        assert seen(job.loader(4)) == [*range(COUNT - 1), 25]


def test_an_object_that_is_gone_has_changed_too(tmp_path):
    (tmp_path / "odd").mkdir()
    for number in range(COUNT):
        (tmp_path / "odd" / f"{number:02}.npy").write_bytes(array(10 * number))
    data = fl.Dataset(tmp_path, on_change="refuse")
    assert len(data) == COUNT
    (tmp_path / "odd" / "03.npy").unlink()
    with job_on(data) as job, pytest.raises(DataChanged, match=r"odd/03\.npy"):
        list(job.loader(4))


def test_an_image_that_is_broken_has_not_changed(tmp_path):
    (tmp_path / "odd").mkdir()
    for number in range(COUNT):
        (tmp_path / "odd" / f"{number:02}.npy").write_bytes(array(10 * number) if number else b"broken")
    with job_on(fl.Dataset(tmp_path, on_change="refuse")) as job:
        assert seen(job.loader(4)) == list(range(1, COUNT))
        assert [sample.changed for sample in job.statistics().skipped] == [False]


def test_a_mask_that_changes_ends_a_job_that_refuses_it(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(4):
        store.write(f"images/{number}.npy", array(number))
        store.write(f"masks/{number}.npy", array(number))
    data = fl.Dataset(tmp_path, on_change="refuse")
    with job_on(data) as job:
        store.write("masks/2.npy", array(9))
        with pytest.raises(DataChanged, match=r"masks/2\.npy is not what it was"):
            list(job.loader(4))


SETTINGS_OF_HUNG_STORES = LoaderSettings(samples_per_request=8, requests_in_flight=2, deadline_s=0.5, retry_for_s=0.5)


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """A bucket of images that is listed and then says nothing, and a way to have it do so."""
    # Longer than any test may take: only the job's deadline can end a wait.
    monkeypatch.setenv("FROSTLINE_STORE_TIMEOUT_S", "1000")
    monkeypatch.setenv("FROSTLINE_STORE_RETRY_FOR_S", "1000")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    folder, ends = image_folder(tmp_path / "images"), threading.Event()
    with bucket_peer() as peer:
        for path in folder.rglob("*.jpg"):
            peer.objects[str(path.relative_to(folder))] = path.read_bytes()
        data = fl.Dataset(f"gs://photos?endpoint={peer.url}", cache=tmp_path / "cache")
        assert len(data) == len(peer.objects)

        def hang():
            peer.answers = lambda: ends.wait() and None

        yield data, hang
        ends.set()


def test_a_job_ends_within_its_own_deadline_where_its_store_hangs(hung):
    data, hang = hung
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=SETTINGS_OF_HUNG_STORES) as job:
        hang()
        with pytest.raises(StoreUnavailable, match=r"nothing came from the store .*deadline_s"):
            list(job.loader(8))


def test_the_jobs_own_node_keeps_the_jobs_deadline_for_stores(hung):
    data, hang = hung
    node = NodeSettings(store_deadline_s=0.2)
    settings = LoaderSettings(samples_per_request=8, requests_in_flight=2, retry_for_s=0.2, deadline_s=1000)
    with fl.offload(None, data, preprocess=tiny_preprocess(), settings=settings, node=node) as job:
        hang()
        with pytest.raises(StoreUnavailable, match="nothing came from the store"):
            list(job.loader(8))


# What any of the stores' clients would find its credentials by.
SECRETS = ("AWS_", "GOOGLE_", "AZURE_", "FROSTLINE_CQL")
# How a client that has none fails: over CQL before it asks.
REFUSED = ("AccessDenied", "SettingError", "StoreUnavailable")
LISTS_ITSELF = """
import sys
import frostline as fl
from frostline.core.errors import FrostlineError
try:
    print(len(fl.Dataset(sys.argv[1])))
except FrostlineError as error:
    print(type(error).__name__)
"""
TRAINS = """
import sys
import torch
import frostline as fl
from support import plain
from support.images import tiny_preprocess
from support.networks import Small

torch.manual_seed(1)
model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
url, near = sys.argv[1:]
settings = fl.LoaderSettings(samples_per_request=8, device_batch=8)
with fl.offload(model, fl.Dataset(url, near=near), preprocess=tiny_preprocess(), near=near, settings=settings) as job:
    losses = plain.through(job, batch_size=8, epochs=2)
print(len(job.data), len(losses), all(torch.isfinite(torch.tensor(losses)).tolist()))
"""


@contextmanager
def node_with(root, environment):
    """A node with credentials, which this process does not have afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        node = start_node((root,), NodeSettings(memory_bytes=1 << 29, device_batch=8, trial_s=0))
    with node:
        yield node


def trainer(folder, *arguments):
    """Run Python in an environment without any credentials, with a home and caches of its own; what it says."""
    folder.mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
    mine = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "AWS_EC2_METADATA_DISABLED": "true"}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**clean, **mine, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def frostline(folder, verb, *arguments):
    code = "import sys; from frostline.cli import main; main(sys.argv[1:])"
    return json.loads(trainer(folder, "-c", code, verb, *arguments, "--json"))


def check_trains(folder, url, near, samples):
    """A trainer cannot list the data itself, and trains on it all the same, in Python and by the verb."""
    assert trainer(folder, "-c", LISTS_ITSELF, url).strip() in REFUSED
    assert trainer(folder, "-c", TRAINS, url, near).split() == [str(samples), str(2 * -(-samples // 8)), "True"]
    small = ["--model", "support.networks:Small", "--until", "stem"]
    asked = ["--data", url, "--near", near, *small, "--epochs", "2", "--out", str(folder / "run")]
    report = frostline(folder, "train", *asked)
    assert report["epochs"] == 2
    assert report["train_samples"] + report["val_samples"] == samples
    assert frostline(folder, "index", "--data", url, "--near", near)["samples"] == samples


def shards_of(folder):
    """The same photographs as two tars, each sample with its class."""
    for shard in range(2):
        members = []
        for path in sorted(folder.glob("*/*.jpg"))[shard::2]:
            key = f"{path.parent.name}/{path.stem}"
            members += [(f"{key}.jpg", path.read_bytes()), (f"{key}.cls", path.parent.name.encode())]
        yield f"train-{shard}.tar", tar_of(members)


@pytest.mark.parametrize("format", sampled(["folders", "webdataset"], usual=("folders",)))
def test_a_trainer_without_credentials_trains_on_a_bucket(s3, tmp_path, format):
    folder, bucket = image_folder(tmp_path / "photos"), f"listed-{format}"
    if format == "folders":
        s3.put_folder(folder, bucket)
    else:
        s3.make_bucket(bucket)
        for name, shard in shards_of(folder):
            s3.put(f"{bucket}/{name}", shard)
    url = f"s3://{bucket}?endpoint=http://{s3.s3}&region=us-east-1"
    with node_with(url, {**s3.environment(), "XDG_CACHE_HOME": str(tmp_path / "node")}) as node:
        check_trains(tmp_path / "trainer", url, node.url, 36)


@pytest.mark.long
def test_a_trainer_without_a_password_trains_on_a_table(cql, tmp_path):
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/listed?protocol=3"
    cql.execute(f"CREATE TABLE {KEYSPACE}.listed (id text PRIMARY KEY, label text, bytes bigint, data blob)")
    folder = image_folder(tmp_path / "photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        open_store(url).put_many(
            TableSample(f"{path.parent.name}/{path.name}", path.read_bytes(), -1, path.parent.name)
            for path in sorted(folder.glob("*/*.jpg"))
        )
    with node_with(url, {"FROSTLINE_CQL_PASSWORD": PASSWORD, "XDG_CACHE_HOME": str(tmp_path / "node")}) as node:
        check_trains(tmp_path / "trainer", url, node.url, 36)


def test_a_node_that_may_not_write_beside_the_data_keeps_the_manifest_itself(s3, tmp_path, monkeypatch):
    s3.put_folder(image_folder(tmp_path / "photos", per_class=2), "listed-readonly")
    url = f"s3://listed-readonly?endpoint=http://{s3.s3}&region=us-east-1"
    node_cache = tmp_path / "node"
    with node_with(url, {**s3.reader(), "XDG_CACHE_HOME": str(node_cache)}) as node:
        data = fl.Dataset(url, near=node.url, cache=tmp_path / "client")
        assert (len(data), data.manifest.found) == (6, False)
        assert list(node_cache.rglob("manifests/*.parquet"))
        again = fl.Dataset(url, near=node.url, cache=tmp_path / "other", relist=False)
        assert (len(again), again.manifest.found) == (6, True)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError):
        len(fl.Dataset(url, cache=tmp_path / "client"))
    nobody = {**s3.environment(key="nobody"), "XDG_CACHE_HOME": str(node_cache)}
    with node_with(url, nobody) as node, pytest.raises(AccessDenied):
        len(fl.Dataset(url, near=node.url, cache=tmp_path / "client"))


def test_images_of_a_folder_and_of_a_bucket_take_turns_by_ratio(s3, tmp_path, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    folder = image_folder(tmp_path / "folder", per_class=8)
    s3.put_folder(image_folder(tmp_path / "other", per_class=4), "blended")
    lists = tmp_path / "lists"
    lists.mkdir()
    with (lists / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["url", "label", "source"])
        for place, root in (("folder", str(folder)), ("bucket", "s3://blended")):
            for object in sorted(path.relative_to(tmp_path / "other") for path in (tmp_path / "other").rglob("*.jpg")):
                rows.writerow([f"{root}/{object}", object.parts[0], place])
    data = fl.Dataset(lists)
    near, far = data.select("source == 'folder'"), data.select("source == 'bucket'")
    assert len(near) == len(far) > 0
    settings = LoaderSettings(samples_per_request=4, cache_bytes=0)
    blend = fl.Mixture(parts=[near, far], ratios=[1, 3], ends="all")
    with (
        start_node(roots_of(data), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(None, data, preprocess=tiny_preprocess(), near=node.url, settings=settings) as job,
    ):
        batches = list(job.loader(4, data=blend, shuffle=True, seed=1))
        plain = {int(id): row for batch in job.loader(4) for id, row in zip(batch.ids, batch.features, strict=True)}
    of_bucket = [np.isin(batch.ids.numpy(), far.samples.ids).sum() for batch in batches if len(batch) == 4]
    assert set(of_bucket) == {3}
    came = [int(id) for batch in batches for id in batch.ids]
    assert set(came) == set(data.samples.ids.tolist())
    for batch in batches:
        for id, row in zip(batch.ids, batch.features, strict=True):
            assert (row == plain[int(id)]).all()
