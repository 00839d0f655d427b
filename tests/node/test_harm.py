"""What untrusted clients and tenants can do to a node: nothing that harms it or another tenant.

One tenant cannot harm the others: with unfinished uploads, huge models or long trials.

A prefix of an untrusted client cannot crash the node, fill its memory or delay others, whatever it contains.

The process that checks prefixes needs nothing of this machine that its limits forbid, and says when torch failed.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import anyio
import numpy as np
import pytest
import torch
from starlette.requests import Request

from frostline.client.http import HttpTransport
from frostline.core import GraphNode, Ref
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.declared import PARSED_BYTES
from frostline.core.errors import BadRequest, EngineNotReady, OverBudget, Overloaded, UnknownTraining, UnsafeArtifact
from frostline.core.files import FileCache
from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import GraphLimits, dry_run
from frostline.models.artifact import digest_of, graph_from_json, graph_to_json, header_of, read_prefix, write_prefix
from frostline.models.rows_apart import keeps_rows_apart_by_runs
from frostline.node import Node, operations, prefixes
from frostline.node import inspection as inspections
from frostline.node.feature_cache import NodeCache
from frostline.node.http.requests import BodyReader
from frostline.node.inspection import Inspector
from frostline.node.memory import Cancelled
from frostline.node.operations import Trainings
from frostline.node.process import start_node
from frostline.node.statistics import Counters
from frostline.node.tenants import Tenants
from frostline.node.torch_bridge import TorchBridge
from frostline.node.trials.queue import TrialQueue
from frostline.preprocess.decoders import Decoders
from frostline.wire.connection import address_of
from frostline.wire.messages import ProfileRequest
from frostline.wire.pieces import PREAMBLE_BYTES, Piece, without
from support.hostile import X, after, artifact, attacks, chain, node, peak_bytes, put
from support.nodes import artifact_of, is_idle, joined, make_images, request, samples_of, served, small_network, until
from support.prefixes import small_prefix
from support.prepared import PLAIN
from support.tenants import tenant, token_of
from support.trials import held_trial, trial_processes

pytestmark = pytest.mark.promise("bounded")

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
    lines = (f"PUT /v1/prefixes/{number:064x} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token_of(name)}")
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


def announced(url, name, path, length, sent=b""):
    """A connection on which a body is announced, and only so much of it comes."""
    peer = socket.create_connection(address_of(url), timeout=60)
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token_of(name)}")
    peer.sendall("\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode() + sent)
    return peer


@pytest.mark.parametrize("path", ["/v1/features", "/v1/profiles", "/v1/embeddings", "/v1/pieces", "/v1/listings"])
def test_bodies_that_are_announced_and_do_not_come_stop_no_other_tenant(images, path):
    node = node_for(images, tenant("ann"), tenant("bob"))
    with node, served(node) as url, ExitStack() as stack:
        most = node.statistics().memory["messages"].total_bytes
        for length in (most // 60, most // 80, 64 << 10, 1000):
            for _ in range(10):
                stack.enter_context(announced(url, "ann", path, length))
        with transport_of("bob", url) as bob:
            for _ in range(3):
                assert len(joined(bob.features(request(images, 1)))[0]) == 6


def test_answers_that_are_read_slowly_keep_no_weights_from_another_tenant(images, monkeypatch):
    """Their weights fill the memory, and their clients take nothing more for as long as they like."""
    monkeypatch.setattr("frostline.node.weights._STAY_S", 0.3)
    monkeypatch.setattr("frostline.node.weights._DRAINED_WITHIN_S", 0.2)
    settings = NodeSettings(memory_bytes=128 << 20, max_requests=8, tenants=tuple(map(tenant, ("ann", "eve", "bob"))))
    node = Node(settings, (images.as_uri(),))
    many = samples_of(images).take(np.arange(6).repeat(40))
    many.ids[:] = np.arange(len(many))
    with node, served(node) as url, ExitStack() as stack:
        peers, artifacts = [], [artifact_of(small_network(width=410 + number, side=16)) for number in range(3)]
        for number, artifact in enumerate(artifacts):  # each takes about 7 of 25 MB
            with transport_of(("ann", "eve")[number % 2], url) as transport:
                transport.put_prefix(*artifact)
        for number, (digest, _) in enumerate(artifacts):
            asked = json.dumps(request(images, 4, digest, many, side=16).to_json()).encode()
            peer = announced(url, ("ann", "eve")[number % 2], "/v1/features", len(asked), asked)
            peers.append(stack.enter_context(peer))
            assert peer.recv(1000).startswith(b"HTTP/1.1 200 ")
        network = small_network(width=413, side=16)
        digest, body = artifact_of(network)
        with transport_of("bob", url) as bob:
            began = time.monotonic()
            bob.put_prefix(digest, body)
            assert time.monotonic() - began < 20
            assert len(joined(bob.features(request(images, network.cuts[-1].number, digest, side=16)))[0]) == 6
        assert any(is_broken(peer) for peer in peers)
        for peer in peers:
            peer.close()
        until(lambda: is_idle(node))


def is_broken(peer):
    """Whether an answer ends before its time, with what its client has not taken lost."""
    peer.settimeout(0.5)
    try:
        while peer.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_an_assignment_that_does_not_come_keeps_no_other_tenant_from_training(images):
    node = node_for(images, tenant("ann"), tenant("bob"), allow_training=True, trainings=1)
    with node, served(node) as url, ExitStack() as stack, transport_of("bob", url) as bob:
        digest, body = artifact_of(small_network())
        bob.put_prefix(digest, body)
        path = f"/v1/trainings?prefix={digest}"
        first = stack.enter_context(announced(url, "ann", path, 10_000, b"x"))
        until(lambda: node.trainings.is_sending("ann"))
        again = stack.enter_context(announced(url, "ann", path, 10_000))
        assert again.recv(65_536).startswith(b"HTTP/1.1 429")
        other = stack.enter_context(announced(url, "bob", path, 3, b"abc"))
        said = other.recv(65_536)
        assert b"no safetensors" in said or b"not a safetensors" in said, "it was started"
        first.close()
        until(lambda: not node.trainings.is_sending("ann"))


class EndedTrainer:
    """A trainer that has said all that it says; what it was told decides whether it left a result."""

    def __init__(self, *_, token, **__):
        self.has_finished = token == "good"

    def begin(self, orders):
        assert orders["threads"]

    def line(self):
        return b""

    def processor_s(self):
        return 0.0

    def end(self):
        pass

    close = end


@pytest.fixture
def trainings(monkeypatch):
    """Two places for three tenants, and what begins a training of one of them."""
    monkeypatch.setattr(operations, "BoundedProcess", EndedTrainer)
    accounts = Tenants([tenant(name) for name in ("ann", "bob", "eve")], Counters())
    settings = NodeSettings(allow_training=True, trainings=2)
    trainings = Trainings(settings, lambda _: nullcontext(), lambda *_: None, lambda: accounts.weights)

    def begin(name, token="good"):
        training = trainings.begin("0" * 64, 0, accounts.account(name))
        try:
            training.start("http://here", token)
        except Overloaded:
            trainings.end(training)
            raise
        return training

    with closing(trainings):
        yield trainings, accounts, begin


def test_a_tenant_that_trains_leaves_others_a_place(trainings):
    trainings, _, begin = trainings
    first = begin("ann")
    with pytest.raises(Overloaded, match="for you"):
        begin("ann")
    second = begin("bob")
    with pytest.raises(Overloaded, match=r"\(2\)"):
        begin("eve")
    for training in (first, second):
        trainings.end(training)
    trainings.end(begin("ann"))


def test_what_a_tenant_trained_is_its_own_and_others_do_not_push_it_out(trainings):
    trainings, accounts, begin = trainings
    ann, eve = accounts.account("ann"), accounts.account("eve")
    trained = begin("ann")
    trainings.end(trained)
    for token in ("good", "bad") * 8:
        trainings.end(begin("eve", token))
    for stolen in (trainings.result, trainings.stop):
        with pytest.raises(UnknownTraining):
            stolen(trained.id, eve)
    trainings.result(trained.id, ann).close()
    assert trainings.stop(trained.id, ann) is False
    with pytest.raises(UnknownTraining):
        trainings.result(trained.id, ann)


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


def test_an_upload_that_is_announced_leaves_others_half_of_the_memory_for_work(images):
    with node_for(images, tenant("ann"), tenant("bob")) as node, ExitStack() as stack:
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))
        total = node.statistics().memory["work"].total_bytes
        # It would be held until the bytes have come, at 64 KiB a second.
        with pytest.raises(OverBudget, match=r"tenant ann may hold 6\.29 MB here"):
            stack.enter_context(node.upload("1" * 64, (total - (3 << 20)) * 8 // 9, ann)).begin()
        most = (total // 2 - (3 << 20)) * 8 // 9
        stack.enter_context(node.upload("2" * 64, most, ann)).begin(longest_s=0.01)
        stack.enter_context(node.upload("3" * 64, most, bob)).begin(longest_s=0.01)


@pytest.mark.parametrize("many", [3, 8])
def test_uploads_that_all_others_announce_together_leave_each_tenant_its_part(images, many):
    names = [f"t{number}" for number in range(many)]
    settings = NodeSettings(memory_bytes=512 << 20, tenants=tuple(map(tenant, names)), max_requests=200)
    with Node(settings, (images.as_uri(),)) as node, ExitStack() as stack:
        *others, last = (node.identify(token_of(name)) for name in names)
        work = node.statistics().memory["work"].total_bytes
        part = work // (2 * many)
        for size in (work // 3, work // 5, part, part // 2, 1 << 20, 1000):
            for account in others:
                with suppress(Overloaded, OverBudget):
                    upload = stack.enter_context(node.upload(uuid4().hex * 2, size, account))
                    upload.begin(longest_s=0.001)
        for pool in ("work", "weights"):
            assert node.statistics().memory[pool].reserved_bytes > node.statistics().memory[pool].total_bytes // 3
        digest, body = artifact_of(small_network())
        with node.upload(digest, part * 8 // 9 - (6 << 20 if many < 4 else part // 2) - 4096, last) as upload:
            upload.begin(longest_s=0.001)
        with node.upload(digest, len(body), last) as upload:
            upload.begin(longest_s=0.001)
            upload.write(body)
            upload.finish()
        wanted = request(images, small_network().cuts[-1].number, digest)
        assert len(joined(node.features(wanted, node.admit(0, last)))[0]) == 6


def test_a_graph_that_needs_more_than_most_waits_for_no_memory(images, monkeypatch):
    monkeypatch.setattr(prefixes, "_USUAL_PARSED", 1000)
    with node_for(images, tenant("ann"), tenant("bob")) as node, ExitStack() as stack:
        ann, bob = (node.identify(token_of(name)) for name in ("ann", "bob"))
        total = node.statistics().memory["work"].total_bytes
        first, second = (stack.enter_context(node.upload(name * 64, 1 << 20, ann)) for name in "12")
        first.begin()
        held = node.statistics().memory["work"].reserved_bytes
        first.write((30_000).to_bytes(8, "little"))
        assert node.statistics().memory["work"].reserved_bytes == held + 30_000 * PARSED_BYTES - 1000
        second.begin()
        other = stack.enter_context(node.upload("3" * 64, (total // 2 - 1000) * 8 // 9, bob))
        other.begin()
        with pytest.raises(Overloaded, match="no memory for the prefix's graph"):
            second.write((60_000).to_bytes(8, "little"))


def test_an_upload_without_memory_is_refused_and_frees_its_slot(images):
    with node_for(images, tenant("ann"), tenant("bob")) as node:
        ann = node.identify(token_of("ann"))
        length = MEMORY // 40  # the memory that a tenant has for work holds one such, and not two
        with node.upload("1" * 64, length, ann) as first:
            first.begin()
            with node.upload("2" * 64, length, ann) as second, pytest.raises(Overloaded, match="memory") as refused:
                second.begin(longest_s=0.01)
            assert refused.value.retry_after_s > 0
            assert node.statistics().memory["work"].waiting == 0
            assert node.statistics().requests_in_progress == 1
        assert is_idle(node)


@pytest.mark.parametrize(
    ("length", "silence_s", "pause_s", "said"),
    [(b"100", 0.05, 0.001, "--min-upload-rate"), (b"1000000000", 0.01, 60.0, "broke off")],
)
def test_refuses_a_body_that_comes_byte_by_byte_and_names_the_option(length, silence_s, pause_s, said):
    async def receive():
        await anyio.sleep(pause_s)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def read():
        scope = {"type": "http", "headers": [(b"content-length", length)]}
        return [chunk async for chunk in BodyReader(1 << 20, silence_s).chunks(Request(scope, receive))]

    with pytest.raises(BadRequest, match=said):
        anyio.run(read)


@pytest.mark.promise("apart", mended="slow samples of two tenants held the memory that a third one's sample needed")
@pytest.mark.parametrize("slow", [("ann",), ("ann", "cy")])
def test_slow_samples_leave_others_their_part_of_memory_and_threads(images, monkeypatch, slow):
    go, decode = threading.Event(), Decoders.decode_into

    def held(self, *args, tenant, **kwargs):
        if tenant in slow:
            assert go.wait(60)
        return decode(self, *args, tenant=tenant, **kwargs)

    monkeypatch.setattr(Decoders, "decode_into", held)
    many = make_images(images.parent / "many", 24)
    tenants = tuple(map(tenant, (*slow, "bob")))
    with Node(NodeSettings(memory_bytes=MEMORY, tenants=tenants), (images.parent.as_uri(),)) as node:
        *waiting, bob = (node.identify(token_of(name)) for name in (*slow, "bob"))

        def answered(folder, account):
            with closing(node.features(request(folder, 1), node.admit(0, account))) as answer:
                return len(joined(answer)[0])

        with ThreadPoolExecutor(len(slow)) as pool:
            late = [pool.submit(answered, many, account) for account in waiting]
            try:  # each has eight threads, of which most wait for memory that their tenant holds
                until(lambda: node.statistics().memory["decode"].waiting > 6 * (len(slow) - 1))
                memory = node.statistics().memory["decode"]
                kept_bytes = memory.total_bytes // 2 if len(slow) == 1 else memory.total_bytes // 6
                assert 0 < memory.reserved_bytes <= memory.total_bytes - kept_bytes
                assert answered(images, bob) == 6
                assert not any(answer.done() for answer in late)
            finally:
                go.set()
            assert [answer.result(60) for answer in late] == [24] * len(slow)


def upload(node, artifact, account, longest_s=60):
    digest, body = artifact
    with node.upload(digest, len(body), account) as upload:
        upload.begin(longest_s)
        upload.write(body)
        upload.finish()


def test_a_tenant_at_its_limit_leaves_memory_for_the_weights_of_others(images):
    # Eighteen megabytes for weights, and each takes seven.
    first, second = (artifact_of(small_network(width=width, side=16)) for width in (440, 441))
    tenants = (tenant(name, work_bytes=12 << 20) for name in ("ann", "bob"))  # to read them; else it would be six
    with node_for(images, *tenants, device_batch=8) as node:
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


def test_an_engine_counts_against_the_quota_of_the_tenant_that_asked(images, tmp_path, monkeypatch):
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
    lines = ("POST /v1/profiles HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token_of(name)}", *more)
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


def test_others_are_served_while_an_engine_is_tried(trying):
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
        ann.charge_trial(600.0)
    with pytest.raises(Overloaded, match="ann has used up its time for trials") as refused:
        ann.check_trials()
    ann.check()
    bob.check_trials()
    now[0] += refused.value.retry_after_s
    ann.check_trials()
    alone = Tenants([tenant("ann")], Counters()).identify(token_of("ann"))
    alone.charge_trial(6000.0)
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
        lines = ("HTTP/1.1", "Host: localhost", f"Authorization: Bearer {token_of('ann')}", "", "")
        with ExitStack() as stack:
            asking = [stack.enter_context(socket.create_connection(address_of(url))) for _ in range(4)]
            stack.callback(go.set)
            for peer, path in zip(asking, ("statistics", "metrics") * 2, strict=True):
                peer.sendall(f"GET /v1/{path} {lines[0]}\r\n".encode() + "\r\n".join(lines[1:]).encode())
            with transport_of("bob", url) as bob:
                assert len(joined(bob.features(request(images, 1)))[0]) == 6
            go.set()
            assert all(peer.recv(65_536).startswith(b"HTTP/1.1 200") for peer in asking)


ATTACKS = attacks()
# Enough for the longest graph to be read at all, so that what it names is what is looked at.
MEMORY_OF_HOSTILE_PREFIXES = 4 << 30
GROWTH = 256 << 20


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A node in a process of its own, which may not take this machine's memory whatever happens."""
    with start_node(
        (str(tmp_path_factory.mktemp("data")),), NodeSettings(memory_bytes=MEMORY_OF_HOSTILE_PREFIXES)
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (6 << 30, 6 << 30))
        yield process


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_prefix_is_refused_in_one_sentence_and_the_node_goes_on(stranger, name):
    pid, before = stranger.pid, peak_bytes(stranger.pid)
    status, said = put(stranger.url, ATTACKS[name])
    assert 400 <= status < 500
    assert said["message"]
    assert "\n" not in said["message"]
    assert stranger.pid == pid
    assert peak_bytes(pid) - before < GROWTH
    status, _ = put(stranger.url, artifact(after(node(name, "aten.relu.default", X))))
    assert status == 201


