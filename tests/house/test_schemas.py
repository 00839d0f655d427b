"""What is persisted has a number of its schema, and one that the reader does not know is refused or passed over."""

import ast
import hashlib
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save, save_file
from safetensors.torch import load as torch_load
from safetensors.torch import save as torch_save

from frostline import demo
from frostline.cache import FeatureStore
from frostline.callbacks.traces import TraceFile
from frostline.control.changes import ControlChanges
from frostline.control.store import RecordStore
from frostline.core.errors import DataError, FrostlineError, OrderMismatch, SettingError, UnsafeArtifact
from frostline.core.files import with_schema, without_schema
from frostline.core.system import __version__
from frostline.datasets import Dataset, source
from frostline.datasets.check import CheckedRows, CheckProgress
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.ready import Layout
from frostline.datasets.manifest import load_manifest
from frostline.jobs.measuring import MeasurementCache, Measurements
from frostline.jobs.profiling import MeasuredPrefix, ProfileCache, ProfileKey
from frostline.models.artifact import GraphLimits, header_of, metadata, read_prefix
from frostline.models.row_check import mixed_rows
from frostline.node.inspection import Inspector, kept_inspections
from frostline.node.trials.queue import TrialPolicy
from frostline.node.trials.store import TrialStore
from frostline.ordering import OrderState, RecordedOrder
from frostline.preprocess import Applied, imagenet
from frostline.profiles import Trial
from frostline.training import what_if
from frostline.training.extract import Parts, Ranges
from frostline.training.loop import Checkpoint
from frostline.training.report.steps import RecordedSteps, StepRecorder
from frostline.training.run_config import RunConfig
from frostline.training.run_folder import CheckpointFolder
from frostline.training.settings import JobSettings
from support.images import image_folder
from support.nodes import artifact_of, small_network
from support.plans import a_situation
from support.reports import a_report
from support.stored import checked, put

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
SMALL = 16 << 20
NUMBERED = {
    "cache/disk.py": "_FORMAT",
    "cache/shared_layout.py": "_FORMAT",
    "callbacks/traces.py": "_FORMAT",
    "control/store.py": "_SCHEMA",
    "datasets/check.py": "_FORMAT",
    "datasets/copy/repack.py": "_FORMAT",
    "datasets/formats/ready.py": "_FORMAT",
    "datasets/manifest_store.py": "_FORMAT",
    "datasets/mapped.py": "_FORMAT",
    "demo.py": "_FORMAT",
    "jobs/in_store.py": "_FORMAT",
    "jobs/measuring.py": "_FORMAT",
    "jobs/profiling.py": "_FORMAT",
    "models/artifact.py": "_FORMAT",
    "models/row_check.py": "_FORMAT",
    "node/inspection.py": "_FORMAT",
    "node/trials/store.py": "_FORMAT",
    "ordering/shards.py": "_SCHEMA",
    "ordering/state.py": "SCHEMA",
    "ray/control.py": "_FORMAT",
    "training/extract.py": "_FORMAT",
    "training/report/report.py": "_FORMAT",
    "training/report/steps.py": "_FORMAT",
    "training/run_config.py": "_FORMAT",
    "training/run_folder.py": "_FORMAT",
    "training/what_if.py": "_FORMAT",
}
"""What has a number, and by which name: a name of one's own for it would not be found by the next reader."""


def is_statement(value):
    """Whether a text is SQL, which is a schema and has a number beside it."""
    return isinstance(value, str) and "CREATE" in value


def trees():
    """Path and syntax of every module."""
    for path in SOURCE.rglob("*.py"):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


@cache  # to parse every module takes a second
def numbers():
    """Every schema number: the module that has it, its name, and what it is."""
    found = []
    for path, tree in trees():
        for node in tree.body:
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            is_number = name in {"SCHEMA", "_SCHEMA", "_FORMAT"} and isinstance(node.value, ast.Constant)
            if is_number and not is_statement(node.value.value):
                found.append((path, name, node.value.value))
    return found


def number_of(module):
    return next(value for place, _, value in numbers() if place == module)


def test_every_schema_number_stands_in_the_list_and_under_one_of_two_names():
    assert {module: name for module, name, _ in numbers()} == NUMBERED


