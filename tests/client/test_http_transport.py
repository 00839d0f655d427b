"""The HTTP client against peers that misbehave."""

import json
import math
import os
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import AnswerDamaged, FrostlineError, NodeUnreachable, SettingError, Unavailable
from frostline.core.system import crc32
from frostline.node import Node
from frostline.node.http.server import listen
from frostline.wire.connection import Connections, Exchange, Message
from frostline.wire.messages import CHECKSUM_HEADER
from support.nodes import is_idle, joined, make_images, request, same, samples_of, served, until
from support.peers import read_request


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 8)


@contextmanager
def answering(*answers):
    """A peer that reads each request and answers with given bytes, then closes; None says nothing at all."""
    listening = listen("127.0.0.1", 0)
    received = []
    silent = []

    def serve():
        for answer in answers:
            peer, _ = listening.accept()
            received.append(read_request(peer))
            if answer is None:
                silent.append(peer)
                continue
            peer.sendall(answer)
            peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", received
    finally:
        thread.join(60)
        for peer in silent:
            peer.close()
        listening.close()


@contextmanager
def replaying():
    """A peer that answers each request with what ``answers[0]`` holds then, and keeps the connection open."""
    listening, answers, peers, serving = listen("127.0.0.1", 0), [b""], [], []

    def answer(peer):
        read_request(peer)
        peer.sendall(answers[0])

    def serve():
        while True:
            peer, _ = listening.accept()
            if not answers:
                return peer.close()
            peers.append(peer)
            serving.append(threading.Thread(target=answer, args=(peer,)))
            serving[-1].start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", answers
    finally:
        answers.clear()
        socket.create_connection(listening.getsockname()).close()
        for one in [thread, *serving]:
            one.join(60)
        for peer in [*peers, listening]:
            peer.close()


