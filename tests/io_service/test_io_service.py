"""An I/O service reads each sample once, whoever asks, and keeps nothing of whoever is gone."""

import os
import pickle
import resource
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from frostline.core.config import IoSettings, NodeSettings
from frostline.core.errors import AddressInUse, NodeUnreachable, SettingError, Unavailable
from frostline.io_service.client import IoTransport
from frostline.io_service.start import listen_at
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.testing import Act, ScriptedTransport
from frostline.wire.messages import ProfileRequest
from frostline.wire.shared_memory import receive, send
from support.nodes import joined, make_images, request, same, samples_of, until
from support.services import SETTINGS, descriptors, is_quiet, serving
from support.situations import profile

COUNT = 40


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), COUNT)


@pytest.fixture
def node(images):
    with Node(NodeSettings(memory_bytes=256 << 20, device_batch=8), (images.as_uri(),)) as node:
        yield node


@contextmanager
def jobs(url, count=2):
    ways = [IoTransport(url, SETTINGS) for _ in range(count)]
    try:
        yield ways
    finally:
        for way in ways:
            way.close()


def asked(images, rows=None, cut=0, **fields):
    samples = samples_of(images, with_versions=True)
    return request(images, cut, samples=samples if rows is None else samples.take(np.array(rows)), **fields)


@pytest.mark.parametrize("cut", [0, 1])
def test_reads_shared_samples_once_for_all_jobs(node, images, cut):
    random = np.random.default_rng(0)
    with serving(LocalTransport(node)) as (service, url), jobs(url) as (one, other):
        first = joined(one.features(asked(images, cut=cut)))
        read = node.statistics().totals.bytes_read
        assert read == samples_of(images).encoded_bytes
        order = random.permutation(COUNT)
        parts = [joined(other.features(asked(images, order[start : start + 7], cut))) for start in range(0, COUNT, 7)]
        again = joined(other.features(asked(images, cut=cut)))
        assert node.statistics().totals.bytes_read == read
        assert same(first, again)
        assert first[2] == again[2]
        assert [id for part in parts for id in part[0]] == samples_of(images).ids[order].tolist()
        assert other.statistics().bytes_received == 0 < one.statistics().bytes_received
        until(lambda: is_quiet(service))


def test_jobs_that_decode_in_different_ways_share_the_encoded_samples(node, images):
    with serving(LocalTransport(node)) as (_, url), jobs(url) as (one, other):
        list(one.features(asked(images)))
        list(other.features(asked(images, side=48)))
        assert node.statistics().totals.bytes_read == samples_of(images).encoded_bytes


def test_pixels_of_another_preprocessing_are_others(node, images):
    with serving(LocalTransport(node)) as (_, url), jobs(url) as (one, other):
        small, large = joined(one.features(asked(images, cut=1))), joined(other.features(asked(images, cut=1, side=48)))
        assert small[1][0].shape[2:] == (32, 32)
        assert large[1][0].shape[2:] == (48, 48)


def test_reads_samples_without_a_version_each_time(node, images):
    with serving(LocalTransport(node)) as (_, url), jobs(url) as (one, other):
        for way in (one, other):
            list(way.features(request(images, 0)))
        assert node.statistics().totals.bytes_read == 2 * samples_of(images).encoded_bytes


@pytest.mark.parametrize("only_here", [True, False])
def test_sends_a_node_all_that_a_profile_is_for(images, only_here):
    upstream = ScriptedTransport(profile=profile((0.0, 1.0, 2.0)))
    wanted = ProfileRequest(features=asked(images, cut=2), codecs=("int8",), accuracy="fp16", only_here=only_here)
    with serving(upstream) as (_, url), jobs(url) as (one, _):
        one.profile(wanted)
    assert [told.to_json() for told in upstream.profiled] == [wanted.to_json()]


def test_samples_that_are_on_their_way_are_not_asked_for_again(images):
    node = ScriptedTransport([Act(gate="door", gate_after=16)])
    with serving(node) as (service, url), jobs(url) as (one, other), ThreadPoolExecutor(2) as threads:
        mine = threads.submit(lambda: joined(one.features(asked(images, range(32)))))
        assert node.wait_for_requests(1)
        its = threads.submit(lambda: joined(other.features(asked(images, range(39, 7, -1)))))
        assert node.wait_for_requests(2)
        assert node.requests[1].samples.ids.tolist() == samples_of(images).ids[39:31:-1].tolist()
        node.open("door")
        assert mine.result(60)[0] == samples_of(images).ids[:32].tolist()
        assert its.result(60)[0] == samples_of(images).ids[39:7:-1].tolist()
        cache = service.statistics()["cache"]
        assert (cache["misses"], cache["hits"] + cache["joined"]) == (COUNT, 24)