@pytest.mark.parametrize("step", [1, 99])
def test_a_loaders_state_of_a_later_schema_is_refused(step):
    state = OrderState(
        manifest="m", order="o", last="keep", seed=0, epoch=0, samples=9, batch_size=2, position=2, ahead=(4,)
    ).to_json()
    assert OrderState.from_json(state).ahead == (4,)
    schema = number_of("ordering/state.py")
    (key,) = (name for name, value in state.items() if value == schema and name not in {"batch_size", "position"})
    with pytest.raises(OrderMismatch, match="newer Frostline"):
        OrderState.from_json({**state, key: schema + step})


@pytest.mark.parametrize("step", [-1, 1])
def test_a_prefix_of_another_format_is_refused(monkeypatch, step):
    from frostline.models import artifact

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "_FORMAT", number_of("models/artifact.py") + step)
        _, body = artifact_of(small_network())
    with pytest.raises(UnsafeArtifact, match="this node reads format"):
        artifact.read_prefix(body)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_training_of_another_format_is_refused(step):
    from frostline.jobs import in_store

    about = json.dumps({"format": number_of("jobs/in_store.py") + step})
    with pytest.raises(UnsafeArtifact, match="this node reads format"):
        in_store.read_assignment(save({}, metadata={"frostline.assignment": about}))


@pytest.mark.parametrize("step", [-1, 1])
def test_a_ready_format_of_another_version_is_to_be_made_again(step):
    with pytest.raises(DataError, match="of another version: make it again"):
        Layout.from_json(json.dumps({"format": number_of("datasets/formats/ready.py") + step}).encode())


@pytest.mark.parametrize("step", [-1, 97])
def test_the_state_of_a_control_plane_of_another_version_is_refused(tmp_path, step):
    path = tmp_path / "state"
    RecordStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {number_of('control/store.py') + step}")
    with pytest.raises(SettingError, match=f"written by another version of Frostline .*this is {__version__}"):
        RecordStore(path)


def test_a_cache_of_another_format_is_begun_anew(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        assert put(store, range(40)) == 40
    (file,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with FeatureStore(tmp_path, SMALL) as store:
        assert checked(store, range(40)) == []
        assert put(store, range(40)) == 40
        assert checked(store, range(40)) == list(range(40))


PLAIN = {
    "cli/plan.py": "a page for people",
    "core/audit.py": "lines that are read one by one, by whatever collects logs",
    "core/files.py": "keeps bytes for modules that are in the list",
    "core/processes.py": "a switch of the kernel",
    "datasets/copy/layout.py": "tars and tables in formats that others define",
    "datasets/formats/cells_apart.py": "a file in memory that is read at once",
    "datasets/formats/webdataset.py": "unpacked tars",
    "datasets/source.py": "bytes of a manifest",
    "doctor.py": "a file that is removed at once",
    "engines/machine.py": "a switch of the kernel",
    "node/trials/processes.py": "read by the process that it starts",
    "node/trials/trial_process.py": "read by the process that started it",
    "stores/disk_tier.py": "samples as their stores have them, by their digests",
    "stores/local.py": "whatever it is given",
    "training/feature_files.py": "tables and tensors in formats that others define",
    "training/predict.py": "a table in a format that others define",
    "training/run.py": "the report, whose number its own module has, and files in formats that others define",
    "wire/tls.py": "certificates and keys in formats that others define",
}
"""What writes files without a number of its own, and why."""
WRITERS = {
    "FileCache",
    "NamedTemporaryFile",
    "ParquetWriter",
    "append_line",
    "atomic_file",
    "open_private",
    "replace_file",
    "write_bytes",
    "write_table",
    "write_tensors",
    "write_text",
}


def writers():
    """The modules that write files."""
    for path, tree in trees():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func) for call in calls}
        opened = any(
            isinstance(value, ast.Constant) and str(value.value) in {"w", "wb", "x", "xb", "a", "ab", "x+b"}
            for call in calls
            if ast.unparse(call.func).rpartition(".")[2] == "open"
            for value in (*call.args, *(keyword.value for keyword in call.keywords))
        )
        if opened or named & WRITERS:
            yield path