def limits(**changes):
    usual = {"max_nodes": 4000, "max_values": 20_000, "max_run_s": 120.0, "max_operation_s": 2.0}
    return GraphLimits(**{**usual, "operations_per_s": 1e11, **changes})


def inspected(inspector, body, *, max_check_s=60.0, **changes):
    return inspector.inspect(header_of(body), max_rows=32, max_check_s=max_check_s, limits=limits(**changes))


@pytest.fixture(scope="module")
def inspector():
    with Inspector() as made:
        yield made


def test_the_inspection_process_finds_what_a_dry_run_in_this_process_finds(inspector):
    prefix = small_prefix()
    found = inspected(inspector, write_prefix(prefix))
    leaves = leaf_values(prefix.graph, prefix.tensors)
    assert found.memory == dry_run(prefix.graph, leaves, prefix.cuts, max_rows=32)
    totals = [found.operations[cut.number].total for cut in prefix.cuts]
    assert totals == sorted(totals)
    assert totals[-1] > 0


W = (3, 32, 32)
MEAN = [node("m", "aten.mean.dim", X, [0]), node("e", "aten.sub.Tensor", X, {"ref": "m"})]
MIXING = {
    "mean": MEAN,
    "softmax": [node("e", "aten.softmax.int", X, 0)],
    "cumsum": [node("e", "aten.cumsum.default", X, 0)],
    "flip": [node("e", "aten.flip.default", X, [0])],
    "roll": [node("e", "aten.roll.default", X, [2], [0])],
    "the first row": [node("f", "aten.slice.Tensor", X, 0, 0, 1), node("e", "aten.sub.Tensor", X, {"ref": "f"})],
    "mean and more": [*MEAN, node("r", "aten.relu.default", {"ref": "e"})],
}


