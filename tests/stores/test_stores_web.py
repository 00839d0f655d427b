"""Web servers that redirect, close and turn on us: nothing outside of a root is asked."""

import os
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from frostline.core.errors import DataError, ObjectNotFound, StoreError, StoreThrottled, StoreUnavailable
from frostline.stores.cloud import cloud_store
from frostline.stores.open import open_store
from frostline.stores.protocols import UNREADABLE
from frostline.stores.urls import parse_url
from frostline.stores.web import path_of_redirect, refuse_private_address
from support.bucket_peer import bucket_peer
from support.web import web_server

TEN = b"0123456789"
URL = "https://photos.example/waste"


@pytest.fixture
def web():
    with web_server() as server:
        server.objects["photos/x.jpg"] = TEN
        yield server


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_refuses_a_redirect_to_another_server_and_asks_it_nothing(web, status):
    with web_server() as other:
        other.objects["photos/secret"] = TEN
        web.redirects["photos/x.jpg"] = (status, f"{other.url}/photos/secret?signature=hunter2")
        store = open_store(f"{web.url}/photos")
        for use in (lambda: store.read("x.jpg", 0, 10), lambda: store.describe("x.jpg")):
            with pytest.raises(StoreError, match="redirects out of it") as caught:
                use()
            assert not isinstance(caught.value, StoreUnavailable)
            assert "hunter2" not in str(caught.value)
        web.redirects["photos"] = (status, other.url)
        with pytest.raises(StoreError, match="redirects out of it"):
            list(store.list())
        assert other.seen == []


def test_refuses_a_redirect_out_of_the_path_of_the_root(web):
    web.objects["private/x.jpg"] = TEN
    store = open_store(f"{web.url}/photos")
    for place in ("/private/x.jpg", "../private/x.jpg", "%2e%2e/private/x.jpg", "/photos/../private/x.jpg"):
        web.redirects["photos/x.jpg"] = (302, place)
        with pytest.raises(StoreError, match="redirects out of it"):
            store.read("x.jpg", 0, 10)
    assert not [path for _, path in web.seen if "private" in path]


def test_follows_redirects_within_the_root(web):
    web.objects["photos/moved ü/y.jpg"] = TEN
    web.redirects["photos/y.jpg"] = (307, "moved%20%C3%BC/y.jpg")
    web.redirects["photos/z.jpg"] = (302, f"{web.url}/photos/y.jpg")
    store = open_store(f"{web.url}/photos")
    assert bytes(store.read("z.jpg", 2, 3)) == b"234"
    assert store.describe("z.jpg").size == 10


def test_gives_up_a_redirect_that_goes_round(web):
    web.redirects["photos/x.jpg"] = (302, "x.jpg")
    with pytest.raises(StoreError, match="redirects more than 5 times"):
        open_store(f"{web.url}/photos").read("x.jpg", 0, 10)
    assert len(web.seen) == 6


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("x", "/waste/x"),
        ("/waste/a%20b?v=1#part", "/waste/a%20b?v=1"),
        ("https://photos.example:443/waste/x", "/waste/x"),
        ("//PHOTOS.example/waste", "/waste"),
        ("http://photos.example/waste/x", None),
        ("https://photos.example:8443/waste/x", None),
        ("https://photos.example@evil.example/waste/x", None),
        ("https://user@photos.example/waste/x", None),
        ("https://169.254.169.254/waste/x", None),
        ("https://[::1]/waste/x", None),
        ("https://[oops/waste", None),
        ("https://photos.example:port/waste", None),
        ("https://photos.example/wasted/x", None),
        ("https://photos.example/waste/%2E%2E/x", None),
        ("https://photos.example/waste/..%5Cx", None),
        ("file:///etc/passwd", None),
        ("/waste/ü", None),
        ("", "/waste/a"),
    ],
)
def test_a_redirect_is_followed_only_within_scheme_host_port_and_path(location, path):
    def found():
        return path_of_redirect(URL, parse_url(URL), "/waste/a", location)

    if path is not None:
        assert found() == path
        return
    with pytest.raises(StoreError, match="redirects"):
        found()


