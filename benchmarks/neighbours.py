"""Neighbouring places of one object in S3: each by a request of its own beside joined requests.

`joined` is `stores.reads`, where one caller reads all; `together` is `stores.reads`, where
threads ask for one place each, as a node's do.

    python benchmarks/neighbours.py [--places 960] [--rounds 3]

Runs a SeaweedFS on this machine, with one object of 100 KB places, as a tar of photographs is. Prints places a second
and milliseconds of the client's processor time a place, at most 32 requests at a time: in order, and shuffled.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZE = 100_000
AT_ONCE = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--places", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    from frostline.stores.protocols import Place
    from support.seaweed import seaweed

    ordered = [Place("photos.tar", number * SIZE, SIZE - 500) for number in range(wanted.places)]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    found = {}
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder)) as server:
        os.environ |= server.environment()
        server.make_bucket("neighbours")
        server.put("neighbours/photos.tar", os.urandom(wanted.places * SIZE))
        for _ in range(wanted.rounds):
            for order, places in (("in order", ordered), ("shuffled", shuffled)):
                for name, read in (("single", single), ("joined", joined), ("together", together)):
                    found.setdefault((order, name), []).append(measured(read, places))
    for (order, name), rows in found.items():
        rate, cpu = (statistics.median(values) for values in zip(*rows, strict=True))
        print(f"{order:9} {name:8} {rate:6.0f} places/s  {cpu:.2f} ms of CPU a place")


def measured(read, places):
    from frostline.stores.open import open_store

    store = open_store("s3://neighbours")
    store.read("photos.tar", 0, 1)
    started, cpu = time.perf_counter(), time.process_time()
    read(store, places)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return len(places) / seconds, 1e3 * cpu / len(places)


def single(store, places):
    with ThreadPoolExecutor(AT_ONCE) as threads:
        assert sum(threads.map(lambda place: len(store.read(*place)), places)) == len(places) * (SIZE - 500)


def together(store, places):
    from frostline.stores.reads import SharedReads

    # A node's requests, one after another; its threads take the samples of each in their order.
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for start in range(0, len(places), 8 * AT_ONCE):
            asked = places[start : start + 8 * AT_ONCE]
            reader = SharedReads(store, asked, lambda nbytes: Ample())
            read = threads.map(reader.read, *zip(*asked, strict=True))
            assert sum(map(len, read)) == len(asked) * (SIZE - 500)
            reader.close()


class Ample:
    """Memory of which there is enough."""

    def release(self):
        pass


def joined(store, places):
    from frostline.stores.reads import BatchedReads

    reader = BatchedReads(store)
    nbytes = 0
    # As many requests of a node's size at a time as their threads can use.
    for start in range(0, len(places), 8 * AT_ONCE):
        for _, (data, _) in reader.read_many(places[start : start + 8 * AT_ONCE], maximum=AT_ONCE):
            nbytes += len(data)
    assert nbytes == len(places) * (SIZE - 500)


if __name__ == "__main__":
    main()
