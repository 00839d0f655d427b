"""Putting data sets into tables of a real Cassandra: each sample once, read back, and taken up again after a kill."""

import dataclasses
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cassandra import InvalidRequest

import frostline as fl
from frostline.datasets.into_cql import put_into_table
from frostline.errors import DataError, SettingError
from frostline.events import ColumnsLeft, Counted
from frostline.stores.cql_link import Link
from frostline.stores.objects import open_store
from support.cassandra import KEYSPACE, PASSWORD, USER
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
    verb += ["ingest", str(many), url(server), "--form", "cql", "--json"]
    with subprocess.Popen(verb, stdout=subprocess.DEVNULL) as process:
        until(lambda: process.poll() is not None or len(seals(session)) >= 20)
        process.send_signal(signal.SIGKILL)
    before = seals(session)
    assert len(before) >= 20
    happened = []
    done = put_into_table(source, url(server), observe=happened.append)
    assert (done.samples, done.made, done.skipped) == (total, total - len(before), ())
    assert [one.done for one in happened if isinstance(one, Counted)][-1] == total
    after = rows(session)
    assert len(after) == len({row.name for row in after}) == total
    assert before == {row.id: row[2] for row in after if row.id in before}, "what was there was not written again"
    assert contents(fl.Dataset(url(server), cache=tmp_path)) == contents(source)


def seals(session):
    """When the data of rows was written that were read back."""
    try:
        return {row.id: row[2] for row in rows(session) if row[3]}
    except InvalidRequest:  # the table is not there yet
        return {}


@pytest.fixture
def few(tmp_path):
    return image_folder(tmp_path / "few", per_class=2)


def test_what_is_there_is_neither_read_nor_put_again(server, session, few, tmp_path, monkeypatch):
    first = put_into_table(fl.Dataset(few, cache=tmp_path), url(server), observe=quiet)
    before = rows(session)
    for path in few.rglob("*.jpg"):
        path.unlink()
    monkeypatch.setattr(Link, "read_everywhere", lambda self, key: pytest.fail("asked all replicas"))
    again = put_into_table(fl.Dataset(few, cache=tmp_path, relist=False), url(server), observe=quiet)
    assert (first.made, again.made) == (6, 0)
    assert (again.samples, again.nbytes, again.skipped) == (first.samples, first.nbytes, ())
    assert rows(session) == before


def test_what_changed_in_the_source_or_in_the_table_is_put_again_in_its_place(server, session, few, tmp_path):
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


def test_where_the_source_has_no_versions_it_is_read_and_not_put_again(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    source = Unversioned(source)
    assert put_into_table(source, url(server), observe=quiet).made == 6
    assert put_into_table(source, url(server), observe=quiet).made == 0
    (few / "noise" / "000.jpg").write_bytes((few / "noise" / "000.jpg").read_bytes()[::-1])
    assert put_into_table(source, url(server), observe=quiet).made == 1


class Unversioned:
    """A data set in a store that tells no versions."""

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


def test_a_sample_of_other_data_is_not_overwritten_by_one_of_its_name(server, session, few, tmp_path):
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


def test_columns_that_a_table_has_no_place_for_are_named_before_it_is_made(server, session, few, tmp_path):
    happened = []
    source = fl.Dataset(few, cache=tmp_path).with_columns({"patient": ["p"] * 6})
    put_into_table(source, url(server), observe=happened.append)
    assert happened[0] == ColumnsLeft(url=source.url, columns=("patient",))


def test_a_table_without_a_column_for_seals_gets_every_sample_again_and_each_once(server, session, few, tmp_path):
    session.execute(f"CREATE TABLE IF NOT EXISTS {KEYSPACE}.bare (id uuid PRIMARY KEY, label text, data blob)")
    source = fl.Dataset(few, cache=tmp_path)
    for _ in range(2):
        assert put_into_table(source, url(server, "bare"), observe=quiet).made == 6
        assert len(rows(session, "bare", "id")) == 6


def test_what_comes_back_otherwise_than_it_was_put_is_noticed(server, session, few, tmp_path):
    source = fl.Dataset(few, cache=tmp_path)
    put_into_table(source, url(server), observe=quiet)
    # A deletion by a server whose clock is ahead hides whatever is written until then.
    ahead = (time.time_ns() // 1000) + 3_600_000_000
    (key,) = [row.id for row in rows(session) if row.name == "noise/001.jpg"]
    session.execute(f"DELETE FROM {KEYSPACE}.put USING TIMESTAMP {ahead} WHERE id = %s", (key,))
    with pytest.raises(DataError, match=r"noise/001\.jpg came back from cql://"):
        put_into_table(source, url(server), observe=quiet)
    assert key not in seals(session)