def recorded(url, method, path, body=b""):
    """The bytes of a node's answer."""
    host, port = url.removeprefix("http://").split(":")
    says = (
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    head = "".join(f"{line}\r\n" for line in (*says, ""))
    with socket.create_connection((host, int(port)), 60) as peer:
        peer.sendall(head.encode() + body)
        answer = b""
        while not is_whole(answer):
            answer += peer.recv(1 << 16)
    return answer


def is_whole(answer):
    head, _, rest = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return len(rest) == int(length[1]) if length else answer.endswith(b"\r\n0\r\n\r\n")


@pytest.fixture(scope="module")
def recorded_answers(tmp_path_factory):
    """Answers of a node, with the question and the value that it has."""
    images = make_images(tmp_path_factory.mktemp("images"), 3)
    wanted = request(images, 1, side=4)
    with Node(NodeSettings(memory_bytes=64 << 20, trial_s=0), (images.as_uri(),)) as node, served(node) as url:
        features = recorded(url, "POST", "/v1/features", json.dumps(wanted.to_json()).encode())
        health = recorded(url, "GET", "/v1/health")
        expected = joined(node.features(wanted))
        return {
            "features": (features, lambda transport: same(joined(transport.features(wanted)), expected)),
            "health": (
                health,
                lambda transport: transport.health().to_json() == json.loads(health.partition(b"\r\n\r\n")[2]),
            ),
        }


@pytest.mark.promise("intact", mended="a flipped bit in a length was waited for until the deadline")
@pytest.mark.parametrize("kind", ["features", "health"])
def test_a_flipped_bit_of_an_answer_never_changes_a_value(recorded_answers, kind, monkeypatch):
    """Also in its head, in the lengths of its chunks and in their ends; nothing waits for the deadline of 1,000 s."""
    monkeypatch.setattr("frostline.wire.connection._REST_S", 0.1)
    monkeypatch.setattr("frostline.wire.connection._END_S", 0.1)
    answer, is_right = recorded_answers[kind]
    head = 8 * (answer.index(b"\r\n\r\n") + 12)
    draw = random.Random(kind)
    bits = [*draw.sample(range(head), 100), *draw.sample(range(head, 8 * len(answer)), 100), *range(head - 80, head)]
    with replaying() as (url, answers):
        for bit in bits:
            damaged = bytearray(answer)
            damaged[bit // 8] ^= 1 << bit % 8
            answers[0] = bytes(damaged)
            with transport_to(url, deadline_s=1_000) as transport:
                try:
                    error = None if is_right(transport) else "another value"
                except Unavailable as raised:
                    error = raised
                counted = transport.statistics()
            assert error is None or url in str(error), f"bit {bit}"
            assert (counted.failures, counted.damaged) == (error is not None, isinstance(error, AnswerDamaged)), (
                f"bit {bit}"
            )


def transport_to(url, **settings):
    return closing(HttpTransport(url, LoaderSettings(**{"deadline_s": 20, **settings})))


def port_of(url):
    return int(url.rpartition(":")[2])


def http(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store-1:7070",
        "ftp://store-1",
        "http://",
        "http://a:b",
        "http://a:99999",
        "http://a/v1",
        "http://u:p@a",
        "http://a#b",
    ],
)
def test_refuses_an_invalid_address_with_an_example(url):
    with pytest.raises(SettingError, match="address"):
        HttpTransport(url)


def test_every_byte_on_the_socket_is_counted(images):
    says = {"version": "1", "host": "h", "hardware": "x", "memory_bytes": 1, "roots": [], "cores": [0]}
    answer = http(json.dumps({**says, "protocol": [1, 1], "trouble": ""}).encode())
    with answering(answer) as (url, received), transport_to(url) as transport:
        assert transport.health().version == "1"
    statistics = transport.statistics()
    assert statistics.bytes_received == len(answer)
    assert statistics.bytes_sent == len(received[0])
    assert statistics.requests == 1


@pytest.mark.parametrize("speed", ["fast", -1, math.nan, math.inf, None])
def test_a_node_whose_speed_is_no_number_sent_a_damaged_answer(speed):
    says = {"version": "1", "host": "h", "hardware": "x", "memory_bytes": 1, "roots": [], "cores": [0]}
    answer = http(json.dumps({**says, "protocol": [1, 1], "trouble": "", "operations_per_s": speed}).encode())
    with answering(answer) as (url, _), transport_to(url) as transport, pytest.raises(FrostlineError, match=url):
        transport.health()


def test_says_that_nothing_listens_at_the_address():
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.close()
    with transport_to(url) as transport, pytest.raises(NodeUnreachable, match="listens there; is frostline"):
        transport.health()


def test_refuses_an_unknown_host():
    with transport_to("http://nowhere.invalid") as transport, pytest.raises(NodeUnreachable, match="not known"):
        transport.health()


def test_a_node_that_falls_silent_is_given_up_after_the_deadline():
    with (
        answering(None) as (url, _),
        transport_to(url, deadline_s=0.2) as transport,
        pytest.raises(NodeUnreachable, match="said nothing"),
    ):
        transport.health()


def test_an_upload_may_take_longer_than_the_longest_silence():
    """230 MB of AlexNet take six minutes at 5 Mbit/s."""
    artifact, taken = bytes(range(256)) * (96 << 10), bytearray()
    listening = listen("127.0.0.1", 0)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)

    def serve():
        peer, _ = listening.accept()
        with closing(peer):
            read_request(peer)
            peer.sendall(http(b"", "404 Not Found"))
            head = bytearray()
            while not head.endswith(b"\r\n\r\n"):
                head += peer.recv(1)
            peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            for quarter in range(1, 5):
                time.sleep(1)
                while len(taken) < quarter * len(artifact) // 4:
                    taken.extend(peer.recv(64 << 10))
            peer.sendall(http(b"", "201 Created"))

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(listening), transport_to(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline_s=3) as transport:
        transport.put_prefix("0" * 64, artifact)
    thread.join(60)
    assert taken == artifact


@pytest.mark.parametrize("answer", [http(b"<html>welcome"), http(b"[]"), http(b'{"version": 1}')])
def test_names_an_address_that_is_no_node(answer):
    with answering(answer) as (url, _), transport_to(url) as transport, pytest.raises(FrostlineError, match="no node"):
        transport.health()


