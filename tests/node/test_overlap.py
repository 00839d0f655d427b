"""Reading, decoding, computing and sending overlap, within one request and between several."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from frostline.core.config import NodeSettings
from frostline.engines.torch import TorchEngine
from frostline.node import Node
from frostline.node import decode as decoding
from frostline.node import pipeline as requests
from frostline.stores.local import FolderStore
from frostline.stores.retry import Wrapped
from support.nodes import artifact_of, is_idle, joined, make_images, request, same, samples_of, small_network

NETWORK = small_network()
DIGEST, ARTIFACT = artifact_of(NETWORK)
LAST = NETWORK.cuts[-1].number
ROWS = 8
PATIENCE_S = 20


class Meeting:
    """A place where several are at once, or nobody passes; each of them once."""

    def __init__(self, *names):
        self._barrier = threading.Barrier(len(names))
        self._lock = threading.Lock()
        self._expected = set(names)

    def attend(self, name):
        with self._lock:
            is_expected = name in self._expected
            self._expected.discard(name)
        if is_expected:
            self._barrier.wait(PATIENCE_S)

    @property
    def was_held(self):
        return not self._expected and not self._barrier.broken


class Watched(Wrapped):
    """Tells of each read before it is made."""

    def __init__(self, store, on_read):
        super().__init__(store)
        self._on_read = on_read

    def read_version(self, object, offset, length):
        self._on_read(object)
        return self._store.read_version(object, offset, length)


@pytest.fixture
def images(tmp_path):
    return make_images(tmp_path / "images", 4 * ROWS)


@pytest.fixture
def watched(images, monkeypatch):
    """A node whose steps are told of: reads by the object, decoding by the sample's id, runs as they come."""
    told = {"read": lambda _: None, "decode": lambda _: None, "run": lambda: None}
    store = Watched(FolderStore(str(images)), lambda object: told["read"](object))
    monkeypatch.setattr(requests, "open_samples", lambda *_, **__: store)
    decode_into, run = decoding.decode_into, TorchEngine.run_divided

    def decodes(*given, id, view):
        told["decode"](id)
        decode_into(*given, id=id, view=view)

    def runs(engine, inputs, cut, between):
        told["run"]()
        return run(engine, inputs, cut, between)

    monkeypatch.setattr(decoding, "decode_into", decodes)
    monkeypatch.setattr(TorchEngine, "run_divided", runs)
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=ROWS, decode_threads=2)
    with Node(settings, (images.as_uri(),)) as node:
        node.put_prefix(DIGEST, ARTIFACT)
        yield node, told


def test_reads_and_decodes_the_next_rows_of_a_request_while_these_are_computed(watched, images):
    node, told = watched
    samples = samples_of(images)
    expected = joined(node.features(request(images, LAST, DIGEST)))
    computed, sent = Meeting("run", "read"), Meeting("sent", "decode")
    told["run"] = lambda: computed.attend("run")
    # Of the second batch: its first sample is read when the first batch runs, its last is decoded when that is sent.
    told["read"] = lambda object: object == samples.objects[ROWS] and computed.attend("read")
    told["decode"] = lambda id: id == samples.ids[2 * ROWS - 1] and sent.attend("decode")
    answer = node.features(request(images, LAST, DIGEST))
    first = next(answer)
    sent.attend("sent")
    assert computed.was_held
    assert sent.was_held
    assert same(joined([first, *answer]), expected)
    assert is_idle(node)


def test_while_one_request_is_sent_others_are_computed_and_decoded_and_read(watched, images):
    node, told = watched
    samples = samples_of(images)
    parts = [samples.take(np.arange(start, start + ROWS)) for start in range(0, len(samples), ROWS)]
    asked = [request(images, LAST, DIGEST, samples=part) for part in parts]
    expected = [joined(node.features(wanted)) for wanted in asked]
    meeting = Meeting("sent", "run", "decode", "read")
    sent, *others = [node.features(wanted) for wanted in asked]
    first = next(sent)
    told["run"] = lambda: meeting.attend("run")
    told["decode"] = lambda id: id in parts[2].ids and meeting.attend("decode")
    told["read"] = lambda object: object in parts[3].objects and meeting.attend("read")
    with ThreadPoolExecutor(len(others)) as threads:
        answers = [threads.submit(joined, other) for other in others]
        meeting.attend("sent")
        found = [joined([first, *sent]), *(answer.result(PATIENCE_S) for answer in answers)]
    assert meeting.was_held
    assert all(map(same, found, expected))
    assert is_idle(node)
