"""Epochs over one, two, four and eight nodes whose computing is simulated: throughput, hits and requests' lengths.

    python benchmarks/many_nodes.py [--samples 4608] [--rate 20] [--out benchmarks/results/DATE-many-nodes]

All nodes are real ones in this process, over HTTP on loopback, each with a cache of its own. Their engine is a test
engine and declared as one: it computes a tiny network, and then waits until as much time has passed as a device of
`--rate` samples a second would need, so that eight nodes fit on two cores. What a node answers waits in the same way
for a link of its own of `--link` samples a second, which only the second epoch feels, since that computes nothing.
Each number of nodes runs twice: by owners, and with requests to the least busy node. The trainer keeps nothing.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

import frostline as fl
from frostline.config import LoaderSettings
from frostline.core import Route
from frostline.engines.backends.torch_eager import TorchEngine
from frostline.events import RequestFinished
from frostline.jobs import loader_factory
from support.images import image_folder, tiny_preprocess
from support.many_nodes import frozen, hits, some_nodes

DEVICE_BATCH = 32
COMPUTED = []  # rows of each run of a simulated device


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4608)
    parser.add_argument("--rate", type=float, default=20.0, help="samples a second of each node's device")
    parser.add_argument("--link", type=float, default=60.0, help="samples a second that each node can send")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    compute_at(wanted.rate)
    scratch = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    folder = image_folder(scratch / "images", per_class=wanted.samples // 3, size=(40, 36))
    found = []
    try:
        for count in wanted.nodes:
            for by_owners in (True, False) if count > 1 else (True,):
                COMPUTED.clear()
                kept = scratch / f"kept-{count}-{by_owners}"
                found.append(run(folder, kept, count, by_owners=by_owners, link=wanted.link))
                check(found[-1], wanted.samples // 3 * 3, wanted.rate, sum(COMPUTED))
                print(json.dumps(found[-1]), flush=True)
    finally:
        shutil.rmtree(scratch)
    if wanted.out:
        about = {"samples": wanted.samples, "rate": wanted.rate, "link": wanted.link, "device_batch": DEVICE_BATCH}
        about["load"] = os.getloadavg()
        wanted.out.with_suffix(".json").write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def compute_at(rate):
    """Let every run of a node's engine take as long as on a device of that rate."""
    compute = TorchEngine.run_divided  # which is what a node calls

    def slowed(self, inputs, cut, between):
        started = time.monotonic()
        result = compute(self, inputs, cut, between)
        rows = len(inputs if hasattr(inputs, "shape") else inputs[0])
        COMPUTED.append(rows)
        time.sleep(max(0.0, started + rows / rate - time.monotonic()))
        return result

    TorchEngine.run_divided = slowed


def check(row, samples, rate, computed):
    """Refuse figures that the declared devices cannot have given."""
    assert computed >= samples, f"the simulated devices computed {computed} rows of {samples}: they are not in use"
    most = 1.05 * row["nodes"] * rate  # the last runs may be shorter than a device batch
    assert row["first_epoch_samples_per_s"] <= most, f"faster than {most:.0f} samples/s, which all devices give"


class Sent:
    """An answer whose rows leave a node as a link of some samples a second lets them. All of a node's share one."""

    def __init__(self, node, link):
        self._features, self._link = node.features, link
        self._turn, self._free_at = threading.Lock(), 0.0
        node.features = self.features

    def features(self, *args, **options):
        answer = self._features(*args, **options)
        taken = type(answer).__next__

        def paced(self_):
            batch = taken(self_)
            with self._turn:
                self._free_at = max(self._free_at, time.monotonic()) + len(batch) / self._link
                free_at = self._free_at
            time.sleep(max(0.0, free_at - time.monotonic()))
            return batch

        answer.__class__ = type("PacedStream", (type(answer),), {"__next__": paced})
        return answer


def run(folder, kept, count, *, by_owners, link):
    """Two epochs over some nodes."""
    asked = []

    def observe(event):
        if isinstance(event, RequestFinished):
            asked.append(event.samples)

    settings = LoaderSettings(
        cache_bytes=0, device_batch=DEVICE_BATCH, hedge_quantile=1.0, requests_in_flight=max(8, 4 * count)
    )
    owned = loader_factory.owned_rows, loader_factory.fetch_from
    if not by_owners:
        loader_factory.owned_rows = lambda transport, data, settings, tensors: (None, settings)
        loader_factory.fetch_from = lambda fetcher, fetch: None
    try:
        with some_nodes(folder, kept, count, device_batch=DEVICE_BATCH) as (nodes, urls):
            for node in nodes:
                Sent(node, link)
            job = fl.offload(
                frozen(), fl.Dataset(folder), preprocess=tiny_preprocess(), near=urls, accuracy="exact",
                settings=settings, observe=observe,
            )  # fmt: skip
            with job:
                job.use({Route(job.frost_line.number): 1.0})  # all frozen layers at the nodes, whatever a plan says
                first_s, samples = epoch(job, 0)
                before, done = hits(nodes), [node.statistics().totals.samples for node in nodes]
                second_s, _ = epoch(job, 1)
                return {
                    "nodes": count,
                    "spread": "by owners" if by_owners else "least busy",
                    "first_epoch_samples_per_s": round(samples / first_s, 1),
                    "second_epoch_samples_per_s": round(samples / second_s, 1),
                    "second_epoch_hits": (hits(nodes) - before) / samples,
                    # Of the second epoch: in the first one the job also measures, on samples of any node.
                    "busiest_node": round(
                        max(
                            node.statistics().totals.samples - by_then
                            for node, by_then in zip(nodes, done, strict=True)
                        )
                        * count
                        / samples,
                        3,
                    ),
                    "request_samples_median": statistics.median(asked),
                    "requests_of_half_a_device_batch": round(
                        sum(rows >= DEVICE_BATCH // 2 for rows in asked) / len(asked), 3
                    ),
                }
    finally:
        loader_factory.owned_rows, loader_factory.fetch_from = owned


def epoch(job, number):
    started = time.monotonic()
    samples = sum(len(batch) for batch in job.loader(32, shuffle=True, seed=3, epoch=number))
    return time.monotonic() - started, samples


if __name__ == "__main__":
    main()
