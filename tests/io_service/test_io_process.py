"""An I/O service as a process: whoever is killed leaves nothing behind, and harms nobody else."""

import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest

from frostline.client.http import HttpTransport
from frostline.core.config import IoSettings, LoaderSettings, NodeSettings
from frostline.core.errors import AddressInUse, NodeUnreachable, SettingError, Unauthenticated
from frostline.io_service.client import IoTransport
from frostline.io_service.handler import Upstream
from frostline.io_service.start import start_io
from frostline.node import Node
from frostline.node.in_process import LocalTransport
from frostline.wire.messages import ProfileRequest
from support.nodes import (
    artifact_of,
    busy_device,
    joined,
    make_images,
    request,
    same,
    samples_of,
    served,
    small_network,
    stop,
    until,
)
from support.services import descriptors, python, serving, shared_memory

SMALL = NodeSettings(memory_bytes=256 << 20, trial_s=0)
SETTINGS = LoaderSettings(deadline_s=30)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images") / "here", 24, size=(320, 240))


@pytest.fixture(scope="module")
def service(images):
    with start_io(Upstream(roots=(images.as_uri(),), node=SMALL), IoSettings(memory_bytes=64 << 20)) as service:
        yield service


def runs(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def asked(images, cut=0, **fields):
    return request(images, cut, samples=samples_of(images, with_versions=True), **fields)


def test_it_serves_at_its_address_and_ends_with_its_context(images):
    before = shared_memory()
    with start_io(Upstream(roots=(images.as_uri(),), node=SMALL)) as service:
        with closing(service.transport(SETTINGS)) as transport:
            assert transport.health().roots == (images.as_uri(),)
            assert len(joined(transport.features(asked(images)))[0]) == 24
        pid = service.pid
        with pytest.raises(AddressInUse):
            start_io(Upstream(roots=(images.as_uri(),), node=SMALL), url=service.url)
    assert not runs(pid)
    until(lambda: shared_memory() <= before)


def test_explains_files_that_cannot_be_read_and_unknown_columns():
    with pytest.raises(SettingError, match="ftp"):
        start_io(Upstream(roots=("ftp://x",), node=SMALL))
    with pytest.raises(SettingError, match="address"):
        start_io(Upstream(near=("nowhere",)))
    with pytest.raises(SettingError, match="one of them"):
        Upstream()


# Forks a client for each line that comes; it asks for ever, holds some batches, and is killed wherever it is.
CLIENTS = """
    import os, pickle, signal, sys
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    transport, requests = pickle.load(open(sys.argv[1], "rb"))
    for line in sys.stdin:
        client = os.fork()
        if client == 0:
            held = []
            while True:
                held = [*held[-3:], *transport.features(requests[int(line)])]
        print(client, flush=True)
"""


def test_clients_that_are_killed_anywhere_leave_nothing_and_the_other_job_goes_on(images, service, tmp_path):
    wanted = [asked(images, cut, side=side) for cut, side in ((0, 32), (1, 224), (1, 200), (1, 160))]
    with closing(service.transport(SETTINGS)) as steady:
        expected = [joined(steady.features(item))[0] for item in wanted]
        before = descriptors(service.pid)
        failures, goes_on = [], threading.Event()

        def work():
            while not goes_on.is_set():
                failures.extend(
                    item for item in wanted if joined(steady.features(item))[0] != samples_of(images).ids.tolist()
                )

        other = threading.Thread(target=work)
        other.start()
        draw = random.Random(0)
        told = tmp_path / "told"
        told.write_bytes(pickle.dumps((service.transport(SETTINGS), wanted)))
        with python(CLIENTS, told) as clients:
            for _ in range(30):
                clients.stdin.write(f"{draw.randrange(len(wanted))}\n")
                clients.stdin.flush()
                pid = int(clients.stdout.readline())
                threading.Event().wait(draw.random() * 0.1)
                os.kill(pid, signal.SIGKILL)
        goes_on.set()
        other.join()
        assert not failures
        assert expected[0] == samples_of(images).ids.tolist()
        until(lambda: len(steady.service_statistics()["jobs"]) == 1)
        until(lambda: steady.service_statistics()["window"]["used_bytes"] == 0)
        # One more for each connection of the job that asked all the time, which it keeps.
        until(lambda: descriptors(service.pid) <= before + 1)


@pytest.mark.parametrize("near", ["a node over HTTP", "a node of the service"])
def test_a_profile_whose_client_is_killed_ends_at_the_node(images, tmp_path, near):
    network = small_network()
    digest, body = artifact_of(network)
    other, other_body = artifact_of(small_network(width=4))
    wanted = tmp_path / "wanted"
    with Node(SMALL, (images.as_uri(),)) as node, ExitStack() as stack:
        for name, artifact in ((digest, body), (other, other_body)):
            node.put_prefix(name, artifact)
        upstream = LocalTransport(node) if "service" in near else HttpTransport(stack.enter_context(served(node)))
        stack.callback(upstream.close)
        service, url = stack.enter_context(serving(upstream))
        asked = ProfileRequest(features=request(images, 2, digest))
        wanted.write_bytes(pickle.dumps((IoTransport(url, SETTINGS), asked)))
        stack.enter_context(busy_device(node, images, other, threading.Event(), threading.Event()))
        with python(PROFILING, wanted):
            until(lambda: node.statistics().waiting_for_device == 2)
        until(lambda: node.statistics().requests_in_progress == 1)
        until(lambda: not service.statistics()["jobs"])


PROFILING = """
    import pickle, sys
    transport, wanted = pickle.load(open(sys.argv[1], "rb"))
    transport.profile(wanted)
"""


def test_a_process_that_forked_and_was_killed_leaves_nothing_though_its_child_lives(images, service, tmp_path):
    code = """
        import os, pickle, sys, time
        transport, request = pickle.load(open(sys.argv[1], "rb"))
        held = list(transport.features(request))
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.read()
    """
    told = tmp_path / "told"
    told.write_bytes(pickle.dumps((service.transport(SETTINGS), asked(images, 1, side=224))))
    with closing(service.transport(SETTINGS)) as watching, python(code, told) as client:
        child = int(client.stdout.readline())
        try:
            assert watching.service_statistics()["window"]["used_bytes"] > 1 << 20
            client.kill()
            client.wait()
            until(lambda: watching.service_statistics()["window"]["used_bytes"] == 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_transport_goes_on_after_a_fork_on_both_sides(images, service):
    with closing(service.transport(SETTINGS)) as transport:
        message = asked(images)
        first = joined(transport.features(message))
        held = list(transport.features(asked(images, 1, side=224)))
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            told = b"different"
            with suppress(BaseException):
                told = b"same" if joined(transport.features(message)) == first else told
                del held
            os.write(writing, told)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"same"
        os.waitpid(child, 0)
        assert joined(transport.features(message)) == first
        assert transport.service_statistics()["window"]["used_bytes"] >= sum(batch.nbytes for batch in held)
        del held
        until(lambda: transport.service_statistics()["window"]["used_bytes"] == 0)


def test_a_service_that_is_killed_ends_answers_with_a_sentence_and_is_found_again(images, service):
    before = shared_memory()
    with closing(service.transport(SETTINGS)) as transport:
        held = list(transport.features(asked(images, 1, side=224)))
        sums = [float(batch.tensors[0].sum()) for batch in held]
        pid = service.pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: service.pid == 0)
        with pytest.raises(NodeUnreachable, match="frostline io"):
            list(transport.features(asked(images)))
        assert [float(batch.tensors[0].sum()) for batch in held] == sums  # what came stays
        until(lambda: shared_memory() <= before)
        service.start()
        assert len(joined(transport.features(asked(images)))[0]) == 24


def test_a_stopped_service_is_noticed_long_before_the_deadline_and_then_used(images, service):
    with closing(service.transport()) as transport:
        whole = joined(transport.features(asked(images)))
        pid = service.pid
        try:
            stop(pid)
            for _ in range(2):  # the connection that it has, and a new one
                began = time.monotonic()
                with pytest.raises(NodeUnreachable, match=r"the I/O service at .* said nothing for too long"):
                    list(transport.features(asked(images)))
                assert time.monotonic() - began < LoaderSettings().deadline_s / 10
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: answers(transport))
        same(joined(transport.features(asked(images))), whole)
        assert service.pid == pid


