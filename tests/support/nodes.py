"""Builders for the node's tests: small images on disk, a small prefix, requests for them."""

import io
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from frostline.control.embedded import control_routes, embedded_settings
from frostline.core import Samples
from frostline.core.errors import Overloaded
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.http.server import Server, listen
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize
from frostline.stores.local import FolderStore
from frostline.wire.messages import FeatureRequest, ProfileRequest

SIDE = 32


def preprocess(side=SIDE):
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    return Preprocess(steps=(Decode(), Resize(side), CenterCrop(side), normalise))


def jpeg(seed=0, size=(48, 40)):
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1] // 4, size[0] // 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(file, "JPEG", quality=90)
    return file.getvalue()


def make_images(folder, count=20, size=(48, 40), broken=()):
    """Write images; those in ``broken`` are cut off."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        data = jpeg(index, size)
        (folder / f"{index:04}.jpg").write_bytes(data[: len(data) // 2] if index in broken else data)
    return folder


def samples_of(folder, *, with_versions=False):
    paths = sorted(Path(folder).iterdir())
    lengths = np.array([path.stat().st_size for path in paths], np.int64)
    etags = {entry.object: entry.etag for entry in FolderStore(str(folder)).list()}
    return Samples(
        ids=np.arange(len(paths), dtype=np.int64) * 3 + 100,
        objects=[path.name for path in paths],
        offsets=np.zeros(len(paths), np.int64),
        lengths=lengths,
        labels=np.full(len(paths), -1, np.int64),
        versions=[etags[path.name] for path in paths] if with_versions else (),
    )


class Small(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, stride=2)
        self.classifier = nn.Linear(width, 5)

    def forward(self, pixels):
        hidden = torch.relu(self.second(torch.relu(self.first(pixels))))
        return self.classifier(hidden.mean((2, 3)))


def small_network(width=8, side=SIDE):
    torch.manual_seed(0)
    return cut_network(freeze(Small(width).eval(), "features"), (3, side, side))


def artifact_of(network):
    body = write_prefix(network.prefix)
    return digest_of(body), body


def request(folder, cut, prefix=None, samples=None, side=SIDE, **fields):
    values = {
        "data": Path(folder).as_uri(),
        "samples": samples_of(folder) if samples is None else samples,
        "prefix": prefix if cut > 1 else None,
        "cut": cut,
        "preprocess": preprocess(side).to_json(),
    }
    return FeatureRequest(**{**values, **fields})


def asked_for(*ids, **fields):
    """A request for made-up samples, of nodes that read none."""
    count = len(ids)
    samples = Samples(
        ids=np.array(ids, np.int64),
        objects=[f"{id}.jpg" for id in ids],
        offsets=np.zeros(count, np.int64),
        lengths=np.full(count, 8, np.int64),
        labels=np.full(count, -1, np.int64),
    )
    return request("/data", 1, samples=samples, **fields)


@contextmanager
def served(node, port=0, limits=None, routes=None):
    """Serve a node of this process over HTTP, with its control plane or other routes; yields its address."""
    routes = control_routes(embedded_settings(node.settings)) if routes is None else routes
    server = Server(node, listen("127.0.0.1", port), limits, routes=routes)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(60)
        yield server.url
    finally:
        server.stop()
        thread.join()


@contextmanager
def busy_device(node, images, digest, begun, go):
    """Hold the device with a profile, whose clock waits."""

    def waits(*_, **__):
        begun.set()
        assert go.wait(60)
        raise Overloaded("enough", retry_after_s=1)

    wanted = ProfileRequest(features=request(images, 2, digest))

    def profile():
        with pytest.raises(Overloaded):
            node.profile(wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "timed_run", waits)
        thread = threading.Thread(target=profile)
        thread.start()
        assert begun.wait(60)
        try:
            yield
        finally:
            go.set()
            thread.join(60)


def until(holds, timeout_s=200.0):
    """Wait until something holds that another thread or process brings about, and return what it gave."""
    never = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not come about"
        never.wait(0.01)
    return found


def stop(pid):
    """Stop a process. Each of its threads stops when the kernel comes to it, and until then one may answer."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in tasks.glob("*/stat")))


def joined(batches):
    """All rows of an answer: ids, tensors, encoded samples, skipped ids."""
    batches = list(batches)
    tensors = zip(*(batch.tensors for batch in batches), strict=True)
    return (
        [int(id) for batch in batches for id in batch.ids],
        [np.concatenate(parts) for parts in tensors],
        [bytes(item) for batch in batches for item in batch.encoded],
        [sample.id for batch in batches for sample in batch.skipped],
    )


def same(one, other):
    """Two answers that ``join_batches`` gave have the same bits."""
    (ids, tensors, _, skipped), (other_ids, other_tensors, _, other_skipped) = one, other
    return (
        ids == other_ids
        and skipped == other_skipped
        and all(np.array_equal(a, b) for a, b in zip(tensors, other_tensors, strict=True))
    )


def is_idle(node):
    """Nothing is in work and nothing but weights is reserved."""
    statistics = node.statistics()
    reserved = [pool.reserved_bytes for name, pool in statistics.memory.items() if name != "weights"]
    return statistics.requests_in_progress == 0 and not any(reserved)


def within_budget(node):
    """No share of the memory was ever exceeded."""
    return all(pool.peak_bytes <= pool.total_bytes for pool in node.statistics().memory.values())
