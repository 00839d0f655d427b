"""Several tenants with networks of their own on one node: does each get its share, and does the node stay as fast?

    python benchmarks/tenants.py --data DIR [--tenants 1,2,5,10,20,40] [--rules fair,hapi,fixed] [--out FILE]
    python benchmarks/tenants.py --data DIR --architectures resnet18 --rules fair --rounds 3

For every number of tenants and every rule a node process is started. Each tenant has a network of its own (eight
architectures in turn, each with other weights) and always several requests under way, as many as every other whatever
its weight, of sizes that fill no run. With one architecture, and what it does alone measured anew in each round, totals
of many tenants are compared with one tenant's and nothing else. When all are warm, the node's statistics are read
twice, some time apart; shares are those from the first request on.
Told are:

* total: what the tenants had, in seconds of their networks alone on the same node, a second. It says how much of one
  tenant's throughput is left when there are many, whatever networks they bring;
* work: the same in the node's seconds of processor time instead of seconds: what is left of one tenant's work for
  each processor second. Other programs on the machine change the first and hardly this;
* Jain's index of the tenants' device seconds divided by their weights, and the share farthest from its weight;
* how many tenants failed, and how often a busy node asked to wait;
* the node's memory at its peak beside its budget; rows a run that were not empty, and how many came from others.

Equal weights first, then, for the rule that knows weights, 1, 2, 3, 4 in turn.
"""

import hashlib
import itertools
import json
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from harness import doing, markdown, processor_s_of, run
from parts.networks import TINY, Tiny
from PIL import Image

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import FrostlineError, Unavailable, UnknownPrefix
from frostline.datasets import Dataset
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.process import start_node
from frostline.preprocess import imagenet
from frostline.wire.messages import FeatureRequest

ARCHITECTURES = (
    "resnet18",
    "mobilenet_v3_small",
    "squeezenet1_1",
    "mobilenet_v2",
    "shufflenet_v2_x1_0",
    "mnasnet0_5",
    "regnet_y_400mf",
    "mobilenet_v3_large",
)
SIDE = 96
# None is a multiple of the rows of a run.
ROWS = (20, 44, 12, 30)
# Requests under way in all, so that a few tenants too always have rows that wait; and the least of one tenant.
IN_FLIGHT, MIN_IN_FLIGHT = 24, 3
OVERSEER = "overseer"


QUICK = {
    "tenants": "2",
    "rules": "fair",
    "weights": "unequal",
    "architectures": TINY,
    "seconds": 0.5,
    "seconds_each": 0.0,
    "memory": 512,
}


def options(parser):
    parser.add_argument("--tenants", default="1,2,5,10,20,40")
    parser.add_argument("--beside", help="numbers of tenants for the rules beside fair, where fewer are enough")
    parser.add_argument("--rules", default="fair,hapi,fixed")
    parser.add_argument("--weights", default="equal,unequal")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--seconds", type=float, default=10.0, help="least seconds of a measurement")
    parser.add_argument("--seconds-each", type=float, default=1.2, help="seconds of it for each weight of a tenant")
    parser.add_argument("--device-batch", type=int, default=8, help="rows of a run; few, so that shares show soon")
    parser.add_argument("--alone", type=Path, help="a result of before, to take from it what networks do alone")
    parser.add_argument("--memory", type=int, default=3072, help="MiB")


def measure(wanted):
    counts = [int(word) for word in wanted.tenants.split(",")]
    beside = [int(word) for word in (wanted.beside or wanted.tenants).split(",")]
    architectures, cells = wanted.architectures.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        data = small_copies(Dataset(wanted.data), Path(folder) / "images")
        networks = make_networks(max(counts), architectures)
        for _ in range(wanted.rounds):
            rates = known_rates(wanted)
            if rates is None:
                rates = rates_alone(wanted, data, networks[: len(architectures)])
            for rule in wanted.rules.split(","):
                for weights in weightings(rule, counts if rule == "fair" else beside, wanted.weights):
                    cells.append(one_cell(wanted, data, networks[: len(weights)], rule, weights, rates))
                    yield {"alone_rows_per_s_and_per_cpu_s": rates, "cells": cells}


def known_rates(wanted):
    """What networks do alone, of an earlier result; the quick form compares with nothing."""
    if wanted.alone is None:
        return {} if wanted.quick else None
    found = json.loads(wanted.alone.read_text())
    return found.get("figures", found)["alone_rows_per_s_and_per_cpu_s"]


