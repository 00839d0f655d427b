"""One tenant cannot harm the others: with unfinished uploads, huge models or long trials."""

import json
import os
import socket
import threading
from contextlib import ExitStack, closing

import anyio
import pytest
from starlette.requests import Request

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import BadRequest, EngineNotReady, OverBudget, Overloaded
from frostline.node import Node
from frostline.node.feature_cache import NodeCache
from frostline.node.http.requests import BodyReader
from frostline.node.memory import Cancelled
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from frostline.node.trials.queue import TrialQueue
from frostline.wire.connection import address_of
from frostline.wire.messages import ProfileRequest
from support.nodes import artifact_of, is_idle, joined, make_images, request, served, small_network, until
from support.tenants import tenant, token_of
from support.trials import held_trial, trial_processes

MEMORY = 96 << 20
ENGINE = "torch-channels-last"


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 6)


def node_for(images, *tenants, **settings):
    return Node(NodeSettings(memory_bytes=MEMORY, tenants=tenants, **settings), (images.as_uri(),))


def transport_of(name, url):
    return closing(HttpTransport(url, LoaderSettings(deadline_s=30, token=token_of(name))))


def unfinished_upload(url, name, number):
    """A connection on which a prefix of which only one byte comes is sent."""
    peer = socket.create_connection(address_of(url))
    lines = (f"PUT /v1/prefixes/{number:064x} HTTP/1.1", "Host: x", f"Authorization: Bearer {token_of(name)}")
    peer.sendall("\r\n".join((*lines, "Content-Length: 100000", "", "x")).encode())
    return peer


def test_refuses_many_unfinished_uploads_and_serves_others(images):
    node = node_for(images, tenant("ann", requests=1), tenant("bob"), max_requests=4)
    with node, served(node) as url, ExitStack() as stack:
        first = stack.enter_context(unfinished_upload(url, "ann", 0))
        until(lambda: node.statistics().requests_in_progress == 1)
        storm = [stack.enter_context(unfinished_upload(url, "ann", number)) for number in range(1, 40)]
        answers = [peer.recv(65_536) for peer in storm]
        assert all(answer.startswith(b"HTTP/1.1 429") for answer in answers)
        assert all(b"retry-after: " in answer.lower() for answer in answers)
        assert node.statistics().tenants["ann"].totals.refused_quota == 39
        with transport_of("bob", url) as bob:
            assert len(joined(bob.features(request(images, 1)))[0]) == 6
            network = small_network()
            bob.put_prefix(*artifact_of(network))
            last = request(images, network.cuts[-1].number, artifact_of(network)[0])
            assert len(joined(bob.features(last))[0]) == 6
        first.close()
        until(lambda: is_idle(node))


def test_uploads_leave_a_slot_to_every_other_tenant_even_without_a_quota(images):
    node = node_for(images, tenant("ann"), tenant("bob"), max_requests=4)
    with node, served(node) as url, ExitStack() as stack:
        for number in range(3):
            stack.enter_context(unfinished_upload(url, "ann", number))
        until(lambda: node.statistics().requests_in_progress == 3)
        refused = stack.enter_context(unfinished_upload(url, "ann", 3))
        assert refused.recv(65_536).startswith(b"HTTP/1.1 429")
        with transport_of("bob", url) as bob:
            assert len(joined(bob.features(request(images, 1)))[0]) == 6


def test_a_refused_large_upload_is_not_sent_and_reports_the_reason(images):
    """Else its sender might see a broken connection, after minutes on a slow link."""
    large = bytes(8 << 20)
    node = node_for(images, tenant("ann", requests=1), max_requests=4)
    with node, served(node) as url, ExitStack() as stack, transport_of("ann", url) as ann:
        first = stack.enter_context(unfinished_upload(url, "ann", 0))
        until(lambda: node.statistics().requests_in_progress == 1)
        with pytest.raises(Overloaded) as refused:
            ann.put_prefix("1" * 64, large)
        assert refused.value.retry_after_s > 0
        assert ann.statistics().bytes_sent < 4096
        first.close()
        until(lambda: is_idle(node))
        with pytest.raises(OverBudget, match="--memory"):
            ann.put_prefix("1" * 64, bytes(MEMORY))
        assert ann.statistics().bytes_sent < 4096
        with pytest.raises(BadRequest, match="does not match its digest"):  # which only its bytes tell
            ann.put_prefix("1" * 64, bytes(2 << 20))
        assert ann.statistics().bytes_sent > 2 << 20
        assert len(joined(ann.features(request(images, 1)))[0]) == 6
    assert node.statistics().tenants["ann"].totals.refused_quota == 1


