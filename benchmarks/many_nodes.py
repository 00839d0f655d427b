"""Epochs over one to eight nodes whose computing is simulated: throughput, hits, unlike nodes, crossing, overlap.

    python benchmarks/many_nodes.py --samples 6144 --rate 25 --link 75
    python benchmarks/many_nodes.py --parts crossing --trainer 110 --samples 3072 --nodes 1,2,3,4,5,6,7,8
    python benchmarks/many_nodes.py --parts overlap --rate 100 --samples 3072
    python benchmarks/many_nodes.py --parts unlike --rate 50 --samples 1536

All nodes are real ones in this process, over HTTP on loopback, each with a cache of its own. Their engine is a test
engine and declared as one: it computes a tiny network, and then waits until as much time has passed as a device of
`--rate` samples a second would need, so that eight nodes fit on two cores. The trainer keeps nothing.

- nodes: each number of nodes runs two epochs twice: by owners, and with requests to the least busy node. What a node
  answers waits in the same way for a link of its own of `--link` samples a second, which only the second epoch feels,
  since that computes nothing.
- unlike: two nodes, of which one answers at `--rate` samples a second, and the other at a part of that.
- crossing: all frozen layers at the trainer alone, whose device is simulated in the same way at `--trainer` samples a
  second, and then at each number of nodes. Beside each stands what the plan (``frostline plan --nodes``) predicts from
  declared rates.
- overlap: one node, and a loop that waits in each batch for as long as its training would take. The shorter of both,
  extraction and training, can be hidden behind the longer one whole.
"""

import os
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from harness import markdown, run

import frostline as fl
from frostline.core import Route
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

DEVICE_BATCH, BATCH = 32, 32
COMPUTED = []  # rows of each run of a simulated device
QUICK = {"parts": "nodes,unlike,crossing,overlap", "nodes": "2", "samples": 96}
QUICK |= {"rate": 400.0, "link": 800.0, "trainer": 600.0}


def options(parser):
    parser.add_argument("--parts", default="nodes")
    parser.add_argument("--samples", type=int, default=4608)
    parser.add_argument("--rate", type=float, default=20.0, help="samples a second of each node's device")
    parser.add_argument("--link", type=float, default=60.0, help="samples a second that each node can send")
    parser.add_argument("--trainer", type=float, default=110.0, help="samples a second of the trainer's device")
    parser.add_argument("--nodes", default="1,2,4,8")


