"""Two tenants on two nodes that keep to shares of computing, as a control plane gives them over both nodes.

    PYTHONPATH=src python benchmarks/node_shares.py [--compute 0.4] [--seconds 40] [--out FILE]

The nodes and the control plane are real ones in this process. Each tenant asks each node for features without a pause,
and comes back when it is told to where it is refused. Device seconds are those that the nodes count; of each run the
first ``--settle`` seconds do not count.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

from frostline.control.reporter import ControlLink, node_reporter
from frostline.control.settings import ControlledJob
from frostline.core.config import NodeSettings
from frostline.core.errors import Overloaded
from frostline.node import Node
from support.control_planes import control_plane
from support.nodes import artifact_of, joined, make_images, request, small_network
from support.tenants import tenant, token_of

WEIGHTS = {"ann": 3.0, "bob": 1.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compute", type=float, default=0.4, help="device seconds a second, over both nodes")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--settle", type=float, default=10)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "command": sys.argv[1:],
            "load": os.getloadavg()[0],
            "device_s_per_s": wanted.compute,
            "without_control": run(wanted, Path(folder) / "free", is_controlled=False),
            "with_control": run(wanted, Path(folder) / "shared", is_controlled=True),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if wanted.out:
        wanted.out.write_text(text + "\n", encoding="utf-8")


def run(wanted, folder, *, is_controlled):
    """What each tenant computed a second, and how often it was refused."""
    folder.mkdir()
    images = make_images(folder / "images", 16, size=(64, 64))
    jobs = [ControlledJob(name=name, weight=weight) for name, weight in WEIGHTS.items()]
    refused, over = dict.fromkeys(WEIGHTS, 0), threading.Event()
    with ExitStack() as stack:
        nodes = [stack.enter_context(a_node(images)) for _ in range(2)]
        if is_controlled:
            plane = control_plane(folder, time.time, jobs=jobs, compute_s_per_s=wanted.compute)
            url, _ = stack.enter_context(plane)
            for node in nodes:
                stack.enter_context(closing(node_reporter(node, ControlLink(url, None)))).begin()
        threads = [
            threading.Thread(target=ask, args=(node, images, name, refused, over)) for node in nodes for name in WEIGHTS
        ]
        for thread in threads:
            thread.start()
        over.wait(wanted.settle)
        before, began = computed(nodes), time.monotonic()
        over.wait(wanted.seconds)
        after, passed_s = computed(nodes), time.monotonic() - began
        over.set()
        for thread in threads:
            thread.join()
    per_s = {name: (after[name] - before[name]) / passed_s for name in WEIGHTS}
    shares = {name: amount / sum(per_s.values()) for name, amount in per_s.items()}
    return {"device_s_per_s": per_s, "shares": shares, "refused": refused}


def a_node(images):
    tenants = tuple(tenant(name) for name in WEIGHTS)
    settings = NodeSettings(
        memory_bytes=128 << 20, device_batch=8, compute_threads=1, decode_threads=1, engines=(), tenants=tenants
    )
    return Node(settings, (images.as_uri(),))


def ask(node, images, name, refused, over):
    digest, body = artifact_of(small_network())
    node.put_prefix(digest, body)
    account = node.identify(token_of(name))
    while not over.is_set():
        try:
            joined(node.features(request(images, 2, digest), node.admit(0, account)))
        except Overloaded as error:
            refused[name] += 1
            over.wait(error.retry_after_s)


def computed(nodes):
    """Device seconds of each tenant at all nodes so far."""
    tenants = [node.statistics().tenants for node in nodes]
    return {name: sum(found[name].totals.compute_s for found in tenants) for name in WEIGHTS}


if __name__ == "__main__":
    main()
