"""Putting data sets into tables of a real Cassandra: each sample once, read back, and taken up again after a kill."""

import dataclasses
import io
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from cassandra import InvalidRequest, OperationTimedOut, Timeout
from cassandra.cluster import NoHostAvailable
from cassandra.protocol import ServerError
from PIL import Image

import frostline as fl
from frostline.core.errors import DataError, SettingError
from frostline.core.events import ColumnsDropped, ProgressMade
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.reading import open_samples
from frostline.stores.cql.session import CqlSession
from frostline.stores.open import open_store
from support.cassandra import KEYSPACE, PASSWORD, USER, decay
from support.images import image_folder
from support.nodes import until


def quiet(_):
    pass


@pytest.fixture(scope="module")
def server(cql):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        yield cql


@pytest.fixture
def session(server):
    with server.session() as session:
        session.execute(f"DROP TABLE IF EXISTS {KEYSPACE}.put")
        yield session


def url(server, table="put"):
    return f"cql://{USER}@{server.place}/{KEYSPACE}/{table}?protocol=3"


def rows(session, table="put", what="id, name, writetime(data), frostline_seal"):
    return list(session.execute(f"SELECT {what} FROM {KEYSPACE}.{table}"))


def contents(data):
    samples = data.samples.take(np.arange(len(data)))
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    store = open_store(data.url)
    return {name: bytes(store.read(*place)) for name, place in zip(data.names, places, strict=True)}


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("many"), per_class=400, size=(24, 24))


