"""A real Cassandra's tables as stores of objects: what every store does, keys, versions, and what goes wrong."""

import os
import pickle
import signal
import subprocess
import sys
import uuid

import pytest

from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataError,
    DataNotFound,
    ObjectNotFound,
    SettingError,
    StoreError,
    StoreUnavailable,
)
from frostline.stores.cql import session as cql_session
from frostline.stores.cql.access import CqlAccess
from frostline.stores.open import open_store
from frostline.stores.protocols import LABELS, ByteRange, StoreLimits, Tabular
from frostline.testing.stores import (
    AccessRefusalTests,
    ListingTests,
    ManyReadingTests,
    MissingRootTests,
    PicklingTests,
    ReadingTests,
    SharingTests,
    Staged,
    VersionTests,
    WritingTests,
)
from support.cassandra import KEYSPACE, PASSWORD, USER, cassandra, why_no_cassandra
from support.nodes import stop

TABLES = (
    f"CREATE TABLE {KEYSPACE}.named (id text PRIMARY KEY, bytes bigint, data blob)",
    f"CREATE TABLE {KEYSPACE}.photos (id uuid PRIMARY KEY, label int, data blob)",
    f"CREATE TABLE {KEYSPACE}.labels (photo uuid PRIMARY KEY, label text, width int, taken timestamp, tags set<text>)",
    f"CREATE TABLE {KEYSPACE}.numbered (id bigint PRIMARY KEY, data blob)",
    f"CREATE TABLE {KEYSPACE}.clustered (id uuid, part int, data blob, PRIMARY KEY (id, part))",
    f"CREATE TABLE {KEYSPACE}.texts (id uuid PRIMARY KEY, data text)",
    f'CREATE TABLE {KEYSPACE}."Upper" ("Id" uuid PRIMARY KEY, "it""s \'odd\'" int, "Data" blob)',
)


def url(server, table, **options):
    said = "&".join(f"{name}={value}" for name, value in {"protocol": 3, **options}.items())
    return f"cql://{USER}@{server.place}/{KEYSPACE}/{table}?{said}"


@pytest.fixture(scope="module")
def tables(cql):
    cql.execute(*TABLES, "CREATE USER reader WITH PASSWORD 'reads' NOSUPERUSER")
    cql.execute(f"GRANT SELECT ON {KEYSPACE}.named TO reader")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        yield cql


@pytest.fixture(scope="module")
def session(tables):
    with tables.session() as session:
        yield session


@pytest.fixture(scope="module")
def named(tables):
    return open_store(url(tables, "named"))


@pytest.fixture(scope="module")
def photos(tables):
    return open_store(url(tables, "photos"))


class TestACqlStore(
    ReadingTests,
    ManyReadingTests,
    VersionTests,
    ListingTests,
    WritingTests,
    SharingTests,
    PicklingTests,
    AccessRefusalTests,
    MissingRootTests,
):
    @pytest.fixture
    def staged(self, named, session):
        for entry in list(named.list()):
            session.execute(f"DELETE FROM {KEYSPACE}.named WHERE id = %s", (entry.object,))
        return Staged(store=named, put=named.write)

    @pytest.fixture
    def refused(self, tables, monkeypatch):
        monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", self.secret)
        return open_store(url(tables, "named"))

    @pytest.fixture
    def missing(self, tables):
        return open_store(url(tables, "nothing"))


def test_a_server_that_hangs_is_waited_for_no_longer_than_the_caller_says(tables, named, monkeypatch):
    # Longer than any test may take, so that only the caller's deadline can end it.
    monkeypatch.setattr(cql_session, "_REQUEST_S", 1000.0)
    named.write("x", b"0123456789")
    store = open_store(url(tables, "named"), StoreLimits(deadline_s=1.0))
    assert bytes(store.read("x", 0, 10)) == b"0123456789"
    (server,) = tables.processes.values()
    try:
        stop(server.pid)
        with pytest.raises(StoreUnavailable):
            store.read("x", 0, 10)
        ((_, found),) = store.read_many([ByteRange("x", 0, 10)])
        assert isinstance(found, StoreUnavailable)
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.fixture
def empty(photos, session):
    session.execute(f"TRUNCATE {KEYSPACE}.photos")
    return photos


