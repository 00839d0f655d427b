"""Two jobs on one machine that read the same samples in other orders: each for itself, and through an I/O service.

    python benchmarks/io_service.py --data DIR [--samples 1024] [--rounds 3] [--cuts 0,1] [--out FILE]

A node serves photographs in a process of its own. Each job is a process that asks for all of them once, in its own
seeded order, in requests of 32 from four threads, and copies every payload once, as a loader copies it into its batch.
"http" asks the node, "service" a service before the node, "service that reads" one that reads the data itself. Told of
each, the median of the rounds: samples a second of both jobs together, processor seconds of a job for each gigabyte of
payload, and bytes that were read from the store over those of the samples. A service is new in each round, so that it
has kept nothing; "again" is a third job that comes when it has. Cut 0 ships encoded samples, cut 1 pixels of 224.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = 32
THREADS = 4
WAYS = ("http", "service", "service that reads")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cuts", default="0,1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", nargs=3)
    wanted = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if wanted.inside:
        job_inside(wanted, *wanted.inside)
        return
    found = []
    for cut in map(int, wanted.cuts.split(",")):
        rounds = [(way, measured(wanted, cut, way)) for _ in range(wanted.rounds) for way in WAYS]
        for way in WAYS:
            found.append({"cut": cut, "way": way, **median([item for name, item in rounds if name == way])})
            print(json.dumps(found[-1]), flush=True)
    if wanted.out:
        wanted.out.write_text(json.dumps(found, indent=2) + "\n")


def median(rounds):
    names = sorted(set.intersection(*map(set, rounds)))
    return {name: round(statistics.median(item[name] for item in rounds), 4) for name in names}


def measured(wanted, cut, way):
    from frostline.client.http import HttpTransport
    from frostline.core.config import IoSettings, NodeSettings
    from frostline.io_service.handler import Upstream
    from frostline.io_service.start import start_io
    from frostline.node.process import start_node

    roots, settings, memory = (Path(wanted.data).resolve().as_uri(),), NodeSettings(), IoSettings(memory_bytes=3 << 30)
    with ExitStack() as stack:
        if way == "service that reads":
            service = stack.enter_context(start_io(Upstream(roots=roots, node=settings), memory))
            where = service.url
        else:
            where = stack.enter_context(start_node(roots, settings)).url
        if way == "service":
            service = stack.enter_context(start_io(Upstream(near=(where,)), memory))
            where = service.url
        jobs = [stack.enter_context(start_job(wanted, where, cut, seed)) for seed in (1, 2)]
        started = time.perf_counter()
        told = answers(jobs)
        seconds = time.perf_counter() - started
        asker = service.transport() if way != "http" else HttpTransport(where)
        with closing(asker):
            read = asker.node_statistics()["totals"]["bytes_read"]
        row = {
            "samples_per_s": sum(item["samples"] for item in told) / seconds,
            "cpu_s_per_gb": sum(item["cpu_s"] for item in told) / sum(item["bytes"] for item in told) * 1e9,
            "read_times": read / told[0]["encoded_bytes"],
        }
        if way != "http":
            jobs = [stack.enter_context(start_job(wanted, where, cut, 3))]
            started = time.perf_counter()
            again = answers(jobs)[0]
            row["again_samples_per_s"] = again["samples"] / (time.perf_counter() - started)
            row["again_cpu_s_per_gb"] = again["cpu_s"] / again["bytes"] * 1e9
        return row


def start_job(wanted, where, cut, seed):
    command = [sys.executable, __file__, "--data", wanted.data, "--samples", str(wanted.samples)]
    job = subprocess.Popen(
        [*command, "--inside", where, str(cut), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "ready\n"
    return job


def answers(jobs):
    for job in jobs:
        job.stdin.write("go\n")
        job.stdin.flush()
    return [json.loads(job.stdout.readline()) for job in jobs]


def job_inside(wanted, where, cut, seed):
    import numpy as np

    from frostline.client.http import HttpTransport
    from frostline.datasets import Dataset
    from frostline.io_service.client import IoTransport
    from frostline.preprocess import imagenet
    from frostline.wire.messages import FeatureRequest

    data = Dataset(wanted.data)
    some = np.linspace(0, len(data) - 1, min(wanted.samples, len(data))).astype(np.int64)
    order = np.random.default_rng(int(seed)).permutation(some)
    transport = IoTransport(where) if where.startswith("unix:") else HttpTransport(where)
    preprocess = imagenet(224).to_json()

    def fetch(rows):
        samples = data.samples.take(rows)
        asked = FeatureRequest(
            data=data.url,
            reading=data.manifest.reading,
            samples=samples,
            prefix=None,
            cut=int(cut),
            preprocess=preprocess,
        )
        nbytes = 0
        for batch in transport.features(asked):
            for tensor in batch.tensors:
                slab[: tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
            for item in batch.encoded:
                slab[: len(item)] = np.frombuffer(item, np.uint8)
            nbytes += batch.nbytes
        return nbytes

    slab = np.empty(64 << 20, np.uint8)
    slab[:] = 0
    with closing(transport), ThreadPoolExecutor(THREADS) as threads:
        transport.health()
        print("ready", flush=True)
        sys.stdin.readline()
        before = time.process_time()
        nbytes = sum(threads.map(fetch, [order[start : start + ROWS] for start in range(0, len(order), ROWS)]))
        cpu_s = time.process_time() - before
        encoded = data.samples.take(some).encoded_bytes
        told = {"samples": len(order), "bytes": nbytes, "cpu_s": cpu_s, "encoded_bytes": encoded}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
