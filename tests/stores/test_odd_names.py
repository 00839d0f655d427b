"""Names of every kind in every store: each object is read by its own name, or listed as one that cannot be.

One table for all stores. Buckets, containers and web servers answer from this process, for real ones refuse some of the
names that people's stores hold; Azurite takes the others where it is.
"""

import base64
import hmac
import os
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frostline.core.errors import DataError, ObjectNotFound, StoreUnavailable
from frostline.datasets import Dataset
from frostline.stores.cloud import list_azure
from frostline.stores.open import open_store
from frostline.stores.protocols import UNREADABLE
from frostline.stores.urls import parse_url
from support.bucket_peer import bucket_peer

pytestmark = pytest.mark.promise("complete", mended="one odd name made a whole container of Azure unreadable")

TEN = b"0123456789"
OTHERS = {f"{folder}/{number}.jpg": bytes(number) for folder in ("cats", "dogs") for number in (1, 2)}
READ = [
    "a%b.jpg", "a%2Fb.jpg", "a%01b.jpg", "cats/%.jpg", "%/a.jpg", "a?b.jpg", "a#b.jpg", "a+b&c=d;e'\"<>.jpg",
    "~a*|:.jpg", "é.jpg", "e\u0301.jpg", "日本/🐈.jpg", "a\u202eb.jpg", "cats/a.jpg.", "cats/a.jpg ", "cats./a.jpg",
    "cats /a.jpg", " a.jpg", "a\\b.jpg", "cats\\a.jpg", "a\ufffeb.jpg", "cats/\ufffe.jpg", "\ufffe/a.jpg",
    "cats/1.jpg.d/x.jpg", "...",
]  # fmt: skip
# Read from folders and from web servers; the driver has no paths of them.
CONTROL = ["cats/a\nb.jpg", "a\tb.jpg", "a\x01b.jpg", "cats/\x1b.jpg", "\x01/a.jpg", "cats/\x7f.jpg", "cats/\r"]
# Names of none of Frostline's objects, which files never have.
NO_NAME = ["cats//a.jpg", "cats/./a.jpg", "cats/../a.jpg", "..", "cats/..", "dogs/deep/../../a.jpg"]
# An object beside which there is a folder of its name, which a file system cannot hold.
BOTH = ["cats", "cats/1.jpg/x.jpg"]


@pytest.fixture(scope="module", params=["s3", "gs", "az", "web"])
def served(request):
    """A server in this process, its bucket's URL, and what kind it is."""
    with bucket_peer() as peer, pytest.MonkeyPatch.context() as patch:
        for name in ("GOOGLE_BEARER_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "token")
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        peer.knows_folders = True
        kind = request.param
        options = {"az": f"?account=x&endpoint={peer.url}", "web": ""}.get(kind, f"?endpoint={peer.url}")
        yield peer, f"{peer.url if kind == 'web' else f'{kind}:/'}/photos{options}", kind


def by_folder(store):
    """The sizes of all objects by their names, as data sets list them."""
    entries, folders = store.sections()
    return sizes([*entries, *(entry for folder in folders for entry in store.list_section(folder))])


def sizes(entries):
    entries = list(entries)
    found = {entry.object: entry.size for entry in entries}
    assert len(found) == len(entries)
    return found


def check(store, key, shown=None):
    """One object of that name beside others costs those nothing; it is read, or listed as one that cannot be."""
    expected = {**{name: len(data) for name, data in OTHERS.items()}, shown or key: UNREADABLE if shown else len(TEN)}
    assert by_folder(store) == sizes(store.list()) == expected
    for name, size in expected.items():
        assert size == UNREADABLE or bytes(store.read(name, 0, size)) == {**OTHERS, key: TEN}[name]


@pytest.mark.parametrize("key", [*READ, *CONTROL, *NO_NAME, *BOTH])
def test_an_object_is_read_or_listed_as_unreadable_beside_all_others(served, key):
    peer, url, kind = served
    peer.objects = {**OTHERS, key: TEN}
    check(open_store(url), key, key if key in NO_NAME or (key in CONTROL and kind != "web") else None)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("/a.jpg", {"gs": "/", "web": "/"}),
        ("//a.jpg", {"gs": "/", "web": "/"}),
        ("./a.jpg", {"web": "."}),
    ],
)
def test_a_folder_of_no_name_is_named_where_its_objects_cannot_be(served, key, shown):
    # To the driver, and of Google's buckets to Arrow, /a.jpg is a.jpg; a web server is asked for no folder like that.
    peer, url, kind = served
    peer.objects = {**OTHERS, key: TEN}
    expected = {name: len(data) for name, data in OTHERS.items()}
    assert by_folder(open_store(url)) == {**expected, shown.get(kind, key): UNREADABLE}


