"""Two tenants on two nodes that keep to shares of computing, as a control plane gives them over both nodes.

    python benchmarks/node_shares.py [--compute 0.4] [--seconds 40] [--out FILE]

The nodes and the control plane are real ones in this process. Each tenant asks each node for features without a pause,
and comes back when it is told to where it is refused. Device seconds are those that the nodes count; of each run the
first ``--settle`` seconds do not count.
"""

import logging
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from harness import markdown, run

from frostline.control.reporter import ControlLink, node_reporter
from frostline.control.settings import ControlledJob
from frostline.core.config import NodeSettings
from frostline.core.errors import Overloaded
from frostline.node import Node
from support.control_planes import control_plane
from support.nodes import artifact_of, joined, make_images, request, small_network
from support.tenants import tenant, token_of

WEIGHTS = {"ann": 3.0, "bob": 1.0}


def options(parser):
    parser.add_argument("--compute", type=float, default=0.4, help="device seconds a second, over both nodes")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--settle", type=float, default=10)


def measure(wanted):
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "device_s_per_s": wanted.compute,
            "without_control": asked(wanted, Path(folder) / "free", is_controlled=False),
            "with_control": asked(wanted, Path(folder) / "shared", is_controlled=True),
        }


def table(found):
    runs = [found["without_control"], found["with_control"]]
    first, due = next(iter(WEIGHTS)), WEIGHTS["ann"] / sum(WEIGHTS.values())
    rows = [
        [f"share of the first tenant, {due:.0%} due", *(f"{item['shares'][first]:.1%}" for item in runs)],
        ["device seconds a second of both", *(sum(item["device_s_per_s"].values()) for item in runs)],
    ]
    return markdown(["", "without control", "with control"], rows)


def asked(wanted, folder, *, is_controlled):
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
        warm = threading.Barrier(len(nodes) * len(WEIGHTS) + 1)
        asks = [(node, images, name, refused, warm, over) for node in nodes for name in WEIGHTS]
        threads = [threading.Thread(target=ask, args=one) for one in asks]
        for thread in threads:
            thread.start()
        warm.wait(120)
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


def ask(node, images, name, refused, warm, over):
    """Ask without a pause, and wait for the others after the first answer."""
    digest, body = artifact_of(small_network())
    node.put_prefix(digest, body)
    account, answers = node.identify(token_of(name)), 0
    while not over.is_set():
        try:
            joined(node.features(request(images, 2, digest), node.admit(0, account)))
        except Overloaded as error:
            refused[name] += 1
            over.wait(error.retry_after_s)
            continue
        answers += 1
        if answers == 1:
            warm.wait(120)


def computed(nodes):
    """Device seconds of each tenant at all nodes so far."""
    tenants = [node.statistics().tenants for node in nodes]
    return {name: sum(found[name].totals.compute_s for found in tenants) for name in WEIGHTS}


if __name__ == "__main__":
    quick = {"seconds": 0.5, "settle": 0.5}
    run(__doc__, measure, quick=quick, options=options, table=table, data=False)