def test_whatever_writes_files_has_a_number_or_a_reason():
    found = {module for module in writers() if not module.startswith("testing/")}
    assert found - NUMBERED.keys() == PLAIN.keys()


def changed(value, step=1):
    """A written value as another version of Frostline writes it."""
    return {**value, "schema": value["schema"] + step, "frostline": "7.3.1"}


@pytest.mark.parametrize("step", [-1, 1, 99])
def test_the_config_of_a_run_of_another_version_is_refused(tmp_path, step):
    RunConfig(options={}, outputs=2).write(tmp_path)
    path = tmp_path / "frostline.json"
    value = json.loads(path.read_text())
    assert value["schema"] == number_of("training/run_config.py")
    path.write_text(json.dumps(changed(value, step)))
    with pytest.raises(SettingError, match=f"written by Frostline 7.3.1 .*this is {__version__}"):
        RunConfig.read(tmp_path)
    path.write_text(json.dumps({**value, "more": 1}))
    with pytest.raises(SettingError, match="'more'"):
        RunConfig.read(tmp_path)


def test_the_record_of_a_runs_steps_of_another_version_is_refused(tmp_path):
    recorder = StepRecorder(tmp_path, Dataset(str(image_folder(tmp_path / "images", per_class=1))).samples)
    recorder.begin({}, "exact")
    path = tmp_path / "steps.jsonl"
    value = json.loads(path.read_text())
    assert value.pop("schema") == number_of("training/report/steps.py")
    del value["blake2b"]
    other = {"schema": number_of("training/report/steps.py") + 1, **value}
    digest = hashlib.blake2b(json.dumps(other).encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps({**other, "blake2b": digest}) + "\n")
    with pytest.raises(SettingError, match=f"written by Frostline {__version__} .*reads schema"):
        RecordedSteps.read(tmp_path)


@given(
    value=st.none() | st.integers() | st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(), st.text()),
    number=st.integers(0, 9),
)
def test_a_number_is_read_by_its_own_reader_alone(value, number):
    if isinstance(value, dict):
        plain = {name: item for name, item in value.items() if name not in ("schema", "frostline")}
        assert without_schema(json.loads(json.dumps(with_schema(plain, number))), number, "x", plain) == plain
        with pytest.raises(SettingError, match=f"x was written by Frostline {__version__} .schema {number}., this is"):
            without_schema(with_schema(plain, number), number + 1, "x", plain)
    with pytest.raises(SettingError, match=r"x (is damaged|was written by another Frostline)"):
        without_schema(value, number, "x", ())


def test_a_report_says_its_number():
    value = a_report().to_json()
    assert (value["schema"], value["frostline"]) == (number_of("training/report/report.py"), __version__)


def test_a_trace_says_its_number(tmp_path):
    with TraceFile(tmp_path / "t.json"):
        pass
    first, *_ = json.loads((tmp_path / "t.json").read_text())
    assert first["args"] == {"schema": number_of("callbacks/traces.py"), "frostline": __version__, "name": "Frostline"}


def measurement(folder):
    return MeasurementCache(folder, {"a": 1}), (Measurements(),)


def profile(folder):
    key = ProfileKey(prefix="a", hardware="b", engine="c", device_batch=8, codecs=(), packed_cuts=())
    cache = ProfileCache(folder)
    found = MeasuredPrefix(cuts=(), codecs=())
    return Kept(put=lambda found: cache.put(key, found), get=lambda: cache.get(key)), (found,)


def trial(folder):
    policy = TrialPolicy(device="cpu", rows=(8,), threads=(1,), keeps_freed=False, max_bytes=1 << 30)
    store, found = TrialStore(folder, policy, SMALL), Trial(engine="a", precision="fp32", cut=1, seconds=0.5)
    return Kept(put=lambda trial: store.put("d", trial), get=lambda: store.get("d", found)), (found,)


def error_of_a_trial(folder):
    policy = TrialPolicy(device="cpu", rows=(8,), threads=(1,), keeps_freed=False, max_bytes=1 << 30)
    store, found = TrialStore(folder, policy, SMALL), Trial(engine="a", precision="fp32", cut=1, error=0.5)
    return Kept(put=lambda trial: store.put_error("d", trial, "s"), get=lambda: store.error("d", found, "s")), (found,)