def test_an_upload_without_memory_is_refused_and_frees_its_slot(images):
    with node_for(images, tenant("ann"), tenant("bob")) as node:
        ann = node.identify(token_of("ann"))
        length = MEMORY // 24  # the memory that a tenant has for work holds one such, and not two
        with node.upload("1" * 64, length, ann) as first:
            first.begin()
            with node.upload("2" * 64, length, ann) as second, pytest.raises(Overloaded, match="memory") as refused:
                second.begin(longest_s=0.01)
            assert refused.value.retry_after_s > 0
            assert node.statistics().memory["work"].waiting == 0
            assert node.statistics().requests_in_progress == 1
        assert is_idle(node)


@pytest.mark.parametrize(
    ("silence_s", "pause_s", "said"), [(0.05, 0.001, "--min-upload-rate"), (0.01, 60.0, "broke off")]
)
def test_refuses_a_body_that_comes_byte_by_byte_and_names_the_option(silence_s, pause_s, said):
    async def receive():
        await anyio.sleep(pause_s)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def read():
        scope = {"type": "http", "headers": [(b"content-length", b"100")]}
        return [chunk async for chunk in BodyReader(1 << 20, silence_s).chunks(Request(scope, receive))]

    with pytest.raises(BadRequest, match=said):
        anyio.run(read)


def upload(node, artifact, account, longest_s=60):
    digest, body = artifact
    with node.upload(digest, len(body), account) as upload:
        upload.begin(longest_s)
        upload.write(body)
        upload.finish()


def test_a_tenant_at_its_limit_leaves_memory_for_the_weights_of_others(images):
    # Eighteen megabytes for weights, and each takes seven.
    first, second = (artifact_of(small_network(width=width, side=16)) for width in (440, 441))
    with node_for(images, tenant("ann"), tenant("bob"), device_batch=8) as node:
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))
        upload(node, first, ann)
        answer = node.features(request(images, 2, first[0], side=16), node.admit(0, ann))
        with pytest.raises(Overloaded, match="ann"):
            upload(node, second, ann, 0.2)
        upload(node, second, bob)
        theirs = node.features(request(images, 2, second[0], side=16), node.admit(0, bob))
        assert len(joined(theirs)[0]) == 6
        answer.close()
        assert is_idle(node)