@pytest.mark.parametrize("name", MIXING)
def test_a_strangers_prefix_that_mixes_rows_is_refused_before_others_rows_come_in(images, inspector, name):
    body = artifact(MIXING[name], shape=W, inputs=W)
    with Node(NodeSettings(memory_bytes=MEMORY), (images.as_uri(),), inspector) as serving:
        serving.put_prefix(digest_of(body), body)
        for _ in range(2):
            with pytest.raises(UnsafeArtifact, match=r"mixes the samples of a batch before cut 2 \(here\)"):
                joined(serving.features(request(images, 2, digest_of(body))))
        assert serving.statistics().totals.samples == 0
        until(lambda: is_idle(serving))


@pytest.mark.parametrize("is_known", [False, True])
def test_a_strangers_rows_are_checked_once_a_cut_unless_operations_say_enough(images, inspector, monkeypatch, is_known):
    asked, look = [], TorchBridge.is_mixing
    monkeypatch.setattr(TorchBridge, "is_mixing", lambda *given: asked.append(1) or look(*given))
    network = small_network()
    body = write_prefix(network.prefix if is_known else with_a_turn(network.prefix))
    digest = digest_of(body)
    assert inspected(inspector, body).keeps_rows_apart == is_known
    with Node(NodeSettings(memory_bytes=MEMORY), (images.as_uri(),), inspector) as serving:
        serving.put_prefix(digest, body)
        for cut in (2, 2, 3, 3, 2):
            assert len(joined(serving.features(request(images, cut, digest)))[0]) == 6
    assert len(asked) == (0 if is_known else 2)


