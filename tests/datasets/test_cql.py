"""Tables of a real Cassandra: read as samples, and written by copies that are taken up again.

Tables of a real Cassandra as data sets: labels, names, lengths and metadata, and what is no data set.

Putting data sets into tables of a real Cassandra: each sample once, read back, and taken up again after a kill.
"""

import dataclasses
import io
import json
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cassandra import InvalidRequest, OperationTimedOut, Timeout
from cassandra.cluster import NoHostAvailable
from cassandra.protocol import ServerError
from PIL import Image

import frostline as fl
from frostline.cli import main
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import DataError, DataNotFound, EmptyDataset, SettingError, TooManySkipped
from frostline.core.events import ColumnsDropped, ProgressMade
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.manifest import load_manifest
from frostline.datasets.reading import open_samples
from frostline.models import freeze
from frostline.node.process import start_node
from frostline.stores.cql.session import CqlSession
from frostline.stores.open import open_store
from support import plain
from support.cassandra import KEYSPACE, PASSWORD, USER, decay
from support.images import image_folder, tiny_preprocess
from support.networks import Small
from support.nodes import until

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


def test_rows_that_are_no_samples_are_named(server, session, tmp_path):
    there = put(session, "f_numbers", label=1, data=b"abc")
    lost = {str(put(session, "f_numbers", label=number)) for number in (2, 3)}
    manifest, samples = table_of(open_store(url(server, "f_numbers")), tmp_path)
    assert list(manifest.names) == [str(there)]
    assert samples.labels.tolist() == [1]
    [left] = manifest.left_out
    assert (left.what, left.reason, left.total, set(left.names)) == ("row", "without data", 2, lost)
    # The manifest that was found says it too.
    assert table_of(open_store(url(server, "f_numbers")), tmp_path)[0].left_out == manifest.left_out


def test_keys_that_can_be_no_names_are_left_out_and_named(server, session, tmp_path):
    session.execute(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.f_texts (id text PRIMARY KEY, label int, data blob)")
    for key in ("a/1.jpg", "a//2.jpg", "../3.jpg", "a/4\n.jpg"):
        put(session, "f_texts", id=key, label=1, data=b"x")
    manifest, _ = table_of(open_store(url(server, "f_texts")), tmp_path)
    assert sorted(manifest.names) == ["a/1.jpg", "a/4\n.jpg"]
    [left] = manifest.left_out
    assert (left.total, set(left.names)) == (2, {"a//2.jpg", "../3.jpg"})


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
    assert [(left.reason, left.total) for left in listed.left_out] == [
        ("without data", 1),
        ("without a row of labels", 1),
    ]


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
        assert (row["label"], row["target_width"], row["target_height"]) == (None, 5, number)
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
        done = put_into_table(source, place, max_skipped_fraction=0.1, on_event=seen.append)
        assert (done.samples, len(done.skipped)) == (18, 1)
        assert len(fl.Dataset(place, cache=tmp_path)) == 18
    with pytest.raises(TooManySkipped, match=r"gone\.jpg"):
        put_into_table(source, place, max_skipped_fraction=0, on_event=seen.append)
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
        put_into_table(source, str(tmp_path), on_event=print)
    with pytest.raises(DataNotFound, match="no keyspace nowhere"):
        put_into_table(source, url(server, "x").replace(f"/{KEYSPACE}/", "/nowhere/"), on_event=print)


def quiet(_):
    pass


@pytest.fixture(scope="module")
def server_of_into_cql(cql):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        yield cql


@pytest.fixture
def session_of_into_cql(server_of_into_cql):
    with server_of_into_cql.session() as session:
        session.execute(f"DROP TABLE IF EXISTS {KEYSPACE}.put")
        yield session


def url_of_into_cql(server, table="put"):
    return f"cql://{USER}@{server.place}/{KEYSPACE}/{table}?protocol=3"


def rows(session, table="put", what="id, name, writetime(data), frostline_digest"):
    return list(session.execute(f"SELECT {what} FROM {KEYSPACE}.{table}"))


def contents(data):
    samples = data.samples.take(np.arange(len(data)))
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    store = open_store(data.url)
    return {name: bytes(store.read(*place)) for name, place in zip(data.names, places, strict=True)}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("many"), per_class=400, size=(24, 24))