def test_an_engine_counts_against_the_tenant_that_asked_for_it_and_is_refused_beyond_its_quota(
    images, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    network = small_network()
    digest, body = artifact_of(network)
    known = tenant("ann", weight_bytes=len(body)), tenant("bob"), tenant("cat", weight_bytes=1)
    asked = request(images, network.cuts[-1].number, digest, engine=ENGINE)
    settings = NodeSettings(memory_bytes=256 << 20, tenants=known, device_batch=8, engines=(ENGINE,))
    with Node(settings, (images.as_uri(),)) as node:
        ann, bob, cat = (node.identify(token_of(name)) for name in ("ann", "bob", "cat"))
        upload(node, (digest, body), ann)
        node.profile(ProfileRequest(features=asked), node.admit(0, bob))
        with pytest.raises(EngineNotReady, match="weight_bytes"):
            node.profile(ProfileRequest(features=asked), node.admit(0, cat))
        with pytest.raises(OverBudget, match="cat"):
            node.features(asked, node.admit(0, cat))
        assert len(joined(node.features(asked, node.admit(0, bob)))[0]) == 6
        taken = {name: tenant_now.weight_bytes for name, tenant_now in node.statistics().tenants.items()}
        assert taken["ann"] == len(body)
        assert taken["bob"] > 0
        assert taken["cat"] == 0


def asked_profile(url, name, message, more=()):
    """A connection on which a profile was asked for."""
    body = json.dumps(message.to_json()).encode()
    peer = socket.create_connection(address_of(url))
    lines = ("POST /v1/profiles HTTP/1.1", "Host: x", f"Authorization: Bearer {token_of(name)}", *more)
    peer.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
    return peer


@pytest.fixture
def trying(tmp_path, monkeypatch):
    """A node of two tenants that tries engines, its address, and a profile for which it does."""
    images = make_images(tmp_path / "images", 12)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    network = small_network()
    digest, body = artifact_of(network)
    node = Node(
        NodeSettings(memory_bytes=256 << 20, tenants=(tenant("ann"), tenant("bob")), device_batch=8, engines=(ENGINE,)),
        (images.as_uri(),),
    )
    with node, served(node) as url:
        node.put_prefix(digest, body)
        wanted = request(images, network.cuts[-1].number, digest)
        yield node, url, ProfileRequest(features=wanted, accuracy="fp16")


def test_others_are_served_while_an_engine_is_tried_and_a_client_that_leaves_ends_its_trial(trying):
    node, url, wanted = trying
    with asked_profile(url, "ann", wanted) as ann, held_trial() as pid:
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        with transport_of("bob", url) as transport:
            assert len(joined(transport.features(wanted.features))[0]) == 12
            assert len(transport.profile(ProfileRequest(features=wanted.features)).cuts) > 0
        with asked_profile(url, "bob", wanted):
            until(lambda: node.statistics().requests_in_progress == 2)
        until(lambda: node.statistics().requests_in_progress == 1)  # it waited for its turn, and no longer
        assert trial_processes() == [pid]
        ann.close()
        until(lambda: is_idle(node))
        assert trial_processes() == []
    assert node.statistics().tenants["ann"].totals.trial_s > 0


def test_a_request_waits_for_another_ones_trial_no_longer_than_its_deadline(trying):
    node, url, wanted = trying
    with asked_profile(url, "ann", wanted), held_trial() as pid:
        with asked_profile(url, "bob", wanted, ("Frostline-Deadline: 1",)) as bob:
            assert bob.recv(65_536).startswith(b"HTTP/1.1 503")
        assert node.statistics().requests_in_progress == 1
        assert trial_processes() == [pid]
    until(lambda: is_idle(node))


def test_a_tenant_that_used_up_its_trial_time_has_to_wait():
    now = [0.0]
    tenants = Tenants([tenant("ann"), tenant("bob")], Counters(), clock=lambda: now[0])
    ann, bob = (tenants.identify(token_of(name)) for name in ("ann", "bob"))
    for _ in range(2):
        ann.check_trials()
        ann.tried(600.0)
    with pytest.raises(Overloaded, match="ann has used up its time for trials") as refused:
        ann.check_trials()
    ann.check()
    bob.check_trials()
    now[0] += refused.value.retry_after_s
    ann.check_trials()
    alone = Tenants([tenant("ann")], Counters()).identify(token_of("ann"))
    alone.tried(6000.0)
    alone.check_trials()


def test_trials_alternate_between_tenants_and_a_cancelled_request_stops_waiting():
    now = [0.0]
    turns, order, gone = TrialQueue(clock=lambda: now[0]), [], threading.Event()

    def take(tenant, name, is_abandoned=lambda: False):
        with turns.turn(tenant, is_abandoned):
            order.append(name)

    def give_up():
        with pytest.raises(Cancelled):
            take("bob", "never", gone.is_set)

    with turns.turn("ann", lambda: False):
        waiting = [
            threading.Thread(target=take, args=("ann", "ann")),
            threading.Thread(target=take, args=("bob", "bob")),
        ]
        for number, thread in enumerate([*waiting, threading.Thread(target=give_up)]):
            thread.start()
            until(lambda number=number: turns.waiting == number + 1)
        gone.set()
        turns.wake()
        until(lambda: turns.waiting == 2)
        now[0] += 5.0
    for thread in waiting:
        thread.join(60)
    assert order == ["bob", "ann"]


def test_statistics_that_wait_for_a_slow_disk_do_not_delay_requests(images, monkeypatch):
    go = threading.Event()

    def slow(_):
        assert go.wait(60)

    monkeypatch.setattr(NodeCache, "statistics", slow)
    with node_for(images, tenant("ann"), tenant("bob")) as node, served(node) as url:
        lines = ("HTTP/1.1", "Host: x", f"Authorization: Bearer {token_of('ann')}", "", "")
        with ExitStack() as stack:
            asking = [stack.enter_context(socket.create_connection(address_of(url))) for _ in range(4)]
            stack.callback(go.set)
            for peer, path in zip(asking, ("statistics", "metrics") * 2, strict=True):
                peer.sendall(f"GET /v1/{path} {lines[0]}\r\n".encode() + "\r\n".join(lines[1:]).encode())
            with transport_of("bob", url) as bob:
                assert len(joined(bob.features(request(images, 1)))[0]) == 6
            go.set()
            assert all(peer.recv(65_536).startswith(b"HTTP/1.1 200") for peer in asking)
