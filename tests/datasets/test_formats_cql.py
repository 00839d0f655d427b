"""Tables of a real Cassandra as data sets: labels, names, lengths and metadata, and what is no data set."""

import io
import json
import uuid

import numpy as np
import pytest
import torch

import frostline as fl
from frostline.cli import main
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, DataNotFound, EmptyDataset, SettingError, TooManySkipped
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.manifest import load_manifest
from frostline.models import freeze
from frostline.node.process import start_node
from frostline.stores.open import open_store
from support import plain
from support.cassandra import KEYSPACE, PASSWORD, USER, decay
from support.images import image_folder, tiny_preprocess
from support.networks import Small

BY_ALL = "PRIMARY KEY (patient, id)"
TABLES = (
    f"CREATE TABLE {KEYSPACE}.f_data (id uuid PRIMARY KEY, data blob)",
    f"CREATE TABLE {KEYSPACE}.f_numbers (id uuid PRIMARY KEY, label int, data blob)",
    f"CREATE TABLE {KEYSPACE}.f_sized (id uuid PRIMARY KEY, label text, name text, bytes int, data blob)",
    f"CREATE TABLE {KEYSPACE}.f_masks (id uuid PRIMARY KEY, label blob, data blob)",
    f"CREATE TABLE {KEYSPACE}.f_meta (patient text, id uuid, name text, kind text, length int, object text, {BY_ALL})",
)


