"""What ``next()`` costs a training loop when its batch is ready: seconds, and processor time of the loop's own thread.

    python benchmarks/ready_batches.py --data DIR [--batches 30] [--rounds 3] [--out FILE]

The loop sleeps between batches for as long as others need to make the next ones ready, so that ``next()`` never waits
for the store: photographs decoded to 224 pixels by a node in the process, and rows of features of 5 kB and 600 kB that
a scripted source has in memory, which come from it or from the job's cache. Batches have 64 samples.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import frostline as fl
from frostline import preprocess
from frostline.cache import FeatureCache, Scope, TieredCache
from frostline.core import FeatureBatch, Route, Samples
from frostline.core.config import LoaderSettings
from frostline.engines.machine import hardware_name
from frostline.loaders import ArrayLoader
from frostline.loaders.row_source import RowSource
from frostline.ordering import Order
from frostline.prefetch.requests import Deal

BATCH = 64
PER_REQUEST = 32
ROW_BYTES = {"features of 5 kB": 5_120, "features of 600 kB": 602_112}
SETTINGS = LoaderSettings(cache_bytes=0, samples_per_request=PER_REQUEST)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    found = {"hardware": hardware_name("cpu"), "cells": []}
    with fl.offload(None, fl.Dataset(wanted.data), preprocess=preprocess.imagenet(224), settings=SETTINGS) as job:
        batches = min(wanted.batches, len(job.arrays(BATCH)) - 4)
        found["cells"].append(cell("photographs", wanted, lambda epoch: job.arrays(BATCH, epoch=epoch), batches, 0.6))
    for name, row_bytes in ROW_BYTES.items():
        for is_kept in (False, True):
            label = f"{name}, {'kept' if is_kept else 'arriving'}"
            make = rows_in_memory(row_bytes, wanted.batches + 4, is_kept=is_kept)
            found["cells"].append(cell(label, wanted, make, wanted.batches, 0.1))
    if wanted.out:
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")


def cell(name, wanted, make, batches, pause_s):
    """Medians, and the least and the most of the rounds' medians, in milliseconds."""
    rounds = [one_pass(make(turn), batches, pause_s) for turn in range(wanted.rounds)]
    waits, spent = ([1e3 * statistics.median(item[kind] for item in some) for some in rounds] for kind in (0, 1))
    found = {"what": name, "batches": batches}
    for kind, values in (("next_ms", waits), ("cpu_ms", spent)):
        found[kind] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    print(
        name, {kind: {item: round(value, 3) for item, value in found[kind].items()} for kind in ("next_ms", "cpu_ms")}
    )
    return found


def one_pass(loader, batches, pause_s):
    """Seconds of each ``next()``, and of the processor in this thread."""
    found, passes = [], iter(loader)
    next(passes)
    for _ in range(batches):
        time.sleep(pause_s)
        started, spent = time.perf_counter(), time.thread_time()
        next(passes)
        found.append((time.perf_counter() - started, time.thread_time() - spent))
    passes.close()
    return found


class Listed:
    digest = ""

    def __init__(self, count):
        ids, zeros = np.arange(count), np.zeros(count, np.int64)
        self.samples = Samples(ids=ids, objects=[""] * count, offsets=zeros, lengths=zeros + 9, labels=zeros)


class OneWay:
    def __init__(self, row_bytes):
        self._row_bytes = row_bytes

    def deal(self, left):
        return Deal(route=Route(1), rows=min(PER_REQUEST, left), bytes_per_sample=self._row_bytes)


def rows_in_memory(row_bytes, batches, *, is_kept):
    """Makes loaders over rows that a source answers at once, or that a cache has."""
    data, width = Listed(batches * BATCH), row_bytes // 4
    cache = None
    if is_kept:
        scope = Scope(data="", prefix="", cut=1, preprocess="", engine="", shapes=((width,),), dtypes=("float32",))
        cache = TieredCache(FeatureCache(scope, 2 * len(data.samples) * row_bytes), None)
        for ids in np.split(data.samples.ids, batches):
            cache.put(ids, (np.ones((len(ids), width), np.float32),))

    def fetch(samples, _route):
        yield FeatureBatch(ids=samples.ids, tensors=(np.ones((len(samples), width), np.float32),))

    source = RowSource(
        fetch=fetch,
        dealer=OneWay(row_bytes),
        cache=cache,
        unreadable=lambda: np.zeros(0, np.int64),
        settings=SETTINGS,
        observe=lambda event: None,
    )
    return lambda epoch: ArrayLoader(
        lambda _: source, data, order=Order(size=len(data.samples), seed=0, epoch=epoch), batch_size=BATCH
    )


if __name__ == "__main__":
    main()