BROKEN_OFF = [
    b"",
    b"HTTP/1.1 200 OK\r\nConte",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\xff\xff\xff\xff\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("answer", BROKEN_OFF)
def test_an_answer_that_breaks_off_is_worth_another_try(images, answer):
    with answering(answer) as (url, _), transport_to(url) as transport, pytest.raises(NodeUnreachable):
        list(transport.features(request(images, 0)))


JUNK = b"\xff\xff\xff\xff\x10\x00\x00\x00" + bytes(range(100))


def test_what_another_service_answers_is_no_answer_of_a_node(images):
    with (
        answering(http(JUNK, "200 OK\r\nContent-Type: text/html; charset=utf-8")) as (url, _),
        transport_to(url) as transport,
        pytest.raises(FrostlineError, match=r"is no node: it sends 'text/html") as caught,
    ):
        list(transport.features(request(images, 0)))
    assert not isinstance(caught.value, NodeUnreachable)


def test_a_senseless_answer_counts_as_damaged_and_names_its_node(images):
    with answering(http(JUNK)) as (url, _), transport_to(url) as transport:
        with pytest.raises(AnswerDamaged, match=f"what came from {url} is damaged: .*no stream"):
            list(transport.features(request(images, 0)))
        assert transport.statistics().damaged == 1


def test_nothing_is_sent_before_the_first_batch_is_asked_for(images):
    with answering() as (url, received), transport_to(url) as transport:
        transport.features(request(images, 0)).close()
        assert received == []


def test_connections_are_kept_and_a_closed_one_is_replaced(images):
    with Node(NodeSettings(memory_bytes=64 << 20), (images.as_uri(),)) as node, ExitStack() as stack:
        with served(node) as url:
            transport = stack.enter_context(transport_to(url))
            for _ in range(3):
                transport.health()
                list(transport.features(request(images, 0)))
        with served(node, port_of(url)):
            assert transport.health().roots  # over a new connection: the node has closed the old one
            assert transport.statistics().failures == 0


def test_a_forked_child_makes_its_own_connections(images):
    settings = NodeSettings(memory_bytes=64 << 20)
    with Node(settings, (images.as_uri(),)) as node, served(node) as url, transport_to(url) as transport:
        transport.health()
        child = os.fork()
        if child == 0:
            os._exit(0 if len(list(transport.features(request(images, 0)))) == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(transport.features(request(images, 0)))) == 1


def asking(url, message):
    """A connection with a question on it, whose answer fits no buffer of the kernel's: it is still being sent."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect(("127.0.0.1", port_of(url)))
    peer.sendall(message)
    return peer


def test_a_client_that_vanishes_in_the_middle_frees_everything(images):
    samples = samples_of(images).take(np.arange(8).repeat(8))
    samples.ids[:] = np.arange(len(samples))
    body = json.dumps(request(images, 1, samples=samples, side=224).to_json()).encode()
    message = f"POST /v1/features HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with Node(NodeSettings(memory_bytes=96 << 20, device_batch=8), (images.as_uri(),)) as node, served(node) as url:
        for _ in range(5):
            with asking(url, message) as peer:
                assert peer.recv(1000).startswith(b"HTTP/1.1 200")
        with asking(url, message[:-10]):  # and one in the middle of its question
            until(lambda: node.statistics().totals.requests == 6)
        until(lambda: is_idle(node))
        assert node.statistics().totals.abandoned == 5


@pytest.mark.parametrize("url", ["http://me:hunter2@store-1:7070", "https://me:hunter2@store-1", "me:hunter2@store:x"])
def test_a_password_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(SettingError, match="address") as caught:
        HttpTransport(url)
    assert "hunter2" not in str(caught.value)


def test_a_request_whose_bits_changed_on_the_way_is_not_answered_for_another_sample(images):
    with Node(NodeSettings(memory_bytes=96 << 20), (images.as_uri(),)) as node, served(node) as url:
        body = json.dumps(request(images, 0).to_json()).encode()
        changed = body.replace(b"0000.jpg", b"0001.jpg", 1)
        assert changed != body
        connections = Connections(url, deadline_s=30, max_idle=0)
        for sent, status in ((body, 200), (changed, 503)):
            exchange = Exchange(connections, url)
            headers = {CHECKSUM_HEADER: f"{crc32(body):08x}"}
            message = Message(method="POST", path="/v1/features", body=sent, headers=headers)
            assert exchange.send(message) == status
            exchange.break_off()
            exchange.end()


def test_a_connection_that_comes_back_after_the_end_is_closed():
    with closing(listen("127.0.0.1", 0)) as listening:
        connections = Connections(f"http://127.0.0.1:{listening.getsockname()[1]}", deadline_s=30, max_idle=1)
        late = connections.make_connection()
        late.connect()
        connections.drop_idle(for_good=True)
        connections.give_back(late)
        assert late.sock is None
        assert connections.take() is None


@pytest.mark.parametrize("carries_more", [b"", b"Connection: close\r\n"])
def test_the_socket_of_an_answer_that_breaks_off_is_closed_at_once(carries_more):
    head = b"HTTP/1.1 200 OK\r\n" + carries_more + b"Content-Length: 9\r\n\r\n"
    with closing(listen("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        exchange = Exchange(Connections(url, deadline_s=0.2, max_idle=1), url)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(exchange.send, Message(method="GET", path="/"))
            peer, _ = listening.accept()
            with closing(peer):
                read_request(peer)
                peer.sendall(head + b"half")
                assert asked.result(60) == 200
                with pytest.raises(NodeUnreachable, match="for too long"):
                    exchange.read(9)
                peer.settimeout(60)
                assert peer.recv(1) == b"", "the reader holds it no longer"