def rates_alone(wanted, data, networks):
    """Rows a second, and a second of processor time, of each architecture on a node of its own."""
    rates = {}
    for network in networks:
        cell = one_cell(wanted, data, [network], "fair", [1.0], {})
        rates[network[0]] = cell["rows_per_s"], cell["rows_per_cpu_s"]
        doing(f"{network[0]} alone: {cell['rows_per_s']:.0f} rows/s")
    return rates


def small_copies(dataset, folder):
    """The photographs made small, so that decoding them does not hide what the device does."""
    folder.mkdir()
    root = Path(dataset.url.removeprefix("file://"))
    for number, name in enumerate(sorted(set(dataset.samples.objects))[:256]):
        with Image.open(root / name) as image:
            made = folder / f"class{number % 2}"
            made.mkdir(exist_ok=True)
            image.convert("RGB").resize((128, 112)).save(made / f"{number:04}.jpg", quality=90)
    return Dataset(str(folder))


def make_networks(count, architectures):
    """A prefix for each tenant: every architecture is traced once, and each has its weights a little changed."""
    preprocess = imagenet(SIDE)
    traced, made = {}, []
    for number in range(count):
        name = architectures[number % len(architectures)]
        if name not in traced:
            torch.manual_seed(0)
            traced[name] = cut_network(freeze(network_of(name).eval(), "features"), preprocess.shape)
        network = traced[name]
        factor = 1 + 1e-3 * (number // len(architectures))
        tensors = {
            key: tensor * factor if tensor.is_floating_point() else tensor
            for key, tensor in network.prefix.tensors.items()
        }
        artifact = write_prefix(replace(network.prefix, tensors=tensors))
        made.append((name, artifact, network.cuts[-1].number))
    return made


def network_of(name):
    if name == TINY:
        return Tiny()
    import torchvision

    return getattr(torchvision.models, name)()


def weightings(rule, counts, kinds):
    for count in counts:
        if "equal" in kinds.split(","):
            yield [1.0] * count
        if "unequal" in kinds.split(",") and rule == "fair" and count > 1:
            yield [1.0 + number % 4 for number in range(count)]


def one_cell(wanted, data, networks, rule, weights, rates):
    """One cell: tenants with these networks and weights on a node with this rule."""
    count = len(networks)
    lanes = max(MIN_IN_FLIGHT, IN_FLIGHT // count)
    settings = NodeSettings(
        memory_bytes=wanted.memory << 20,
        batching=rule,
        device_batch=wanted.device_batch,
        max_requests=lanes * count + count + 4,
        tenants=(
            *(tenant(f"t{number}", weight=weight) for number, weight in enumerate(weights)),
            tenant(OVERSEER, sees_all=True),
        ),
    )
    window_s = max(wanted.seconds, wanted.seconds_each * sum(weights))
    with ExitStack() as stack:
        node = stack.enter_context(start_node((data.url,), settings))
        overseer = stack.enter_context(closing(HttpTransport(node.url, LoaderSettings(token=OVERSEER))))
        idle = memory_of(node.pid, "VmRSS")
        jobs = [Job(node.url, f"t{number}", data, *network) for number, network in enumerate(networks)]
        stop = threading.Event()
        threads = [threading.Thread(target=job.keep_asking, args=(stop, lane)) for job in jobs for lane in range(lanes)]
        for job in jobs:
            job.upload()
        for thread in threads:
            thread.start()
        for job in jobs:
            job.warm.wait(120)
        before, began, used = overseer.node_statistics(), time.monotonic(), processor_s_of(node.pid)
        stop.wait(window_s)
        after, took_s, used = overseer.node_statistics(), time.monotonic() - began, processor_s_of(node.pid) - used
        stop.set()
        for thread in threads:
            thread.join()
        spent = {"seconds": took_s, "cpu_seconds": used, "memory_peak_bytes": memory_of(node.pid, "VmHWM") - idle}
        return cell_of(rule, weights, jobs, rates, before, after, spent, settings)


def cell_of(rule, weights, jobs, rates, before, after, spent, settings):
    def grown(name, tenant=None):
        new, old = (item["totals"] if tenant is None else item["tenants"][tenant]["totals"] for item in (after, before))
        return new[name] - old[name]

    def alone_s(kind):
        return [count / rates[job.name][kind] for job, count in zip(jobs, rows, strict=True)]

    took_s = spent["seconds"]
    names = [job.tenant for job in jobs]
    # From the first request on: a first run takes longer, is paid for, and would be made up for in what follows.
    seconds = np.array([after["tenants"][name]["totals"]["compute_s"] for name in names])
    fair = seconds / np.array(weights)
    shares = seconds / seconds.sum() / (np.array(weights) / sum(weights))
    rows = [grown("samples", name) for name in names]
    runs = max(1, grown("runs"))
    return {
        "rule": rule,
        "tenants": len(jobs),
        "weights": "equal" if len(set(weights)) == 1 else "1, 2, 3, 4 in turn",
        **spent,
        "rows_per_s": sum(rows) / took_s,
        "rows_per_cpu_s": sum(rows) / spent["cpu_seconds"],
        "total": sum(alone_s(0)) / took_s if rates else 1.0,
        "work": sum(alone_s(1)) / spent["cpu_seconds"] if rates else 1.0,
        "device_busy": grown("compute_s") / took_s,
        "jain": float(fair.sum() ** 2 / (len(fair) * (fair**2).sum())),
        "shares": [round(float(share), 4) for share in shares],
        "farthest_share": float(shares[np.abs(shares - 1).argmax()]),
        "failed": sorted({f"{job.name}: {job.failure}" for job in jobs if job.failure}),
        "failed_tenants": sum(bool(job.failure) for job in jobs),
        "asked_to_wait": sum(job.waits for job in jobs),
        "memory_budget_bytes": settings.memory_bytes,
        "shares_within": all(item["peak_bytes"] <= item["total_bytes"] for item in after["memory"].values()),
        "rows_per_run": sum(rows) / runs,
        "merged_per_run": grown("rows_merged") / runs,
        "evicted": after["totals"]["evicted"],
        "uploaded_again": sum(job.uploads for job in jobs),
    }


class Job:
    """One tenant: its network, and threads that ask for features as fast as they get them."""

    def __init__(self, url, tenant, data, name, artifact, cut):
        self.tenant = tenant
        self.name = name
        self.failure = None
        self.waits = 0
        self.uploads = 0  # beside the first
        self.warm = threading.Event()
        self._artifact = artifact
        self._digest = digest_of(artifact)
        self._cut = cut
        self._data = data
        self._transport = HttpTransport(url, LoaderSettings(token=tenant))

    def upload(self):
        self._transport.put_prefix(self._digest, self._artifact)

    def keep_asking(self, stop, lane):
        for number in itertools.count(lane):
            if stop.is_set() or self.failure:
                break
            try:
                try:
                    self._take(number, stop)
                except UnknownPrefix:  # dropped for others since: it is sent again, as a loader does
                    self.uploads += 1
                    self.upload()
                    self._take(number, stop)
            except (UnknownPrefix, Unavailable) as error:  # too late, or the node has no memory: it asks again later
                self.waits += 1
                stop.wait(getattr(error, "retry_after_s", 0.2))
            except FrostlineError as error:
                self.failure = f"{type(error).__name__}: {error}"
            self.warm.set()

    def _take(self, number, stop):
        with closing(self._transport.features(self._request(number))) as answer:
            for batch in answer:
                del batch
                if stop.is_set():
                    break

    def _request(self, number):
        samples = self._data.samples
        rows = np.arange(number * 50, number * 50 + ROWS[number % len(ROWS)]) % len(samples)
        return FeatureRequest(
            data=self._data.url,
            samples=samples.take(rows),
            prefix=self._digest,
            cut=self._cut,
            preprocess=imagenet(SIDE).to_json(),
        )


def tenant(name, **fields):
    return TenantSettings(name=name, token_sha256=hashlib.sha256(name.encode()).hexdigest(), **fields)


def memory_of(pid, field):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def table(found):
    head = ["rule", "tenants", "weights", "total", "work", "Jain", "farthest share", "failed", "MB", "rows a run"]
    rows = []
    for cell in found["cells"]:
        figures = [cell[name] for name in ("total", "work", "jain", "farthest_share", "failed_tenants")]
        memory = f"{cell['memory_peak_bytes'] / 1e6:.0f} of {cell['memory_budget_bytes'] / 1e6:.0f}"
        rows.append([cell["rule"], cell["tenants"], cell["weights"], *figures, memory, cell["rows_per_run"]])
    return markdown(head, rows)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, pictures=16)
