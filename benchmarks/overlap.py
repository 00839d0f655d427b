"""How much of a first epoch's extraction is hidden behind its training: slow trainers, fast ones, and one between.

    python benchmarks/overlap.py [--samples 1536] [--rate 100] [--out benchmarks/results/DATE-overlap]

One real node over HTTP, whose device is simulated at `--rate` samples a second (see ``many_nodes.py``), and a loop that
waits in each batch for as long as its training would take. The shorter of both, extraction and training, can be hidden
behind the longer one whole. One epoch of shuffled samples; features are kept nowhere.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from many_nodes import a_job, compute_at

from frostline.core import Route
from support.images import image_folder
from support.many_nodes import some_nodes

BATCH = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1536)
    parser.add_argument("--rate", type=float, default=100.0, help="samples a second of the node's device")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    compute_at(wanted.rate)
    scratch = Path(tempfile.mkdtemp())
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    found = []
    try:
        folder = image_folder(scratch / "images", per_class=wanted.samples // 3, size=(40, 36))
        for times in (0.25, 1.0, 4.0):
            found.append(run(folder, scratch / f"kept-{times}", wanted, times * wanted.rate))
            print(json.dumps(found[-1]), flush=True)
    finally:
        shutil.rmtree(scratch)
    if wanted.out:
        about = {"samples": wanted.samples, "rate": wanted.rate, "batch": BATCH, "load": os.getloadavg()}
        wanted.out.with_suffix(".json").write_text(json.dumps({**about, "runs": found}, indent=1) + "\n")


def run(folder, kept, wanted, trained_per_s):
    extraction_s, training_s = wanted.samples / wanted.rate, wanted.samples / trained_per_s
    with some_nodes(folder, kept, 1, device_batch=BATCH) as (_, urls), a_job(folder, urls) as job:
        job.use({Route(job.frost_line.number): 1.0})
        started = time.monotonic()
        for batch in job.loader(BATCH, shuffle=True, seed=3):
            time.sleep(len(batch) / trained_per_s)
        took_s = time.monotonic() - started
    hidden = (extraction_s + training_s - took_s) / min(extraction_s, training_s)
    return {
        "trained_samples_per_s": trained_per_s,
        "extraction_s": round(extraction_s, 2),
        "training_s": round(training_s, 2),
        "epoch_s": round(took_s, 2),
        "hidden_share_of_the_shorter": round(hidden, 3),
    }


if __name__ == "__main__":
    main()