def test_a_run_that_was_killed_is_taken_up_and_puts_only_what_is_missing(
    server_of_into_cql, session_of_into_cql, many, tmp_path
):
    source = fl.Dataset(many, cache=tmp_path)
    total = len(source)
    verb = [sys.executable, "-c", "from frostline.cli import main; raise SystemExit(main())"]
    verb += ["ingest", str(many), url_of_into_cql(server_of_into_cql), "--format", "cql", "--json"]
    with subprocess.Popen(verb, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        before = until(
            lambda: marked if len(marked := digests(session_of_into_cql)) >= 20 else process.poll() is not None
        )
        process.send_signal(signal.SIGKILL)
        assert before is not True, process.communicate()[1]
    killed_at_us = time.time_ns() // 1000
    happened = []
    done = put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=happened.append)
    after = rows(session_of_into_cql)
    # The server may do more of what the killed run sent, at any time; the client says when a row was written.
    again = {row.id for row in after if row[2] >= killed_at_us}
    assert (done.samples, done.made, done.skipped) == (total, len(again), ())
    assert [event.done for event in happened if isinstance(event, ProgressMade)][-1] == total
    assert len(after) == len({row.name for row in after}) == total
    assert before == {row.id: row[2] for row in after if row.id in before}, "what was there was not written again"
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == contents(source)


def digests(session):
    """When the data of rows was written that were read back."""
    try:
        return {row.id: row[2] for row in rows(session) if row[3]}
    except (InvalidRequest, NoHostAvailable, OperationTimedOut, ServerError, Timeout):
        # The table is not there yet or is being made, or the server has too much to do to read it whole.
        return {}


@pytest.fixture
def few(tmp_path):
    return image_folder(tmp_path / "few", per_class=2)


def test_existing_objects_are_neither_read_nor_put_again(
    server_of_into_cql, session_of_into_cql, few, tmp_path, monkeypatch
):
    first = put_into_table(fl.Dataset(few, cache=tmp_path), url_of_into_cql(server_of_into_cql), on_event=quiet)
    before = rows(session_of_into_cql)
    for path in few.rglob("*.jpg"):
        path.unlink()
    monkeypatch.setattr(CqlSession, "check_everywhere", lambda self, key: pytest.fail("asked all replicas"))
    again = put_into_table(
        fl.Dataset(few, cache=tmp_path, relist=False), url_of_into_cql(server_of_into_cql), on_event=quiet
    )
    assert (first.made, again.made) == (6, 0)
    assert (again.samples, again.nbytes, again.skipped) == (first.samples, first.nbytes, ())
    assert rows(session_of_into_cql) == before


def test_puts_changed_samples_again_in_their_place(server_of_into_cql, session_of_into_cql, few, tmp_path):
    put_into_table(fl.Dataset(few, cache=tmp_path), url_of_into_cql(server_of_into_cql), on_event=quiet)
    (few / "noise" / "000.jpg").write_bytes(b"another image")
    keys = {row.name: row.id for row in rows(session_of_into_cql)}
    store = open_store(url_of_into_cql(server_of_into_cql))
    store.write(str(keys["circle/000.jpg"]), b"somebody else's")
    session_of_into_cql.execute(f"DELETE data FROM {KEYSPACE}.put WHERE id = %s", (keys["circle/001.jpg"],))
    session_of_into_cql.execute(f"DELETE FROM {KEYSPACE}.put WHERE id = %s", (keys["stripe/000.jpg"],))
    source = fl.Dataset(few, cache=tmp_path)
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 4
    assert {row.name: row.id for row in rows(session_of_into_cql)} == keys
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == contents(source)


def test_rows_that_rotted_behind_their_digests_are_put_again_when_all_is_verified(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    source = fl.Dataset(few, cache=tmp_path)
    put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)
    for name in ("circle/000.jpg", "noise/001.jpg"):
        decay(session_of_into_cql, "put", name)
    before = {row.name: row[2] for row in rows(session_of_into_cql)}
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 0, (
        "a digest does not tell of it"
    )
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) != contents(source)
    done = put_into_table(source, url_of_into_cql(server_of_into_cql), verify=True, on_event=quiet)
    assert (done.samples, done.made) == (6, 2)
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == contents(source)
    assert {row.name for row in rows(session_of_into_cql) if row[2] != before[row.name]} == {
        "circle/000.jpg",
        "noise/001.jpg",
    }
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), verify=True, on_event=quiet).made == 0


