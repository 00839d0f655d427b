"""Where buckets and containers are looked for and as whom: variables, profiles and options; and no secret gets out."""

import logging
import os
import pickle
import re
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from botocore.session import Session

from frostline.core.errors import (
    AccessDenied,
    DataError,
    ObjectNotFound,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.datasets import Dataset
from frostline.stores.cloud import (
    azure_settings,
    cloud_store,
    google_settings,
    list_azure,
    list_by_arrow,
    profile_of,
    s3_settings,
)
from frostline.stores.open import open_store
from frostline.stores.protocols import is_other_version, version_of_time
from frostline.stores.urls import parse_url
from frostline.stores.web import hosts_alone
from support.bucket_peer import bucket_peer
from support.web import web_server

TEN = b"0123456789"


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """An environment that says nothing of S3."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def profile(folder, monkeypatch, server, **changes):
    """Files as `aws configure` writes them, with one profile `shop`."""
    said = server.environment(**changes)
    credentials, config = folder / "credentials", folder / "config"
    keys = {f"{name} = {said[name.upper()]}" for name in ("aws_access_key_id", "aws_secret_access_key")}
    credentials.write_text("\n".join(["[shop]", *keys]))
    config.write_text(f"[profile shop]\nregion = us-east-1\nendpoint_url = {said['AWS_ENDPOINT_URL']}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))


def test_a_profile_of_the_url_says_server_region_and_credentials(s3, nobody, monkeypatch):
    s3.make_bucket("profiles")
    profile(nobody, monkeypatch, s3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    store = open_store("s3://profiles/a?profile=shop")
    store.write("x", TEN)
    assert bytes(store.read("x", 3, 4)) == b"3456"
    assert bytes(pickle.loads(pickle.dumps(store)).read("x", 3, 4)) == b"3456"


def test_the_profile_of_the_environment_is_used_where_it_holds_no_keys(s3, nobody, monkeypatch):
    s3.make_bucket("profiles")
    profile(nobody, monkeypatch, s3)
    monkeypatch.setenv("AWS_PROFILE", "shop")
    assert list(open_store("s3://profiles/none").list()) == []


def test_names_an_unknown_profile(s3, nobody, monkeypatch):
    profile(nobody, monkeypatch, s3)
    with pytest.raises(SettingError, match="no AWS profile shopp"):
        list(open_store("s3://profiles?profile=shopp").list())


def test_a_profile_without_credentials_is_refused(nobody, monkeypatch):
    (nobody / "config").write_text("[profile shop]\nregion = eu-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(nobody / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match="the AWS profile shop holds no credentials"):
        list(open_store("s3://profiles?profile=shop").list())


def test_wrong_credentials_of_a_profile_are_refused_and_not_shown(s3, nobody, monkeypatch):
    s3.make_bucket("profiles")
    profile(nobody, monkeypatch, s3, secret="hunter2")
    store = open_store("s3://profiles?profile=shop")
    with pytest.raises(AccessDenied) as caught:
        list(store.list())
    assert "hunter2" not in f"{caught.value}{store!r}"


@pytest.mark.parametrize(
    ("options", "environment", "profile"),
    [
        ({"profile": "one"}, {"AWS_ACCESS_KEY_ID": "key", "AWS_PROFILE": "two"}, "one"),
        ({}, {"AWS_ACCESS_KEY_ID": "key", "AWS_PROFILE": "two"}, None),
        ({}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/x", "AWS_PROFILE": "two"}, None),
        ({}, {"AWS_SKIP_SIGNATURE": "true", "AWS_PROFILE": "two"}, None),
        ({}, {"AWS_PROFILE": "two"}, "two"),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": __file__}, "default"),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}, None),
        ({}, {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": __file__}, None),
    ],
)
def test_chooses_the_aws_profile_as_the_aws_tools_do(options, environment, profile):
    assert profile_of(options, environment) == profile


def test_options_of_a_url_go_before_the_environment(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    s3.make_bucket("optional")
    store = open_store(f"s3://optional/x?endpoint=http://{s3.s3}&region=us-east-1")
    store.write("a", TEN)
    assert bytes(store.read("a", 0, 10)) == TEN


@pytest.mark.parametrize(
    ("settings", "options", "environment", "told"),
    [
        (s3_settings, {}, {}, {}),
        (s3_settings, {"region": "eu-1", "anonymous": "true"}, {}, {"region": "eu-1", "skip_signature": "true"}),
        (google_settings, {}, {"STORAGE_EMULATOR_HOST": "h:1"}, {"base_url": "http://h:1", "allow_http": "true"}),
        (google_settings, {"endpoint": "https://g"}, {"STORAGE_EMULATOR_HOST": "h:1"}, {"base_url": "https://g"}),
        (
            azure_settings,
            {"account": "other"},
            {
                "AZURE_STORAGE_CONNECTION_STRING": "AccountName=one;AccountKey=a2V5==;BlobEndpoint=http://h/one;QueueEndpoint=y"
            },
            {"account_name": "other", "account_key": "a2V5==", "endpoint": "http://h/one", "allow_http": "true"},
        ),
        (
            azure_settings,
            {},
            {
                "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=one;"
                "SharedAccessSignature=?sv=1&sig=a%3D;EndpointSuffix=core.chinacloudapi.cn"
            },
            {
                "account_name": "one",
                "sas_key": "sv=1&sig=a%3D",
                "endpoint": "https://one.blob.core.chinacloudapi.cn",
            },
        ),
        (
            azure_settings,
            {},
            {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
            {"use_emulator": "true"},
        ),
    ],
)
def test_passes_on_settings_that_the_driver_does_not_read(settings, options, environment, told):
    assert settings(options, environment) == told


def test_an_invalid_connection_string_is_not_repeated_in_the_error():
    with pytest.raises(SettingError, match="AZURE_STORAGE_CONNECTION_STRING") as caught:
        azure_settings({}, {"AZURE_STORAGE_CONNECTION_STRING": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_names_unknown_settings_of_a_connection_string():
    with pytest.raises(SettingError, match="says 'DevelopmentStorageProxyUri', which") as caught:
        azure_settings({}, {"AZURE_STORAGE_CONNECTION_STRING": "DevelopmentStorageProxyUri=http://hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        "UseDevelopmentStorage=true",
        "AccountName=one;SharedAccessSignature=sv=1&sig=hunter2%3D;BlobEndpoint=http://127.0.0.1:1/one",
    ],
)
def test_a_connection_string_makes_a_client_that_the_driver_takes(said, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
    monkeypatch.setenv("FROSTLINE_STORE_TIMEOUT_S", "0.001")
    monkeypatch.setenv("FROSTLINE_STORE_RETRY_FOR_S", "0")
    with pytest.raises(StoreUnavailable) as caught:
        open_store("az://photos").read("x", 0, 1)
    assert "hunter2" not in str(caught.value)


def test_a_default_profile_of_the_file_of_settings_says_server_and_region(s3, nobody, monkeypatch):
    s3.make_bucket("profiles")
    said = s3.environment()
    keys = "\n".join(f"{name} = {said[name.upper()]}" for name in ("aws_access_key_id", "aws_secret_access_key"))
    (nobody / ".aws").mkdir()
    about = f"region = us-east-1\nendpoint_url = {said['AWS_ENDPOINT_URL']}"
    (nobody / ".aws" / "config").write_text(f"[default]\n{keys}\n{about}\n")
    assert list(open_store("s3://profiles/none").list()) == []


def test_google_is_asked_by_its_own_interface(monkeypatch):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    with bucket_peer() as peer:
        peer.token = "token"
        store = open_store(f"gs://photos/a?endpoint={peer.url}")
        store.write("b c", TEN)
        assert list(store.list())
        assert peer.seen == [("PUT", "/photos/a%2Fb%20c"), ("GET", "/photos?list-type=2&prefix=a%2F")]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, b"<Error><Code>AccessDenied</Code></Error>", AccessDenied),
        (404, b"<Error><Code>NoSuchBucket</Code></Error>", StoreError),
        (404, b"<Error><Code>NoSuchKey</Code></Error>", ObjectNotFound),
        (429, b"<Error><Code>TooManyRequests</Code></Error>", StoreThrottled),
        (503, b"<Error><Code>SlowDown</Code></Error>", StoreThrottled),
    ],
)
def test_explains_errors_of_google_cloud_storage(monkeypatch, status, body, kind):
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "hunter2")
    with bucket_peer() as peer:
        peer.answers = lambda: (status, {"Retry-After": "0"}, body)
        url = f"gs://photos?endpoint={peer.url}"
        store = cloud_store(url, parse_url(url), retry_for_s=0.0)
        with pytest.raises(kind) as caught:
            store.read("x", 0, 1)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(params=["s3", "gs"])
def peer_and_url(request, monkeypatch):
    """A bucket's server in this process, and the URL of its bucket."""
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with bucket_peer() as peer:
        peer.knows_folders = True
        yield peer, f"{request.param}://photos?endpoint={peer.url}"


def test_a_key_that_cannot_be_a_name_costs_other_folders_nothing(peer_and_url):
    peer, url = peer_and_url
    peer.objects = {"dogs/1.jpg": TEN, "cats/a//1.jpg": TEN, "cats/2.jpg": TEN}
    store = open_store(url)
    assert store.list_section("dogs/")[0].etag == store.describe("dogs/1.jpg").etag
    # Without etags in such a listing, versions are times; neither says that the other has changed.
    (version,) = (entry.etag for entry in store.list_section("cats/") if entry.object == "cats/2.jpg")
    assert version == version_of_time(datetime(2026, 1, 1, tzinfo=UTC).timestamp())
    assert not is_other_version(version, store.read_version("cats/2.jpg", 0, 1)[1])


def test_a_key_that_cannot_be_a_name_is_named_where_nothing_else_lists(peer_and_url):
    peer, url = peer_and_url
    peer.objects = {"dogs/1.jpg": TEN, "cats//1.jpg": TEN}
    store, asked = open_store(url), []

    def refused_to_arrow():
        # Its listings ask for so many keys at once, or by Google's other interface; the driver's say nothing of that.
        asked.append(peer.seen[-1][1])
        return (403, {}, b"<Error><Code>AccessDenied</Code></Error>") if re.search("max|/o[?]", asked[-1]) else None

    peer.answers = refused_to_arrow
    with pytest.raises(DataError, match=r"holds an object 'cats//1\.jpg'"):
        list(store.list())
    assert len(asked) > 1


def test_a_bucket_with_odd_keys_is_a_data_set_without_them(s3, monkeypatch, caplog):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("oddkeys")
    there = ["cats/1.jpg", "cats/é.jpg", "cats/a b+c%20d.jpg", "dogs/1.jpg"]
    odd = ["cats/a\nb.jpg", "dogs/a\tb.jpg", "dogs/deep/\n/x.jpg"]
    client = Session().create_client("s3", endpoint_url=f"http://{s3.s3}")
    for name in [*there, *odd]:
        client.put_object(Bucket="oddkeys", Key=name, Body=TEN)
    data = Dataset("s3://oddkeys")
    assert sorted(data.manifest.names) == sorted(there)
    assert data.classes == ("cats", "dogs")
    (left,) = data.manifest.left_out
    assert (left.total, sorted(left.names)) == (3, sorted(map(ascii, odd)))
    assert "3 objects that cannot be read by that name" in caplog.text
    # It is said again, of the manifest that was found.
    assert Dataset("s3://oddkeys").manifest.left_out == (left,)


def test_a_web_server_that_lists_nothing_says_what_to_do(s3):
    with pytest.raises(StoreError, match="lists nothing: that takes WebDAV"):
        list(open_store(f"http://{s3.filer}/buckets").list())


def test_a_web_server_without_ranges_is_named():
    with bucket_peer() as peer:
        peer.gives_ranges = False
        peer.objects["x"] = TEN
        with pytest.raises(StoreError, match="whole objects only"):
            open_store(f"{peer.url}/photos").read("x", 0, 3)


@pytest.fixture(params=["web", "s3"])
def held(request, monkeypatch):
    """A server, and the store that reads its only object."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with web_server() as server:
        server.objects["photos/x"] = TEN * 1000
        place = f"{server.url}/photos" if request.param == "web" else f"s3://photos?endpoint={server.url}"
        yield server, lambda: open_store(place)


def test_a_store_that_says_nothing_is_given_up_by_a_limit_that_the_sentence_names(held, monkeypatch):
    server, opened = held
    server.is_silent = True
    monkeypatch.setenv("FROSTLINE_STORE_TIMEOUT_S", "0.2")
    monkeypatch.setenv("FROSTLINE_STORE_RETRY_FOR_S", "0.3")
    store = opened()
    for use in (lambda: store.read("x", 0, 1), lambda: store.describe("x")):
        with pytest.raises(StoreUnavailable, match=r"nothing came .*photos/x.* within FROSTLINE_STORE_TIMEOUT_S"):
            use()
    assert 2 <= len(server.seen) <= 4


def test_reads_a_slow_but_steady_body_to_its_end(held, monkeypatch):
    server, opened = held
    server.pieces, server.pause_s = 12, 0.25
    monkeypatch.setenv("FROSTLINE_STORE_TIMEOUT_S", "2")
    assert bytes(opened().read("x", 0, 10_000)) == TEN * 1000


@pytest.mark.parametrize(
    ("name", "text"), [("TIMEOUT_S", "60s"), ("TIMEOUT_S", "0"), ("RETRY_FOR_S", "nan"), ("REQUESTS_PER_S", "0")]
)
def test_limits_that_are_no_seconds_are_refused(name, text, monkeypatch):
    monkeypatch.setenv(f"FROSTLINE_STORE_{name}", text)
    with pytest.raises(SettingError, match=f"FROSTLINE_STORE_{name} is a number of"):
        open_store("https://photos.example/a").read("x", 0, 1)


def test_no_secret_gets_into_a_manifest_a_log_or_a_repr(s3, monkeypatch, caplog, tmp_path):
    said = s3.environment()
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("secrets")
    for label in ("cats", "dogs"):
        s3.put(f"secrets/{label}/1.jpg", b"is listed, never read")
    caplog.set_level(logging.DEBUG)
    data = Dataset(f"s3://secrets?endpoint=http://{s3.s3}", cache=tmp_path)
    (entry,) = (item for item in open_store(data.url).list() if item.object.endswith(".parquet")) if len(data) else ()
    table = bytes(open_store(data.url).read(entry.object, 0, entry.size))
    shown = f"{data!r}{data.manifest!r}{data.statistics()!r}{open_store(data.url)!r}{caplog.text}"
    for secret in (said["AWS_SECRET_ACCESS_KEY"], said["AWS_ACCESS_KEY_ID"]):
        assert secret not in shown
        assert secret.encode() not in table


@pytest.mark.parametrize("host", ["127.1", "0x7f.1", "2130706433", "b\u00fccket.example", "store.example.", "a%62c"])
def test_a_host_that_the_driver_writes_in_another_way_is_asked_as_ever(host):
    assert hosts_alone(f"http://{host}:9000") == {}
    assert hosts_alone("http://store.example", f"http://{host}") == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "STORE-1.example", "minio"])
def test_a_proxy_of_the_environment_stays_in_use(host, monkeypatch):
    found = hosts_alone("", f"http://{host}:9000/a")
    assert found["proxy_excludes"] == host.strip("[]").lower()
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert hosts_alone(f"http://{host}:9000") == {}


@pytest.mark.promise("data", mended="a name that the driver cannot list had another client follow redirects anywhere")
@pytest.mark.parametrize("how", ["anonymous", "keys"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_listing_by_other_means_leads_to_no_other_host(scheme, how, nobody, monkeypatch):
    if how == "keys":
        account = {"s3": {"AWS_ACCESS_KEY_ID": "A" * 20, "AWS_SECRET_ACCESS_KEY": "not-secret"}}.get(scheme, {})
        for name, value in {**account, "AZURE_STORAGE_SAS_TOKEN": "sv=1&sig=x", "GOOGLE_BEARER_TOKEN": "x"}.items():
            monkeypatch.setenv(name, value)
    with web_server() as web, web_server() as other:
        options = "" if how == "keys" else "&anonymous=true"
        options += {"s3": "&region=eu-1", "gs": "", "az": "&account=a"}[scheme]
        root = parse_url(f"{scheme}://photos?endpoint={web.url}{options}")
        web.redirects = _All(f"{other.url.replace('127.0.0.1', 'localhost')}/private/secret")
        with pytest.raises((OSError, pa.ArrowException, StoreError)):
            list((list_azure if scheme == "az" else list_by_arrow)(root, 5.0, ""))
        assert web.seen
        assert other.seen == []


class _All:
    """Where every path is said to have gone to."""

    def __init__(self, location):
        self._location = location

    def get(self, _):
        return 307, self._location


@pytest.mark.promise("data", mended="the server of a bucket led the node to any other host, whose answer was a sample")
@pytest.mark.parametrize("how", ["keys", "profile", "environment", "s3", "gs", "az"])
def test_the_server_of_a_bucket_leads_to_no_other_host(how, nobody, tmp_path, monkeypatch):
    scheme = how if how in ("gs", "az") else "s3"
    if how in ("keys", "environment"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "A" * 20)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-secret")
    if how == "profile":
        (tmp_path / "credentials").write_text("[p]\naws_access_key_id = A\naws_secret_access_key = not-secret\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with web_server() as web, web_server() as other:
        options = {"keys": "", "profile": "&profile=p"}.get(how, "&anonymous=true")
        options += "&account=a" if how == "az" else "" if how == "gs" else "&region=eu-1"
        url = f"{scheme}://photos/waste?endpoint={web.url}{options}"
        if how == "environment":
            monkeypatch.setenv("AWS_ENDPOINT_URL", web.url)
            monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
            url = "s3://photos/waste?region=eu-1"
        other.objects["private/secret"] = b"0123456789"
        host = other.url.replace("127.0.0.1", "localhost")
        web.redirects = _All(f"{host}/private/secret")
        store = cloud_store(url, parse_url(url), retry_for_s=0.0)
        for use in (lambda: store.read("x.jpg", 0, 10), lambda: store.describe("x.jpg"), lambda: list(store.list())):
            with pytest.raises(StoreError, match="redirects to another host, which is not followed"):
                use()
        assert web.seen
        assert other.seen == []