def with_a_turn(prefix):
    """The same behind an operation that has no rule, and changes nothing."""
    [name] = prefix.graph.inputs
    turn = GraphNode(name="turned", op="aten.movedim.int", args=(Ref(name), 1, 1))
    said = json.dumps(graph_to_json(prefix.graph)).replace(json.dumps({"ref": name}), '{"ref": "turned"}')
    graph = graph_from_json(json.loads(said))
    cuts = tuple(replace(cut, after=cut.after + 1) if cut.after >= 0 else cut for cut in prefix.cuts)
    return replace(prefix, graph=replace(graph, nodes=(turn, *graph.nodes)), cuts=cuts)


SIZE = node("n", "aten.sym_size.int", X, 0)
# (n - 8)(n - 9), which is nothing for batches of eight and nine.
NOTHING = [
    node("a", "operator.sub", {"ref": "n"}, 8),
    node("b", "operator.sub", {"ref": "n"}, 9),
    node("c", "operator.mul", {"ref": "a"}, {"ref": "b"}),
]
HIDING = {
    "rows elsewhere": [
        *(SIZE, *NOTHING, node("d", "operator.add", {"ref": "n"}, {"ref": "c"})),
        node("e", "aten.view.default", X, [{"ref": "d"}, 3, 32, -1]),
    ],
    "a slice of sizes": [
        *(SIZE, *NOTHING, node("d", "operator.sub", 32, {"ref": "c"})),
        node("e", "aten.slice.Tensor", X, 3, 0, {"ref": "d"}),
    ],
    "a shift by rows": [SIZE, node("e", "aten.roll.default", X, [{"ref": "n"}], [3])],
    "rows of nine": [node("e", "aten.view.default", X, [9, -1, 32, 32])],
    "halves of a batch": [
        node("h", "aten.view.default", X, [2, -1, 3, 32, 32]),
        node("e", "aten.flip.default", {"ref": "h"}, [0]),
    ],
    "a mean of all rows": [
        node("v", "aten.view.default", X, [-1, 32]),
        node("e", "aten.softmax.int", {"ref": "v"}, 0),
    ],
}