def measure(wanted):
    torch.set_num_threads(1)
    parts = {"nodes": epochs, "unlike": unlike, "crossing": crossing, "overlap": overlap}
    found = {}
    with tempfile.TemporaryDirectory() as scratch, devices_of(wanted.rate):
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        folder = image_folder(Path(scratch, "images"), per_class=wanted.samples // 3, size=(40, 36))
        for part in wanted.parts.split(","):
            found[part] = []
            for row in parts[part](folder, Path(scratch, part), wanted):
                found[part].append(row)
                yield found


def counts(wanted):
    return [int(word) for word in wanted.nodes.split(",")]


def epochs(folder, kept, wanted):
    for count in counts(wanted):
        for by_owners in (True, False) if count > 1 else (True,):
            COMPUTED.clear()
            row = two_epochs(folder, kept / f"{count}-{by_owners}", count, by_owners=by_owners, link=wanted.link)
            check(row, wanted.samples // 3 * 3, wanted.rate, sum(COMPUTED))
            yield row


def unlike(folder, kept, wanted):
    """The second of two nodes as fast as the first, and two, four and ten times slower."""
    for slower in (1, 2, 4, 10):
        rates = (wanted.rate, wanted.rate / slower)
        some = some_nodes(folder, kept / str(slower), 2, device_batch=DEVICE_BATCH)
        with some as (nodes, urls), a_job(folder, urls) as job:
            for node, rate in zip(nodes, rates, strict=True):
                Sent(node, rate)
            job.use({Route(job.frost_line.number): 1.0})
            took_s, samples = epoch(job, 0)
            asked_of_slower = served(nodes)[1]
        row = {"slower": slower, "samples_per_s": samples / took_s, "share_of_slower": asked_of_slower / samples}
        yield {**row, "of_what_both_can_do": samples / took_s / sum(rates)}


def crossing(folder, kept, wanted):
    """The trainer alone, and then as many nodes as are wanted, beside what the plan predicts for them."""
    seconds = (0.0, 0.0, 1 / wanted.rate)
    trainer, link = profile((0.0, 0.0, 1 / wanted.trainer)), Link(bytes_per_s=1e12, round_trip_s=0.0)
    declared = situation(seconds=seconds, trainer=trainer, link=link)
    with trainer_of(wanted.trainer):
        for count in (0, *counts(wanted)):
            predicted = make_plan(vary(declared, nodes=max(1, count)), "freeze" if count else "baseline")
            nodes = some_nodes(folder, kept / str(count), max(1, count), device_batch=DEVICE_BATCH)
            with nodes as (_, urls), a_job(folder, urls) as job:
                job.use({Route(job.frost_line.number if count else 0): 1.0})
                took_s, samples = epoch(job, 0)
            row = {"nodes": count, "samples_per_s": samples / took_s}
            yield {**row, "predicted_samples_per_s": predicted.mean_samples_per_s}


def overlap(folder, kept, wanted):
    for times in (0.25, 1.0, 4.0):
        trained_per_s = times * wanted.rate
        extraction_s, training_s = wanted.samples / wanted.rate, wanted.samples / trained_per_s
        nodes = some_nodes(folder, kept / str(times), 1, device_batch=DEVICE_BATCH)
        with nodes as (_, urls), a_job(folder, urls) as job:
            job.use({Route(job.frost_line.number): 1.0})
            started = time.monotonic()
            for batch in job.loader(BATCH, shuffle=True, seed=3):
                time.sleep(len(batch) / trained_per_s)
            took_s = time.monotonic() - started
        hidden = (extraction_s + training_s - took_s) / min(extraction_s, training_s)
        row = {"trained_samples_per_s": trained_per_s, "extraction_s": extraction_s, "training_s": training_s}
        yield {**row, "epoch_s": took_s, "hidden_share_of_the_shorter": hidden}


@contextmanager
def trainer_of(rate):
    """Let every run of the trainer's engine take as long as on a device of that rate."""
    run_batch = TorchLocalPrefix._run_batch  # noqa: SLF001 (the trainer's device)

    def slowed(self, arrays, size):
        started = time.monotonic()
        result = run_batch(self, arrays, size)
        time.sleep(max(0.0, started + size / rate - time.monotonic()))
        return result

    TorchLocalPrefix._run_batch = slowed  # noqa: SLF001
    try:
        yield
    finally:
        TorchLocalPrefix._run_batch = run_batch  # noqa: SLF001


@contextmanager
def devices_of(rate):
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
    try:
        yield
    finally:
        TorchEngine.run_divided = compute


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


@contextmanager
def spread(count, *, by_owners):
    """Requests go to the owners of their samples, as they do, or else to the least busy node."""
    owned, nodes_of = (loader_factory.owned_rows, loader_factory.fetch_from), EpochStream.nodes
    if not by_owners:
        loader_factory.owned_rows = lambda transport, data, settings, tensors: (None, settings)
        loader_factory.fetch_from = lambda fetcher, fetch: None
        EpochStream.nodes = count
    try:
        yield
    finally:
        (loader_factory.owned_rows, loader_factory.fetch_from), EpochStream.nodes = owned, nodes_of


def two_epochs(folder, kept, count, *, by_owners, link):
    """Two epochs over some nodes."""
    asked = []

    def on_event(event):
        if isinstance(event, RequestFinished):
            asked.append(event.samples)

    nodes = some_nodes(folder, kept, count, device_batch=DEVICE_BATCH)
    with spread(count, by_owners=by_owners), nodes as (nodes, urls), a_job(folder, urls, on_event) as job:
        for node in nodes:
            Sent(node, link)
        job.use({Route(job.frost_line.number): 1.0})  # all frozen layers at the nodes, whatever a plan says
        first_s, samples = epoch(job, 0)
        before, done = hits(nodes), served(nodes)
        second_s, _ = epoch(job, 1)
        # Of the second epoch: in the first one the job also measures, on samples of any node.
        busiest = max(late - early for early, late in zip(done, served(nodes), strict=True))
        return {
            "nodes": count,
            "spread": "by owners" if by_owners else "least busy",
            "first_epoch_samples_per_s": samples / first_s,
            "second_epoch_samples_per_s": samples / second_s,
            "second_epoch_hits": (hits(nodes) - before) / samples,
            "busiest_node": busiest * count / samples,
            "request_samples_median": statistics.median(asked),
            "requests_of_half_a_device_batch": sum(rows >= DEVICE_BATCH // 2 for rows in asked) / len(asked),
        }


def served(nodes):
    return [node.statistics().totals.samples for node in nodes]


def a_job(folder, urls, on_event=None):
    settings = fl.LoaderSettings(
        cache_bytes=0, device_batch=DEVICE_BATCH, hedge_quantile=1.0, requests_in_flight=max(8, 4 * len(urls))
    )
    options = {"preprocess": tiny_preprocess(), "accuracy": "exact", "settings": settings, "on_event": on_event}
    return fl.offload(frozen(), fl.Dataset(folder), near=urls, **options)


def epoch(job, number):
    started = time.monotonic()
    samples = sum(len(batch) for batch in job.loader(BATCH, shuffle=True, seed=3, epoch=number))
    return time.monotonic() - started, samples


def table(found):
    parts = []
    for rows in found.values():
        head = [name.replace("_", " ") for name in rows[0]]
        parts.append(markdown(head, [list(row.values()) for row in rows]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, data=False)