def test_two_jobs_that_wait_for_each_other_both_end(images):
    node = ScriptedTransport(otherwise=Act(rows_per_batch=1))
    with serving(node) as (_, url), jobs(url, 4) as ways, ThreadPoolExecutor(4) as threads:
        random = np.random.default_rng(0)
        for _ in range(20):
            orders = [random.permutation(COUNT) for _ in ways]
            asks = [asked(images, order) for order in orders]
            answers = list(threads.map(lambda pair: joined(pair[0].features(pair[1]))[0], zip(ways, asks, strict=True)))
            assert answers == [samples_of(images).ids[order].tolist() for order in orders]


def test_waiters_for_a_failed_job_ask_themselves(images):
    failing = Act(gate="door", gate_after=8, rows_per_batch=8, error=NodeUnreachable("cut"), error_after=16)
    node = ScriptedTransport([failing])
    with serving(node) as (_, url), jobs(url) as (one, other), ThreadPoolExecutor(2) as threads:
        mine = threads.submit(lambda: joined(one.features(asked(images))))
        assert node.wait_for_requests(1)
        its = threads.submit(lambda: joined(other.features(asked(images))))
        until(lambda: len(node.requests) == 1)
        node.open("door")
        with pytest.raises(Unavailable, match="cut"):
            mine.result(60)
        assert its.result(60)[0] == samples_of(images).ids.tolist()


def test_waiters_get_what_a_leaving_job_fetched(images):
    node = ScriptedTransport([Act(gate="door", gate_after=8, rows_per_batch=8)])
    with serving(node) as (service, url), jobs(url) as (one, other), ThreadPoolExecutor(1) as threads:
        answer = one.features(asked(images))
        assert len(next(answer)) == 8
        its = threads.submit(lambda: joined(other.features(asked(images))))
        until(lambda: service.statistics()["cache"]["joined"] == COUNT - 8)
        answer.close()
        one.close()
        node.open("door")
        assert its.result(60)[0] == samples_of(images).ids.tolist()
        assert len(node.requests) == 1


def test_ends_a_response_whose_client_left(images):
    node = ScriptedTransport([Act(gate="door", gate_after=8, rows_per_batch=8)])
    with serving(node) as (service, url), jobs(url, 1) as (one,):
        answer = one.features(asked(images))
        assert len(next(answer)) == 8
        answer.close()
        assert next(answer, None) is None
        until(lambda: is_quiet(service))  # though the door never opens
        assert joined(one.features(asked(images)))[0] == samples_of(images).ids.tolist()


def test_closing_frees_a_thread_that_waits_for_room(images):
    node = ScriptedTransport(otherwise=Act(gate="door"))
    lengths = samples_of(images).encoded_bytes
    with serving(node, memory_bytes=1 << 20, window_bytes=lengths + 10) as (service, url), jobs(url, 1) as (one,):
        answers = [one.features(asked(images)) for _ in range(2)]
        got = []
        threads = [threading.Thread(target=lambda answer=answer: got.append(next(answer, None))) for answer in answers]
        for thread in threads:
            thread.start()
        until(lambda: sum(job["waiting"] for job in service.statistics()["jobs"].values()) == 1)
        for answer in answers:
            answer.close()
        for thread in threads:
            thread.join(60)
        assert got == [None, None]
        until(lambda: is_quiet(service))


def test_the_cache_stays_within_its_bound_and_drops_what_was_not_used_for_longest(node, images):
    each = samples_of(images).encoded_bytes / COUNT
    room = int(25 * (each + 600))
    with (
        serving(LocalTransport(node), memory_bytes=(1 << 20) + room, window_bytes=1 << 20) as (service, url),
        jobs(url, 1) as (one,),
    ):
        for start in range(0, COUNT, 5):
            list(one.features(asked(images, range(start, start + 5))))
            list(one.features(asked(images, range(5))))  # used all the time
            cache = service.statistics()["cache"]
            assert cache["bytes"] <= cache["budget_bytes"] == room
        assert cache["evicted"] > 0
        before = node.statistics().totals.bytes_read
        list(one.features(asked(images, range(5))))
        assert node.statistics().totals.bytes_read == before


