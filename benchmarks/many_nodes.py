"""Epochs over one to eight nodes whose computing is simulated: throughput, hits, requests' lengths, and a crossing.

    python benchmarks/many_nodes.py [--samples 4608] [--rate 20] [--out benchmarks/results/DATE-many-nodes]

All nodes are real ones in this process, over HTTP on loopback, each with a cache of its own. Their engine is a test
engine and declared as one: it computes a tiny network, and then waits until as much time has passed as a device of
`--rate` samples a second would need, so that eight nodes fit on two cores. What a node answers waits in the same way
for a link of its own of `--link` samples a second, which only the second epoch feels, since that computes nothing.
Each number of nodes runs twice: by owners, and with requests to the least busy node. Both begin with two requests for
each node. The trainer keeps nothing.

    python benchmarks/many_nodes.py --trainer 110 --nodes 1 2 3 4 5 6 7 8 [--out benchmarks/results/DATE-crossing]

runs all frozen layers at the trainer alone, whose device is simulated in the same way at so many samples a second, and
then at that many nodes. Beside each stands what the plan (``frostline plan --nodes``) predicts from declared rates.
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
from frostline.core import Route
from frostline.core.config import LoaderSettings
from frostline.core.events import RequestFinished
from frostline.engines.torch import TorchEngine
from frostline.jobs import loader_factory
from frostline.jobs.partition import TorchLocalPrefix
from frostline.loaders.epoch import EpochStream
from frostline.planning import Link, make_plan
from frostline.planning.replanning import vary
from support.images import image_folder, tiny_preprocess
from support.many_nodes import frozen, hits, some_nodes
from support.situations import profile, situation

DEVICE_BATCH = 32
COMPUTED = []  # rows of each run of a simulated device


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=4608)
    parser.add_argument("--rate", type=float, default=20.0, help="samples a second of each node's device")
    parser.add_argument("--link", type=float, default=60.0, help="samples a second that each node can send")
    parser.add_argument("--trainer", type=float, help="samples a second of the trainer's device: find the crossing")
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
        if wanted.trainer:
            found = crossing(folder, scratch, wanted)
            return
        for count in wanted.nodes:
            for by_owners in (True, False) if count > 1 else (True,):
                COMPUTED.clear()
                kept = scratch / f"kept-{count}-{by_owners}"
                found.append(run(folder, kept, count, by_owners=by_owners, link=wanted.link))
                check(found[-1], wanted.samples // 3 * 3, wanted.rate, sum(COMPUTED))
                print(json.dumps(found[-1]), flush=True)
    finally:
        shutil.rmtree(scratch)
        if wanted.out and found:
            about = {name: getattr(wanted, name) for name in ("samples", "rate", "link", "trainer")}
            about |= {"device_batch": DEVICE_BATCH, "load": os.getloadavg()}
            wanted.out.with_suffix(".json").write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def crossing(folder, scratch, wanted):
    """The trainer alone, and then as many nodes as are wanted, beside what the plan predicts for them."""
    run_batch = TorchLocalPrefix._run_batch  # noqa: SLF001 (the trainer's device)

    def slowed(self, arrays, size):
        started = time.monotonic()
        result = run_batch(self, arrays, size)
        time.sleep(max(0.0, started + size / wanted.trainer - time.monotonic()))
        return result

    TorchLocalPrefix._run_batch = slowed  # noqa: SLF001
    seconds = (0.0, 0.0, 1 / wanted.rate)
    declared = situation(
        seconds=seconds, trainer=profile((0.0, 0.0, 1 / wanted.trainer)), link=Link(bytes_per_s=1e12, round_trip_s=0.0)
    )
    found = []
    for count in (0, *wanted.nodes):
        predicted = make_plan(vary(declared, nodes=max(1, count)), "freeze" if count else "baseline")
        kept = scratch / f"crossing-{count}"
        with (
            some_nodes(folder, kept, max(1, count), device_batch=DEVICE_BATCH) as (_, urls),
            a_job(folder, urls) as job,
        ):
            job.use({Route(job.frost_line.number if count else 0): 1.0})
            took_s, samples = epoch(job, 0)
        row = {"nodes": count, "samples_per_s": round(samples / took_s, 1)}
        found.append({**row, "predicted_samples_per_s": round(predicted.mean_samples_per_s, 1)})
        print(json.dumps(found[-1]), flush=True)
    return found


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

    owned, nodes_of = (loader_factory.owned_rows, loader_factory.fetch_from), EpochStream.nodes
    if not by_owners:
        loader_factory.owned_rows = lambda transport, data, settings, tensors: (None, settings)
        loader_factory.fetch_from = lambda fetcher, fetch: None
        EpochStream.nodes = count
    try:
        with some_nodes(folder, kept, count, device_batch=DEVICE_BATCH) as (nodes, urls):
            for node in nodes:
                Sent(node, link)
            with a_job(folder, urls, observe) as job:
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
        (loader_factory.owned_rows, loader_factory.fetch_from), EpochStream.nodes = owned, nodes_of


def a_job(folder, urls, observe=None):
    settings = LoaderSettings(
        cache_bytes=0, device_batch=DEVICE_BATCH, hedge_quantile=1.0, requests_in_flight=max(8, 4 * len(urls))
    )
    return fl.offload(
        frozen(), fl.Dataset(folder), preprocess=tiny_preprocess(), near=urls, accuracy="exact", settings=settings,
        observe=observe,
    )  # fmt: skip


def epoch(job, number):
    started = time.monotonic()
    samples = sum(len(batch) for batch in job.loader(32, shuffle=True, seed=3, epoch=number))
    return time.monotonic() - started, samples


if __name__ == "__main__":
    main()
