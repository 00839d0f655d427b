"""Does a node stay as it is under load for minutes, and what does it do with more clients than it takes?

    python benchmarks/soak.py --data DIR [--seconds 600] [--clients 16] [--crowd 200] [--out FILE]

One node process and clients of four tenants with weights 1, 2, 3 and 4, each with a connection of its own, which ask
for features of random photographs and of all lengths as fast as they get them; one request in eight is given up in the
middle. Told over time: the node's memory, descriptors, threads, latency and samples a second; growth is the median of
the last quarter over that of the second. Then --crowd clients ask at once, more than the node has places: how many were
answered by 429 and how many of these did not say when to come back, the latency of those that were admitted beside that
of as many clients as there are places, and each tenant's part of the device beside its weight.
"""

import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from harness import doing, markdown, run
from parts.networks import Tiny
from tenants import memory_of, tenant

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import FrostlineError, Overloaded
from frostline.datasets import Dataset
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.process import start_node
from frostline.preprocess import imagenet
from frostline.wire.messages import FeatureRequest

SIDE, PLACES = 64, 32
WEIGHTS = (1.0, 2.0, 3.0, 4.0)
OVERSEER = "overseer"
QUICK = {"seconds": 2.0, "every": 0.25, "clients": 4, "crowd": 40, "crowd_seconds": 1.0}


def options(parser):
    parser.add_argument("--seconds", type=float, default=600.0, help="under steady load")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--crowd", type=int, default=200, help="clients that ask at once in the end")
    parser.add_argument("--crowd-seconds", type=float, default=30.0)
    parser.add_argument("--memory", type=int, default=1024, help="MiB of the node's budget")


class Clients:
    """Threads that ask as fast as they are answered."""

    def __init__(self, node, data, prefix, count):
        self._node, self._data = node, data
        self._digest, self._cut = prefix
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._took_s, self.samples, self.refused, self.unsaid, self.failed = [], 0, 0, 0, set()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def latencies(self):
        """Seconds of those that were answered whole since the last call."""
        with self._lock:
            took_s, self._took_s = self._took_s, []
        return took_s

    def _ask(self, number):
        draw = np.random.default_rng(number)
        settings = LoaderSettings(token=f"t{number % len(WEIGHTS)}")
        with closing(HttpTransport(self._node.url, settings)) as way:
            while not self._stop.is_set():
                began = time.perf_counter()
                try:
                    samples = self._take(way, draw)
                except Overloaded as error:
                    with self._lock:
                        self.refused += 1
                        self.unsaid += error.retry_after_s <= 0
                    self._stop.wait(error.retry_after_s)
                except FrostlineError as error:
                    self.failed.add(f"{type(error).__name__}: {error}"[:200])
                    self._stop.wait(0.2)
                else:
                    with self._lock:
                        self.samples += samples
                        self._took_s.append(time.perf_counter() - began)

    def _take(self, way, draw):
        whole = self._data.samples
        samples = whole.take(draw.choice(len(whole), int(draw.integers(1, 1 + min(32, len(whole)))), replace=False))
        wanted = FeatureRequest(
            data=self._data.url,
            samples=samples,
            prefix=self._digest,
            cut=self._cut,
            preprocess=imagenet(SIDE).to_json(),
        )
        gives_up, came = draw.random() < 1 / 8, 0
        with closing(way.features(wanted)) as answer:
            for batch in answer:
                came += len(batch)
                if gives_up:
                    break
        return came


def measure(wanted):
    data = Dataset(wanted.data)
    settings = NodeSettings(
        memory_bytes=wanted.memory << 20,
        max_requests=PLACES,
        cache_bytes=0,
        tenants=(
            *(tenant(f"t{number}", weight=weight) for number, weight in enumerate(WEIGHTS)),
            tenant(OVERSEER, sees_all=True),
        ),
    )
    network = cut_network(freeze(Tiny().eval(), "features"), imagenet(SIDE).shape)
    artifact = write_prefix(network.prefix)
    prefix = digest_of(artifact), network.cuts[-1].number
    with (
        start_node((data.url,), settings) as node,
        closing(HttpTransport(node.url, LoaderSettings(token=OVERSEER))) as way,
    ):
        for number in range(len(WEIGHTS)):
            with closing(HttpTransport(node.url, LoaderSettings(token=f"t{number}"))) as own:
                own.put_prefix(prefix[0], artifact)
        found = {"looks": []}
        with Clients(node, data, prefix, wanted.clients) as clients:
            yield from steady(wanted, node, clients, found)
        found["as_many_as_places"] = crowd(wanted, node, way, data, prefix, PLACES)
        found["crowd"] = crowd(wanted, node, way, data, prefix, wanted.crowd)
        found["after"] = standing(node)
        yield found


