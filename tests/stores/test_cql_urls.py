"""What a cql:// URL means, what stays out of statements and sentences, and what the driver's exceptions become."""

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataError,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.stores.cql.access import CqlAccess, error_of_cql
from frostline.stores.cql.schema import TableSchema, key_of, shape_of
from frostline.stores.urls import CqlLocation, is_within, normalise_url, parse_cql

names = st.from_regex(r"[A-Za-z0-9_]{1,48}", fullmatch=True)


@pytest.mark.parametrize(
    ("given_url", "canonical"),
    [
        ("cql://host/photos/waste", "cql://host/photos/waste"),
        ("cql://host:9042/photos/waste/", "cql://host/photos/waste"),
        ("cql://Host:9142,b/Photos/waste", "cql://b:9142,host:9142/Photos/waste"),
        ("cql://b,a,b/photos/waste", "cql://a,b/photos/waste"),
        ("cql://me@[::1]:9142/photos/waste", "cql://me@[::1]:9142/photos/waste"),
        ("cql://m%20e@host/photos", None),
        ("cql://me%C3%BC@host/photos", "cql://me%C3%BC@host/photos"),
        ("cql://h/k/t?tls=true&meta=o.m&label=class&id=id", "cql://h/k/t?label=class&meta=o.m&tls=true"),
        ("cql://h/k/t?consistency=local_quorum", "cql://h/k/t?consistency=LOCAL_QUORUM"),
        ("cql://h/k/t?consistency=LOCAL_ONE", "cql://h/k/t"),
        ("cql://h/k/t?protocol=4&dc=eu-1", "cql://h/k/t?dc=eu-1&protocol=4"),
        ("cql://", None),
        ("cql:///photos/waste", None),
        ("cql://host", None),
        ("cql://host//waste", None),
        ("cql://host/photos/waste/1", None),
        ("cql://host/photos/waste%20", None),
        ("cql://host/photos/wa'ste", None),
        ('cql://host/photos/wa"ste', None),
        ("cql://a:1,b:2/photos/waste", None),
        ("cql://a:0/photos/waste", None),
        ("cql://a:65536/photos/waste", None),
        ("cql://a b/photos/waste", None),
        ("cql://h/k/t?protocol=2", None),
        ("cql://h/k/t?consistency=ANY", None),
        ("cql://h/k/t?tls=false", None),
        ("cql://h/k/t?meta=a.b.c", None),
        ('cql://h/k/t?label=a"b', None),
        ("cql://h/k/t?label=a&label=b", None),
        ("cql://h/k/t?label", None),
        ("cql://h/k/t?password=x", None),
    ],
)
def test_a_url_has_one_canonical_spelling_or_is_refused(given_url, canonical):
    if canonical is None:
        with pytest.raises(SettingError) as caught:
            normalise_url(given_url)
        assert "\n" not in str(caught.value)
    else:
        assert normalise_url(given_url) == canonical
        assert normalise_url(canonical) == canonical


@given(names, names, names, names)
def test_every_place_survives_its_url(keyspace, table, meta, label):
    tables = {"keyspace": keyspace, "table": table, "meta": meta, "label": label}
    place = CqlLocation(hosts=("a", "b"), port=9142, user="mé%&?", **tables)
    assert parse_cql(place.url.removeprefix("cql://")) == place


@pytest.mark.parametrize(
    "url",
    [
        "cql://me:hunter2@host/photos/waste",
        "cql://host/photos/waste?password=hunter2",
        "cql://host/photos/waste?consistency=hunter2",
        "cql://host/photos/waste?label=hunter2%22",
        "cql://host/photos/waste?hunter2",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url):
    with pytest.raises(SettingError) as caught:
        normalise_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "root", "answer"),
    [
        ("cql://h/k/t", "cql://h/k/t", True),
        ("cql://h/k/t", "cql://h:9042/k", True),
        ("cql://h/kk/t", "cql://h/k", False),
        ("cql://h/k/tt", "cql://h/k/t", False),
        ("cql://other/k/t", "cql://h/k", False),
        ("cql://me@h/k/t", "cql://h/k", False),
        ("cql://h/k/t", "cql://h/k?tls=true", False),
        ("cql://h/k/t?tls=true", "cql://h/k?tls=true", True),
        ("cql://h/k/t?data=other", "cql://h/k", False),
    ],
)
def test_allows_a_table_within_its_keyspace_on_the_same_servers(url, root, answer):
    assert is_within(url, root) is answer


