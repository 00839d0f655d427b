"""Trainers that have no credentials for a store: the node beside it lists, reads and computes."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import frostline as fl
from frostline.core.config import NodeSettings
from frostline.core.errors import AccessDenied, StoreError
from frostline.node.process import start_node
from frostline.stores.cql.writer import TableSample
from frostline.stores.open import open_store
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.formats import tar_of
from support.images import image_folder
from support.matrices import sampled

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