parts = st.sampled_from(["a", "cats", "%41", "é", "1.jpg", " a ", "\ufffe", "...", "a\nb", "\x01", "", ".", ".."])
keys = st.sets(st.lists(parts, min_size=1, max_size=3).map("/".join).filter(lambda key: key.strip("/") == key != ""))


@pytest.mark.parametrize("served", ["s3", "gs", "az"], indirect=True)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=keys)
def test_a_listing_holds_every_key_once_and_those_that_can_be_read_as_such(served, keys):
    peer, url, _ = served
    peer.objects = dict.fromkeys(keys, TEN)
    store = open_store(url)
    found = by_folder(store)
    assert found == sizes(store.list())
    assert found.keys() == keys
    odd = {"", ".", "..", "a\nb", "\x01"}
    for name, size in found.items():
        is_odd = not odd.isdisjoint(name.split("/"))
        assert size == (UNREADABLE if is_odd else len(TEN))
        assert is_odd or bytes(store.read(name, 0, size)) == TEN


@pytest.mark.parametrize("served", ["s3", "gs", "az"], indirect=True)  # no file of a web server has such a name
@pytest.mark.parametrize("key", ["a.jpg/", "cats/a//", "//"])
def test_an_object_that_ends_as_a_folder_does_is_named(served, key):
    peer, url, _ = served
    peer.objects = {**OTHERS, key: TEN}
    assert {name for name, size in by_folder(open_store(url)).items() if size == UNREADABLE} & {key, "/"}


NESTED = ["cats/a.jpg", "cats/a.jpg/", "cats/a.jpg/b.jpg", "cats/a.jpg/b.jpg/", "cats/a.jpg-1", "cats/d/", "cats/d/e"]


@pytest.mark.parametrize("served", ["s3", "gs", "az"], indirect=True)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(objects=st.dictionaries(st.sampled_from(NESTED), st.sampled_from([b"", TEN, TEN + TEN])))
def test_keys_that_are_folders_of_others_or_end_in_a_slash_are_read_or_named(served, objects):
    peer, url, _ = served
    peer.objects = {**OTHERS, **objects}
    store = open_store(url)
    found = by_folder(store)
    assert found == sizes(store.list())
    for key, data in objects.items():
        name = key.rstrip("/")
        # A key that nothing but its slash tells from an object is listed as one, which is not there to be read.
        is_alone = name not in objects and not any(other.startswith(key) and other != key for other in objects)
        if key == name:
            assert found[name] == len(data)
            assert bytes(store.read(name, 0, len(data))) == data
        elif is_alone and data:
            with pytest.raises(ObjectNotFound):
                store.read(name, 0, found.pop(name))
            found[key] = UNREADABLE
        else:
            assert found[key] == UNREADABLE
    assert found.keys() == peer.objects.keys()


def test_a_file_is_read_by_every_name_that_a_file_can_have(tmp_path):
    store = open_store(str(tmp_path))
    for number, key in enumerate([*READ, *CONTROL]):
        folder = tmp_path / str(number)
        for name, data in {**OTHERS, key: TEN}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        check(open_store(str(folder)), key)
    assert len(sizes(store.list())) == (len(OTHERS) + 1) * len([*READ, *CONTROL])


@pytest.mark.parametrize("key", [*READ, *BOTH])
def test_an_object_in_memory_is_read_by_its_name(key):
    store = open_store(f"memory://{uuid.uuid4()}")
    for name, data in {**OTHERS, key: TEN}.items():
        store.write(name, data)
    check(store, key)