def test_blocks_are_given_back_with_the_last_array_over_them_and_not_before(images, tmp_path):
    big = make_images(tmp_path / "big", 12, size=(640, 480))
    with (
        Node(NodeSettings(memory_bytes=512 << 20), (big.as_uri(),)) as node,
        serving(LocalTransport(node)) as (service, url),
        jobs(url, 1) as (one,),
    ):
        before = descriptors()
        batches = list(one.features(asked(big, cut=1, side=256)))
        held = [batch.tensors[0] for batch in batches]
        rows = [array[1] for array in held]
        sums = [float(row.sum()) for row in rows]
        used = service.statistics()["window"]["used_bytes"]
        assert used >= sum(array.nbytes for array in held) > 0
        del batches, held
        assert service.statistics()["window"]["used_bytes"] == used
        one.close()
        until(lambda: service.statistics()["jobs"] == {})
        assert [float(row.sum()) for row in rows] == sums  # the memory outlives the connection
        del rows
        until(lambda: is_quiet(service))
        until(lambda: descriptors() <= before)


def test_a_transport_that_is_pickled_is_the_same_job(node, images):
    with serving(LocalTransport(node)) as (service, url), jobs(url, 1) as (one,):
        copy = pickle.loads(pickle.dumps(one))
        list(one.features(asked(images)))
        with closing(copy):
            list(copy.features(asked(images)))
            assert [len(job["processes"]) for job in service.statistics()["jobs"].values()] == [2]


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"frst" + b"\xff" * 12, b"frst\x05\0\0\0" + b"\0" * 8 + b"nojso", b"frst"],
)
def test_refuses_garbage_on_the_socket_and_serves_others(node, images, garbage):
    with serving(LocalTransport(node)) as (_, url), jobs(url, 1) as (one,):
        before = descriptors()
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as wild:
                wild.connect("\0" + url.removeprefix("unix:@"))
                wild.sendall(garbage)
                wild.shutdown(socket.SHUT_WR)
                answer = receive(wild)
                assert answer is not None
                assert answer.says["error"]["error"] == "BadRequest"
        assert len(joined(one.features(asked(images)))[0]) == COUNT
        one.close()
        until(lambda: descriptors() <= before)


def test_a_session_that_sends_nonsense_gets_a_sentence_and_may_go_on(node, images):
    with serving(LocalTransport(node)) as (_, url), socket.socket(socket.AF_UNIX) as session:
        session.connect("\0" + url.removeprefix("unix:@"))
        hello = {"kind": "hello", "protocol": 1, "session": "ab", "job": "cd"}
        send(session, {**hello, "role": "session"})
        assert receive(session).says["kind"] == "welcome"
        with socket.socket(socket.AF_UNIX) as asks:
            asks.connect("\0" + url.removeprefix("unix:@"))
            send(asks, {**hello, "role": "asks"})
            for nonsense in ({"kind": "dance"}, {"kind": "features"}, {"kind": "features", "request": [1]}, {}):
                send(asks, nonsense)
                assert receive(asks).says["error"]["error"] == "BadRequest"
            send(asks, {"kind": "health"})
            assert receive(asks).says["value"]["roots"] == [images.as_uri()]
        session.sendall(b"\xff" * 160)  # records of what was never lent
        with closing(IoTransport(url, SETTINGS)) as one:
            assert len(joined(one.features(asked(images)))[0]) == COUNT


def test_a_field_of_a_frame_that_nobody_reads_is_refused_by_its_name(node, images):
    with serving(LocalTransport(node)) as (_, url), socket.socket(socket.AF_UNIX) as session:
        hello = {"kind": "hello", "protocol": 1, "session": "ab", "job": "cd"}
        for wrong in ({"tenant": "a"}, {}):
            with socket.socket(socket.AF_UNIX) as greets:
                greets.connect("\0" + url.removeprefix("unix:@"))
                send(greets, {**hello, "role": "session", **wrong})
                answer = receive(greets).says
                assert answer["kind"] == ("error" if wrong else "welcome")
                assert not wrong or "no field 'tenant'" in answer["error"]["message"]
        session.connect("\0" + url.removeprefix("unix:@"))
        send(session, {**hello, "role": "session", "session": "ef"})
        assert receive(session).says["kind"] == "welcome"
        with socket.socket(socket.AF_UNIX) as asks:
            asks.connect("\0" + url.removeprefix("unix:@"))
            send(asks, {**hello, "role": "asks", "session": "ef"})
            whole = {"request": asked(images).to_json()}
            for kind, says in {"features": whole, "profile": {}, "prefix": {}, "health": {}, "statistics": {}}.items():
                send(asks, {"kind": kind, "answer": 1, **says, "tolerence": 1e-6})
                assert "has no field 'tolerence'" in receive(asks).says["error"]["message"]
            twice = b'{"kind": "health", "kind": "node"}'
            asks.sendall(struct.pack("<4sIQ", b"frst", len(twice), 0) + twice)
            assert "the field 'kind' twice" in receive(asks).says["error"]["message"]


