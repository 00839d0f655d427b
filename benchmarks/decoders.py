"""What decoding in processes apart costs: the same photographs here and apart by turns, and what a new process costs.

    python benchmarks/decoders.py --data DIR [--samples 200] [--rounds 15] --out FILE

Photographs are decoded to 224 pixels from memory, one and two at a time, here as a node without tenants does, and
apart as one with tenants does; as many threads bring them as a node has for reading. A round has each way once, and
each way apart is compared with the one here in its round. The seconds of the processor, of both sides, are what a busy
machine changes least. Starts are those of a process for a tenant that has none, from the request to its first sample.
"""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from threading import Semaphore

import numpy as np
from harness import by_turns, markdown, run, spread

from frostline.engines.machine import keep_freed_memory
from frostline.preprocess import imagenet
from frostline.preprocess.apply import MAX_PIXELS, decode_into, pixels_needed
from frostline.preprocess.decoders import Decoders

SIDE, READERS = 224, 16
MEMORY_BYTES = 256 << 20
QUICK = {"samples": 8, "rounds": 2, "starts": 2}


def options(parser):
    parser.add_argument("--samples", type=int, default=200, help="photographs in a run")
    parser.add_argument("--starts", type=int, default=20, help="processes that are started for new tenants")
    parser.set_defaults(rounds=15)


def measure(wanted):
    encoded = [path.read_bytes() for path in sorted(Path(wanted.data).rglob("*.jpg"))[: wanted.samples]]
    assert encoded, f"{wanted.data} has photographs"
    encoded = [encoded[number % len(encoded)] for number in range(wanted.samples)]
    keep_freed_memory()  # as a node's process does
    found = {"bytes": float(np.mean([len(each) for each in encoded])), "runs": {}}
    with closing(Decoders(MEMORY_BYTES, 1)) as one, closing(Decoders(MEMORY_BYTES, 2)) as two:
        runs = {
            f"{name} {at_once}": partial(decode, encoded, decoders)
            for at_once, decoders in ((1, one), (2, two))
            for name, decode in (("here", partial(here, at_once=at_once)), ("apart", apart))
        }
        for way, rows in by_turns(wanted.rounds, runs, warm=1).items():
            found["runs"][way] = rows
        found["start_s"] = starts(one, encoded[0], wanted.starts)
    return found


def here(encoded, decoders, *, at_once):
    slots = Semaphore(at_once)

    def decode(preprocess, sample, out):
        with slots:
            assert pixels_needed(preprocess, sample) <= MAX_PIXELS
            decode_into(preprocess, sample, out, id=0, view=None)

    return spent(decode, encoded, decoders)


def apart(encoded, decoders):
    return spent(partial(decoders.decode_into, id=0, view=None, tenant="one"), encoded, decoders)


def spent(decode, encoded, decoders):
    """Samples a second, and processor seconds of a sample."""
    preprocess = imagenet(SIDE)

    def work(number):
        out = np.empty(preprocess.shape, preprocess.dtype)
        for sample in encoded[number::READERS]:
            decode(preprocess, sample, out)

    with ThreadPoolExecutor(READERS) as pool:
        before, began = spent_s(decoders), time.perf_counter()
        list(pool.map(work, range(READERS)))
        took_s, spent = time.perf_counter() - began, spent_s(decoders) - before
    return {"samples_per_s": len(encoded) / took_s, "processor_s": spent / len(encoded)}


def spent_s(decoders):
    """Of this process and of those that wait; nanoseconds of /proc/PID/schedstat, where ticks are too coarse."""
    files = [Path(f"/proc/{pid}/schedstat") for pid in decoders.pids()]
    return time.process_time() + sum(int(file.read_text().split()[0]) / 1e9 for file in files)


def starts(decoders, sample, number):
    """Seconds of the first sample of tenants that have no process yet, less those of the second."""
    preprocess, took_s, names = imagenet(SIDE), [], count()
    out = np.empty(preprocess.shape, preprocess.dtype)
    for _ in range(number):
        tenant, each = f"new {next(names)}", []
        for _ in range(2):
            began = time.perf_counter()
            decoders.decode_into(preprocess, sample, out, id=0, view=None, tenant=tenant)
            each.append(time.perf_counter() - began)
        took_s.append(each[0] - each[1])
    return took_s


# A quick form may take less processor time than the system counts.
_LEAST = 1e-3


def table(found):
    ratios = defaultdict(list)
    lines = []
    for threads in (1, 2):
        pairs = list(zip(found["runs"][f"here {threads}"], found["runs"][f"apart {threads}"], strict=True))
        for field in ("samples_per_s", "processor_s"):
            ratios[field] = [apart[field] / max(here[field], _LEAST) for here, apart in pairs]
        lines.append(
            [
                threads,
                *(spread([pair[side]["samples_per_s"] for pair in pairs], 0) for side in (0, 1)),
                spread(ratios["samples_per_s"], 3),
                *(spread([1000 * pair[side]["processor_s"] for pair in pairs], 2) for side in (0, 1)),
                spread(ratios["processor_s"], 3),
            ]
        )
    head = ["at once", "samples/s here", "apart", "ratio", "processor ms here", "apart", "ratio"]
    began = spread([1000 * seconds for seconds in found["start_s"]], 1)
    return markdown(head, lines) + f"\n\nA process for a new tenant: {began} ms more for its first sample."


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table)
