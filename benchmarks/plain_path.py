"""What a plain sample costs the processor, beside another checkout of Frostline, by turns.

    python benchmarks/plain_path.py --data DIR --other CHECKOUT [--rounds 4] [--out FILE.json]

A process each: photographs of a folder are decoded to 224 pixels by PyTorch's loader, and nothing is kept. The first of
three epochs starts threads and finds the window's bounds; the second and third are those compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
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


def passes(checkout, data):
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PASSES, str(data)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {"other": [], "this": []}
    for _ in range(given.rounds):
        for name, checkout in (("other", given.other), ("this", HERE)):
            found[name].append(passes(checkout, given.data))
    for name, rounds in found.items():
        later = [figures for epochs in rounds for figures in epochs[1:]]
        for figure in ("processor_ms", "samples_per_s"):
            values = [figures[figure] for figures in later]
            median, low, high = statistics.median(values), min(values), max(values)
            print(f"{name}: {figure} {median:.2f} ({low:.2f} to {high:.2f})")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