def steady(wanted, node, clients, found):
    began = last = time.monotonic()
    samples = 0
    while last - began < wanted.seconds:
        time.sleep(wanted.every)
        now, took_s, done = time.monotonic(), clients.latencies(), clients.samples
        look = {"s": now - began, "samples_per_s": (done - samples) / (now - last), **percentiles(took_s)}
        found["looks"].append({**look, **standing(node)})
        samples, last = done, now
        found["growth"] = {name: growth(found["looks"], name) for name in ("memory_bytes", "descriptors", "threads")}
        found["growth"]["p50_s"] = growth(found["looks"], "p50_s")
        found["failed"] = sorted(clients.failed)
        doing(f"{look['s']:.0f} s: {found['looks'][-1]['memory_bytes'] / 2**20:.0f} MiB, {look['samples_per_s']:.0f}/s")
        yield found


def standing(node):
    own = Path(f"/proc/{node.pid}")
    return {
        "memory_bytes": memory_of(node.pid, "VmRSS"),
        "descriptors": len(list((own / "fd").iterdir())),
        "threads": len(list((own / "task").iterdir())),
    }


def percentiles(took_s):
    if not took_s:
        return {"p50_s": None, "p95_s": None}
    return {"p50_s": float(np.percentile(took_s, 50)), "p95_s": float(np.percentile(took_s, 95))}


def growth(looks, name):
    """Of the last quarter over the second; None while there is no such quarter."""
    figures = [look[name] for look in looks if look[name] is not None]
    part = len(figures) // 4
    return float(np.median(figures[-part:]) / np.median(figures[part : 2 * part])) if part else None


def crowd(wanted, node, way, data, prefix, count):
    """Many clients at once: who is admitted, who is refused, and whose the device is."""
    before = way.node_statistics()["tenants"]
    with Clients(node, data, prefix, count) as clients:
        time.sleep(wanted.crowd_seconds)
        took_s, refused = clients.latencies(), clients.refused
        after = way.node_statistics()["tenants"]
    names = [f"t{number}" for number in range(len(WEIGHTS))]
    spent = np.array([after[name]["totals"]["compute_s"] - before[name]["totals"]["compute_s"] for name in names])
    shares = spent / max(1e-9, spent.sum())
    return {
        "clients": count,
        "answered": len(took_s),
        **percentiles(took_s),
        "refused": refused,
        "refused_without_a_time": clients.unsaid,
        "share_by_weight": [float(share) for share in shares / (np.array(WEIGHTS) / sum(WEIGHTS))],
        "failed": sorted(clients.failed),
    }


def table(found):
    first, last = found["looks"][len(found["looks"]) // 4], found["looks"][-1]
    rows = [
        ["memory, MiB", first["memory_bytes"] / 2**20, last["memory_bytes"] / 2**20, found["growth"]["memory_bytes"]],
        ["descriptors", first["descriptors"], last["descriptors"], found["growth"]["descriptors"]],
        ["threads", first["threads"], last["threads"], found["growth"]["threads"]],
        ["latency, ms", 1e3 * (first["p50_s"] or 0), 1e3 * (last["p50_s"] or 0), found["growth"]["p50_s"]],
    ]
    over = [found[name] for name in ("as_many_as_places", "crowd") if name in found]
    crowds = [
        [
            each["clients"],
            each["answered"],
            1e3 * (each["p50_s"] or 0),
            1e3 * (each["p95_s"] or 0),
            each["refused"],
            each["refused_without_a_time"],
            ", ".join(f"{share:.2f}" for share in each["share_by_weight"]),
        ]
        for each in over
    ]
    head = ["clients", "answered", "p50, ms", "p95, ms", "429", "without a time", "share over weight"]
    steadily = markdown(["of the node", f"at {first['s']:.0f} s", f"at {last['s']:.0f} s", "growth"], rows)
    return steadily + "\n\n" + markdown(head, crowds)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, pictures=16)
