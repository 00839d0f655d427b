"""Stores at the far end of a long link, read by a plain loader itself: how much of its rate is left?

    python benchmarks/far_stores.py --data DIR [--mbit 100] [--round-trips 0,20,75,150] [--stores SeaweedFS,Cassandra]

A SeaweedFS, and then a Cassandra (`scripts/cassandra.sh` fetches it), hold the same photographs at one end of a
wide-area link (`wide_link.py`), each side on a core of its own. A plain loader with default settings (nothing cached,
64 pixels, JPEGs decoded at a reduced scale, so that the link is the limit) reads them across it, in order, from cold.
Told of each: samples a second of the whole pass; megabits of samples a second that arrived from --steady-after on, when
the window's bounds have been found, and their share of those without delay; and the first
batch. Needs root. With --out FILE (without suffix) also JSON and a table; cells that the JSON has are kept beside.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

from links import STORE, TRAINER, Inside, answer_questions
from wide_link import STORE_ADDRESS, WideLink

STORES = ("SeaweedFS", "Cassandra")
SIDE, BATCH = 64, 16


def main():
    wanted = arguments()
    if wanted.inside:
        {"store": store_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    support = Path(__file__).parents[1] / "tests"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(support), os.environ.get("PYTHONPATH")]))
    cells = earlier(wanted)
    for store in wanted.stores:
        for round_trip_ms in wanted.round_trips:
            found = over_one_link(wanted, store, round_trip_ms)
            cells = [cell for cell in cells if (cell["store"], cell["round_trip_ms"]) != (store, round_trip_ms)]
            cells = sorted([*cells, found], key=lambda item: (item["store"], item["round_trip_ms"]))
            keep(wanted, cells)
    print(table(cells))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trips", type=numbers, default=[0, 20, 75, 150], help="ms")
    parser.add_argument("--stores", type=lambda text: text.split(","), default=list(STORES))
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=25)
    parser.add_argument("--steady-after", type=float, default=10)
    parser.add_argument("--out")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text):
    return [float(word) for word in text.split(",")]


def earlier(wanted):
    path = Path(f"{wanted.out}.json")
    return json.loads(path.read_text())["cells"] if wanted.out and path.exists() else []


def over_one_link(wanted, store, round_trip_ms):
    options = ["--data", wanted.data, "--samples", str(wanted.samples), "--store", store]
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit),
        Inside(STORE, 0, __file__, "--inside", "store", *options) as there,
    ):
        served = there.answer()
        with Inside(TRAINER, 1, __file__, "--inside", "trainer", *options, environment=served["environment"]) as here:
            here.ask(do="open", url=served["url"])
            found = here.ask(do="run", seconds=wanted.seconds, steady_after=wanted.steady_after)
    found |= {"store": store, "round_trip_ms": round_trip_ms, "mbit": wanted.mbit, "load": os.getloadavg()[0]}
    print(
        f"{store:10} {round_trip_ms:4.0f} ms {found['steady_mbit']:6.1f} Mbit/s, "
        f"{found['samples_per_s']:6.1f} samples/s in all, "
        f"first batch after {found['first_batch_s']:.2f} s",
        flush=True,
    )
    return found


def store_inside(wanted):
    """Serve the first photographs of each class until standard input ends."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        few = some_of(Path(wanted.data), Path(folder) / "few", wanted.samples)
        place = Path(folder) / "store"
        place.mkdir()
        url, environment = {"SeaweedFS": seaweed_with, "Cassandra": cassandra_with}[wanted.store](stack, place, few)
        print(json.dumps({"url": url, "environment": environment}), flush=True)
        sys.stdin.read()


def some_of(data, folder, count):
    classes = sorted(path for path in data.iterdir() if path.is_dir() and path.name[0] != ".")
    for class_ in classes:
        (folder / class_.name).mkdir(parents=True)
        for path in sorted(class_.iterdir())[: -(-count // len(classes))]:
            shutil.copy(path, folder / class_.name)
    return folder


def seaweed_with(stack, place, few):
    from support.seaweed import seaweed

    server = stack.enter_context(seaweed(place, host=STORE_ADDRESS))
    server.put_folder(few, "photographs")
    return "s3://photographs", server.environment()


def cassandra_with(stack, place, few):
    import frostline as fl
    from frostline.datasets.copy.cql import put_into_table
    from support.cassandra import KEYSPACE, cassandra

    server = stack.enter_context(cassandra(place, host=STORE_ADDRESS, heap_mb=512))
    url = f"cql://{server.place}/{KEYSPACE}/photographs?protocol=3"
    put_into_table(fl.Dataset(few, cache=place), url, observe=lambda _: None)
    return url, {}


def trainer_inside(wanted):
    del wanted
    with tempfile.TemporaryDirectory() as cache:
        side = Trainer(Path(cache))
        answer_questions({"open": side.open, "run": side.run})


class Trainer:
    """The program at the trainer's end."""

    def __init__(self, cache):
        self._cache = cache
        self._data = None

    def open(self, url):
        import frostline as fl

        self._data = fl.Dataset(url, cache=self._cache)
        return {"samples": len(self._data)}

    def run(self, *, seconds, steady_after):
        import frostline as fl
        from frostline.core.config import LoaderSettings
        from frostline.preprocess.steps import Decode

        whole = fl.preprocess.imagenet(SIDE)
        preprocess = replace(whole, steps=(Decode(reduced=True), *whole.steps[1:]))
        with fl.offload(None, self._data, preprocess=preprocess, settings=LoaderSettings(cache_bytes=0)) as job:
            started, done, first, steady = time.perf_counter(), 0, None, None
            for batch in chain.from_iterable(job.epochs(BATCH, range(1 << 20), shuffle=True, seed=0)):
                at = time.perf_counter() - started
                done += len(batch)
                first = at if first is None else first
                if steady is None and at >= steady_after:
                    steady = (at, job.statistics().wire_bytes)
                if at >= seconds:
                    received = job.statistics().wire_bytes
                    break
        return {
            "samples_per_s": done / at,
            "steady_mbit": 8e-6 * (received - steady[1]) / (at - steady[0]),
            "first_batch_s": first,
        }


def keep(wanted, cells):
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps({"command": sys.argv[1:], "cells": cells}, indent=1) + "\n")
        Path(f"{wanted.out}.md").write_text(table(cells))


def table(cells):
    lines = [
        "| store | round trip | steady Mbit/s | of no delay | samples/s in all | first batch |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    near = {cell["store"]: cell["steady_mbit"] for cell in cells if not cell["round_trip_ms"]}
    for cell in cells:
        share = f"{cell['steady_mbit'] / near[cell['store']]:.0%}" if cell["store"] in near else ""
        lines.append(
            f"| {cell['store']} | {cell['round_trip_ms']:.0f} ms | {cell['steady_mbit']:.1f} | {share} "
            f"| {cell['samples_per_s']:.1f} | {cell['first_batch_s']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
