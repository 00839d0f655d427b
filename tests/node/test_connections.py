"""Connections to a node: limits of time and number, and links that are thin or break.

Connections of untrusted clients: unfinished heads, many of them, and which connections are closed.

Symbolic links in a data root lead out of it only where the operator of the node allows it.
"""

import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.client.http import HttpTransport
from frostline.core.audit import AuditLog
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import AccessDenied, FrostlineError, SettingError
from frostline.node import Node
from frostline.node.http.connection_guard import ConnectionLimits, ConnectionTable, SeldomLog, limits_of, place_of
from frostline.node.http.pages import MAX_VIEWERS
from frostline.node.http.requests import OwnNames, log_refusal
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.open import open_store
from frostline.stores.protocols import LinkBounds, StoreLimits
from frostline.wire.connection import address_of
from support.nodes import is_idle, joined, jpeg, make_images, request, samples_of, served, until
from support.tenants import tenant, token_of

pytestmark = pytest.mark.promise("bounded")

MEMORY = 96 << 20
HEALTH = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 4)


@contextmanager
def node_with(images, *tenants, **limits):
    settings = NodeSettings(memory_bytes=MEMORY, tenants=tenants)
    with Node(settings, (images.as_uri(),)) as node, served(node, limits=ConnectionLimits(**limits)) as url:
        yield url


def connection(url, data=b""):
    peer = socket.create_connection(address_of(url), timeout=60)
    peer.sendall(data)
    return peer


def health(peer, token=None):
    who = f"Authorization: Bearer {token}\r\n" if token else ""
    peer.sendall(f"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n{who}\r\n".encode())
    return answer(peer)


