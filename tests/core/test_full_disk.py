"""A full disk under each folder that is written: caches cost their speed alone, what was asked for says where."""

import errno
import os
import resource
import shutil
import subprocess
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.cache import FeatureStore
from frostline.callbacks.traces import TraceFile
from frostline.cli import commands
from frostline.core.config import NodeSettings
from frostline.core.errors import OutOfSpace, StoreUnavailable
from frostline.core.events import EpochStarted
from frostline.core.files import FileCache, append_line
from frostline.datasets.check import CheckedRows, CheckProgress
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.manifest import load_manifest, null_observer
from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey
from frostline.loaders import Batch
from frostline.preprocess import Applied
from frostline.stores import disk_tier
from frostline.stores.disk_tier import LocalTier
from frostline.stores.open import open_store
from frostline.training.feature_files import Contents, tensor_column, write_features
from frostline.training.loop import Checkpoint
from frostline.training.report.steps import RecordedSteps, StepRecorder
from frostline.training.run_config import write_text
from frostline.training.run_folder import CheckpointFolder
from frostline.wire.tls import Authority
from support.images import image_folder, tiny_preprocess
from support.listing_nodes import answer_of, manifest_bytes, stranger, table_of
from support.networks import Small
from support.stored import put

pytestmark = pytest.mark.promise("kept", mended="a full disk under the user's cache folder ended every verb")

SMALL = 16 << 20


class Disk:
    """A file system of its own, on which there is space or none."""

    def __init__(self, path):
        self.path = path
        self._filler = path / "filler"

    def fill(self):
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        assert shutil.disk_usage(self.path).free == 0

    def free(self):
        self._filler.unlink(missing_ok=True)

    def written_bytes(self, folder):
        return sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file()) * 512


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield Disk(path)
    subprocess.run(["umount", path], check=True)


@pytest.fixture
def disk(mounted):
    yield mounted
    mounted.free()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=4)


def keeps_small_files(folder, images):
    """Traces, rows that may run together, inspections and measurements."""
    files = FileCache(folder, ".json")
    files.put("one", b"1")
    return files.get("one") == b"1"


def keeps_profiles(folder, images):
    key = ProfileKey(prefix="a", hardware="b", engine="c", device_batch=8, codecs=(), packed_cuts=())
    ProfileCache(folder).put(key, MeasuredPrefix(cuts=(), codecs=()))
    return ProfileCache(folder).get(key) is not None


def keeps_features(folder, images):
    store = FeatureStore.try_open(folder, SMALL)
    if store is None:
        return False
    with store:
        return put(store, range(2)) == 2


def keeps_encoded_samples(folder, images):
    tier = LocalTier(folder, budget_bytes=1 << 20)
    tier.put("0" * 40, b"12345")
    return tier.has("0" * 40)


def keeps_checks(folder, images):
    progress = CheckProgress(folder / "a.jsonl")
    progress.add(CheckedRows(start=0, stop=1, digests={}, unreadable=()))
    return len(list(progress.read_previous())) > 0


def keeps_manifests(folder, images):
    data = fl.Dataset(images, cache=folder)
    assert len(data) == 12
    return data.statistics().manifest != ""


def keeps_mapped_manifests(folder, images):
    found = load_manifest(open_store(str(images)), cache=folder, in_memory_bytes=0)
    assert len(found.samples) == 12
    return found.columns.is_mapped


def keeps_manifests_of_nodes(folder, images):
    with stranger(answer_of(manifest_bytes(table_of()))) as url:
        data = fl.Dataset("s3://bucket/photos", near=url, cache=folder)
        assert len(data) == 3
        return data.statistics().manifest != ""


def keeps_traces(folder, images):
    folder.mkdir(exist_ok=True)
    with TraceFile(folder / "trace.json") as trace:
        for epoch in range(200):
            trace(EpochStarted(epoch=epoch, samples=1))
    return (folder / "trace.json").read_text().endswith("]\n")


CACHES = {name.removeprefix("keeps_"): keeps for name, keeps in list(globals().items()) if name.startswith("keeps_")}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_is_full_is_told_of_once_and_ends_nothing(disk, images, name, monkeypatch, caplog):
    monkeypatch.setattr(disk_tier, "_LEFT_BYTES", -(1 << 20))  # else it does not try at all
    folder = disk.path / name
    disk.fill()
    for _ in range(2):
        assert not CACHES[name](folder, images)
    (told,) = [record.getMessage() for record in caplog.records if str(disk.path) in record.getMessage()]
    assert told.startswith(f"nothing more can be kept in {folder}")
    assert disk.written_bytes(folder) == 0
    assert not [path for path in folder.rglob("*") if "part" in path.name.lstrip(".")[:8] or path.suffix == ".part"]
    disk.free()
    assert CACHES[name](folder, images)
    disk.fill()
    CACHES[name](folder, images)  # beside what was kept already


def keep_checkpoint(folder, images):
    step = Checkpoint(epoch=0, epoch_steps=1, steps=0, order=None, losses=(1.0,), epoch_losses=(), samples=0)
    CheckpointFolder(folder).keep(step)


def export(suffix, folder, images):
    columns = {"id": [1, 2], "label": [0, 1], "features": tensor_column(np.zeros((2, 3), np.float32))}
    contents = Contents(rows=2, shape=(3,), dtype="float32", classes=("a", "b"))
    write_features(folder / f"features{suffix}", [pa.table(columns)], contents)


def save_splits(folder, images):
    data = fl.Dataset(images, cache=folder)
    data.save_splits(data.split({"train": 0.5, "val": 0.5}))


