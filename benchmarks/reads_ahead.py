"""Samples a second that a node reads of a store that is far away, by how many reads it may have under way.

    python benchmarks/reads_ahead.py [--delay 0.05] [--threads 16 32 64 128 256] [--samples 2048] [--requests 4]

The store is memory, each read of which takes the delay longer; as a table it is given many keys at once and takes the
delay for all of them. Each sample is read once, in requests of 256, encoded and decoded.
"""

import argparse
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
AT_ONCE = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--threads", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=4)
    wanted = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    with tempfile.TemporaryDirectory() as folder:
        images, stores = far_away(Path(folder) / "images", wanted.samples, wanted.delay)
        for kind, store in stores.items():
            for threads in wanted.threads if kind == "objects" else wanted.threads[:1]:
                for cut, what in enumerate(("encoded", "decoded")):
                    per_s = measured(images, store, cut, threads, wanted)
                    print(f"{kind}, {threads} threads, {what}: {per_s:.0f} samples/s", flush=True)


def far_away(images, count, delay_s):
    from frostline.stores.open import open_store
    from frostline.stores.retry import Delayed
    from support.nodes import make_images

    class Table(Delayed):
        def read_many(self, places, *, maximum=1024):
            time.sleep(delay_s)
            for index, place in enumerate(places):
                yield index, memory.read_version(*place)

    memory = open_store(f"memory://{uuid.uuid4()}")
    for path in make_images(images, count).iterdir():
        memory.write(path.name, path.read_bytes())
    return images, {"objects": Delayed(memory, delay_s), "table": Table(memory, delay_s)}


def measured(images, store, cut, threads, wanted):
    from frostline.core.config import NodeSettings
    from frostline.node import Node
    from frostline.node import pipeline as requests
    from support.nodes import request, samples_of

    requests.open_samples = lambda *_, **__: store
    samples = samples_of(images)

    def asked(start):
        some = samples.take(np.arange(start, min(start + AT_ONCE, len(samples))))
        return sum(len(batch) for batch in node.features(request(images, cut, samples=some)))

    with Node(NodeSettings(read_threads=threads), (images.as_uri(),)) as node:
        started = time.perf_counter()
        with ThreadPoolExecutor(wanted.requests) as pool:
            read = sum(pool.map(asked, range(0, len(samples), AT_ONCE)))
        return read / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