def test_a_service_hears_others_after_a_flood_took_all_descriptors(node, images):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def connect_all(flood):
        while True:
            flood.enter_context(socket.socket(socket.AF_UNIX)).connect("\0" + url.removeprefix("unix:@"))

    with serving(LocalTransport(node)) as (_, url), jobs(url, 1) as (one,):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 32, hard))
        try:
            with ExitStack() as flood, pytest.raises(OSError, match="Too many open files"):
                connect_all(flood)
            assert len(joined(one.features(asked(images)))[0]) == COUNT
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_is_served(node, images, monkeypatch, caplog):
    def no_thread(_):
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with serving(LocalTransport(node)) as (_, url), jobs(url, 1) as (one,):
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        with socket.socket(socket.AF_UNIX) as refused:
            refused.connect("\0" + url.removeprefix("unix:@"))
            assert refused.recv(1) == b""
        assert len(joined(one.features(asked(images)))[0]) == COUNT
    assert "cannot take a connection: can't start new thread" in caplog.text


def test_reports_another_version(node):
    with serving(LocalTransport(node)) as (_, url), socket.socket(socket.AF_UNIX) as session:
        session.connect("\0" + url.removeprefix("unix:@"))
        send(session, {"kind": "hello", "protocol": 99, "session": "ab", "job": "cd", "role": "session"})
        assert "version" in receive(session).says["error"]["message"]


def test_explains_how_to_start_a_missing_io_service(tmp_path):
    how = f"frostline io --socket {tmp_path}/io.sock"
    with closing(IoTransport(f"unix://{tmp_path}/io.sock", SETTINGS)) as way, pytest.raises(NodeUnreachable, match=how):
        way.health()


@pytest.mark.parametrize("url", ["unix:", "unix:@", "unix:relative", "http://here", "/run/io.sock"])
def test_an_invalid_address_is_a_one_sentence_error(url):
    with pytest.raises(SettingError, match="address"):
        IoTransport(url, SETTINGS)


def test_puts_the_socket_in_a_folder_that_no_other_user_may_enter(tmp_path):
    url = f"unix://{tmp_path}/open/io.sock"
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SettingError, match="0700"), listen_at(url):
        pass
    (tmp_path / "open").chmod(0o700)
    with listen_at(url):
        assert (tmp_path / "open" / "io.sock").is_socket()
    assert not list((tmp_path / "open").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(SettingError, match="folder of your own"), listen_at(f"unix://{tmp_path}/theirs/io.sock"):
        pass


def test_only_one_service_listens_at_an_address_and_a_stale_socket_is_replaced(node, tmp_path):
    url = f"unix://{tmp_path}/new/io.sock"
    with listen_at(url), pytest.raises(AddressInUse, match="already"), listen_at(url):
        pass
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/new/io.sock")
    with serving(LocalTransport(node), url) as _, jobs(url, 1) as (one,):
        assert one.health() == node.health()


def test_a_stopping_service_ends_requests_with_a_sentence_and_is_found_again(images, tmp_path):
    node, url = ScriptedTransport([Act(gate="door", gate_after=8, rows_per_batch=8)]), f"unix://{tmp_path}/x/io.sock"
    with jobs(url, 1) as (one,):
        with serving(node, url):
            answer = one.features(asked(images))
            assert len(next(answer)) == 8
        with pytest.raises(NodeUnreachable, match="I/O service"):
            list(answer)
        with pytest.raises(NodeUnreachable, match="frostline io"):
            one.health()
        with serving(node, url):
            assert joined(one.features(asked(images)))[0] == samples_of(images).ids.tolist()


def test_a_budget_larger_than_the_memory_makes_no_sense():
    with pytest.raises(SettingError, match="window_bytes"):
        IoSettings(memory_bytes=1 << 20, window_bytes=2 << 20)
