"""Builders for trainings in the store: a small data set's assignment, and a node's process that trains."""

import json
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save

import frostline as fl
from frostline.client.http import HttpTransport
from frostline.core import REFERENCE, TensorSpec
from frostline.jobs.in_store import Assignment, write_assignment
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.models.portable import make_portable
from frostline.wire.recipes import Recipe
from support.images import tiny_preprocess
from support.networks import Small

SHAPE = (3, 32, 32)


def frozen(until="stem"):
    torch.manual_seed(1)
    return freeze(Small().train(), until, input_shape=SHAPE)


def assignment_for(folder, network=None, **changes) -> Assignment:
    """What a job on that folder, or data set, would have trained."""
    data = folder if isinstance(folder, fl.Dataset) else fl.Dataset(folder)
    train, held_out = data.split(0.25, 0)
    network = cut_network(frozen(), SHAPE) if network is None else network
    line = network.frost_line
    plain = Assignment(
        data=data.url,
        reading=data.manifest.reading,
        train=train.samples.take(np.arange(len(train))),
        held_out=held_out.samples.take(np.arange(len(held_out))),
        classes=len(data.classes),
        prefix=digest_of(write_prefix(network.prefix)),
        engine=REFERENCE,
        cut=line.number,
        inputs=tuple(map(TensorSpec, line.shapes, line.dtypes)),
        preprocess=tiny_preprocess(),
        plain_preprocess=tiny_preprocess(),
        head=make_portable(network.head),
        recipe=Recipe(epochs=2, batch_size=6),
        views=0,
        max_skipped=1,
    )
    return replace(plain, **changes)


def ignore(_):
    pass


@contextmanager
def training(url, assignment, body=None, settings=None):
    """Ask the node at that address for it; a context manager that follows it."""
    artifact = write_prefix(cut_network(frozen(), SHAPE).prefix)
    with closing(HttpTransport(url, settings)) as transport:
        transport.put_prefix(digest_of(artifact), artifact)
        body = write_assignment(assignment) if body is None else body
        with transport.train(assignment.prefix, body) as running:
            yield running


def tampered(assignment, change, tensors=ignore):
    """Its file, changed by an untrusted client."""
    body = write_assignment(assignment)
    length = int.from_bytes(body[:8], "little")
    about = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["frostline.assignment"])
    held = load(body)
    change(about)
    tensors(held)
    return save(held, metadata={"frostline.assignment": json.dumps(about)})


def children_of(task):
    """Of one thread; none where it has ended meanwhile."""
    try:
        return (task / "children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def trainers_of(pid):
    """Process ids of the trainers that a node's process has started."""
    lists = [children_of(task) for task in Path(f"/proc/{pid}/task").iterdir()]
    found = {int(word) for some in lists for word in some.split()}
    return sorted(item for item in found if b"frostline.training.in_store_process" in _command(item))


def runs(pid):
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