def test_reads_the_password_from_a_variable_or_a_named_file(tmp_path):
    (tmp_path / "secret").write_text("hunter2\n", encoding="utf-8")
    file = {"FROSTLINE_CQL_PASSWORD_FILE": str(tmp_path / "secret")}
    assert CqlAccess.of(file).password == "hunter2"
    assert CqlAccess.of({**file, "FROSTLINE_CQL_PASSWORD": "x"}).password == "x"
    assert "hunter2" not in repr(CqlAccess.of(file))
    with pytest.raises(SettingError, match="FROSTLINE_CQL_PASSWORD_FILE"):
        CqlAccess.of({"FROSTLINE_CQL_PASSWORD_FILE": str(tmp_path / "nothing")})


COLUMNS = {"id": "uuid", "data": "blob", 'la"bel': "text", "tags": "set<text>"}


def test_names_that_servers_tell_are_quoted_in_statements():
    table = TableSchema(keyspace="k", name="t", columns=COLUMNS, partition=("id",), clustering=())
    shape = shape_of(CqlLocation(hosts=("h",), keyspace="k", table="t"), table, None)
    assert shape.rows is not None
    assert shape.rows.columns == ("id", 'la"bel')
    assert '"la""bel"' in shape.rows.text
    assert shape.read == 'SELECT "data", writetime("data") FROM "k"."t" WHERE "id" = ?'


def test_metadata_is_scanned_by_its_own_partition_key():
    columns = {"patient": "text", "slide": "int", "id": "uuid", "label": "int"}
    data = TableSchema(keyspace="k", name="t", columns=COLUMNS, partition=("id",), clustering=())
    meta = TableSchema(keyspace="k", name="m", columns=columns, partition=("patient", "slide"), clustering=("id",))
    shape = shape_of(CqlLocation(hosts=("h",), keyspace="k", table="t", meta="m"), data, meta)
    assert shape.rows is not None
    assert shape.rows.columns == ("id", "label", "patient", "slide")
    assert shape.rows.text.endswith('WHERE token("patient", "slide") > ? AND token("patient", "slide") <= ?')


@pytest.mark.parametrize("kind", ["map<text, int>", "double", "blob"])
def test_a_key_of_a_type_that_names_no_objects_is_refused(kind):
    table = TableSchema(keyspace="k", name="t", columns={**COLUMNS, "id": kind}, partition=("id",), clustering=())
    with pytest.raises(DataError, match="not one of"):
        shape_of(CqlLocation(hosts=("h",), keyspace="k", table="t"), table, None)


@given(st.sampled_from(["uuid", "text", "bigint"]), st.text())
def test_a_key_is_the_name_again_or_refused(kind, name):
    try:
        key = key_of(kind, name)
    except BadRequest:
        return
    assert str(key) == name