@pytest.mark.parametrize("name", HIDING)
def test_no_strangers_sizes_make_rows_that_mix_look_apart(name):
    prefix = read_prefix(artifact(HIDING[name], shape=W, inputs=W))
    assert not keeps_rows_apart_by_runs(prefix.graph, prefix.inputs, prefix.tensors)


HEAVY = torch.zeros(3 << 20)  # twelve megabytes of weights


def test_a_graph_is_inspected_while_its_weights_come_and_refused_once_they_have(images, inspector, monkeypatch):
    body = artifact([node("e", "aten.nonzero.default", X)], {"w": HEAVY})
    inspected, inspect = threading.Event(), Inspector.inspect

    def noted(*said, **more):
        try:
            return inspect(*said, **more)
        finally:
            inspected.set()

    monkeypatch.setattr(Inspector, "inspect", noted)
    with Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),), inspector) as serving:
        with serving.upload(digest_of(body), len(body)) as sending:
            sending.begin()
            sending.write(body[: 1 << 16])
            assert inspected.wait(60)
            sending.write(body[1 << 16 :])  # who is refused in the middle sees a connection that broke
            with pytest.raises(UnsafeArtifact, match="nonzero"):
                sending.finish()
        until(lambda: is_idle(serving))


def test_uploads_that_end_behind_their_headers_have_one_thread_for_each_tenant(images, inspector, monkeypatch):
    body = artifact([node("e", "aten.relu.default", X)], {"w": HEAVY})
    begun, go_on, looked, inspect = threading.Event(), threading.Event(), [], Inspector.inspect

    def held(*said, **more):
        looked.append(more["tenant"])
        begun.set()
        assert go_on.wait(60)
        return inspect(*said, **more)

    monkeypatch.setattr(Inspector, "inspect", held)
    with Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),), inspector) as serving:
        try:
            for _ in range(5):
                with serving.upload(digest_of(body), len(body)) as sending:
                    sending.begin()
                    sending.write(body[: 1 << 16])
                    assert begun.wait(60)
            assert len(looked) == 1
        finally:
            go_on.set()
        until(lambda: not any("inspecting" in thread.name for thread in threading.enumerate()))
        serving.put_prefix(digest_of(body), body)