def test_rows_of_a_source_without_versions_are_verified_too(server_of_into_cql, session_of_into_cql, few, tmp_path):
    source = Unversioned(fl.Dataset(few, cache=tmp_path))
    put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)
    decay(session_of_into_cql, "put", "circle/000.jpg")
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 0
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), verify=True, on_event=quiet).made == 1
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), verify=True, on_event=quiet).made == 0


def test_reads_a_source_without_versions_and_puts_nothing_again(server_of_into_cql, session_of_into_cql, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    source = Unversioned(source)
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 6
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 0
    (few / "noise" / "000.jpg").write_bytes((few / "noise" / "000.jpg").read_bytes()[::-1])
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 1


class Unversioned:
    """A data set in a store that tells no versions."""

    has_targets = False

    def __init__(self, source):
        self._source = source
        self.samples = self

    def refresh(self):
        return self

    def take(self, rows):
        return dataclasses.replace(self._source.samples.take(rows), versions=())

    def __len__(self):
        return len(self._source)

    def __getattr__(self, name):
        return getattr(self._source, name)


def test_never_overwrites_a_sample_of_other_data_with_the_same_name(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    first = fl.Dataset(few, cache=tmp_path)
    put_into_table(first, url_of_into_cql(server_of_into_cql), on_event=quiet)
    before = rows(session_of_into_cql)
    # The same names and classes, as in most data sets with numbered files.
    second = fl.Dataset(image_folder(tmp_path / "second", per_class=2, size=(30, 30)), cache=tmp_path)
    assert second.names == first.names
    with pytest.raises(SettingError, match=r"another sample called \w+/00\d\.jpg, .* into another table") as caught:
        put_into_table(second, url_of_into_cql(server_of_into_cql), on_event=quiet)
    assert "\n" not in str(caught.value)
    assert rows(session_of_into_cql) == before
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == contents(first)


def test_data_sets_share_a_table_if_names_differ_or_samples_are_equal(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    first = fl.Dataset(few, cache=tmp_path)
    put_into_table(first, url_of_into_cql(server_of_into_cql), on_event=quiet)
    moved = tmp_path / "moved"
    shutil.copytree(few / "circle", moved / "circle")
    shutil.copytree(few / "noise", moved / "dots")
    second = fl.Dataset(moved, cache=tmp_path)
    put_into_table(second, url_of_into_cql(server_of_into_cql), on_event=quiet)
    assert contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == contents(first) | contents(
        second
    )


ABOUT = {
    "patient": ["p1", None, "p2", "ü", "", "p1"],
    "slide": [1, 2, None, 1 << 40, -5, 6],
    "score": [0.5, None, 1.0, 2.0, -1.5, 3.0],
    "seen": [True, False, None, True, True, False],
    "taken at": pa.array([1_795_000_001_250, *[None] * 5], pa.timestamp("ms")).to_pylist(),
    "data": ["a", "b", "c", "d", "e", "f"],
}


def test_metadata_arrives_with_its_types_and_is_put_again_where_it_changes(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    plain = fl.Dataset(few, cache=tmp_path)
    put_into_table(plain, url_of_into_cql(server_of_into_cql), on_event=quiet)
    happened = []
    source = plain.with_columns(ABOUT | {"boxes": [[1]] * 6})
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=happened.append).made == 6
    assert happened[0] == ColumnsDropped(url=source.url, columns=("boxes",))
    copy = fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)
    names = {name: "meta_data" if name == "data" else name for name in ABOUT}
    assert {name: copy.column(called).to_pylist() for name, called in names.items()} == ABOUT
    assert [str(copy.column(name).type) for name in ("slide", "score", "seen")] == ["int64", "double", "bool"]
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 0
    assert (
        put_into_table(
            plain.with_columns(ABOUT | {"slide": [1] * 6}), url_of_into_cql(server_of_into_cql), on_event=quiet
        ).made
        == 5
    )


def test_what_is_said_of_samples_goes_into_a_table_and_from_there_into_every_format(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    images, classes = [path.read_bytes() for path in sorted(few.rglob("*.jpg"))], ["zebra", "ant", "monkey", "unseen"]
    features = {"image": {"_type": "Value"}, "label": {"_type": "ClassLabel", "names": classes}}
    about = {
        "day": [date(2024, 1, 1 + row) for row in range(6)],
        "at": pa.array([1_795_000_001_250_001, *range(1, 6)], pa.timestamp("us")),
        "price": [Decimal(f"{row}.125") for row in range(6)],
        "words": ["ü", "", "a\nb", None, "NA", "0"],
        "whole": [(1 << 60) + row for row in range(6)],
        "site": ["x", "y"] * 3,
    }
    table = pa.table({"image": images, "label": [0, 1, 2, 0, None, 1], **about})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for split, some in (("train", slice(0, 4)), ("val", slice(4, 6))):
        (tmp_path / "source").mkdir(exist_ok=True)
        pq.write_table(table.take(list(range(6))[some]), tmp_path / "source" / f"{split}.parquet")
    source, happened = fl.Dataset(tmp_path / "source", cache=tmp_path), []
    put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=happened.append)
    there = fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)
    wanted = said_of(source, (*about, "split"))
    assert wanted[images[4]][0] is None
    # What none of its types holds whole is a text there.
    as_texts = {image: tuple(v if isinstance(v, int | None) else str(v) for v in row) for image, row in wanted.items()}
    assert said_of(there, (*about, "split")) == as_texts
    assert there.classes == ("ant", "monkey", "zebra")
    assert any("4 classes" in str(event) or "unseen" in str(event) for event in happened), happened
    for format in ("parquet", "webdataset", "original"):
        # Folders of classes have no place for who has none, nor for metadata.
        some, columns = (
            (there, (*about, "split")) if format != "original" else (there.select("label is not None"), ("split",))
        )
        repack(some, tmp_path / format, format, on_event=happened.append)
        copy = fl.Dataset(tmp_path / format, cache=tmp_path)
        assert said_of(copy, columns) == said_of(some, columns)
        assert copy.classes == there.classes


def said_of(data, columns):
    """The class and the metadata of each sample, by its bytes."""
    samples = data.samples.take(np.arange(len(data)))
    reader = open_samples(data.url, data.manifest.reading)
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    labels = [None if label < 0 else data.classes[label] for label in samples.labels.tolist()]
    values = zip(labels, *(data.column(name).to_pylist() for name in columns), strict=True)
    found = {bytes(reader.read(*place)): value for place, value in zip(places, values, strict=True)}
    assert len(found) == len(data)
    return found


def test_columns_that_a_user_may_not_add_are_named_and_the_rest_is_put(
    server_of_into_cql, session_of_into_cql, few, tmp_path, monkeypatch
):
    session_of_into_cql.execute(
        f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.lent (id uuid PRIMARY KEY, label text, data blob)"
    )
    session_of_into_cql.execute("CREATE USER IF NOT EXISTS writer WITH PASSWORD 'w' NOSUPERUSER")
    for right in ("SELECT", "MODIFY"):
        session_of_into_cql.execute(f"GRANT {right} ON {KEYSPACE}.lent TO writer")
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", "w")
    happened = []
    source = fl.Dataset(few, cache=tmp_path).with_columns({"patient": ["p"] * 6})
    place = url_of_into_cql(server_of_into_cql, "lent").replace(USER, "writer", 1)
    for _ in range(2):  # without a column for digests, all is put again, and nothing twice
        assert put_into_table(source, place, on_event=happened.append).made == 6
        assert len(rows(session_of_into_cql, "lent", "id")) == 6
    assert happened[0] == ColumnsDropped(url=source.url, columns=("patient",))


def test_a_column_with_other_values_is_refused_before_anything_is_put(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    put_into_table(
        fl.Dataset(few, cache=tmp_path).with_columns({"slide": range(6)}),
        url_of_into_cql(server_of_into_cql),
        on_event=quiet,
    )
    source = fl.Dataset(few, cache=tmp_path).with_columns({"slide": ["one"] * 6})
    with pytest.raises(DataError, match=r"column 'slide' of cql://.* is bigint, and this data has text"):
        put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)


def test_a_table_that_was_made_elsewhere_gets_a_column_for_digests(
    server_of_into_cql, session_of_into_cql, few, tmp_path
):
    session_of_into_cql.execute(
        f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.bare (id uuid PRIMARY KEY, label text, data blob)"
    )
    source = fl.Dataset(few, cache=tmp_path)
    assert put_into_table(source, url_of_into_cql(server_of_into_cql, "bare"), on_event=quiet).made == 6
    assert put_into_table(source, url_of_into_cql(server_of_into_cql, "bare"), on_event=quiet).made == 0
    assert len(rows(session_of_into_cql, "bare", "id")) == 6


def masks_of(data):
    """Name, class and mask of every sample."""
    samples, store = data.samples.take(np.arange(len(data))), open_samples(data.url, data.manifest.reading)
    rows, masks = samples.masks
    found = {
        int(row): bytes(store.read(masks.objects[place], int(masks.offsets[place]), int(masks.lengths[place])))
        for place, row in enumerate(rows)
    }
    return [(name, int(samples.labels[row]), found.get(row)) for row, name in enumerate(data.names)]


def test_masks_go_along_and_are_put_again_where_they_change(server_of_into_cql, session_of_into_cql, tmp_path):
    folder = tmp_path / "pairs"
    for number in range(4):
        for part in ("images", "masks"):
            (folder / part / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        np.save(folder / "images" / f"c{number % 2}" / f"{number}.npy", np.full((8, 8), number, np.uint8))
        np.save(folder / "masks" / f"c{number % 2}" / f"{number}.npy", np.full((8, 8), number, np.uint16))
    (folder / "masks" / "c1" / "3.npy").unlink()
    source = fl.Dataset(folder, cache=tmp_path)
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 4
    copy = fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)
    assert copy.has_targets
    assert copy.classes == ("c0", "c1")
    assert masks_of(copy) == masks_of(source)
    assert contents(copy) == contents(source)
    name = next(row.name for row in rows(session_of_into_cql) if row.name.endswith("1.npy"))
    decay(session_of_into_cql, "put", name, "label")
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 0
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), verify=True, on_event=quiet).made == 1
    assert masks_of(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == masks_of(source)
    np.save(folder / "masks" / "c0" / "2.npy", np.full((8, 8), 77, np.uint16))
    key = next(row.id for row in rows(session_of_into_cql) if row.name.endswith("0.npy"))
    session_of_into_cql.execute(f"UPDATE {KEYSPACE}.put SET label = %s WHERE id = %s", (b"somebody else's", key))
    source = fl.Dataset(folder, cache=tmp_path)
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet).made == 2
    assert masks_of(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path)) == masks_of(source)