def situation(folder):
    job = JobSettings(data="s3://photos/waste", model="timm:resnet18", until="features")
    found = what_if.recent_situation(job, a_situation())
    return Kept(put=what_if.keep, get=lambda: what_if.find(job)), (found,)


def checked_piece(folder):
    progress = CheckProgress(folder / "a.jsonl")
    piece = CheckedRows(start=0, stop=1, digests={}, unreadable=())
    return Kept(put=progress.add, get=lambda: next(progress.read_previous(), None)), (piece,)


@dataclass
class Kept:
    """A cache of one value."""

    put: Callable[..., None]
    get: Callable[[], object]


@pytest.mark.parametrize("made", [measurement, profile, trial, error_of_a_trial, situation, checked_piece])
def test_a_cache_of_another_version_is_made_anew(tmp_path, monkeypatch, made):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, values = made(tmp_path / "kept")
    cache.put(*values)
    assert cache.get() is not None
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_text(json.dumps(changed(json.loads(path.read_text()))) + "\n")
    assert cache.get() is None
    cache.put(*values)
    assert cache.get() is not None


def altered(text, how):
    """JSON with one thing wrong, and what a refusal says of it."""
    if how == "unknown":
        return text[:-1] + ', "more": 1}', "more"
    name, rest = text[1:].split(":", 1)
    return f"{{{name}: 1, {name}:{rest}", f"the field {name.strip().replace(chr(34), chr(39))} twice"


@dataclass
class Persisted:
    """A file that somebody may have written: its JSON, and what reads it with another JSON in its place."""

    text: str
    read: Callable[[str], object]


def in_place(path, read):
    def read_with(text):
        path.write_text(text.ljust(path.stat().st_size))  # some are as long as their readers ask for
        return read()

    return Persisted(path.read_text().strip(), read_with)


def run_config(folder):
    RunConfig(options={}, outputs=2).write(folder)
    return in_place(folder / "frostline.json", lambda: RunConfig.read(folder))


def checkpoint(folder):
    checkpoints = CheckpointFolder(folder)
    checkpoints.keep(Checkpoint(epoch=0, epoch_steps=1, steps=2, order=None, losses=(1.0,), epoch_losses=(), samples=4))
    (path,) = (folder / "checkpoints").iterdir()
    tensors, said = load(path.read_bytes()), metadata(path.read_bytes())

    def read(text):
        save_file(tensors, path, {**said, "checkpoint": text})
        return CheckpointFolder(folder).read_latest()

    return Persisted(said["checkpoint"], read)


def recorded_steps(folder):
    path = folder / "steps.jsonl"
    StepRecorder(folder, Dataset(str(image_folder(folder / "images", per_class=1))).samples).begin({}, "exact")
    value = json.loads(path.read_text())
    del value["blake2b"]

    def read(text):
        digest = hashlib.blake2b(json.dumps(json.loads(text)).encode(), digest_size=16).hexdigest()
        path.write_text(f'{text[:-1]}, "blake2b": "{digest}"}}\n')
        return RecordedSteps.read(folder)

    return Persisted(json.dumps(value), read)


def named_splits(folder):
    images, cache = image_folder(folder / "images"), folder / "cache"
    data = Dataset(images, cache=cache)
    data.save_splits({"few": data.take(np.arange(3))})
    (path,) = (cache / ".frostline" / "splits").glob("*.json")
    return in_place(path, lambda: Dataset(images, cache=cache)["few"])


def claim_of_a_copy(folder):
    images = image_folder(folder / "images")

    def copy():
        return repack(Dataset(images), folder / "copy", "webdataset", on_event=lambda _: None)

    copy()
    return in_place(folder / "copy" / ".frostline" / "ingest" / "what.json", copy)


def ready_layout(_):
    applied = Applied.to(imagenet(32), "fp16")
    text = json.dumps(Layout(source="a", applied=applied, samples=1, records_per_object=1).to_json())
    return Persisted(text, lambda text: Layout.from_json(text.encode()))


