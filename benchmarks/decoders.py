"""What decoding in processes apart costs: the same photographs here and apart by turns, and what a new process costs.

    python benchmarks/decoders.py --data DIR [--samples 200] [--rounds 15] --out FILE

Photographs are decoded to 224 pixels from memory, by one thread and by two, here as a node without tenants does, and
apart as one with tenants does. A round has each way once, and each way apart is compared with the one here in its
round. The seconds of the processor, of both sides, are what a busy machine changes least. Starts are those of a process
for a tenant that has none, from the request to its first sample.
"""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from harness import by_turns, markdown, processor_s, processor_s_of, run, spread

from frostline.engines.machine import keep_freed_memory
from frostline.preprocess import imagenet
from frostline.preprocess.apply import decode_into
from frostline.preprocess.decoders import Decoders

SIDE = 224
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
    with closing(Decoders(256 << 20)) as decoders:
        apart = partial(decoders.decode_into, tenant="one")
        runs = {
            f"{name} {threads}": partial(one, decode, decoders, encoded, threads)
            for threads in (1, 2)
            for name, decode in (("here", decode_into), ("apart", apart))
        }
        found = {"bytes": float(np.mean([len(each) for each in encoded])), "runs": {}}
        for way, rows in by_turns(wanted.rounds, runs, warm=1).items():
            found["runs"][way] = rows
        found["start_s"] = starts(decoders, encoded[0], wanted.starts)
    return found


def one(decode, decoders, encoded, threads):
    """Samples a second, and processor seconds of a sample."""
    preprocess = imagenet(SIDE)
    outs = [np.empty(preprocess.shape, preprocess.dtype) for _ in range(threads)]

    def work(number):
        for sample in encoded[number::threads]:
            decode(preprocess, sample, outs[number], id=0, view=None)

    with ThreadPoolExecutor(threads) as pool:
        before, began = spent_s(decoders), time.perf_counter()
        list(pool.map(work, range(threads)))
        took_s = time.perf_counter() - began
    return {"samples_per_s": len(encoded) / took_s, "processor_s": (spent_s(decoders) - before) / len(encoded)}


def spent_s(decoders):
    return processor_s() + sum(map(processor_s_of, decoders.pids()))


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
    head = ["threads", "samples/s here", "apart", "ratio", "processor ms here", "apart", "ratio"]
    began = spread([1000 * seconds for seconds in found["start_s"]], 1)
    return markdown(head, lines) + f"\n\nA process for a new tenant: {began} ms more for its first sample."


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table)