@pytest.fixture(scope="module")
def server(cql):
    cql.execute(*TABLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        yield cql


@pytest.fixture
def session(server):
    with server.session() as session:
        yield session
        for name in ("f_data", "f_numbers", "f_sized", "f_masks", "f_meta"):
            session.execute(f"TRUNCATE {KEYSPACE}.{name}")


def url(server, table, **options):
    said = "&".join(f"{name}={value}" for name, value in {"protocol": 3, **options}.items())
    return f"cql://{USER}@{server.place}/{KEYSPACE}/{table}?{said}"


def put(session, table, **values):
    key = uuid.uuid5(uuid.NAMESPACE_URL, str(values))
    values = {"id": key, **values}
    marks = ", ".join("%s" for _ in values)
    session.execute(f"INSERT INTO {KEYSPACE}.{table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    return values["id"]


def table_of(store, tmp_path):
    manifest = load_manifest(store, cache=tmp_path)
    return manifest, manifest.samples


def test_numbers_beside_the_data_are_labels_and_keys_are_names(server, session, tmp_path):
    keys = {put(session, "f_numbers", label=number % 3, data=bytes(number)): number for number in range(1, 10)}
    manifest, samples = table_of(open_store(url(server, "f_numbers")), tmp_path)
    assert manifest.classes == ("0", "1", "2")
    assert list(manifest.names) == sorted(str(key) for key in keys) == list(samples.objects)
    for row, name in enumerate(manifest.names):
        assert (samples.labels[row], samples.lengths[row]) == (keys[uuid.UUID(name)] % 3, keys[uuid.UUID(name)])


def test_names_and_sizes_are_taken_from_their_columns(server, session, tmp_path):
    put(session, "f_sized", label="glass", name="b.jpg", bytes=3, data=b"abc")
    put(session, "f_sized", label="can", name="a.jpg", bytes=2, data=b"ab")
    manifest, samples = table_of(open_store(url(server, "f_sized")), tmp_path)
    assert list(manifest.names) == ["a.jpg", "b.jpg"]
    assert manifest.classes == ("can", "glass")
    assert samples.labels.tolist() == [0, 1]
    assert samples.lengths.tolist() == [2, 3]


def test_another_table_says_which_rows_are_samples_and_keeps_its_columns(server, session):
    keys = [put(session, "f_data", data=bytes(number)) for number in range(1, 5)]
    for number, key in enumerate(keys[:3]):
        put(session, "f_meta", id=key, patient=f"p{number}", name=f"{9 - number}", kind="ab"[number % 2], length=number)
    put(session, "f_meta", id=uuid.uuid4(), patient="gone", name="x", kind="c")
    store = open_store(url(server, "f_data", meta="f_meta", label="kind"))
    listed = CqlTables().read(store, list(store.list()))
    assert listed.table["name"].to_pylist() == ["7", "8", "9"]
    assert listed.table["patient"].to_pylist() == ["p2", "p1", "p0"]
    assert listed.table["meta_length"].to_pylist() == [2, 1, 0]
    assert listed.table["length"].to_pylist() == [3, 2, 1]
    assert listed.classes == ("a", "b")


def test_a_label_that_changes_makes_a_new_manifest_and_reads_no_data_again(server, session, tmp_path, monkeypatch):
    key = put(session, "f_numbers", label=0, data=b"abc")
    put(session, "f_numbers", label=1, data=b"abcd")
    store = open_store(url(server, "f_numbers"))
    before = load_manifest(store, cache=tmp_path)
    assert load_manifest(store, cache=tmp_path).found
    session.execute(f"UPDATE {KEYSPACE}.f_numbers SET label = 1 WHERE id = %s", (key,))
    monkeypatch.setattr(type(store), "contents", lambda self, objects: pytest.fail("data was read"))
    after = load_manifest(store, cache=tmp_path)
    assert after.digest != before.digest
    assert after.samples.labels.tolist() == [1, 1]


def array(*shape):
    out = io.BytesIO()
    np.save(out, np.zeros(shape, np.uint8))
    return out.getvalue()


def test_labels_that_are_blobs_are_masks(server, session, tmp_path):
    keys = [put(session, "f_masks", data=array(number, 5, 3), label=array(number, 5)) for number in (2, 3)]
    keys.append(put(session, "f_masks", data=array(4, 5, 3)))
    put(session, "f_masks", label=array(1, 1))
    store = open_store(url(server, "f_masks"))
    manifest = load_manifest(store, cache=tmp_path)
    table = {row["name"]: row for row in manifest.columns.table.to_pylist()}
    assert set(table) == {str(key) for key in keys}
    assert manifest.classes == ()
    for number, key in enumerate(keys[:2], 2):
        row = table[str(key)]
        assert (row["label"], row["target_width"], row["target_height"]) == (-1, 5, number)
        mask, version = store.read_version(row["target_object"], 0, row["target_length"])
        assert (bytes(mask), version) == (array(number, 5), row["target_etag"])
    assert (table[str(keys[2])]["target_object"], table[str(keys[2])]["target_length"]) == ("", 0)


def test_a_mask_that_changes_makes_a_new_manifest_for_which_only_it_is_read(server, session, tmp_path, monkeypatch):
    keys = [put(session, "f_masks", data=array(number, 5, 3), label=array(number, 5)) for number in (2, 3)]
    store, read = open_store(url(server, "f_masks")), []
    before = load_manifest(store, cache=tmp_path)
    session.execute(f"UPDATE {KEYSPACE}.f_masks SET label = %s WHERE id = %s", (array(7, 7), keys[0]))
    contents = store.contents
    monkeypatch.setattr(store, "contents", lambda objects: (read.extend(objects), contents(objects))[1])
    after = load_manifest(store, cache=tmp_path)
    assert after.digest != before.digest
    assert read == [f".masks/{keys[0]}"]
    assert sorted(after.columns.table["target_length"].to_pylist()) == sorted([len(array(7, 7)), len(array(3, 5))])


def test_masks_have_classes_and_metadata_from_another_table(server, session, tmp_path):
    keys = [put(session, "f_masks", data=array(number, 5, 3), label=array(number, 5)) for number in (2, 3)]
    for key, kind in zip(keys, ("b", "a"), strict=True):
        put(session, "f_meta", id=key, patient=f"p{kind}", kind=kind)
    data = fl.Dataset(url(server, "f_masks", meta="f_meta"), cache=tmp_path)
    assert data.has_targets
    assert data.classes == ()
    assert sorted(data.column("patient").to_pylist()) == ["pa", "pb"]
    session.execute(f"ALTER TABLE {KEYSPACE}.f_meta ADD class text")
    for key, kind in zip(keys, ("b", "a"), strict=True):
        session.execute(
            f"UPDATE {KEYSPACE}.f_meta SET class = %s WHERE id = %s AND patient = %s", (kind, key, f"p{kind}")
        )
    assert fl.Dataset(url(server, "f_masks", meta="f_meta"), cache=tmp_path).classes == ("a", "b")


@pytest.mark.parametrize(
    ("table", "options", "kind", "words"),
    [
        ("f_data", {}, DataError, "has no labels"),
        ("f_numbers", {"label": "kind"}, DataError, "no column 'kind'.* only label"),
        ("f_numbers", {}, EmptyDataset, "holds no row"),
    ],
)
def test_reports_a_table_without_samples_in_one_sentence(server, table, options, kind, words, tmp_path):
    with pytest.raises(kind, match=words) as caught:
        load_manifest(open_store(url(server, table, **options)), cache=tmp_path)
    assert "\n" not in str(caught.value)


def test_two_rows_of_one_name_are_named(server, session, tmp_path):
    put(session, "f_sized", label="a", name="same", data=b"1")
    put(session, "f_sized", label="b", name="same", data=b"2")
    with pytest.raises(DataError, match="'same' stands in more than one row"):
        load_manifest(open_store(url(server, "f_sized")), cache=tmp_path)


def losses(place: str, cache) -> list[float]:
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8)
    data = fl.Dataset(place, cache=cache)
    with (
        start_node((place,), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(model, data, preprocess=tiny_preprocess(flip=True), near=node.url, settings=settings) as job,
    ):
        return plain.through(job, batch_size=8, epochs=2)


def test_a_folder_that_is_put_into_a_table_twice_is_there_once_and_trains_alike(server, session, tmp_path):
    folder = image_folder(tmp_path / "photos", per_class=6)
    (folder / "noise" / "gone.jpg").write_bytes(b"x")
    source = fl.Dataset(folder, cache=tmp_path)
    source.names  # noqa: B018 (listed before it goes)
    (folder / "noise" / "gone.jpg").unlink()
    place = url(server, "f_made")
    seen = []
    for _ in range(2):
        done = put_into_table(source, place, skip_allowance=0.1, observe=seen.append)
        assert (done.samples, len(done.skipped)) == (18, 1)
        assert len(fl.Dataset(place, cache=tmp_path)) == 18
    with pytest.raises(TooManySkipped, match=r"gone\.jpg"):
        put_into_table(source, place, skip_allowance=0, observe=seen.append)
    data = fl.Dataset(place, cache=tmp_path)
    assert list(data.names) == sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jpg"))
    for row, name in enumerate(data.names):
        assert data.classes[data.samples.labels[row]] == name.partition("/")[0]
        assert data.samples.lengths[row] == (folder / name).stat().st_size
    assert losses(place, tmp_path) == losses(str(folder), tmp_path)


def test_ingest_writes_a_folder_into_a_table(server, session, tmp_path, capsys):
    folder = image_folder(tmp_path / "photos", per_class=2)
    command = ["ingest", str(folder), url(server, "f_sized"), "--format", "cql", "--json"]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert json.loads(capsys.readouterr().out)["samples"] == 6
    assert len(fl.Dataset(url(server, "f_sized"), cache=tmp_path)) == 6
    decay(session, "f_sized", "circle/000.jpg")
    for option, made in (([], 0), (["--verify"], 1), (["--verify"], 0)):
        with pytest.raises(SystemExit, match="0"):
            main([*command, *option])
        assert json.loads(capsys.readouterr().out)["made"] == made
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--dtype", "fp16"])
    assert "--format ready" in capsys.readouterr().err


def test_reports_a_missing_table_or_keyspace_before_reading(server, tmp_path):
    source = fl.Dataset(image_folder(tmp_path / "photos", per_class=2), cache=tmp_path)
    with pytest.raises(SettingError, match="is no table"):
        put_into_table(source, str(tmp_path), observe=print)
    with pytest.raises(DataNotFound, match="no keyspace nowhere"):
        put_into_table(source, url(server, "x").replace(f"/{KEYSPACE}/", "/nowhere/"), observe=print)