@pytest.mark.parametrize("is_other", [False, True])
def test_what_is_inspected_is_the_header_that_the_file_has_in_the_end(images, inspector, monkeypatch, is_other):
    body = artifact([node("e", "aten.relu.default", X)], {"w": HEAVY})
    ends = len(header_of(body)) + PREAMBLE_BYTES
    looked, inspect = [], Inspector.inspect
    monkeypatch.setattr(Inspector, "inspect", lambda *said, **more: looked.append(said[1]) or inspect(*said, **more))
    monkeypatch.setattr(prefixes.Prefixes, "write_piece", lambda _, __, many, ___, file: file.write(body[9 : 9 + many]))
    hidden = [Piece(digest="0" * 64, start=9, stop=ends - 9)] if is_other else []
    with (
        Node(NodeSettings(memory_bytes=256 << 20), (images.as_uri(),), inspector) as serving,
        serving.upload(digest_of(body), len(body), is_in_pieces=True) as sending,
    ):
        sending.begin()
        sent = without(body, hidden)
        sending.write(sent[: 1 << 16])
        sending.write(sent[1 << 16 :])
        sending.finish()
    assert looked == [header_of(body)]


def test_a_check_that_takes_too_long_is_ended_and_the_next_is_not(inspector):
    body = artifact(chain("aten.relu.default", 4000))
    with pytest.raises(UnsafeArtifact, match="1 s of a core"):
        inspected(inspector, body, max_check_s=1.0)
    assert inspected(inspector, artifact(after())).memory


