"""What a plain sample costs the processor, and beside another checkout of Frostline, by turns.

    python benchmarks/plain_path.py --data DIR [--other CHECKOUT] [--rounds 4] [--out FILE]

A process each: photographs of a folder are decoded to 224 pixels by PyTorch's loader, and nothing is kept. The first of
three epochs starts threads and finds the window's bounds; the second and third are those compared.
"""

import json
import os
import subprocess
import sys
from functools import partial

from harness import ROOT, by_turns, markdown, run, spread

PASSES = """
import json, sys, time
import frostline as fl
figures = []
with fl.offload(None, fl.Dataset(sys.argv[1]), settings=fl.LoaderSettings(cache_bytes=0)) as job:
    for epoch in range(3):
        processor, clock, samples = time.process_time(), time.perf_counter(), 0
        for batch in job.loader(32, shuffle=True, epoch=epoch):
            samples += len(batch.labels)
        figures.append({
            "processor_ms": 1000 * (time.process_time() - processor) / samples,
            "samples_per_s": samples / (time.perf_counter() - clock),
        })
print(json.dumps(figures))
"""


def options(parser):
    parser.set_defaults(rounds=4)
    parser.add_argument("--other", help="a checkout to compare with")


def measure(wanted):
    checkouts = {**({"other": wanted.other} if wanted.other else {}), "this": str(ROOT)}
    runs = {name: partial(passes, checkout, wanted.data) for name, checkout in checkouts.items()}
    return by_turns(wanted.rounds, runs)


def passes(checkout, data):
    path = os.pathsep.join(filter(None, (f"{checkout}/src", os.environ.get("PYTHONPATH"))))
    argv = [sys.executable, "-c", PASSES, data]
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table(found):
    rows = []
    for name, rounds in found.items():
        later = [figures for epochs in rounds for figures in epochs[1:]]
        figures = ("processor_ms", "samples_per_s")
        rows.append([name, *(spread([item[figure] for item in later], digits=2) for figure in figures)])
    return markdown(["checkout", "processor time of a sample, ms", "samples/s"], rows)


if __name__ == "__main__":
    run(__doc__, measure, quick={"rounds": 1}, options=options, table=table)