def recorded_order(_):
    state = OrderState(manifest="m", order="o", last="keep", seed=0, epoch=0, samples=2, batch_size=2, position=2)
    body = RecordedOrder(state=state, positions=np.arange(2)).to_bytes()[:-32]
    start, stop = body.index(b"{"), body.rindex(b"}") + 1

    def read(text):
        other = body[:start] + text.encode() + body[stop:]
        return RecordedOrder.from_bytes(other + hashlib.sha256(other).digest())

    return Persisted(body[start:stop].decode(), read)


def prefix(_):
    _, body = artifact_of(small_network())
    ((key, text),) = metadata(body).items()
    return Persisted(text, lambda text: read_prefix(torch_save(torch_load(body), {key: text})))


def state_of_a_control_plane(folder):
    path = folder / "state"
    RecordStore(path).close()
    text = json.dumps(ControlChanges().to_json())

    def read(text):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("REPLACE INTO changes VALUES (1, ?)", [text])
        with closing(RecordStore(path)) as store:
            return store.changes()

    return Persisted(text, read)


def photographs(folder):
    value = {"per_class": 4, "seed": 7, "classes": sorted(vars(demo)["_SOURCES"]), "schema": number_of("demo.py")}
    mark = folder / ".frostline" / "photographs.json"
    mark.parent.mkdir()
    mark.write_text(json.dumps({**value, "total_bytes": 9}))
    return in_place(mark, lambda: demo.make(folder, per_class=4, seed=7))


WITHOUT_NAMES = {photographs: "holds something else"}
"""What is made again elsewhere, at no loss, and does not say which field it is."""


@pytest.mark.parametrize("how", ["unknown", "twice"])
@pytest.mark.parametrize(
    "made",
    [
        run_config,
        checkpoint,
        recorded_steps,
        named_splits,
        claim_of_a_copy,
        ready_layout,
        recorded_order,
        prefix,
        state_of_a_control_plane,
        photographs,
    ],
)
def test_a_field_that_nobody_reads_or_that_stands_twice_is_refused(tmp_path, made, how):
    persisted = made(tmp_path)
    persisted.read(persisted.text)
    text, said = altered(persisted.text, how)
    with pytest.raises(FrostlineError, match=WITHOUT_NAMES.get(made, said)):
        persisted.read(text)


@pytest.mark.parametrize("how", ["unknown", "twice"])
@pytest.mark.parametrize("made", [measurement, profile, trial, error_of_a_trial, situation, checked_piece])
def test_a_cache_with_a_field_that_nobody_reads_is_made_anew(tmp_path, monkeypatch, made, how):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, values = made(tmp_path / "kept")
    cache.put(*values)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_text(altered(path.read_text().strip(), how)[0] + "\n")
    assert cache.get() is None