def answer(peer):
    """A whole answer: its head and its body may come apart."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += (more := peer.recv(65_536))
        assert more, head
    length = int(re.search(rb"\r\ncontent-length: (\d+)\r\n", head, re.IGNORECASE)[1])
    left = length - len(head.partition(b"\r\n\r\n")[2])
    while left > 0:
        more = peer.recv(65_536)
        assert more
        head, left = head + more, left - len(more)
    return head


def is_closed(peer):
    try:
        return peer.recv(65_536) == b""
    except ConnectionResetError:
        return True


def takes_no_more(peer, data, within_s=20.0):
    """Send it again and again; whether the connection was closed in time."""
    until_s = time.monotonic() + within_s
    peer.settimeout(within_s)
    with suppress(BrokenPipeError, ConnectionResetError):
        while time.monotonic() < until_s:
            peer.sendall(data)
            threading.Event().wait(0.02)
    return time.monotonic() < until_s


def transport_of(name, url):
    return closing(HttpTransport(url, LoaderSettings(deadline_s=30, token=token_of(name))))


@pytest.mark.parametrize("begun", [b"", b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n", b"G"])
def test_closes_a_connection_whose_head_does_not_end(images, caplog, begun):
    caplog.set_level(logging.WARNING, "frostline.node")
    with node_with(images, head_s=0.05) as url, connection(url, begun) as peer:
        assert peer.recv(65_536).startswith(b"HTTP/1.1 408 ")
        assert is_closed(peer)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "frostline.node"]
    assert "sent no whole head within 0.05 s" in line


def test_the_second_head_on_a_connection_must_come_in_time_too(images):
    with node_with(images, head_s=0.5) as url, connection(url) as peer:
        assert health(peer).startswith(b"HTTP/1.1 200 ")
        peer.sendall(b"GET /v1/he")
        assert peer.recv(65_536).startswith(b"HTTP/1.1 408 ")


def test_refuses_a_head_that_is_too_large(images):
    with node_with(images, head_bytes=1000) as url, connection(url, HEALTH[:-2] + b"a: " + bytes(1100)) as peer:
        assert peer.recv(65_536).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    with node_with(images, head_bytes=1000) as url, connection(url, HEALTH[:-2] + b"a: " + b"b" * 1100) as peer:
        assert peer.recv(65_536).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "head", [HEALTH[:-2] + b"a: " + b"b" * 1100 + b"\r\n\r\n", HEALTH.replace(b"health", b"health?" + b"a" * 1100)]
)
def test_refuses_a_head_that_is_too_large_and_comes_in_one_piece(images, head):
    with node_with(images, head_bytes=1000) as url, connection(url, head) as peer:
        assert answer(peer).startswith(b"HTTP/1.1 431 ")
        assert is_closed(peer)


def test_a_body_that_comes_in_one_piece_with_its_head_makes_that_no_larger(images):
    begun = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" + bytes(5000)
    with node_with(images, head_bytes=1000) as url, connection(url) as peer:
        for _ in range(3):
            peer.sendall(begun)
            assert answer(peer).startswith(b"HTTP/1.1 200 ")


def test_refuses_a_head_with_too_many_fields(images):
    with node_with(images, head_fields=4) as url, connection(url, HEALTH[:-2] + b"a: b\r\n" * 3 + b"\r\n") as peer:
        assert answer(peer).startswith(b"HTTP/1.1 200 ")
        peer.sendall(HEALTH[:-2] + b"a: b\r\n" * 4 + b"\r\n")
        assert answer(peer).startswith(b"HTTP/1.1 431 ")
        assert is_closed(peer)


def test_an_early_answer_is_read_and_its_connection_closed(images):
    upload = b"PUT /v1/prefixes/" + b"a" * 64 + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n\r\n"
    with node_with(images, tenant("ann"), unread_s=2.0) as url, connection(url, upload) as peer:
        for _ in range(16):
            peer.sendall(bytes(1 << 16))
        said = answer(peer)
        assert said.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in said
        assert is_closed(peer)


@pytest.mark.parametrize("length", [1, 1 << 40])
def test_who_sends_no_body_is_closed_soon_after_the_answer(images, length):
    begun = f"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
    with node_with(images, unread_s=0.1) as url, connection(url, begun) as peer:
        assert answer(peer).startswith(b"HTTP/1.1 200 ")
        assert is_closed(peer)
        assert takes_no_more(peer, b"a")


def test_a_body_that_came_whole_leaves_its_connection_open(images):
    begun = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc"
    with node_with(images) as url, connection(url) as peer:
        for _ in range(3):
            peer.sendall(begun)
            assert b"connection: close" not in answer(peer)


def test_requests_that_wait_are_answered_in_turn_up_to_a_number(images):
    asked = [b"GET /v1/health", b"GET /nothing"]

    def heads(count):
        return b"".join(asked[number % 2] + HEALTH[len(asked[0]) :] for number in range(count))

    with node_with(images, max_waiting=5) as url, connection(url, heads(6)) as peer:
        data = b""
        while data.count(b"HTTP/1.1 ") < 6:
            data += peer.recv(1 << 16)
        assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"404"] * 3
        peer.sendall(heads(7))
        while peer.recv(1 << 16):
            pass


def test_a_connection_on_which_nobody_was_recognised_is_not_kept_for_long(images):
    with node_with(images, tenant("ann"), head_s=0.3) as url, connection(url) as known, connection(url) as peer:
        assert health(known, token_of("ann")).startswith(b"HTTP/1.1 200 ")
        assert health(peer, "wrong").startswith(b"HTTP/1.1 401 ")
        assert is_closed(peer)
        assert health(known, token_of("ann")).startswith(b"HTTP/1.1 200 ")


def test_a_reader_that_takes_nothing_is_closed(images, caplog):
    with node_with(images, unsent_s=0.3) as url, closing(socket.socket()) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(address_of(url))
        assert takes_no_more(peer, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert "whose reader took no answer" in caplog.text


def test_a_reader_that_takes_an_answer_for_ever_is_closed_and_gives_its_memory_back(images, caplog):
    """It takes enough each time that it is not silent, and far too little in all."""
    samples = samples_of(images).take(np.arange(4).repeat(500))
    samples.ids[:] = np.arange(len(samples))
    body = json.dumps(request(images, 1, samples=samples).to_json()).encode()
    head = f"POST /v1/features HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    limits = ConnectionLimits(unsent_s=0.8, unsent_bytes=1, min_bytes_per_s=100 << 20)
    with (
        Node(NodeSettings(memory_bytes=MEMORY), (images.as_uri(),)) as node,
        served(node, limits=limits) as url,
        closing(connection(url, head + body)) as peer,
    ):
        assert peer.recv(1000).startswith(b"HTTP/1.1 200 ")
        until_s = time.monotonic() + 20
        with suppress(ConnectionResetError):
            while time.monotonic() < until_s and peer.recv(64 << 10):
                threading.Event().wait(0.02)
        assert time.monotonic() < until_s
        assert "took an answer too slowly" in caplog.text
        until(lambda: is_idle(node))


def test_who_sends_no_more_is_answered_and_an_answer_without_an_end_is_ended(images):
    events = b"GET /v1/statistics HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
    with node_with(images, half_s=0.4) as url:
        for sent in (HEALTH, HEALTH * 3):
            with connection(url, sent) as peer:
                peer.shutdown(socket.SHUT_WR)
                found = b"".join(iter(lambda peer=peer: peer.recv(1 << 16), b""))
                assert found.count(b"HTTP/1.1 200 ") == sent.count(b"GET")
        with connection(url, events) as peer, connection(url, b"GET /v1/he") as unfinished:
            for half in (peer, unfinished):
                half.shutdown(socket.SHUT_WR)
            assert is_closed(unfinished)
            began = time.monotonic()
            found = b"".join(iter(lambda: peer.recv(1 << 16), b""))
            assert found.startswith(b"HTTP/1.1 200 ")
            assert time.monotonic() - began < 20


def test_who_leaves_with_requests_waiting_ends_the_answer_under_way(images):
    events = b"GET /v1/statistics HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
    with node_with(images) as url:
        for _ in range(2 * MAX_VIEWERS):
            with connection(url, events + HEALTH) as peer:
                until(lambda: b"data: " in peer.recv(1 << 16))
        with connection(url, events) as peer:
            assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_many_unfinished_heads_do_not_shut_out_others(images, caplog):
    with node_with(images, tenant("ann"), max_unknown=8, max_connections=16) as url, ExitStack() as stack:
        connections = [stack.enter_context(connection(url, b"GET /v1/he")) for _ in range(40)]
        with transport_of("ann", url) as ann:
            assert len(joined(ann.features(request(images, 1)))[0]) == 4
        assert all(is_closed(peer) for peer in connections[:24])
    assert sum("in favour of another" in record.getMessage() for record in caplog.records) == 1


def test_a_wrong_token_leaves_a_connection_unknown(images):
    with node_with(images, tenant("ann"), max_unknown=2, young_s=0.0, max_connections=16) as url, ExitStack() as stack:
        known = stack.enter_context(connection(url))
        assert health(known, token_of("ann")).startswith(b"HTTP/1.1 200 ")
        wrong = [stack.enter_context(connection(url)) for _ in range(2)]
        for peer in wrong:
            assert health(peer, "wrong").startswith(b"HTTP/1.1 401 ")
        # It takes the place of the first of them as soon as the node accepts it.
        assert health(stack.enter_context(connection(url)), token_of("ann")).startswith(b"HTTP/1.1 200 ")
        assert is_closed(wrong[0])
        assert health(known, token_of("ann")).startswith(b"HTTP/1.1 200 ")


def test_idle_connections_of_known_tenants_are_closed_for_new_ones_too(images):
    with node_with(images, max_unknown=4, max_connections=6) as url, ExitStack() as stack:
        for _ in range(20):
            assert health(stack.enter_context(connection(url))).startswith(b"HTTP/1.1 200 ")


def test_a_node_answers_beside_more_unfinished_heads_than_descriptors(images):
    few = 128
    command = [sys.executable, "-c", "from frostline.cli import main; main()", "serve", "--data-root", str(images)]
    command += ["--listen", "127.0.0.1:0", "--json"]
    node = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few)),
    )
    with node, ExitStack() as stack:
        try:
            url = json.loads(node.stdout.readline())["url"]
            for _ in range(2 * few):
                stack.enter_context(connection(url, b"GET /v1/he"))
            with transport_of("nobody", url) as nobody:
                assert len(joined(nobody.features(request(images, 1)))[0]) == 4
        finally:
            node.terminate()


@given(
    limits=st.builds(
        ConnectionLimits,
        max_unknown=st.integers(1, 4),
        max_connections=st.integers(1, 8),
        young_s=st.sampled_from((0.0, 2.0)),
    ),
    steps=st.lists(st.tuples(st.sampled_from(["enter", "note_tenant", "note_answer", "leave"]), st.integers(0, 99))),
)
def test_limits_connections_and_closes_those_of_whoever_has_most(limits, steps):
    # Each is called by the number of its arrival, counted from one, which is its time too.
    connections, here, working, idle = ConnectionTable(limits), [], {}, {}
    for number, (step, place) in enumerate(steps, 1):
        if step == "enter":
            known = Counter([*working.values(), *idle.values()])
            unknown = [peer for peer in here if peer not in working and peer not in idle]
            gone = connections.enter(number, float(number))
            here.append(number)
            if gone is not None:
                here.remove(gone)
                assert gone in unknown or gone == number or not unknown
                tenant = idle.pop(gone, None) or working.get(gone)
                assert tenant is None or known[tenant] == max(known.values())
                if working.pop(gone, None):
                    assert known[tenant] > 1
                    assert tenant not in idle.values()
        elif here:
            connection = here[place % len(here)]
            if step == "note_tenant":
                tenant = working.get(connection) or ("ann", "bob", "eve")[place % 3]
                connections.note_tenant(connection, tenant)
                idle.pop(connection, None)
                working[connection] = tenant
            elif step == "note_answer":
                connections.note_answer(connection)
                if connection in working:
                    idle[connection] = working.pop(connection)
            else:
                connections.leave(connection)
                here.remove(connection)
                working.pop(connection, None)
                idle.pop(connection, None)
        assert len(connections) == len(here) <= limits.max_connections
        unknown = [peer for peer in here if peer not in working and peer not in idle]
        assert len(unknown) <= limits.max_unknown or limits.young_s


@pytest.mark.promise("apart", mended="slow bodies of one tenant took every connection of a server")
def test_bodies_that_do_not_come_leave_others_connections(images):
    slow = (
        "PATCH /v1/tenants/ann HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nAuthorization: Bearer {}\r\n\r\n"
    )
    with node_with(images, tenant("ann"), tenant("bob"), max_connections=12) as url, ExitStack() as stack:
        held = [stack.enter_context(connection(url, slow.format(token_of("bob")).encode()))]
        for _ in range(40):
            held.append(stack.enter_context(connection(url, slow.format(token_of("ann")).encode())))
        bob = stack.enter_context(connection(url))
        for _ in range(3):
            assert health(bob, token_of("bob")).startswith(b"HTTP/1.1 200 ")
        held[0].sendall(bytes(100))
        assert answer(held[0]).startswith(b"HTTP/1.1 "), "what bob has under way goes on"


def test_does_not_close_a_new_connection_for_another_new_one():
    connections = ConnectionTable(ConnectionLimits(max_unknown=2, max_connections=100, young_s=1.0))
    assert [connections.enter(number, 0.5) for number in range(1, 51)] == [None] * 50
    assert connections.enter(51, 1.6) == 1


def test_the_place_with_most_connections_that_nobody_knows_makes_room():
    connections = ConnectionTable(ConnectionLimits(max_unknown=4, max_connections=100, young_s=0.0))
    assert connections.enter("ann", 0.0, "10.0.0.1") is None
    assert [connections.enter(number, 1.0 + number, "10.0.0.2") for number in range(9)] == [None] * 3 + [*range(6)]
    connections.leave(6)
    assert connections.enter("bob", 20.0, "10.0.0.3") is None
    assert connections.enter("eve", 20.0, "10.0.0.4") == 7
    assert connections.enter("joe", 20.0, "10.0.0.5") == "ann", "the oldest where each has one"


def test_an_address_of_ipv6_counts_by_its_network():
    assert place_of(("2001:db8:0:1::1", 1)) == place_of(("2001:db8:0:1:ffff::2", 2)) != place_of(("2001:db8:0:2::1", 1))
    assert place_of(("::ffff:10.0.0.1", 1)) == place_of(("10.0.0.1", 2)) == "10.0.0.1"
    assert place_of(("fe80::1%eth0", 1)) == place_of(("fe80::2", 1))
    assert place_of(None) == ""


@pytest.mark.parametrize("descriptors", [3, 64, 128, 1024, 1 << 20, -1])
def test_connections_leave_descriptors_for_files_and_stores(descriptors):
    limits = limits_of(descriptors)
    assert 1 <= limits.max_unknown <= limits.max_connections <= 4096
    if descriptors >= 64:
        assert limits.max_connections <= descriptors - min(256, descriptors // 2)


@pytest.fixture
def places(tmp_path):
    """A root with a link to a file outside, one to a folder outside, and one that stays inside."""
    outside = make_images(tmp_path / "outside", 1)
    root = make_images(tmp_path / "root", 1)
    inside = make_images(root / "real", 1)
    (root / "hosts.jpg").symlink_to(outside / "0000.jpg")
    (root / "away").symlink_to(outside)
    (root / "here").symlink_to(inside)
    return root, outside


def bounded(*folders):
    return LinkBounds(tuple(map(str, folders)))


def asked(node, folder, account=None):
    """What a node answers to a request for all files that a folder shows, as its caller lists them."""
    admission = None if account is None else node.admit(0, account)
    return joined(node.features(request(folder, 0, samples=samples_of(folder)), admission))


def test_does_not_follow_links_out_of_a_root(places):
    root, outside = places
    (root / "0000.jpg").unlink()
    for name in ("here", "away", "real"):
        (root / name).rename(root.parent / f"_{name}")
    refused = pytest.raises(AccessDenied, match=r"hosts\.jpg .*leads out of the data root.*--follow-links")
    with Node(NodeSettings(memory_bytes=MEMORY), (root.as_uri(),)) as node, refused:
        asked(node, root)
    with Node(NodeSettings(memory_bytes=MEMORY, follow_links=True), (root.as_uri(),)) as node:
        assert asked(node, root)[2] == [(outside / "0000.jpg").read_bytes()]


def test_refuses_a_data_set_that_is_a_link_out_of_the_root(places):
    root, _ = places
    with Node(NodeSettings(memory_bytes=MEMORY), (root.as_uri(),)) as node:
        with pytest.raises(AccessDenied):
            asked(node, root / "away")
        assert asked(node, root / "here")[2] == [jpeg(0)]


def test_links_between_roots_are_followed_as_far_as_the_tenant_may_read(places):
    root, outside = places
    tenants = (tenant("both"), tenant("one", roots=(root.as_uri(),)))
    settings = NodeSettings(memory_bytes=MEMORY, tenants=tenants)
    with Node(settings, (root.as_uri(), outside.as_uri())) as node:
        assert asked(node, root / "away", node.identify(token_of("both")))[2] == [jpeg(0)]
        with pytest.raises(AccessDenied):
            asked(node, root / "away", node.identify(token_of("one")))


@pytest.mark.parametrize("name", ["hosts.jpg", "away/0000.jpg", "here/up.jpg"])
def test_a_bounded_folder_reads_and_describes_nothing_outside_itself(places, name):
    store = open_store(str(places[0]), StoreLimits(links=bounded(places[0])))
    (places[0] / "real" / "up.jpg").symlink_to("../../outside/0000.jpg")
    for use in (lambda: store.read(name, 0, 1), lambda: store.describe(name), lambda: list(store.list())):
        with pytest.raises(AccessDenied, match="symbolic link"):
            use()


def test_a_bounded_folder_lists_and_reads_links_that_stay_inside(places):
    root, _ = places
    (root / "hosts.jpg").unlink()
    (root / "away").unlink()
    store = open_store(str(root), StoreLimits(links=bounded(root)))
    names = {entry.object for entry in store.list()}
    assert names == {"0000.jpg", "real/0000.jpg", "here/0000.jpg"}
    for name in names:
        assert bytes(store.read(name, 0, 4)) == jpeg(0)[:4]
        assert store.describe(name).size == len(jpeg(0))


def test_read_only_files_are_mapped_only_where_links_may_lead(places):
    root, outside = places
    for path in (outside / "0000.jpg", root / "0000.jpg"):
        path.chmod(0o444)
    store = MmapFolder(FolderStore(str(root), bounded(root)))
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]
    with pytest.raises(AccessDenied):
        store.read("hosts.jpg", 0, 4)


def test_a_root_that_is_a_link_may_be_pointed_elsewhere(places, tmp_path):
    root, outside = places
    current = tmp_path / "current"
    current.symlink_to(root)
    store = open_store(str(current), StoreLimits(links=bounded(current)))
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]
    current.unlink()
    current.symlink_to(outside)
    assert bytes(store.read("0000.jpg", 0, 4)) == jpeg(0)[:4]


def test_a_link_that_changes_while_it_is_opened_reveals_nothing(places, monkeypatch):
    root, outside = places
    opened = os.open

    def turned(path, *rest):
        if str(path).endswith("/0000.jpg"):
            return opened(outside / "0000.jpg", *rest)
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", turned)
    with pytest.raises(AccessDenied):
        open_store(str(root), StoreLimits(links=bounded(root))).read("0000.jpg", 0, 1)


GARBAGE = {
    "no HTTP": b"\x00\x01\x02\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "escapes": b"GET \x1b]0;x\x07 HTTP/1.1\r\n\r\n",
    "no such way": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "no JSON": b"POST /v1/features HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nConnection: close\r\n\r\n{",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_flood_of_what_is_refused_writes_few_lines_of_log(images, caplog, kind):
    with caplog.at_level(logging.WARNING), node_with(images, tenant("ann")) as url:
        for _ in range(300):
            with closing(connection(url, GARBAGE[kind])) as peer:
                assert peer.recv(1 << 16).startswith(b"HTTP/1.1 ")
        with closing(connection(url)) as peer:
            assert health(peer, token_of("ann")).startswith(b"HTTP/1.1 200 ")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) <= 1, said
    assert sum(map(len, said)) < 1000


def test_a_seldom_log_counts_what_it_leaves_out(caplog):
    now_s = [0.0]
    log = SeldomLog(logging.getLogger("frostline.node"), lambda: now_s[0])

    def failing(why):
        try:
            raise ValueError(why)
        except ValueError as error:
            log.error("it failed\n", exc_info=error)

    with caplog.at_level(logging.WARNING):
        for number in range(60):
            now_s[0] = float(number)
            log.warning("%s was refused", number)
            log.info("nothing of this")
            failing(f"for reason {number}")
        now_s[0] = 60.0
        log.warning("%s was refused", "the last")
    assert [record.getMessage() for record in caplog.records] == [
        "0 was refused (1 since the last such line)",
        "it failed (1 since the last such line)",
        "the last was refused (60 since the last such line)",
    ]
    assert caplog.records[1].exc_info[1].args == ("for reason 0",)


def test_errors_of_several_places_are_all_logged(caplog):
    log = SeldomLog(logging.getLogger("frostline.node"))
    for make in (lambda: 1 / 0, lambda: [].pop(), lambda: {}["a"]):
        for _ in range(5):
            try:
                make()
            except (ArithmeticError, LookupError) as error:
                log.error("it failed", exc_info=error)
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError, IndexError, KeyError]


def test_a_path_in_the_log_of_refusals_is_short_and_printable(caplog):
    class Odd(FrostlineError):
        """Of which nothing was logged yet."""

    log_refusal("/v1/prefixes/\x1b[2J\n" + "z" * 9999, Odd("it makes no sense"))
    [said] = [record.getMessage() for record in caplog.records]
    assert said.isprintable()
    assert said.startswith("refused /v1/prefixes/\\x1b[2J\\nzz")
    assert len(said) < 400


def status(url, *headers, method="GET", path="/v1/health", body=b""):
    """The status of an answer, asked as any program may ask."""
    lines = (f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "Connection: close", "", "")
    with closing(connection(url, "\r\n".join(lines).encode("latin-1") + body)) as peer:
        data = b""
        while b"\r\n" not in data:
            data += peer.recv(1 << 16)
    return int(data.split()[1])


OURS = ("127.0.0.1", "127.0.0.1:7070", "localhost", "LOCALHOST:1", "a.localhost", "[::1]:7070", "10.1.2.3:80")
OTHERS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:7070",
    "evil",
    "2130706433",
    "127.1",
    "0x7f.1",
)
ODD = ("", "[", "a b", "localhost@evil.example")


def test_a_page_that_rebinds_a_name_reads_nothing_of_a_server_that_answers_everybody(images):
    with node_with(images) as url:
        assert {host: status(url, f"Host: {host}") for host in OURS} == dict.fromkeys(OURS, 200)
        assert {host: status(url, f"Host: {host}") for host in OTHERS} == dict.fromkeys(OTHERS, 403)
        assert {status(url, f"Host: {host}") for host in ODD} <= {400, 403}
        assert status(url, "Host: localhost", "Host: evil.example") in {400, 403}
        assert status(url, "Host: evil.example", path="/") == 403, "nor the page itself"
    with node_with(images, tenant("ann")) as url:
        assert status(url, "Host: evil.example", f"Authorization: Bearer {token_of('ann')}") == 200
        assert status(url, "Host: evil.example") == 401


FOREIGN = (
    ("Origin: http://evil.example",),
    ("Origin: null",),
    ("Origin: http://127.0.0.1:1",),
    ("Origin: http://localhost.evil.example",),
    ("Origin: file://",),
    ("Sec-Fetch-Site: cross-site",),
    ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors"),
    ("Sec-Fetch-Site: CROSS-SITE", "Sec-Fetch-Mode: navigate"),
)


@pytest.mark.parametrize("tenants", [(), (tenant("ann"),)])
def test_a_page_of_another_site_sends_nothing(images, tenants):
    forged = {"method": "POST", "path": "/v1/stages", "body": b"{}"}
    who = (f"Authorization: Bearer {token_of('ann')}",) if tenants else ()
    with node_with(images, *tenants) as url:
        host = url.removeprefix("http://")
        for headers in FOREIGN:
            said = status(url, f"Host: {host}", *headers, *who, "Content-Type: text/plain", **forged)
            assert said == 403, headers
            assert status(url, f"Host: {host}", *headers, *who) == 403, headers
        own = (f"Origin: http://{host}", "Sec-Fetch-Site: same-origin", *who)
        assert status(url, f"Host: {host}", *own, **forged) == 400, "its own page is heard"
        assert status(url, f"Host: {host}", *own) == 200
        assert status(url, f"Host: {host}", "Sec-Fetch-Site: none", *who) == 200
        assert status(url, f"Host: {host}", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", path="/") == 200
        assert status(url, f"Host: {host}", "Origin: http://evil.example", method="OPTIONS") == 403


def test_a_page_that_is_refused_stands_in_the_audit_log(images, tmp_path):
    path = tmp_path / "audit.jsonl"
    node = Node(NodeSettings(memory_bytes=MEMORY), (images.as_uri(),), audit=AuditLog(path))
    with node, served(node) as url:
        for _ in range(3):
            assert status(url, "Host: evil.example") == 403
        assert status(url, "Host: localhost", "Origin: http://evil.example") == 403
        assert status(url, "Host: localhost") == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    about = {(line["event"], line["kind"], line["address"]) for line in lines}
    assert about == {("refused", "Forbidden", "127.0.0.1")}
    names, pages = (sum(line["times"] for line in lines if word in line["why"]) for word in ("asked by", "other sites"))
    assert (names, pages) == (3, 1)


def test_names_that_were_given_are_own_ones(images):
    settings = NodeSettings(memory_bytes=MEMORY, allowed_hosts=("store.example.org",))
    with Node(settings, (images.as_uri(),)) as node, served(node) as url:
        for name in ("store.example.org:80", "one.STORE.example.org", "store.example.org."):
            assert status(url, f"Host: {name}") == 200
        for name in ("otherstore.example.org", "example.org", "store.example.org.evil.example"):
            assert status(url, f"Host: {name}") == 403
        assert status(url, "Host: localhost", "Origin: https://pages.store.example.org") == 200


def test_beyond_this_machine_names_without_a_dot_are_its_own():
    here, there = OwnNames(is_local=True), OwnNames(is_local=False)
    for name in (b"store-1:7070", b"node"):
        assert here.refusal("GET", "/", [(b"host", name)]) is not None
        assert there.refusal("GET", "/", [(b"host", name)]) is None
    behind = (b"127.0.0.1:80@evil.example", b"[::1]evil.example", b"[::1", b"localhost:x", b"[]", b"127.0.0.1:80:80")
    for name in (b"2130706433", b"evil.example", b"", b"store.data", *behind):
        assert there.refusal("GET", "/", [(b"host", name)]) is not None
    for names in (here, there):
        assert names.refusal("GET", "/", [(b"host", socket.gethostname().encode())]) is None
        for name in (b"[::1]:80", b"[fe80::1%25eth0]", b"127.0.0.1:80", b"localhost:", b"localhost."):
            assert names.refusal("GET", "/", [(b"host", name)]) is None
        assert names.refusal("GET", "/", []) is None, "no browser leaves it out"


@given(
    st.lists(
        st.tuples(st.sampled_from([b"host", b"origin", b"sec-fetch-site", b"x"]), st.binary(max_size=20)), max_size=4
    )
)
def test_no_header_makes_the_check_fail(headers):
    for is_open in (True, False):
        why = OwnNames(is_open=is_open, names=("a.b",)).refusal("GET", "/v1/health", headers)
        assert why is None or why.endswith(("server", "may", "NAME"))


@pytest.mark.parametrize("name", ["http://a", "a:1", "A.b", "", "a..b", "*.a", "a" * 254])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(SettingError, match="--allow-host"):
        NodeSettings(allowed_hosts=(name,))