def test_a_row_is_an_object_and_its_uuid_the_name(empty, session):
    key = uuid.uuid4()
    session.execute(f"INSERT INTO {KEYSPACE}.photos (id, label, data) VALUES (%s, 3, %s)", (key, b"0123"))
    written = session.execute(f"SELECT writetime(data) FROM {KEYSPACE}.photos WHERE id = %s", (key,)).one()[0]
    assert empty.read_version(str(key), 1, 2) == (b"12", str(written))
    assert [entry for entry in empty.list() if entry.object != LABELS] == [(str(key), -1, str(written))]


def test_writing_data_keeps_the_label(empty, session):
    key = uuid.uuid4()
    session.execute(f"INSERT INTO {KEYSPACE}.photos (id, label) VALUES (%s, 7)", (key,))
    assert [entry.object for entry in empty.list()] == [LABELS], "a row without data is no object"
    empty.write(str(key), b"x")
    assert empty.rows().to_pylist() == [{"/key": str(key), "label": 7}]


@pytest.mark.parametrize("name", ["x", "1", "{12345678-1234-5678-1234-567812345678}", str(uuid.UUID(int=10)).upper()])
def test_refuses_a_name_that_is_not_a_uuid(photos, name):
    for use in (lambda: photos.read(name, 0, 1), lambda: photos.write(name, b"x")):
        with pytest.raises(BadRequest, match="is no key"):
            use()


def test_whole_numbers_are_keys_too(tables):
    store = open_store(url(tables, "numbered"))
    store.write("-5", b"five")
    assert bytes(store.read("-5", 0, 4)) == b"five"
    with pytest.raises(BadRequest):
        store.read("05", 0, 4)
    with pytest.raises(BadRequest):
        store.read(str(1 << 70), 0, 4)


def test_names_of_tables_and_columns_are_taken_to_the_letter(tables):
    store = open_store(url(tables, "Upper", id="Id", data="Data"))
    key = str(uuid.uuid4())
    store.write(key, b"x")
    assert bytes(store.read(key, 0, 1)) == b"x"


def test_many_reads_are_under_way_at_once_and_each_comes_once(empty):
    keys = {str(uuid.uuid4()): number for number in range(1500)}
    for key, number in list(keys.items())[::10]:
        empty.write(key, bytes([number % 251]) * 50)
    places = [ByteRange(key, 10, 20) for key in keys]
    assert isinstance(empty, Tabular)
    got = list(empty.read_many(places))
    assert sorted(index for index, _ in got) == list(range(1500))
    for index, found in got:
        if index % 10:
            assert isinstance(found, ObjectNotFound)
        else:
            assert bytes(found[0]) == bytes([index % 251]) * 20


def test_abandoned_reads_delay_no_others(empty):
    key = str(uuid.uuid4())
    empty.write(key, b"x" * 1000)
    reads = empty.read_many([ByteRange(key, 0, 1000)] * 500, maximum=4)
    assert len(next(reads)[1][0]) == 1000
    reads.close()
    assert bytes(empty.read(key, 0, 1)) == b"x"


def test_a_scan_gives_every_row_of_a_table_of_many_pages_once(empty, session):
    insert = session.prepare(f"INSERT INTO {KEYSPACE}.photos (id, label, data) VALUES (?, ?, ?)")
    keys = [uuid.uuid5(uuid.NAMESPACE_OID, str(number)) for number in range(12_000)]
    for start in range(0, len(keys), 500):
        for future in [session.execute_async(insert, (key, 1, b"x")) for key in keys[start : start + 500]]:
            future.result()
    listed = [entry.object for entry in empty.list() if entry.object != LABELS]
    assert len(listed) == len(keys)
    assert set(listed) == {str(key) for key in keys}
    assert sorted(empty.rows()["/key"].to_pylist()) == sorted(listed)


def test_another_table_holds_labels_and_further_columns(tables, session):
    key = uuid.uuid4()
    session.execute(
        f"INSERT INTO {KEYSPACE}.labels (photo, label, width, taken, tags) VALUES (%s, 'glass', 640, 1000, {{'a'}})",
        (key,),
    )
    store = open_store(url(tables, "photos", meta="labels", meta_id="photo"))
    store.write(str(key), b"x")
    (row,) = store.rows().to_pylist()
    assert (row["/key"], row["label"], row["width"], row["taken"].timestamp()) == (str(key), "glass", 640, 1.0)
    assert "tags" not in row
    before = next(entry for entry in store.list() if entry.object == LABELS)
    session.execute(f"UPDATE {KEYSPACE}.labels SET label = 'paper' WHERE photo = %s", (key,))
    assert next(entry for entry in store.list() if entry.object == LABELS) != before