def test_restarts_an_inspection_process_that_died():
    with Inspector() as inspector:
        assert inspected(inspector, artifact(after())).memory
        first = inspector.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert inspected(inspector, artifact(after())).memory
        assert inspector.pid != first


def test_does_not_inspect_the_same_prefix_again(tmp_path, monkeypatch):
    kept, body = FileCache(tmp_path, ".json"), write_prefix(small_prefix())
    looks, exchange = [], vars(inspections)["_exchange"]
    monkeypatch.setattr(inspections, "_exchange", lambda *said: looks.append(1) or exchange(*said))
    with Inspector(kept=kept) as inspector:
        found = inspected(inspector, body)
        assert inspected(inspector, body) == found
        assert len(looks) == 1
        assert inspected(inspector, body, max_values=10_000) == found  # other bounds: it might have been refused
        assert len(looks) == 2
        (first, _) = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
        for damage in (b"", b"[]", b'{"1": [1]}', b"\xff"):
            first.write_bytes(damage)
            assert inspected(inspector, body) == found
        assert len(looks) == 6
        for _ in range(2):
            with pytest.raises(OverBudget):
                inspected(inspector, products(10, 256), max_run_s=3e-3)
        assert len(looks) == 8  # what is refused is kept nowhere
    with Inspector(fork=False, kept=FileCache(tmp_path, ".json")) as another:
        assert inspected(another, body) == found
    assert len(looks) == 8


def test_a_closed_inspector_leaves_no_process():
    with Inspector() as inspector:
        pid = inspector.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    inspector.close()


def test_refuses_a_prefix_if_the_inspection_gives_no_valid_answer(inspector, monkeypatch):
    for answer in (b"", b"[]", b"{", b'{"1": [1]}', b'{"x": 1}'):
        monkeypatch.setattr(inspections, "_exchange", lambda *_, answer=answer: answer)
        with pytest.raises(UnsafeArtifact, match="it is refused"):
            inspected(inspector, artifact(after()))


def products(count, side):
    weight = {"ref": "w"}
    return artifact(after(*chain("aten.mm.default", count, weight, begin=weight)), {"w": torch.zeros(side, side)})


def test_limits_the_cost_of_a_run_of_one_operation_and_the_number_of_values(inspector):
    body = products(10, 256)
    found = inspected(inspector, body)
    assert found.operations[2].total >= 10 * 2 * 256**3
    assert found.operations[2].heaviest >= 2 * 256**3
    with pytest.raises(OverBudget, match="--max-run"):
        inspected(inspector, body, max_run_s=3e-3)
    with pytest.raises(OverBudget, match="--max-operation"):
        inspected(inspector, body, max_operation_s=1e-4)
    parts = [node(f"p{number}", "aten.unbind.int", X, 1) for number in range(5)]
    with pytest.raises(UnsafeArtifact, match="12 values"):
        inspected(inspector, artifact(after(*parts)), max_values=12)
    assert inspected(inspector, artifact(after(*parts)), max_values=16).memory
    with pytest.raises(UnsafeArtifact, match="differences are of order 1"):
        inspected(inspector, artifact(after(node("d", "aten.diff.default", X, 1 << 40))))


@pytest.mark.parametrize(
    "call",
    [
        node("a", "aten.relu.default"),
        node("a", "aten.relu.default", X, X),
        node("a", "aten.relu.default", 1),
        node("a", "aten.relu.default", self=X, other=X),
        node("a", "aten.relu.default", X, self=X),
        node("a", "aten.add.Tensor", X, "1"),
        node("a", "aten.add.Tensor", X, X, alpha=None),
        node("a", "aten.cat.default", X),
        node("a", "aten.cat.default", [X], 65),
        node("a", "aten.cat.default", [X], True),
        node("a", "aten.conv2d.padding", X, X, None, [1], "none"),
        node("a", "aten.einsum.default", "ij;ij", [X]),
        node("a", "aten.gelu.default", X, approximate="x"),
        node("a", "aten.max_pool2d.default", X, [0, 0]),
        node("a", "aten.ones.default", [1], pin_memory=True),
        node("a", "aten.ones.default", [1 << 60]),
        node("a", "aten.ones.default", [1], device="cuda"),
        node("a", "aten.reshape.default", X, [[1]]),
        node("a", "aten.slice.Tensor", X, 0, 0, 9, 0),
        node("a", "aten.softmax.int", X, 1, {"memory_format": "channels_last"}),
        node("a", "operator.getitem", X, "a"),
        node("a", "operator.mul", 2.0, 2),
        node("a", "operator.mul", 2),
        node("a", "operator.mul", 2, 2, other=2),
    ],
)
def test_an_argument_that_the_operator_does_not_take_is_refused_before_it_is_called(call):
    with pytest.raises(UnsafeArtifact, match=call["op"]):
        read_prefix(artifact([call]))


