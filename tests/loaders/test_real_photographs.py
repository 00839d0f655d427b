"""The promise on real input: real photographs, real weights, a real node, BatchNorm and dropout in what is trained."""

import copy
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

import frostline as fl
from frostline.training.networks import load_model
from support import plain


def test_the_losses_on_photographs_are_those_of_the_plain_loop(photographs, shared_node):
    data = fl.Dataset(photographs)
    data = data.take(np.linspace(0, len(data) - 1, 32).astype(np.int64))
    network = load_model("demo:efficientnet_lite0", classes=len(data.classes))
    model = fl.freeze(network.model, until="_blocks.13")
    twin = copy.deepcopy(model)
    with fl.offload(model, data, preprocess=network.preprocess, near=shared_node.url) as job:
        ours = plain.through(job, batch_size=16, epochs=2)
        received = job.statistics().wire_bytes
    folder = Path(unquote(urlsplit(data.url).path))
    assert ours == plain.losses(twin, folder, data, network.preprocess, batch_size=16, epochs=2)
    # Two epochs crossed once; the rest is headers, and the few encoded samples that measured the link.
    assert received < 32 * job.frost_line.bytes_per_sample + 10 * data.samples.lengths.max() + 20_000
