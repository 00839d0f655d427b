"""What a client sends to a node and a control plane that run as they do for users: memory and time have bounds.

Each server is a process of its own with tenants, and nobody here has a token.
"""

import hashlib
import json
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings
from frostline.wire.connection import address_of
from support.nodes import make_images, until

pytestmark = pytest.mark.promise("bounded", mended="trailer fields without end took gigabytes before anybody was known")

HEAD = b"GET /v1/metrics HTTP/1.1\r\nHost: localhost\r\n"
READY = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# What the process may have more than before, after any of the floods and at any moment of one.
GROWTH = 24 << 20
# Bytes that a flood may get rid of before it is stopped: limits, and what the buffers of both sockets hold.
TAKEN = 24 << 20
# Seconds after which nobody is answered any more, on a machine whose cores others use too.
PATIENCE_S = 60.0


def program(*words):
    return [sys.executable, "-c", "from frostline.cli import main; main()", *map(str, words), "--json"]


@contextmanager
def started(command, log):
    with log.open("wb") as words, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words) as server:
        try:
            yield server.pid, json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The process and the address of a node and of a control plane."""
    folder = tmp_path_factory.mktemp("servers")
    tenant = f'[[tenant]]\nname = "ann"\ntoken_sha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n'
    for name in ("tenants.toml", "control.toml"):
        (folder / name).write_text(tenant)
        (folder / name).chmod(0o600)
    images = make_images(folder / "images", 1)
    listens = ("--listen", "127.0.0.1:0")
    node = program("serve", "--data-root", images, "--tenants", folder / "tenants.toml", "--control", "none", *listens)
    control = program("control", "--config", folder / "control.toml", *listens)
    with started(node, folder / "node.log") as a_node, started(control, folder / "control.log") as a_plane:
        for pid, url in (a_node, a_plane):
            until(partial(answers, url))
            if url == a_node[1]:
                until(partial(is_warm, url))
            settle(pid)
        yield {"node": a_node, "control plane": a_plane}


@pytest.fixture(params=["node", "control plane"])
def server(servers, request):
    return servers[request.param]


def is_warm(url):
    """Whether a node has imported what it needs for networks; how fast it is it measures last."""
    with closing(HttpTransport(url, LoaderSettings(token="secret"))) as transport:
        return transport.health().operations_per_s > 0


def settle(pid):
    """Wait until a process that has just started takes no more memory."""
    before = 0
    while (now := resident(pid)) - before > 1 << 20:
        before = now
        time.sleep(1.0)


def resident(pid):
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def descriptors(pid):
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def processor_s(pid):
    """Seconds that a process has computed, which say how long others wait for it however busy the machine is."""
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def answers(url, within_s=10.0):
    """Whether somebody else is answered, and within some seconds."""
    with suppress(OSError), closing(socket.create_connection(address_of(url), timeout=within_s)) as peer:
        peer.sendall(READY)
        return peer.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return False


def flood(url, begun, more, *, within_s=8.0):
    """Send without end; gives how many bytes were taken until the connection was closed, and what was answered."""
    taken, answer, until_s = 0, b"", time.monotonic() + within_s
    with closing(socket.create_connection(address_of(url), timeout=5.0)) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 << 10)
        peer.sendall(begun)
        peer.setblocking(False)
        with suppress(OSError):
            while time.monotonic() < until_s:
                ready, writable, _ = select.select([peer], [peer] if more else [], [], 0.2)
                if writable:
                    taken += peer.send(more)
                if ready:
                    answer += (got := peer.recv(1 << 16))
                    if not got and not more:
                        break
        assert time.monotonic() < until_s, "it was closed in time"
        with suppress(OSError):
            while got := peer.recv(1 << 16):
                answer += got
    return taken, answer


# A head or a body that begins, and what is sent behind it without end.
ENDLESS = {
    "trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 5000, 411),
    "one long trailer": (CHUNKED + b"0\r\na: ", b"b" * 60_000, 411),
    "a long name of a trailer": (CHUNKED + b"0\r\n", b"a" * 60_000, 411),
    "an extension of a chunk": (CHUNKED + b"1;", b"a=b;" * 10_000, 411),
    "chunks": (CHUNKED, b"1\r\na\r\n" * 10_000, 411),
    "a chunk of 10^15 bytes": (CHUNKED + b"38D7EA4C68000\r\n", bytes(60_000), 411),
    "zeros of a chunk's length": (CHUNKED, b"0" * 60_000, 411),
    "another coding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"1\r\na\r\n" * 10_000, 411),
    "both lengths": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", b"a: b\r\n" * 5000, (400, 411)),
    "an announced body": (HEAD + b"Content-Length: 1000000000000000\r\n\r\n", bytes(60_000), 401),
    "a body of an upload": (
        b"PUT /v1/prefixes/" + b"a" * 64 + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n",
        bytes(60_000),
        (401, 404),
    ),
    "a body that waits to be asked": (
        b"POST /v1/stages HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n",
        bytes(60_000),
        (401, 404),
    ),
    "fields": (HEAD, b"a: b\r\n" * 5000, 431),
    "one field": (HEAD + b"a: ", b"b" * 60_000, 431),
    "the name of a field": (HEAD, b"b" * 60_000, 431),
    "folded lines": (HEAD + b"a: b\r\n", b" b\r\n" * 5000, (400, 431)),
    "the address": (b"GET /", b"a" * 60_000, 431),
    "the method": (b"", b"G" * 60_000, 400),
    "empty lines": (b"", b"\r\n" * 30_000, (400, 431)),
    "requests": (READY, READY * 1000, 200),
    "requests of other kinds": (b"", b"TRACE * HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000, (403, 404, 405)),
    "behind a last request": (HEAD + b"Connection: close\r\n\r\n", READY * 1000, 401),
    "behind another protocol": (HEAD + b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n", bytes(60_000), 401),
    "behind a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(60_000), (400, 404, 405)),
    "a coding that is none": (HEAD + b"Transfer-Encoding: identity\r\n\r\n", bytes(60_000), 411),
    "chunks of chunks": (HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n", b"1\r\na\r\n" * 9000, (400, 411)),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", bytes(60_000), 400),
    "a length with a sign": (HEAD + b"Content-Length: +5\r\n\r\n", bytes(60_000), 400),
    "a length of 30,000 digits": (HEAD + b"Content-Length: " + b"9" * 30_000 + b"\r\n\r\n", bytes(60_000), 400),
    "lines without their return": (b"GET / HTTP/1.1\nHost: localhost\n\n", b"a: b\n" * 9000, (200, 400)),
    "no character": (HEAD + b"a: \0\r\n\r\n", bytes(60_000), 400),
    "a name with a space": (HEAD + b"a b: c\r\n\r\n", b"a: b\r\n" * 9000, 400),
    "a hello of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x16\x03\x01\x40\x00" * 9000, 400),
    "frames of a socket": (
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"\x81\xff" + b"\xff" * 8 + bytes(60_000),
        401,
    ),
    "requests that keep the connection": (
        b"GET /v1/metrics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET /v1/metrics HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 1000,
        401,
    ),
    "a packed body": (
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1000000000\r\n\r\n",
        b"\x1f\x8b" * 30_000,
        401,
    ),
    "another version": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(60_000), 400),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_a_stranger_sends_without_end_takes_neither_memory_nor_time(server, kind):
    pid, url = server
    before, open_before = resident(pid), descriptors(pid)
    begun, more, statuses = ENDLESS[kind]
    for _ in range(3):
        taken, answer = flood(url, begun, more)
        assert taken < TAKEN, f"{taken} bytes were taken"
        assert not answer or int(answer.split()[1]) in ((statuses,) if isinstance(statuses, int) else statuses), answer
        assert resident(pid) - before < GROWTH
        assert answers(url)
    assert resident(pid) - before < GROWTH, "and it keeps nothing"
    until(lambda: descriptors(pid) <= open_before + 1)


def test_what_stops_amid_what_nobody_reads_is_closed(server):
    _, url = server
    with ExitStack() as stack:
        peers = {}
        for kind, (begun, more, _) in ENDLESS.items():
            peers[kind] = stack.enter_context(socket.create_connection(address_of(url), timeout=14.0))
            peers[kind].sendall(begun + more[:101])
        until_s = time.monotonic() + 14.0
        for kind, peer in peers.items():
            answer = b""
            with suppress(ConnectionResetError):
                while got := peer.recv(1 << 16):
                    answer += got
            assert answer.startswith(b"HTTP/1.1 "), kind
        assert time.monotonic() < until_s


def test_many_large_heads_that_do_not_end_take_little_memory(server):
    pid, url = server
    before = resident(pid)
    with ExitStack() as stack:
        for _ in range(400):
            peer = stack.enter_context(socket.create_connection(address_of(url), timeout=5.0))
            peer.sendall(HEAD + b"a: " + b"b" * 30_000)
        assert resident(pid) - before < GROWTH + 400 * (40 << 10)
        assert answers(url)
    assert answers(url)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127/8 as its own addresses")
def test_what_connections_of_many_addresses_took_is_given_back(server):
    """A part of each head stayed in the heap of the process: 36 to 55 MB, and some more with every flood."""
    pid, url = server
    before = resident(pid)
    for _ in range(3):
        with ExitStack() as stack:
            for number in range(1600):
                place = (f"127.0.1.{number % 200 + 2}", 0)
                peer = socket.create_connection(address_of(url), timeout=5.0, source_address=place)
                stack.enter_context(closing(peer)).sendall(HEAD + b"a: " + b"b" * 20_000)
            assert answers(url, PATIENCE_S)
    until(lambda: resident(pid) - before < GROWTH // 2, 30.0)


def test_a_page_that_nobody_reads_is_not_made_again_and_again(server):
    pid, url = server
    before = resident(pid)
    with ExitStack() as stack:
        for _ in range(100):
            peer = socket.socket()
            stack.enter_context(closing(peer))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.settimeout(5.0)
            peer.connect(address_of(url))
            peer.sendall(READY * 8)
        assert answers(url)
        assert resident(pid) - before < GROWTH + 100 * (256 << 10)


@contextmanager
def asking(url, asked, count):
    """So many connections that send a request whenever the last one was answered, until the block ends."""
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(count):
            peer = stack.enter_context(socket.create_connection(address_of(url), timeout=PATIENCE_S))
            peer.sendall(asked)
            selector.register(peer, selectors.EVENT_READ)
        ended = threading.Event()

        def ask():
            while not ended.is_set():
                for key, _ in selector.select(0.1):
                    with suppress(OSError):
                        key.fileobj.recv(1 << 16)
                        key.fileobj.sendall(asked)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def test_many_connections_that_keep_asking_shut_nobody_out(server):
    """Each newcomer waited for a round of the event loop with all of theirs, behind each that came before it."""
    pid, url = server
    with asking(url, HEAD + b"\r\n", 600):
        before_s = processor_s(pid)
        assert answers(url, PATIENCE_S)
        assert processor_s(pid) - before_s < 2.0


def test_requests_that_nobody_waits_for_make_no_node_unready(servers):
    pid, url = servers["node"]
    asked, before_s = b"GET /v1/ready HTTP/1.1\r\nHost: localhost\r\n\r\n", processor_s(pid)
    for _ in range(1500):
        with closing(socket.create_connection(address_of(url), timeout=PATIENCE_S)) as peer:
            peer.sendall(asked)
    with closing(socket.create_connection(address_of(url), timeout=PATIENCE_S)) as peer:
        peer.sendall(asked)
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert processor_s(pid) - before_s < 2.0
