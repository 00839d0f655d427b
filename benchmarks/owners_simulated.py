"""Owners of blocks among a thousand nodes, computed and not run: how even they are, what moves, and what it costs.

    python benchmarks/owners_simulated.py [--out benchmarks/results/DATE-owners-simulated]

Ten data sets of a thousand million samples each, a thousand jobs on each. All jobs of a data set find the same owners,
as `tests/client/test_owners.py` holds, so that each data set is computed once. Nodes are alike, or of three speeds. A
node comes, and one goes. Seconds are of one processor core, so that other work on the machine does not count.
"""

import argparse
import json
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np

from frostline.client.owners import BlockOwners, Blocks

SPEEDS = (1.0, 2**0.5, 2.0)
SMALL = ((1_000_000, 1000), (1_000_000, 100), (100_000, 16), (100_000, 4), (10_000, 8), (1_000, 4))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--data-sets", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10**10)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    per_set = wanted.samples // wanted.data_sets
    found = {"nodes": wanted.nodes, "samples": wanted.samples, "jobs": wanted.jobs, "data_sets": [], "small": []}
    together = {"alike": np.zeros(wanted.nodes), "three speeds": np.zeros(wanted.nodes)}
    for number in range(wanted.data_sets):
        kind = "three speeds" if number % 2 else "alike"
        blocks = Blocks(data=f"s3://data/set-{number}", samples=per_set)
        row, relative = one_set(blocks, nodes(wanted.nodes, SPEEDS if number % 2 else (1.0,)))
        found["data_sets"].append({"kind": kind, "jobs": wanted.jobs // wanted.data_sets, **row})
        together[kind] += relative
        print(json.dumps(found["data_sets"][-1]), flush=True)
    for samples, count in SMALL:
        row, _ = one_set(Blocks(data="s3://data/small", samples=samples), nodes(count, (1.0,)))
        found["small"].append({"samples": samples, "nodes": count, **row})
        print(json.dumps(found["small"][-1]), flush=True)
    found["loads"] = {kind: np.round(loads / (wanted.data_sets / 2), 4).tolist() for kind, loads in together.items()}
    for kind, loads in found["loads"].items():
        print(f"all data sets, {kind}: {min(loads):.3f} to {max(loads):.3f} of the share")
    if wanted.out:
        wanted.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found, wanted.out.with_suffix(".svg"))


def nodes(count, speeds):
    return {f"http://store-{number}:7070": speeds[number % len(speeds)] for number in range(count)}


def one_set(blocks, speeds):
    """Figures of one data set, and each node's samples as a multiple of its share, in the order of names."""
    owners, of_s = timed(lambda: BlockOwners.of(blocks, speeds))
    assert owners.nodes == tuple(sorted(speeds))
    relative = samples_of(owners) / (blocks.samples * np.array(owners.weights) / sum(owners.weights))
    more, more_s = timed(lambda: owners.changed({**speeds, "http://new:7070": 1.0}))
    gone = next(iter(speeds))
    less, less_s = timed(lambda: owners.changed({name: speed for name, speed in speeds.items() if name != gone}))
    rows = np.random.default_rng(0).integers(0, blocks.samples, 56 * min(64, len(speeds)))
    _, group_s = timed(lambda: [owners.of_rows(rows) for _ in range(100)])
    row = {
        "slots": blocks.slots,
        "max_share": float(relative.max()),
        "min_share": float(relative.min()),
        "moved_for_one_more": moved(owners, more),
        "moved_for_one_less": moved(owners, less),
        "table_bytes": sum(getattr(owners, name).nbytes for name in ("owners", "nearest", "costs")),
        "first_s": of_s,
        "one_more_s": more_s,
        "one_less_s": less_s,
        "group_s": group_s / 100,
        "group_rows": len(rows),
    }
    return row, relative


def timed(call):
    started = time.process_time()
    found = call()
    return found, time.process_time() - started


def samples_of(owners):
    """Samples of each node: blocks share slots in turn, so that slots differ by one block at most."""
    blocks = owners.blocks
    count = -(-blocks.samples // blocks.rows)
    of_slot = count // blocks.slots + (np.arange(blocks.slots) < count % blocks.slots)
    return np.bincount(owners.owners, weights=of_slot * blocks.rows, minlength=len(owners.nodes))


def moved(before, after):
    """Slots that have another owner, as a multiple of the fewest that could."""
    then, now = np.array(before.nodes)[before.owners], np.array(after.nodes)[after.owners]
    new = ~np.isin(after.nodes, before.nodes)
    weights = np.array(after.weights)
    fewest = max((~np.isin(then, after.nodes)).sum(), len(then) * weights[new].sum() / weights.sum())
    return float((then != now).sum() / fewest)


def draw(found, path):
    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for kind, loads in found["loads"].items():
        left.hist(loads, bins=30, alpha=0.6, label=f"nodes {kind}" if kind == "alike" else f"nodes of {kind}")
    left.set(xlabel="samples of a node, as a multiple of its share", ylabel="nodes")
    left.axvline(1.1, color="grey", linestyle=":")
    left.legend(frameon=False)
    for place, (key, label) in enumerate((("moved_for_one_more", "one more"), ("moved_for_one_less", "one less"))):
        values = [row[key] for row in found["data_sets"]]
        right.scatter([place] * len(values), values, alpha=0.6)
        right.annotate(label, (place, 0.93), ha="center")
    right.axhline(1.2, color="grey", linestyle=":")
    right.set(ylabel="moved blocks, as a multiple of the fewest", xlim=(-0.6, 1.6), ylim=(0.9, 1.25), xticks=[])
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