def test_a_host_with_a_public_address_may_not_turn_into_a_private_one():
    public = set()
    refuse_private_address(URL, "photos.example", "10.0.0.1", public)
    refuse_private_address(URL, "photos.example", "93.184.216.34", public)
    for address in ("127.0.0.1", "169.254.169.254", "192.168.1.1", "fe80::1%eth0", "::ffff:10.0.0.1"):
        with pytest.raises(StoreError, match="had a public address"):
            refuse_private_address(URL, "photos.example", address, public)
        refuse_private_address(URL, "inside.example", address, public)


def test_connections_are_used_again_and_never_a_parents(web):
    store = open_store(f"{web.url}/photos")
    assert bytes(store.read("x.jpg", 0, 3)) == b"012"
    child = os.fork()
    if not child:
        os._exit(0 if bytes(store.read("x.jpg", 3, 3)) == b"345" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(store.read("x.jpg", 6, 3)) == b"678"
    assert web.connections == 2


def test_an_answer_that_is_not_what_was_asked_for_is_refused(web):
    store = cloud_store(f"{web.url}/photos", parse_url(f"{web.url}/photos"), retry_for_s=0.0)
    web.ranges = lambda first, last, size: f"bytes {first + 1}-{last}/{size}"
    with pytest.raises(StoreError, match="other ranges than it is asked for"):
        store.read("x.jpg", 0, 5)
    web.ranges = lambda first, last, size: f"bytes {first}-{last}/{size}"
    with pytest.raises(ObjectNotFound, match="ends before"):
        store.read("x.jpg", 8, 1 << 60)


@pytest.mark.parametrize(
    "said",
    ["bytes 0-4/" + "9" * 5000, "bytes " + "0" * 5000 + "-4/10", "bytes -1-4/10", "bytes 0-4", "items 0-4/10", ""],
)
def test_refuses_an_invalid_range(web, said):
    web.ranges = lambda *_: said
    with pytest.raises(StoreError, match="other ranges than it is asked for"):
        open_store(f"{web.url}/photos").read("x.jpg", 0, 5)


@pytest.mark.parametrize(
    "date", ["Mon, 01 Jan 0001 00:00:00 +9999", "Mon, 01 Jan 2024 00:00:00 +" + "9" * 30, "never", "\x7f" * 50]
)
def test_takes_an_invalid_date_for_no_version(web, date):
    web.versions["photos/x.jpg"] = {"Last-Modified": date}
    store = open_store(f"{web.url}/photos")
    assert bytes(store.read_version("x.jpg", 0, 5)[0]) == b"01234"
    assert store.describe("x.jpg").size == 10


def listing(*entries):
    """What a WebDAV server says: of each entry its address, and its size as it is written."""
    said = "".join(
        f"<response><href>{href}</href><propstat><prop><getcontentlength>{size}</getcontentlength></prop></propstat>"
        "</response>"
        for href, size in entries
    )
    return f'<?xml version="1.0"?><multistatus xmlns="DAV:">{said}</multistatus>'.encode()


def listed(answer):
    with bucket_peer() as peer:
        peer.answers = lambda: (207, {}, answer)
        url = f"{peer.url}/photos"
        return list(cloud_store(url, parse_url(url), retry_for_s=0.0).list())


def test_lists_nothing_outside_the_root():
    found = listed(listing(("/photos/", 0), ("/photos/a%20b.jpg", 3), ("/private/x.jpg", 3), ("http://h/photos/c", 4)))
    assert [(entry.object, entry.size) for entry in found] == [("a b.jpg", 3), ("c", 4)]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<",
        b"no listing",
        listing(("/photos/x", 3))[:-20],
        b'<?xml version="1.0" encoding="odd"?><multistatus/>',
        b'<?xml version="1.0" encoding="big5"?><multistatus/>',
        listing(("http://[oops/photos/x", 3)),
        b'<!DOCTYPE l [<!ENTITY a "aaaaaaaaaa">' + b'<!ENTITY b "&a;&a;">' + b"]><multistatus>&b;</multistatus>",
    ],
)
def test_a_listing_that_makes_no_sense_gets_a_sentence(answer):
    with suppress(StoreError, DataError):  # some are empty listings, and none raises anything else
        assert listed(answer) == []


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (("/photos/x", "9" * 5000), "x"),
        (("/photos/x", "-1"), "x"),
        (("/photos/x", ""), "x"),
        (("/photos/%2e%2e/x", 3), "../x"),
        (("/photos/a//x", 3), "a//x"),
        (("/photos/a%00b", 3), "a\\0b"),
    ],
)
def test_an_object_that_cannot_be_asked_for_is_listed_as_unreadable(entry, name):
    found = listed(listing(("/photos/a%0Ab", 1), entry, ("/photos/y", 4)))
    assert [(entry.object, entry.size) for entry in found] == [("a\nb", 1), (name, UNREADABLE), ("y", 4)]