ASKED = {
    "a run's file": lambda folder, images: write_text(folder / "report.json", "{}"),
    "a checkpoint": keep_checkpoint,
    "features.parquet": partial(export, ".parquet"),
    "features.safetensors": partial(export, ".safetensors"),
    "features.lance": partial(export, ".lance"),
    "a ready format": lambda folder, images: ingest(
        fl.Dataset(images), folder, Applied.to(tiny_preprocess(), "uint8"), on_event=null_observer
    ),
    "a copy": lambda folder, images: repack(fl.Dataset(images), folder, "webdataset", on_event=null_observer),
    "splits": save_splits,
    "certificates": lambda folder, images: Authority(folder),
}


@pytest.mark.parametrize("name", ASKED)
def test_output_on_a_full_disk_is_an_error_and_leaves_nothing_half_written(disk, images, name):
    folder = disk.path / name.replace(" ", "-")
    folder.mkdir()
    disk.fill()
    with pytest.raises(OutOfSpace) as error:
        ASKED[name](folder, images)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert disk.written_bytes(folder) == 0
    assert not [path for path in folder.rglob("*") if path.suffix == ".part"]
    disk.free()
    ASKED[name](folder, images)
    assert disk.written_bytes(folder) > 0


def test_a_record_of_steps_stops_where_there_is_no_room_and_what_it_has_is_read(disk, caplog):
    folder = disk.path / "run"
    folder.mkdir()
    ids = np.arange(4, dtype=np.int64)
    samples = fl.core.Samples(
        ids=ids, objects=["a"] * 4, offsets=ids * 0, lengths=ids + 1, labels=ids * 0, versions=["v"] * 4
    )
    recorder = StepRecorder(folder, samples)
    recorder.begin({}, "exact")
    batch = Batch(features=torch.ones(4, 2000), labels=torch.zeros(4), ids=torch.arange(4))
    recorder.add(batch, step=1, epoch=0, number=0, engine="e")
    disk.fill()
    for step in range(2, 40):
        if recorder.is_due(step):
            recorder.add(batch, step=step, epoch=0, number=step, engine="e")
    steps = [step.step for step in RecordedSteps.read(folder).steps]
    assert steps == list(range(1, len(steps) + 1))
    assert 1 <= len(steps) < 39
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]


def test_a_job_on_a_full_disk_gives_the_same_features(disk, images, tmp_path, monkeypatch, caplog):
    def features(place):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))
        torch.manual_seed(0)
        model = fl.freeze(Small().train(), "stem", input_shape=(3, 32, 32))
        settings = fl.LoaderSettings(cache_folder=str(place / "of-job"), cache_bytes=0)
        node = NodeSettings(memory_bytes=1 << 28, device_batch=8, cache_folder=str(place / "of-node"))
        data = fl.Dataset(images)
        with (
            TraceFile(place / "trace.json") as trace,
            fl.offload(model, data, preprocess=tiny_preprocess(), settings=settings, node=node, on_event=trace) as job,
        ):
            loader = job.loader(4, shuffle=True, seed=1)
            return torch.cat([batch.features for _ in range(2) for batch in loader])

    disk.fill()
    found = features(disk.path)
    for name in ("home/frostline", "of-job", "of-node", "trace.json"):
        assert [record for record in caplog.records if f"{disk.path}/{name}" in record.getMessage()]
    assert torch.equal(found, features(tmp_path))


@contextmanager
def at_most(what, limit):
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda data: data.hex().encode() + b"\n"), max_size=8),
    room=st.lists(st.integers(0, 40), min_size=8, max_size=8),
)
def test_a_line_that_found_no_room_takes_no_other_with_it(tmp_path_factory, lines, room):
    path = tmp_path_factory.mktemp("lines") / "audit.jsonl"
    written = []
    for line, nbytes in zip(lines, room, strict=False):
        with suppress(OSError), at_most(resource.RLIMIT_FSIZE, nbytes):
            append_line(path, line)
            written.append(line)
    append_line(path, b"last\n")
    found = path.read_bytes().splitlines(keepends=True)
    places = iter(found)
    assert all(line in places for line in [*written, b"last\n"]), "they stand whole and in their order"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no space left to write a file (/"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x/y"), "no space left to write /x/y: free some"),
        (OSError(errno.EFBIG, "File too large", "/x/y"), "no space left to write /x/y: free some"),
        (OSError(errno.EMFILE, "Too many open files", "/x/y"), "cannot open /x/y: Too many open files; allow this"),
        (OSError(errno.ENFILE, "Too many open files in system"), "cannot open another file: Too many open files"),
    ],
)
def test_what_a_library_meets_is_one_sentence_of_the_command_line(monkeypatch, capsys, error, said):
    def met(**_):
        raise error

    monkeypatch.setattr(commands.verbs, "main", met)
    with pytest.raises(SystemExit) as ended:
        commands.run(["demo"], 0.0)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"frostline: {said}")


def test_other_errors_of_the_system_are_not_hidden(monkeypatch):
    def met(**_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(commands.verbs, "main", met)
    with pytest.raises(OSError, match="Input/output"):
        commands.run(["demo"], 0.0)


def test_a_store_without_descriptors_is_asked_again_and_reads_on(images):
    store = open_store(str(images))
    name = next(iter(store.list())).object
    data = bytes(store.read(name, 0, 9))
    with at_most(resource.RLIMIT_NOFILE, 3), pytest.raises(StoreUnavailable, match=os.strerror(errno.EMFILE)):
        store.read(name, 0, 9)
    assert bytes(store.read(name, 0, 9)) == data