def test_images_are_scaled_down_on_their_way_into_a_table(server_of_into_cql, session_of_into_cql, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    whole = put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)
    small = put_into_table(source, url_of_into_cql(server_of_into_cql), shorter_side=8, on_event=quiet)
    assert (whole.made, small.made) == (6, 6), "another size is other data"
    assert put_into_table(source, url_of_into_cql(server_of_into_cql), shorter_side=8, on_event=quiet).made == 0
    copy = contents(fl.Dataset(url_of_into_cql(server_of_into_cql), cache=tmp_path))
    assert {min(Image.open(io.BytesIO(data)).size) for data in copy.values()} == {8}
    with pytest.raises(SettingError, match="at least 1"):
        put_into_table(source, url_of_into_cql(server_of_into_cql), shorter_side=0, on_event=quiet)


def test_masks_do_not_fit_into_a_table_of_classes(server_of_into_cql, session_of_into_cql, few, tmp_path):
    put_into_table(fl.Dataset(few, cache=tmp_path), url_of_into_cql(server_of_into_cql), on_event=quiet)
    for part in ("images", "masks"):
        (tmp_path / "pairs" / part).mkdir(parents=True)
        np.save(tmp_path / "pairs" / part / "1.npy", np.zeros((8, 8), np.uint8))
    with pytest.raises(DataError, match="holds no masks: its column label is text"):
        put_into_table(
            fl.Dataset(tmp_path / "pairs", cache=tmp_path), url_of_into_cql(server_of_into_cql), on_event=quiet
        )


def test_notices_bytes_that_differ_from_those_put(server_of_into_cql, session_of_into_cql, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)
    # A deletion by a server whose clock is ahead hides whatever is written until then.
    ahead = (time.time_ns() // 1000) + 3_600_000_000
    (key,) = [row.id for row in rows(session_of_into_cql) if row.name == "noise/001.jpg"]
    session_of_into_cql.execute(f"DELETE FROM {KEYSPACE}.put USING TIMESTAMP {ahead} WHERE id = %s", (key,))
    with pytest.raises(DataError, match=r"noise/001\.jpg came back from cql://"):
        put_into_table(source, url_of_into_cql(server_of_into_cql), on_event=quiet)
    assert key not in digests(session_of_into_cql)