def test_a_server_that_would_be_left_alone_for_years_is_asked_again_soon():
    waited = []
    with bucket_peer() as peer:
        peer.answers = lambda: (429, {"Retry-After": "9" * 300}, b"")
        url = f"{peer.url}/photos"
        store = cloud_store(url, parse_url(url), retry_for_s=0.0, wait=waited.append)
        with pytest.raises(StoreThrottled) as caught:
            store.read("x", 0, 1)
        assert caught.value.retry_after_s <= 10
    assert max(waited, default=0) <= 10


@contextmanager
def endless_server(head):
    """A server that answers every request with a head and a body that never ends; gives its URL and the bytes sent."""
    sent = [0]

    def answer(connection):
        with connection, suppress(OSError):
            while b"\r\n\r\n" not in connection.recv(1 << 16):
                pass
            connection.sendall(head)
            while sent[0] < 1 << 28:  # so that whoever keeps it all fails, and takes nobody along
                connection.sendall(b"01234" * 13_107)
                sent[0] += 5 * 13_107

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/photos", sent
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.promise("bounded", mended="a listing whose entry had no end was kept as it grew, and read over and over")
@pytest.mark.parametrize(
    ("head", "read", "error"),
    [
        (b"206 Partial Content\r\nContent-Range: bytes 0-4/10", "read", None),
        (b"206 Partial Content\r\nContent-Range: bytes 0-4/10\r\nContent-Length: 99999999999", "read", None),
        (b"200 OK", "read", "gives whole objects only"),
        (b"503 Slow Down", "read", "503"),
        (b"404 Not Found", "read", "x.jpg"),
        (b"302 Found\r\nLocation: y.jpg", "read", "redirects more than 5 times"),
        (b"207 Multi-Status", "list", "the listing of .* broke off, or is no WebDAV"),
        (b"404 Not Found", "list", "photos"),
    ],
)
def test_a_body_without_an_end_is_read_no_further_than_was_asked_for(head, read, error):
    with endless_server(b"HTTP/1.1 " + head + b"\r\n\r\n") as (url, sent):
        store = cloud_store(url, parse_url(url), retry_for_s=0.0)
        if error is None:
            assert bytes(store.read("x.jpg", 0, 5)) == b"01234"
        else:
            with pytest.raises((DataError, StoreError, StoreUnavailable), match=error):
                store.read("x.jpg", 0, 5) if read == "read" else list(store.list())
    assert sent[0] < 64 << 20


@pytest.mark.promise("bounded", mended="the server of a bucket that sent an object without an end filled memory")
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_object_of_a_bucket_without_an_end_is_read_no_further_than_was_asked_for(scheme):
    about = b'ETag: "1"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Range: bytes 0-4/10\r\n'
    length = b"Content-Length: 99999999999\r\n\r\n"  # without one the driver reads nothing
    with endless_server(b"HTTP/1.1 206 Partial Content\r\n" + about + length) as (url, sent):
        options = {"s3": "&region=eu-1", "gs": "", "az": "&account=a"}[scheme]
        root = f"{scheme}://photos?endpoint={url.removesuffix('/photos')}&anonymous=true{options}"
        store = cloud_store(root, parse_url(root), retry_for_s=0.0)
        with pytest.raises(StoreError, match="gives other ranges than it is asked for"):
            store.read("x.jpg", 0, 5)
    assert sent[0] < 64 << 20


def test_redirects_are_bounded_in_the_same_way_behind_a_proxy(monkeypatch):
    with web_server() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        proxy.objects["http://photos.example/waste/x.jpg"] = TEN
        store = open_store("http://photos.example/waste")
        assert bytes(store.read("x.jpg", 2, 3)) == b"234"
        for place in ("http://169.254.169.254/waste/x.jpg", "http://photos.example/private", "//other.example/waste/x"):
            proxy.redirects["http://photos.example/waste/y.jpg"] = (302, place)
            with pytest.raises(StoreError, match="redirects out of it"):
                store.read("y.jpg", 0, 10)
        assert {path for _, path in proxy.seen} == {f"http://photos.example/waste/{name}.jpg" for name in "xy"}
