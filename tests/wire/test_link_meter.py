"""How fast a link is, from the bodies that are under way on it."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from frostline.client.http import HttpTransport
from frostline.core import FeatureBatch
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.node import Node
from frostline.node.http.server import listen
from frostline.node.in_process import LocalTransport
from frostline.wire.connection import LinkMeter, Meter
from frostline.wire.framing import Encoder
from support.nodes import make_images, request
from support.peers import read_request

KB = 1 << 10


class Line:
    """A connection whose bytes come and are read as a test says, at times that it says."""

    def __init__(self, bench):
        self.bench = bench
        self.far, self.near = socket.socketpair()
        bench.transfers.watch(self.near)

    def come(self, nbytes):
        self.far.sendall(bytes(nbytes))

    def read(self, nbytes):
        left = nbytes
        while left:
            left -= len(self.near.recv(left))
        self.bench.meter.add(received=nbytes)

    def close(self):
        self.bench.transfers.forget(self.near)
        self.far.close()
        self.near.close()


class Bench:
    def __init__(self):
        self.now = 100.0
        self.meter = Meter()
        self.transfers = LinkMeter(self.meter, lambda: self.now)
        self.stack = ExitStack()

    def line(self):
        return self.stack.enter_context(closing(Line(self)))

    def body(self, line, nbytes):
        return self.transfers.body(line.near, nbytes)


@pytest.fixture
def bench():
    bench = Bench()
    with bench.stack:
        yield bench


def test_a_body_counts_from_its_first_byte_to_its_last(bench):
    line = bench.line()
    with bench.body(line, 100 * KB):
        line.come(60 * KB)
        bench.now += 1
        line.read(60 * KB)
        line.come(40 * KB)
        bench.now += 2
        line.read(40 * KB)
    bench.now += 50
    assert bench.transfers.read() == (100 * KB, 3.0)


def test_counts_nothing_that_was_in_the_buffer_before(bench):
    line = bench.line()
    line.come(50 * KB)
    with bench.body(line, 150 * KB):
        line.read(50 * KB)
        line.come(100 * KB)
        bench.now += 2
        line.read(100 * KB)
    assert bench.transfers.read() == (100 * KB, 2.0)


@pytest.mark.parametrize(("nbytes", "lying"), [(63 * KB, 0), (100 * KB, 100 * KB), (100 * KB, 40 * KB)])
def test_small_bodies_and_those_that_lie_there_already_are_left_out(bench, nbytes, lying):
    line = bench.line()
    line.come(lying)
    with bench.body(line, nbytes):
        line.come(nbytes - lying)
        bench.now += 2
        line.read(nbytes)
    assert bench.transfers.read() == (0, 0.0)


def test_seconds_are_counted_once_for_all_connections(bench):
    one, other = bench.line(), bench.line()
    with bench.body(one, 100 * KB):
        bench.now += 1
        with bench.body(other, 100 * KB):
            one.come(100 * KB)
            bench.now += 1
            other.come(100 * KB)
            one.read(100 * KB)
        bench.now += 1
    with bench.body(other, 100 * KB):  # which came meanwhile
        other.read(100 * KB)
        bench.now += 1
    assert bench.transfers.read() == (200 * KB, 3.0)


def test_counts_bytes_for_a_busy_reader_as_they_arrive(bench):
    one, busy = bench.line(), bench.line()
    with bench.body(one, 100 * KB):
        one.come(50 * KB)
        busy.come(50 * KB)
        bench.now += 1
        one.read(50 * KB)
    assert bench.transfers.read() == (100 * KB, 1.0)
    with bench.body(busy, 80 * KB):  # not again
        busy.read(50 * KB)
        bench.now += 1
    assert bench.transfers.read() == (100 * KB, 1.0)


def test_reports_the_bytes_of_a_body_while_it_arrives(bench):
    line = bench.line()
    with bench.body(line, 400 * KB):
        line.come(100 * KB)
        bench.now += 1
        assert bench.transfers.read() == (100 * KB, 1.0)
        line.read(100 * KB)
        bench.now += 1
        assert bench.transfers.read() == (100 * KB, 2.0)


def test_a_connection_that_is_closed_with_bytes_in_it_takes_nothing_away(bench):
    line, gone = bench.line(), bench.line()
    with bench.body(line, 100 * KB):
        gone.come(30 * KB)
        bench.now += 1
        gone.close()
        line.come(10 * KB)
        bench.now += 1
    assert bench.transfers.read() == (40 * KB, 2.0)
    with bench.transfers.body(None, 100 * KB):
        bench.now += 1
    assert bench.transfers.read() == (40 * KB, 2.0)


STEP = 32 * KB


def stream_of(rows):
    batch = FeatureBatch(ids=np.arange(rows), tensors=(np.zeros((rows, 8 * KB), np.float32),))
    encoder = Encoder()
    return b"".join([*encoder.encode(batch), encoder.finish()])


class Pace:
    """Sends in steps, all connections together, as a thin link does; knows how fast it really was."""

    def __init__(self, step_s):
        self.step_s = step_s
        self.lock = threading.Lock()
        self.next = 0.0
        self.steps = []

    def send(self, peer, data):
        for start in range(0, len(data), STEP):
            with self.lock:
                now = time.monotonic()
                self.next = max(self.next + self.step_s, now)
                threading.Event().wait(self.next - now)
                peer.sendall(data[start : start + STEP])
                self.steps.append(time.monotonic())

    @property
    def bytes_per_s(self):
        """From the first step to the last, which on a busy machine is slower than was asked for."""
        return (len(self.steps) - 1) * STEP / (self.steps[-1] - self.steps[0])


@contextmanager
def paced(step_s, answers, body):
    """A peer that answers so many requests with a body, paced."""
    pace, listening, threads = Pace(step_s), listen("127.0.0.1", 0), []

    def answer(peer):
        with peer:
            read_request(peer)
            peer.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            pace.send(peer, body)

    def serve():
        for _ in range(answers):
            threads.append(threading.Thread(target=answer, args=(listening.accept()[0],)))
            threads[-1].start()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", pace
    finally:
        server.join(60)
        for thread in threads:
            thread.join(60)
        listening.close()


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 2)


@pytest.mark.parametrize(("step_s", "connections"), [(0.005, 1), (0.02, 1), (0.005, 3)])
def test_the_rate_is_that_of_the_link(images, step_s, connections):
    message = request(images, 1)
    with (
        paced(step_s, connections, stream_of(32)) as (url, pace),
        closing(HttpTransport(url, LoaderSettings(deadline_s=20))) as transport,
        ThreadPoolExecutor(connections) as threads,
    ):
        list(threads.map(lambda _: list(transport.features(message)), range(connections)))
        statistics = transport.statistics()
    rate = statistics.transfer_bytes / statistics.transfer_s
    assert statistics.transfer_bytes > 0.8 * connections * (1 << 20)
    assert 0.6 < rate / pace.bytes_per_s < 1.5


def test_within_a_process_there_is_no_link(images):
    with Node(NodeSettings(memory_bytes=64 << 20), (images.as_uri(),)) as node:
        transport = LocalTransport(node)
        list(transport.features(request(images, 1)))
        assert (transport.statistics().transfer_bytes, transport.statistics().transfer_s) == (0, 0.0)