def test_a_run_that_was_killed_is_taken_up_and_puts_only_what_is_missing(server, session, many, tmp_path):
    source = fl.Dataset(many, cache=tmp_path)
    total = len(source)
    verb = [sys.executable, "-c", "from frostline.cli import main; raise SystemExit(main())"]
    verb += ["ingest", str(many), url(server), "--format", "cql", "--json"]
    with subprocess.Popen(verb, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        before = until(lambda: sealed if len(sealed := seals(session)) >= 20 else process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        assert before is not True, process.communicate()[1]
    killed_at_us = time.time_ns() // 1000
    happened = []
    done = put_into_table(source, url(server), observe=happened.append)
    after = rows(session)
    # The server may do more of what the killed run sent, at any time; the client says when a row was written.
    again = {row.id for row in after if row[2] >= killed_at_us}
    assert (done.samples, done.made, done.skipped) == (total, len(again), ())
    assert [event.done for event in happened if isinstance(event, ProgressMade)][-1] == total
    assert len(after) == len({row.name for row in after}) == total
    assert before == {row.id: row[2] for row in after if row.id in before}, "what was there was not written again"
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(source)


def seals(session):
    """When the data of rows was written that were read back."""
    try:
        return {row.id: row[2] for row in rows(session) if row[3]}
    except (InvalidRequest, NoHostAvailable, OperationTimedOut, ServerError, Timeout):
        # The table is not there yet or is being made, or the server has too much to do to read it whole.
        return {}


@pytest.fixture
def few(tmp_path):
    return image_folder(tmp_path / "few", per_class=2)


def test_existing_objects_are_neither_read_nor_put_again(server, session, few, tmp_path, monkeypatch):
    first = put_into_table(fl.Dataset(few, cache=tmp_path), url(server), observe=quiet)
    before = rows(session)
    for path in few.rglob("*.jpg"):
        path.unlink()
    monkeypatch.setattr(CqlSession, "check_everywhere", lambda self, key: pytest.fail("asked all replicas"))
    again = put_into_table(fl.Dataset(few, cache=tmp_path, relist=False), url(server), observe=quiet)
    assert (first.made, again.made) == (6, 0)
    assert (again.samples, again.nbytes, again.skipped) == (first.samples, first.nbytes, ())
    assert rows(session) == before


def test_puts_changed_samples_again_in_their_place(server, session, few, tmp_path):
    put_into_table(fl.Dataset(few, cache=tmp_path), url(server), observe=quiet)
    (few / "noise" / "000.jpg").write_bytes(b"another image")
    keys = {row.name: row.id for row in rows(session)}
    store = open_store(url(server))
    store.write(str(keys["circle/000.jpg"]), b"somebody else's")
    session.execute(f"DELETE data FROM {KEYSPACE}.put WHERE id = %s", (keys["circle/001.jpg"],))
    session.execute(f"DELETE FROM {KEYSPACE}.put WHERE id = %s", (keys["stripe/000.jpg"],))
    source = fl.Dataset(few, cache=tmp_path)
    assert put_into_table(source, url(server), observe=quiet).made == 4
    assert {row.name: row.id for row in rows(session)} == keys
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(source)


def test_rows_that_rotted_behind_their_seals_are_put_again_when_all_is_verified(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    put_into_table(source, url(server), observe=quiet)
    for name in ("circle/000.jpg", "noise/001.jpg"):
        decay(session, "put", name)
    before = {row.name: row[2] for row in rows(session)}
    assert put_into_table(source, url(server), observe=quiet).made == 0, "a seal does not tell of it"
    assert contents(fl.Dataset(url(server), cache=tmp_path)) != contents(source)
    done = put_into_table(source, url(server), verify=True, observe=quiet)
    assert (done.samples, done.made) == (6, 2)
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(source)
    assert {row.name for row in rows(session) if row[2] != before[row.name]} == {"circle/000.jpg", "noise/001.jpg"}
    assert put_into_table(source, url(server), verify=True, observe=quiet).made == 0


def test_rows_of_a_source_without_versions_are_verified_too(server, session, few, tmp_path):
    source = Unversioned(fl.Dataset(few, cache=tmp_path))
    put_into_table(source, url(server), observe=quiet)
    decay(session, "put", "circle/000.jpg")
    assert put_into_table(source, url(server), observe=quiet).made == 0
    assert put_into_table(source, url(server), verify=True, observe=quiet).made == 1
    assert put_into_table(source, url(server), verify=True, observe=quiet).made == 0


def test_reads_a_source_without_versions_and_puts_nothing_again(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    source = Unversioned(source)
    assert put_into_table(source, url(server), observe=quiet).made == 6
    assert put_into_table(source, url(server), observe=quiet).made == 0
    (few / "noise" / "000.jpg").write_bytes((few / "noise" / "000.jpg").read_bytes()[::-1])
    assert put_into_table(source, url(server), observe=quiet).made == 1


class Unversioned:
    """A data set in a store that tells no versions."""

    has_targets = False

    def __init__(self, source):
        self._source = source
        self.samples = self

    def refreshed(self):
        return self

    def take(self, rows):
        return dataclasses.replace(self._source.samples.take(rows), versions=())

    def __len__(self):
        return len(self._source)

    def __getattr__(self, name):
        return getattr(self._source, name)


def test_never_overwrites_a_sample_of_other_data_with_the_same_name(server, session, few, tmp_path):
    first = fl.Dataset(few, cache=tmp_path)
    put_into_table(first, url(server), observe=quiet)
    before = rows(session)
    # The same names and classes, as in most data sets with numbered files.
    second = fl.Dataset(image_folder(tmp_path / "second", per_class=2, size=(30, 30)), cache=tmp_path)
    assert second.names == first.names
    with pytest.raises(SettingError, match=r"another sample called \w+/00\d\.jpg, .* into another table") as caught:
        put_into_table(second, url(server), observe=quiet)
    assert "\n" not in str(caught.value)
    assert rows(session) == before
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(first)


def test_data_sets_share_a_table_where_their_names_differ_or_their_samples_are_the_same(server, session, few, tmp_path):
    first = fl.Dataset(few, cache=tmp_path)
    put_into_table(first, url(server), observe=quiet)
    moved = tmp_path / "moved"
    shutil.copytree(few / "circle", moved / "circle")
    shutil.copytree(few / "noise", moved / "dots")
    second = fl.Dataset(moved, cache=tmp_path)
    put_into_table(second, url(server), observe=quiet)
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(first) | contents(second)


ABOUT = {
    "patient": ["p1", None, "p2", "ü", "", "p1"],
    "slide": [1, 2, None, 1 << 40, -5, 6],
    "score": [0.5, None, 1.0, 2.0, -1.5, 3.0],
    "seen": [True, False, None, True, True, False],
    "taken at": pa.array([1_795_000_001_250, *[None] * 5], pa.timestamp("ms")).to_pylist(),
    "data": ["a", "b", "c", "d", "e", "f"],
}


def test_metadata_arrives_with_its_types_and_is_put_again_where_it_changes(server, session, few, tmp_path):
    plain = fl.Dataset(few, cache=tmp_path)
    put_into_table(plain, url(server), observe=quiet)
    happened = []
    source = plain.with_columns(ABOUT | {"boxes": [[1]] * 6})
    assert put_into_table(source, url(server), observe=happened.append).made == 6
    assert happened[0] == ColumnsDropped(url=source.url, columns=("boxes",))
    copy = fl.Dataset(url(server), cache=tmp_path)
    names = {name: "meta_data" if name == "data" else name for name in ABOUT}
    assert {name: copy.column(called).to_pylist() for name, called in names.items()} == ABOUT
    assert [str(copy.column(name).type) for name in ("slide", "score", "seen")] == ["int64", "double", "bool"]
    assert put_into_table(source, url(server), observe=quiet).made == 0
    assert put_into_table(plain.with_columns(ABOUT | {"slide": [1] * 6}), url(server), observe=quiet).made == 5


def test_columns_that_a_user_may_not_add_are_named_and_the_rest_is_put(server, session, few, tmp_path, monkeypatch):
    session.execute(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.lent (id uuid PRIMARY KEY, label text, data blob)")
    session.execute("CREATE USER IF NOT EXISTS writer WITH PASSWORD 'w' NOSUPERUSER")
    for right in ("SELECT", "MODIFY"):
        session.execute(f"GRANT {right} ON {KEYSPACE}.lent TO writer")
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", "w")
    happened = []
    source = fl.Dataset(few, cache=tmp_path).with_columns({"patient": ["p"] * 6})
    place = url(server, "lent").replace(USER, "writer", 1)
    for _ in range(2):  # without a column for seals, all is put again, and nothing twice
        assert put_into_table(source, place, observe=happened.append).made == 6
        assert len(rows(session, "lent", "id")) == 6
    assert happened[0] == ColumnsDropped(url=source.url, columns=("patient",))


def test_a_column_with_other_values_is_refused_before_anything_is_put(server, session, few, tmp_path):
    put_into_table(fl.Dataset(few, cache=tmp_path).with_columns({"slide": range(6)}), url(server), observe=quiet)
    source = fl.Dataset(few, cache=tmp_path).with_columns({"slide": ["one"] * 6})
    with pytest.raises(DataError, match=r"column 'slide' of cql://.* is bigint, and this data has text"):
        put_into_table(source, url(server), observe=quiet)


def test_a_table_that_was_made_elsewhere_gets_a_column_for_seals(server, session, few, tmp_path):
    session.execute(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.bare (id uuid PRIMARY KEY, label text, data blob)")
    source = fl.Dataset(few, cache=tmp_path)
    assert put_into_table(source, url(server, "bare"), observe=quiet).made == 6
    assert put_into_table(source, url(server, "bare"), observe=quiet).made == 0
    assert len(rows(session, "bare", "id")) == 6


def masks_of(data):
    """Name, class and mask of every sample."""
    samples, store = data.samples.take(np.arange(len(data))), open_samples(data.url, data.manifest.reading)
    rows, masks = samples.masks
    found = {
        int(row): bytes(store.read(masks.objects[place], int(masks.offsets[place]), int(masks.lengths[place])))
        for place, row in enumerate(rows)
    }
    return [(name, int(samples.labels[row]), found.get(row)) for row, name in enumerate(data.names)]


def test_masks_go_along_and_are_put_again_where_they_change(server, session, tmp_path):
    folder = tmp_path / "pairs"
    for number in range(4):
        for part in ("images", "masks"):
            (folder / part / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        np.save(folder / "images" / f"c{number % 2}" / f"{number}.npy", np.full((8, 8), number, np.uint8))
        np.save(folder / "masks" / f"c{number % 2}" / f"{number}.npy", np.full((8, 8), number, np.uint16))
    (folder / "masks" / "c1" / "3.npy").unlink()
    source = fl.Dataset(folder, cache=tmp_path)
    assert put_into_table(source, url(server), observe=quiet).made == 4
    copy = fl.Dataset(url(server), cache=tmp_path)
    assert copy.has_targets
    assert copy.classes == ("c0", "c1")
    assert masks_of(copy) == masks_of(source)
    assert contents(copy) == contents(source)
    name = next(row.name for row in rows(session) if row.name.endswith("1.npy"))
    decay(session, "put", name, "label")
    assert put_into_table(source, url(server), observe=quiet).made == 0
    assert put_into_table(source, url(server), verify=True, observe=quiet).made == 1
    assert masks_of(fl.Dataset(url(server), cache=tmp_path)) == masks_of(source)
    np.save(folder / "masks" / "c0" / "2.npy", np.full((8, 8), 77, np.uint16))
    key = next(row.id for row in rows(session) if row.name.endswith("0.npy"))
    session.execute(f"UPDATE {KEYSPACE}.put SET label = %s WHERE id = %s", (b"somebody else's", key))
    source = fl.Dataset(folder, cache=tmp_path)
    assert put_into_table(source, url(server), observe=quiet).made == 2
    assert masks_of(fl.Dataset(url(server), cache=tmp_path)) == masks_of(source)


def test_images_are_scaled_down_on_their_way_into_a_table(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    whole = put_into_table(source, url(server), observe=quiet)
    small = put_into_table(source, url(server), shorter_side=8, observe=quiet)
    assert (whole.made, small.made) == (6, 6), "another size is other data"
    assert put_into_table(source, url(server), shorter_side=8, observe=quiet).made == 0
    copy = contents(fl.Dataset(url(server), cache=tmp_path))
    assert {min(Image.open(io.BytesIO(data)).size) for data in copy.values()} == {8}
    with pytest.raises(SettingError, match="at least 1"):
        put_into_table(source, url(server), shorter_side=0, observe=quiet)


def test_masks_do_not_fit_into_a_table_of_classes(server, session, few, tmp_path):
    put_into_table(fl.Dataset(few, cache=tmp_path), url(server), observe=quiet)
    for part in ("images", "masks"):
        (tmp_path / "pairs" / part).mkdir(parents=True)
        np.save(tmp_path / "pairs" / part / "1.npy", np.zeros((8, 8), np.uint8))
    with pytest.raises(DataError, match="holds no masks: its column label is text"):
        put_into_table(fl.Dataset(tmp_path / "pairs", cache=tmp_path), url(server), observe=quiet)


def test_notices_bytes_that_differ_from_those_put(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    put_into_table(source, url(server), observe=quiet)
    # A deletion by a server whose clock is ahead hides whatever is written until then.
    ahead = (time.time_ns() // 1000) + 3_600_000_000
    (key,) = [row.id for row in rows(session) if row.name == "noise/001.jpg"]
    session.execute(f"DELETE FROM {KEYSPACE}.put USING TIMESTAMP {ahead} WHERE id = %s", (key,))
    with pytest.raises(DataError, match=r"noise/001\.jpg came back from cql://"):
        put_into_table(source, url(server), observe=quiet)
    assert key not in seals(session)