@pytest.fixture
def container(monkeypatch):
    """A container whose listings come in pages of two, and the URL of its folder p."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with bucket_peer() as peer:
        peer.knows_folders, peer.page_size = True, 2
        peer.objects = {**{f"p/{name}": data for name, data in OTHERS.items()}, "p/cats/a//b&c.jpg": TEN, "q//x": TEN}
        yield peer, f"az://photos/p?account=x&endpoint={peer.url}"


def test_a_container_is_listed_page_by_page_with_etags_and_nothing_beside_its_folder(container, monkeypatch):
    peer, url = container
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    store = open_store(url)
    assert by_folder(store) == {**{name: len(data) for name, data in OTHERS.items()}, "cats/a//b&c.jpg": UNREADABLE}
    assert any("&marker=2" in target for _, target in peer.seen)
    assert {entry.etag for entry in store.list_section("cats/") if entry.size == 1} == {
        store.describe("cats/1.jpg").etag
    }


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5", None),
        ("AZURE_STORAGE_ACCESS_KEY", "a2V5", None),
        ("AZURE_STORAGE_TOKEN", "hunter2", "Bearer hunter2"),
        ("AZURE_STORAGE_SAS_KEY", "?sv=2021&sig=a%2Bb%3D", ""),
        ("AZURE_STORAGE_SAS_TOKEN", "sv=2021&sig=a+b=", ""),
        ("AZURE_SKIP_SIGNATURE", "true", ""),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=x;AccountKey=a2V5", None),
    ],
)
def test_such_a_listing_is_signed_as_the_drivers_are(container, monkeypatch, variable, value, shown):
    peer, url = container
    monkeypatch.setenv(variable, value)
    assert UNREADABLE in sizes(open_store(url).list()).values()
    target, headers = peer.seen[-1][1], peer.headers
    assert ("sig=a%2Bb%3D" in target) == ("SAS" in variable)
    if shown is None:
        assert "&marker=4" in target
        asked = ["comp:list", "marker:4", "prefix:p/", "restype:container"]
        about = [f"{name}:{headers[name]}" for name in ("x-ms-date", "x-ms-version")]
        text = "\n".join(["GET", *[""] * 11, *about, "/x/photos", *asked])
        shown = f"SharedKey x:{base64.b64encode(hmac.digest(b'key', text.encode(), 'sha256')).decode()}"
    assert (headers["Authorization"] or "") == shown


def test_credentials_that_sign_no_such_listing_leave_the_name_in_a_sentence(container, monkeypatch):
    peer, url = container
    for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID"):
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", "hunter2")
    monkeypatch.setenv("AZURE_STORAGE_AUTHORITY_HOST", peer.url)
    peer.answers = lambda: (
        (200, {}, b'{"access_token": "t", "expires_in": 3600}') if "oauth2" in peer.seen[-1][1] else None
    )
    with pytest.raises(DataError, match=r"holds an object 'p/cats/a//b&c\.jpg'") as caught:
        open_store(url).list_section("cats/")
    assert "hunter2" not in str(caught.value)
    assert sizes(open_store(url).list_section("dogs/")) == {"dogs/1.jpg": 1, "dogs/2.jpg": 2}
    peer.objects["p/dogs/a%b.jpg"] = TEN
    assert "dogs/a%b.jpg" in sizes(open_store(url).list_section("dogs/"))


def test_a_real_container_with_odd_names_is_a_data_set_of_all_that_can_be_read(azurite, monkeypatch):
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    azurite.make_container("oddnames")
    # Azurite takes a backslash for a slash, and lists nothing where XML cannot hold a name.
    read = [key for key in READ if "\\" not in key and "\ufffe" not in key and key.endswith(".jpg")]
    odd = ["cats//a.jpg", "cats/./a.jpg", "cats/a\nb.jpg", "/a.jpg", ".."]
    for key in [*OTHERS, *read, *odd]:
        azurite.put(f"oddnames/{key}", TEN)
    store = open_store("az://oddnames")
    assert by_folder(store) == {**dict.fromkeys([*OTHERS, *read], len(TEN)), **dict.fromkeys(odd, UNREADABLE)}
    assert {bytes(store.read(key, 0, 10)) for key in read} == {TEN}
    data = Dataset("az://oddnames")
    assert sorted(data.manifest.names) == sorted(key for key in [*OTHERS, *read] if "/" in key)
    assert sum(left.total for left in data.manifest.left_out) == len(odd) + sum("/" not in key for key in read)


def test_a_container_whose_page_names_itself_as_the_next_ends_in_a_sentence(container, monkeypatch):
    peer, url = container
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    peer.page_size = 0
    with pytest.raises(StoreUnavailable, match="the listing of the container photos has no end"):
        list(list_azure(parse_url(url), 5.0, "p/"))