EXPECTED = {
    "cassandra": {
        "AlreadyExists": StoreError,
        "AuthenticationFailed": AccessDenied,
        "CDCWriteFailure": StoreUnavailable,
        "ConfigurationException": StoreError,
        "CoordinationFailure": StoreUnavailable,
        "DependencyException": StoreUnavailable,
        "DriverException": StoreUnavailable,
        "FunctionFailure": StoreError,
        "InvalidRequest": StoreError,
        "OperationTimedOut": StoreUnavailable,
        "ReadFailure": StoreUnavailable,
        "ReadTimeout": StoreUnavailable,
        "RequestExecutionException": StoreUnavailable,
        "RequestValidationException": StoreError,
        "Timeout": StoreUnavailable,
        "Unauthorized": AccessDenied,
        "Unavailable": StoreUnavailable,
        "UnresolvableContactPoints": StoreUnavailable,
        "UnsupportedOperation": SettingError,
        "WriteFailure": StoreUnavailable,
        "WriteTimeout": StoreUnavailable,
    },
    "cassandra.cluster": {
        "NoHostAvailable": StoreUnavailable,
        "QueryExhausted": StoreUnavailable,
        "UserTypeDoesNotExist": StoreError,
    },
    "cassandra.connection": {
        "ConnectionBusy": StoreThrottled,
        "ConnectionException": StoreUnavailable,
        "ConnectionShutdown": StoreUnavailable,
        "CrcMismatchException": StoreUnavailable,
        "ProtocolError": SettingError,
        "ProtocolVersionUnsupported": SettingError,
    },
    "cassandra.pool": {"NoConnectionsAvailable": StoreThrottled},
    "cassandra.protocol": {
        "AlreadyExistsException": StoreError,
        "BadCredentials": AccessDenied,
        "CDCWriteException": StoreUnavailable,
        "ClientWriteError": StoreUnavailable,
        "ConfigurationException": StoreError,
        "ErrorMessage": StoreUnavailable,
        "ErrorMessageSub": StoreUnavailable,
        "FunctionFailureMessage": StoreError,
        "InternalError": StoreUnavailable,
        "InvalidRequestException": StoreError,
        "IsBootstrappingErrorMessage": StoreUnavailable,
        "NotSupportedError": SettingError,
        "OverloadedErrorMessage": StoreThrottled,
        "PreparedQueryNotFound": StoreError,
        "ProtocolException": SettingError,
        "ReadFailureMessage": StoreUnavailable,
        "ReadTimeoutErrorMessage": StoreUnavailable,
        "RequestExecutionException": StoreUnavailable,
        "RequestValidationException": StoreError,
        "ServerError": StoreUnavailable,
        "SyntaxException": StoreError,
        "TruncateError": StoreUnavailable,
        "UnauthorizedErrorMessage": AccessDenied,
        "UnavailableErrorMessage": StoreUnavailable,
        "WriteFailureMessage": StoreUnavailable,
        "WriteTimeoutErrorMessage": StoreUnavailable,
    },
    "cassandra.query": {"TraceUnavailable": StoreError},
    "cassandra.segment": {"CrcException": StoreUnavailable},
}
KINDS = [(module, name, kind) for module, known in EXPECTED.items() for name, kind in known.items()]


@pytest.mark.parametrize("module", EXPECTED)
def test_every_exception_of_the_driver_is_known(module):
    found = importlib.import_module(module)
    raised = [var for var in vars(found).values() if isinstance(var, type) and issubclass(var, Exception)]
    assert {error.__name__ for error in raised if error.__module__ == module} == set(EXPECTED[module])


@pytest.mark.parametrize(("module", "name", "kind"), KINDS)
def test_every_exception_of_the_driver_becomes_one_of_ours(module, name, kind):
    one = getattr(importlib.import_module(module), name)
    error = one.__new__(one)
    error.args = ("SELECT secret FROM hunter2",)
    error.code, error.message, error.info = 0, "hunter2", None
    made = error_of_cql(error, "cql://h/k/t", "x")
    assert type(made) is kind
    assert "hunter2" not in str(made)
    assert "\n" not in str(made)
    assert "cql://h/k/t" in str(made)


def test_counts_the_errors_of_single_servers():
    from cassandra import AuthenticationFailed
    from cassandra.cluster import NoHostAvailable

    made = error_of_cql(NoHostAvailable("nobody", {"a": OSError(), "b": AuthenticationFailed()}), "cql://h/k/t", "")
    assert type(made) is AccessDenied