@pytest.mark.parametrize(
    ("module", "place"),
    [("models/row_check.py", "rows"), ("node/inspection.py", "inspections")],
)
def test_a_cache_whose_files_are_named_by_the_number_is_made_anew(tmp_path, monkeypatch, module, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"frostline.{module.removesuffix('.py').replace('/', '.')}"
    make = {"rows": check_rows, "inspections": inspect}[place]

    def files():
        return {path: path.stat().st_ino for path in (tmp_path / "frostline" / place).iterdir()}

    make()
    before = files()
    make()
    assert files().keys() == before.keys(), "it is found again"
    monkeypatch.setattr(f"{name}._FORMAT", number_of(module) + 1)
    make()
    assert files() != before


def check_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("frostline.models.row_check.keeps_rows_apart", lambda *_: False)
        mixed_rows(small_network().prefix, torch.device("cpu"))


LIMITS = GraphLimits(max_nodes=2000, max_values=50_000, max_run_s=60, max_operation_s=60, operations_per_s=1e11)


def inspect():
    _, body = artifact_of(small_network())
    with Inspector(kept=kept_inspections()) as inspector:
        inspector.inspect(header_of(body), max_rows=2, max_check_s=20, limits=LIMITS)


@pytest.mark.parametrize("in_memory_bytes", [0, 1 << 30])
def test_a_manifest_of_another_version_is_made_anew_and_its_splits_are_refused(tmp_path, monkeypatch, in_memory_bytes):
    monkeypatch.setattr(source, "load_manifest", partial(load_manifest, in_memory_bytes=in_memory_bytes))
    folder, cache = image_folder(tmp_path / "images"), tmp_path / "cache"
    data = Dataset(folder, cache=cache)
    data.save_splits({"few": data.take(np.arange(3))})
    assert Dataset(folder, cache=cache)["few"].statistics().samples == 3
    for module in ("datasets/manifest_store.py", "datasets/mapped.py"):
        name = f"frostline.{module.removesuffix('.py').replace('/', '.')}._FORMAT"
        monkeypatch.setattr(name, number_of(module) + 1)
    again = Dataset(folder, cache=cache)
    assert again.digest == data.digest
    (splits,) = (cache / ".frostline" / "splits").glob("*.json")
    before = splits.read_bytes()
    for use in (lambda: again["few"], lambda: again.save_splits({"all": again})):
        with pytest.raises(SettingError, match="written by Frostline"):
            use()
    assert splits.read_bytes() == before, "what a user divided is not lost"


def test_a_copy_that_another_version_began_is_refused(tmp_path):
    folder = image_folder(tmp_path / "images")

    def copy():
        return repack(Dataset(folder), tmp_path / "copy", "webdataset", on_event=lambda _: None)

    copy()
    path = tmp_path / "copy" / ".frostline" / "ingest" / "what.json"
    value = json.loads(path.read_text())
    assert value["schema"] == number_of("datasets/copy/repack.py")
    path.write_text(json.dumps(changed(value)))
    with pytest.raises(SettingError, match=r"written by Frostline 7\.3\.1"):
        copy()


def test_an_extraction_of_another_version_is_made_anew(tmp_path, monkeypatch):
    ids = np.arange(4, dtype=np.int64)

    def parts():
        return Parts(tmp_path / "f.parquet", {"features": "a"}, ids.take, Ranges(rows=4, rows_per_part=4))

    parts()
    (tmp_path / ".f.parquet.parts" / "000000.parquet").write_bytes(b"of the version before")
    parts()
    assert (tmp_path / ".f.parquet.parts" / "000000.parquet").is_file()
    monkeypatch.setattr("frostline.training.extract._FORMAT", number_of("training/extract.py") + 1)
    parts()
    assert not (tmp_path / ".f.parquet.parts" / "000000.parquet").exists()


def test_photographs_of_another_version_are_not_taken_for_these(tmp_path):
    value = {"per_class": 4, "seed": 7, "classes": sorted(vars(demo)["_SOURCES"]), "schema": number_of("demo.py")}
    mark = tmp_path / ".frostline" / "photographs.json"
    mark.parent.mkdir()
    mark.write_text(json.dumps({**value, "total_bytes": 9}))
    assert demo.make(tmp_path, per_class=4, seed=7).total_bytes == 9
    mark.write_text(json.dumps({**value, "total_bytes": 9, "schema": value["schema"] + 1}))
    with pytest.raises(SettingError, match="holds something else"):
        demo.make(tmp_path, per_class=4, seed=7)


def test_a_ray_that_another_version_started_is_not_taken_for_ones_own(tmp_path, monkeypatch):
    from frostline.ray import control

    monkeypatch.setattr(control, "folder", lambda: tmp_path)
    monkeypatch.setattr(control, "_is_ray", lambda pid: True)
    value = {"schema": number_of("ray/control.py"), "frostline": __version__, "pid": 1, "address": "a:1"}
    (tmp_path / "head.json").write_text(json.dumps(value))
    assert control.running_address() == "a:1"
    (tmp_path / "head.json").write_text(json.dumps(changed(value)))
    assert control.running_address() is None


def test_an_order_that_another_version_recorded_is_refused():
    state = OrderState(manifest="m", order="o", last="keep", seed=0, epoch=0, samples=2, batch_size=2, position=2)
    body = RecordedOrder(state=state, positions=np.arange(2)).to_bytes()
    assert RecordedOrder.from_bytes(body).state == state
    with pytest.raises(OrderMismatch, match=f"schema 2., this is {__version__}, which reads schema 1"):
        RecordedOrder.from_bytes(body.replace(b"order 1\n", b"order 2\n"))
