"""Epochs from the trainer's memory, beside a loop that only copies the same rows: what memory itself allows.

    python benchmarks/trainer_memory.py --data DIR [--rounds 5] [--what features,late,middle,pixels] [--disk]
        [--out FILE]

A job's cache is filled with features of the photographs of DIR: 5 kB, activations of two blocks of EfficientNet-lite0,
and pixels. There are more samples than photographs (links to the same files), so that they do not fit the processor's
own cache, and each has rows of its own; the network computes those of the first links, and the others are put beside
them. Then whole epochs come from memory, each in another random order. The other loop gathers as many rows of one array
into new batches in another random order, one numpy call a batch with nothing around it, and drops each at once.

With --disk the same rows come from the trainer's disk instead, from pages that the system has in memory, and are
checked when they are read.

Medians of the rounds, which take turns. Writes JSON with --out.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import frostline as fl
from frostline.core import Route
from frostline.core.config import LoaderSettings
from frostline.engines.machine import hardware_name
from frostline.training.networks import load_model

ROWS = {
    "features": ("features", 16_384),
    "late": ("_blocks.7", 8_192),
    "middle": ("_blocks.4", 8_192),
    "pixels": (None, 2_048),
}
BATCH = 64
COMPUTED = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", default=",".join(ROWS))
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    found = [measured(wanted, what, *ROWS[what]) for what in wanted.what.split(",")]
    if wanted.out:
        known = json.loads(wanted.out.read_text())["rows"] if wanted.out.exists() else []
        found = {"hardware": hardware_name("cpu"), "rows": [*known, *found]}
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(wanted, what, until, samples):
    network = load_model("demo:efficientnet_lite0", classes=6)
    model = None if until is None else fl.freeze(network.model.eval(), until=until)
    with tempfile.TemporaryDirectory() as folder:
        settings = LoaderSettings(
            cache_bytes=0 if wanted.disk else 2 << 30,
            cache_folder=f"{folder}/kept" if wanted.disk else None,
            follow=False,
        )
        data = fl.Dataset(linked(Path(wanted.data), Path(folder, "photographs"), samples))
        with fl.offload(model, data, preprocess=network.preprocess, settings=settings) as job:
            if model is not None:
                job.use({Route(job.frost_line.number): 1.0})
            rows = filled(job, data)
            rates = [memory_rates(job, rows, turn) for turn in range(1, wanted.rounds + 1)]
    shares = [ours / copied for ours, copied in rates]
    found = {
        "from": "disk" if wanted.disk else "memory",
        "what": what,
        "row_bytes": rows[0].nbytes,
        "samples": len(rows),
        "samples_per_s": round(statistics.median(ours for ours, _ in rates) * 1e9 / rows[0].nbytes),
        "GB_per_s": round(statistics.median(ours for ours, _ in rates), 3),
        "copying_GB_per_s": round(statistics.median(copied for _, copied in rates), 3),
        "share": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
    }
    print(found, flush=True)
    return found


def linked(data, folder, samples):
    """A folder with so many links to photographs, some of each class."""
    paths = sorted(data.glob("*/*.*"))
    for number in range(samples):
        path = paths[number % len(paths)]
        link = folder / path.parent.name / f"{number:06}{path.suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())
    return folder


def filled(job, data):
    """Fill the job's cache; the rows, in the manifest's order."""
    part = data.take(np.arange(COMPUTED))
    some = np.concatenate([batch.features.numpy() for batch in job.loader(BATCH, data=part)])
    rows = np.empty((len(data), *some.shape[1:]), some.dtype)
    cache = job._maker.cache_policy.cache(job._fetcher.preprocess, None)  # noqa: SLF001 (to fill it in no time)
    for start in range(0, len(data), COMPUTED):
        rows[start : start + COMPUTED] = some[: len(data) - start]
        cache.put(data.samples.ids[start : start + COMPUTED], (rows[start : start + COMPUTED],))
    return rows


def memory_rates(job, rows, turn):
    """Gigabytes a second of an epoch from the cache, and of gathering its rows alone."""
    started, nbytes = time.perf_counter(), 0
    for batch in job.loader(BATCH, shuffle=True, seed=0, epoch=turn):
        nbytes += batch.features.numpy().nbytes
    ours = nbytes / (time.perf_counter() - started) / 1e9
    assert nbytes == rows.nbytes
    order = np.random.default_rng(turn).permutation(len(rows))
    started = time.perf_counter()
    for start in range(0, len(order), BATCH):
        rows[order[start : start + BATCH]]
    return ours, rows.nbytes / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    main()
