"""Samples of WebDataset shards in a real S3 server: one shard after another, or each by its range in any order.

    python benchmarks/shard_reads.py --data DIR [--rounds 5] [--concurrency 32] [--part-mb 16] [--out FILE]

The photographs of DIR are copied into shards by `frostline ingest`. Each way then reads every photograph once, in as
many threads, and gives its bytes to nobody:

* whole shards: a request a shard, whose members are taken apart on arrival, as WebDataset reads; neighbours stay so;
* ranges in order: a request a sample, in the shards' order;
* ranges joined: in the shards' order, neighbouring members up to 1 MB in one request;
* ranges shuffled: a request a sample, in the seeded order of an epoch over all shards, as a loader asks.

Server and client share the cores. Medians over the rounds of samples and requests a second, the bytes asked for, and
milliseconds of the client's processor time a sample; ways take turns in each round. Writes JSON with --out.
"""

import argparse
import io
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from frostline.datasets import Dataset
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.folders import IMAGE_SUFFIXES, suffix_of
from frostline.engines.machine import hardware_name
from frostline.ordering import Order
from frostline.stores.open import open_store
from frostline.stores.reads import Range, plan_ranges

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.seaweed import seaweed

JOINED_BYTES, GAP_BYTES = 1 << 20, 16 << 10


def main():
    wanted = arguments()
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder)) as server:
        os.environ.update(server.environment())
        server.make_bucket("shards")
        copied = repack(
            Dataset(wanted.data), "s3://shards", "webdataset", part_bytes=wanted.part_mb << 20, observe=lambda _: None
        )
        shards = Shards(Dataset(copied.url))
        ways = {"whole shards": shards.whole, "ranges in order": shards.in_order}
        ways |= {"ranges joined": shards.joined, "ranges shuffled": shards.shuffled}
        rounds = {name: [] for name in ways}
        with ThreadPoolExecutor(wanted.concurrency) as threads:
            for turn in range(wanted.rounds + 1):
                for name, way in ways.items():
                    found = timed(threads, *way())
                    assert found["samples"] == len(shards.rows), f"{name} gave {found['samples']} samples"
                    if turn:  # the first round warms up
                        rounds[name].append(found)
    result = {
        "hardware": hardware_name("cpu"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "samples": len(shards.rows),
        "shards": len(shards.sizes),
        "concurrency": wanted.concurrency,
        "ways": {name: summed_up(found) for name, found in rounds.items()},
    }
    for name, found in result["ways"].items():
        print(f"{name:16} {found}")
    if wanted.out:
        wanted.out.write_text(json.dumps(result, indent=1) + "\n")


class Shards:
    """Each way as a call and what it is called with; a call gives its samples and the bytes that it asked for."""

    def __init__(self, data):
        self.store = open_store(data.url)
        self.sizes = {entry.object: entry.size for entry in self.store.list() if entry.object.endswith(".tar")}
        samples = data.samples
        self.rows = [
            (samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row])) for row in range(len(samples))
        ]

    def whole(self):
        return self._whole, list(self.sizes.items())

    def in_order(self):
        return self._range, self.rows

    def shuffled(self):
        order = Order(size=len(self.rows), seed=0, epoch=0, shuffle=True)
        return self._range, [self.rows[row] for row in order.indices(0, len(self.rows)).tolist()]

    def joined(self):
        reads = []
        for shard in self.sizes:
            asked = [Range(offset, length) for object, offset, length in self.rows if object == shard]
            plan = plan_ranges(asked, max_gap_bytes=GAP_BYTES, max_bytes=JOINED_BYTES)
            inside = [
                [request for request in asked if read.offset <= request.offset < read.stop] for read in plan.reads
            ]
            reads += [(shard, read, some) for read, some in zip(plan.reads, inside, strict=True)]
        return self._joined, reads

    def _whole(self, one):
        data = self.store.read(one[0], 0, one[1])
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = [tar.extractfile(info).read() for info in tar if suffix_of(info.name) in IMAGE_SUFFIXES]
        return len(members), len(data)

    def _range(self, place):
        return 1, len(self.store.read(*place))

    def _joined(self, one):
        shard, read, some = one
        data = self.store.read(shard, read.offset, read.length)
        return sum(len(data[a.offset - read.offset :][: a.length]) == a.length for a in some), len(data)


def timed(threads, call, arguments):
    started, cpu = time.perf_counter(), time.process_time()
    found = list(threads.map(call, arguments))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    samples, nbytes = (sum(column) for column in zip(*found, strict=True))
    return {"samples": samples, "bytes": nbytes, "requests": len(arguments), "seconds": seconds, "cpu_s": cpu_s}


def summed_up(rounds):
    rates = [item["samples"] / item["seconds"] for item in rounds]
    return {
        "samples_per_s": round(statistics.median(rates)),
        "range": [round(min(rates)), round(max(rates))],
        "requests": rounds[0]["requests"],
        "bytes": rounds[0]["bytes"],
        "client_cpu_ms_per_sample": round(
            statistics.median(item["cpu_s"] / item["samples"] * 1e3 for item in rounds), 3
        ),
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--part-mb", type=int, default=16)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
