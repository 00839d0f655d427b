"""Epochs from the trainer's memory, beside a loop that only copies the same rows: what memory itself allows.

    python benchmarks/trainer_memory.py --data DIR [--rounds 5] [--out FILE]

A job keeps what it fetched in its first epoch; later ones come from memory. Features of 5 kB, activations of
EfficientNet-lite0's fifth block and pixels of 600 kB, of the photographs of DIR. The other loop gathers as many rows
into new batches in another random order, with nothing else around it. Medians of the rounds; writes JSON with --out.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

import frostline as fl
from frostline.config import LoaderSettings
from frostline.core import Route
from frostline.engines.hardware import hardware_name
from frostline.training.networks import load_model

ROWS = (("features", "features"), ("activations", "_blocks.4"), ("pixels", None))
BATCH = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    found = {"hardware": hardware_name("cpu"), "rows": [measured(wanted, *one) for one in ROWS]}
    if wanted.out:
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(wanted, what, until):
    network = load_model("demo:efficientnet_lite0", classes=6)
    model = None if until is None else fl.freeze(network.model.eval(), until=until)
    settings = LoaderSettings(cache_bytes=2 << 30, follow=False)
    with fl.offload(model, fl.Dataset(wanted.data), preprocess=network.preprocess, settings=settings) as job:
        if model is not None:
            job.use({Route(job.frost_line.number): 1.0})
        batches = [batch.features.numpy() for batch in job.loader(BATCH, shuffle=True, seed=0, epoch=0)]
        rows = np.concatenate(batches)
        rates = [memory_rates(job, rows, turn) for turn in range(1, wanted.rounds + 1)]
    shares = [ours / copied for ours, copied in rates]
    found = {
        "what": what,
        "row_bytes": rows[0].nbytes,
        "samples": len(rows),
        "GB_per_s": round(statistics.median(ours for ours, _ in rates), 3),
        "copying_GB_per_s": round(statistics.median(copied for _, copied in rates), 3),
        "share": round(statistics.median(shares), 3),
        "shares": [round(one, 3) for one in shares],
    }
    print(found, flush=True)
    return found


def memory_rates(job, rows, turn):
    """Gigabytes a second of an epoch from the cache, and of gathering its rows alone."""
    started, nbytes = time.perf_counter(), 0
    for batch in job.loader(BATCH, shuffle=True, seed=0, epoch=turn):
        nbytes += batch.features.numpy().nbytes
    ours = nbytes / (time.perf_counter() - started) / 1e9
    order = np.random.default_rng(turn).permutation(len(rows))
    started = time.perf_counter()
    for start in range(0, len(order), BATCH):
        rows[order[start : start + BATCH]]
    return ours, rows.nbytes / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    main()