def answers(transport):
    with suppress(NodeUnreachable):
        return transport.health() is not None
    return False


PARENT = """
    import sys
    from frostline.core.config import NodeSettings
    from frostline.io_service.start import start_io
    from frostline.io_service.handler import Upstream
    service = start_io(Upstream(roots=(sys.argv[1],), node=NodeSettings(memory_bytes=64 << 20)))
    print(service.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_is_killed_leaves_no_service_behind(images, how):
    with python(PARENT, images.as_uri()) as parent:
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.send_signal(how)
        parent.wait(60)
        until(lambda: not runs(pid))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_processes_and_services_of_other_users_are_not_trusted(images, service):
    code = f"""
        import os, socket
        os.setuid(65534)
        one = socket.socket(socket.AF_UNIX)
        one.connect(chr(0) + {service.url!r}.removeprefix("unix:@"))
        print(one.recv(4096)[16:].decode())
    """
    told = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "answers processes of user 0, not of 65534" in told.stdout
    theirs = f"""
        import os, socket, sys
        os.setuid(65534)
        one = socket.socket(socket.AF_UNIX)
        one.bind(chr(0) + "{service.url.removeprefix("unix:@")}x")
        one.listen()
        print("ready", flush=True)
        sys.stdin.read()
    """
    with python(theirs) as other, closing(IoTransport(f"{service.url}x", SETTINGS)) as transport:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(Unauthenticated, match="65534"):
            transport.health()