@pytest.mark.parametrize(
    ("table", "options", "kind", "words"),
    [
        ("waste", {}, DataNotFound, "there is no table waste"),
        ("photos", {"meta": "nowhere.labels"}, DataNotFound, "there is no keyspace nowhere"),
        ("photos", {"data": "image"}, DataError, "has no column 'image', only data, id, label"),
        ("photos", {"meta": "labels"}, DataError, "meta_id"),
        ("clustered", {}, DataError, "must be the primary key"),
        ("texts", {}, DataError, "not a blob"),
        ("photos", {"dc": "elsewhere"}, StoreError, "elsewhere"),
    ],
)
def test_reports_an_unreadable_table_in_one_sentence(tables, table, options, kind, words):
    with pytest.raises(kind, match=words) as caught:
        list(open_store(url(tables, table, **options)).list())
    assert "\n" not in str(caught.value)


def test_says_that_the_user_may_only_read(tables, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", "reads")
    store = open_store(url(tables, "named").replace(USER, "reader", 1))
    list(store.list())
    with pytest.raises(AccessDenied, match="the user's rights"):
        store.write("x", b"x")
    with pytest.raises(AccessDenied):
        list(open_store(url(tables, "photos").replace(USER, "reader", 1)).list())


def test_a_user_without_a_password_is_asked_for_one(tables, monkeypatch):
    monkeypatch.delenv("FROSTLINE_CQL_PASSWORD")
    with pytest.raises(SettingError, match="FROSTLINE_CQL_PASSWORD"):
        list(open_store(url(tables, "named")).list())


def test_a_server_older_than_the_driver_says_which_setting_it_needs(tables):
    with pytest.raises(SettingError, match="protocol=3"):
        list(open_store(url(tables, "named").replace("?protocol=3", "")).list())


def test_a_server_that_does_not_answer_is_worth_another_try(monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", "hunter2")
    with pytest.raises(StoreUnavailable) as caught:
        list(open_store("cql://me@127.0.0.1:1/photos/waste").list())
    assert "hunter2" not in str(caught.value)


def test_frostlines_own_files_stay_out_of_the_table(named):
    with pytest.raises(AccessDenied):
        named.write(".frostline/manifests/0.parquet", b"x")


FORKED = """
import os, sys
from frostline.core.errors import StoreError
from frostline.stores.open import open_store

list(open_store(sys.argv[1]).list())
child = os.fork()
if child == 0:
    try:
        open_store(sys.argv[1]).read("x", 0, 1)
    except StoreError as error:
        os._exit(7 if "'spawn'" in str(error) and "frostline io --data-root" in str(error) else 1)
    os._exit(2)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_of_a_user_of_the_driver_gets_a_sentence_and_never_hangs(tables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FORKED, url(tables, "named")]
    assert subprocess.run(command, timeout=200, check=False, env=environment).returncode == 7


@pytest.mark.usefixtures("plain_starts")
def test_the_driver_is_not_loaded_before_a_table_needs_it():
    code = (
        "import sys, frostline; from frostline.stores.open import open_store; open_store('cql://host/photos/waste');"
        "sys.exit(any(name.partition('.')[0] == 'cassandra' for name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_a_password_is_in_no_store_and_travels_nowhere(named):
    assert PASSWORD not in repr(CqlAccess(password=PASSWORD))
    assert set(pickle.loads(pickle.dumps(named)).__getstate__()) == {"_place"}


@pytest.mark.skipif(why_no_cassandra() is not None, reason=str(why_no_cassandra()))
def test_a_server_that_speaks_tls_alone_is_known_by_its_certificate(tmp_path, monkeypatch):
    with cassandra(tmp_path, encrypted=True) as server:
        server.execute(f"CREATE TABLE {KEYSPACE}.named (id text PRIMARY KEY, bytes bigint, data blob)")
        known = url(server, "named", tls="true").replace(f"{USER}@", "")
        with pytest.raises(SettingError, match="FROSTLINE_CQL_CA"):
            list(open_store(known).list())
        monkeypatch.setenv("FROSTLINE_CQL_CA", str(server.certificate))
        store = open_store(known)
        store.write("x", b"secret")
        assert bytes(store.read("x", 0, 6)) == b"secret"
        monkeypatch.setenv("FROSTLINE_CQL_CA", str(tmp_path / "nothing"))
        with pytest.raises(SettingError, match="PEM"):
            list(open_store(known).list())