@pytest.mark.parametrize(
    "call",
    [
        node("a", "aten.add.Tensor", X, 1.5, alpha=2),
        node("a", "aten.avg_pool2d.default", X, 2, 2),
        node("a", "aten.clone.default", X, memory_format={"memory_format": "channels_last"}),
        node("a", "aten.max_pool2d.default", X, [2, 2], [2, 2]),
        node("a", "aten.ones.default", [2], dtype={"dtype": "int64"}, device={"device": ""}, pin_memory=False),
        node("a", "aten.slice.Tensor", X, 1, 0, (1 << 63) - 1),
        node("a", "aten.to.dtype", X, {"dtype": "float16"}),
    ],
)
def test_arguments_that_networks_use_are_taken(call):
    assert read_prefix(artifact(after(call))).graph.nodes[0].op == call["op"]


# `dill` sets a folder for temporary files at its import, which hides that torch looks for one.
CHECK = """
import sys
sys.modules["dill"] = None
from pathlib import Path
from frostline.core.files import FileCache
from frostline.node.inspection import Inspector

{before}
kept = FileCache(Path({folder!r}), ".json")
kept.put("0" * 64, b"{{}}")
with Inspector(fork=True, kept=kept) as inspector:
    from frostline.engines.measure import GraphLimits
    from frostline.models.artifact import header_of
    import torch
    from support.hostile import X, after, artifact, node

    ones = {{"ref": "ones"}}
    norm = node("n", "aten.batch_norm.default", X, ones, ones, ones, ones, False, 0.1, 1e-5, False)
    body = artifact(after(norm), {{"ones": torch.ones(3)}})
    limits = GraphLimits(max_nodes=9, max_values=99, max_run_s=9, max_operation_s=9, operations_per_s=1e9)
    asked = {{"max_rows": 8, "max_check_s": 60.0, "limits": limits, "tokenizer": {tokenizer!r}}}
    print(len(inspector.inspect(header_of(body), **asked).memory))
"""
FAILING = """
from frostline.node import inspection_process
def fails(*_, **__):
    raise FileNotFoundError("No usable temporary directory found in ['/tmp']")
inspection_process.inspect_prefix = fails
"""


REACHING = """
import os, socket
from frostline.core.errors import UnsafeArtifact
from frostline.node import inspection_process
def reaches(content):
    found = []
    for act in (lambda: open("/etc/hostname"), lambda: os.listdir("/"), socket.socket, lambda: os.kill(1, 0)):
        try:
            act()
        except PermissionError as error:
            found.append(f"refused {error.errno}")
        else:
            found.append("done")
    raise UnsafeArtifact(f"{content.decode()}: {found}")
inspection_process.try_tokenizer = reaches
"""


def checked(folder, before="", tokenizer=b""):
    """A check by a fork that is not warmed up, in a process in which nobody has named a folder for files."""
    hidden = {"TORCHINDUCTOR_CACHE_DIR", "TMPDIR"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    tests = str(Path(__file__).parents[1])
    environment[PLAIN] = "1"
    environment["PYTHONPATH"] = os.pathsep.join((tests, environment.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", CHECK.format(folder=str(folder), before=before, tokenizer=tokenizer)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_a_fork_without_warm_up_checks_what_imports_the_compiler(tmp_path):
    said = checked(tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "2"


def test_tells_an_error_of_torch_from_a_check_that_took_too_long(tmp_path):
    said = checked(tmp_path, FAILING)
    last = said.stderr.strip().splitlines()[-1]
    assert last.endswith("UnsafeArtifact: PyTorch failed on the prefix with FileNotFoundError: it is refused")


@pytest.mark.promise("data", mended="a stranger's tokenizer was first read where files and networks could be reached")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines processes so")
def test_a_tokenizer_is_first_read_where_neither_files_nor_networks_are_reached(tmp_path):
    said = checked(tmp_path, REACHING, b"what was sent")
    assert "UnsafeArtifact: what was sent: ['refused 1', " in said.stderr, said.stderr
    assert "done" not in said.stderr.strip().splitlines()[-1]
