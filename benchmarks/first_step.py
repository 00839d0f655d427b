"""How long a new user waits: seconds from the command, and from the call of ``offload``, to the first training step.

    python benchmarks/first_step.py --data DIR [--rounds 3] [--out FILE]

Each run is a process of its own, by turns. ``first`` begins with an empty cache folder, as on a new machine;
``second`` with what the first one left there: the trace of the network, the engine, the plan. The verb is ``frostline
train`` at its defaults; the loop is ten lines that call ``offload``, as in the README, with PyTorch and the network
ready before the clock starts. Prints medians and the range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from frostline.engines.machine import hardware_name
from frostline.training.report.report import versions

LOOP = """
import json, sys, time, warnings
import torch
import frostline as fl
from frostline.training.networks import load_model
network = load_model("demo:efficientnet_lite0", classes=6, seed=0, weights=None, augment=False)
model = fl.freeze(network.model, until="features", input_shape=network.preprocess.shape)
data = fl.Dataset(sys.argv[1])
began = time.perf_counter()
with fl.offload(model, data, preprocess=network.preprocess) as job:
    offloaded_s = time.perf_counter() - began
    optimizer = torch.optim.Adam((weight for weight in model.parameters() if weight.requires_grad), lr=2e-3)
    first_step_s = None
    for batch in job.loader(batch_size=32, shuffle=True, seed=0):
        loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        if first_step_s is None:
            first_step_s = time.perf_counter() - began
print(json.dumps({
    "offloaded_s": offloaded_s, "first_step_s": first_step_s, "seconds": time.perf_counter() - began,
    "engine": job.engine.engine,
}))
"""
VERB = ("--model", "demo:efficientnet_lite0", "--until", "features", "--json")
FIELDS = ("offloaded_s", "setup_s", "first_step_s", "seconds")


def main():
    wanted = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    wanted.add_argument("--data", required=True, help="folders of photographs, one a class")
    wanted.add_argument("--rounds", type=int, default=3)
    wanted.add_argument("--out", type=Path, help="write every run here, as JSON")
    wanted = wanted.parse_args()
    commands = {
        "frostline train": [Path(sys.executable).with_name("frostline"), "train", "--data", wanted.data, *VERB],
        "offload in a loop": [sys.executable, "-W", "ignore", "-c", LOOP, wanted.data],
    }
    runs = {f"{name}, {which}": [] for name in commands for which in ("first", "second")}
    for _ in range(wanted.rounds):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as cache:
                for which in ("first", "second"):
                    runs[f"{name}, {which}"].append(run(command, cache))
    for name, found in runs.items():
        print(f"{name}: {described(found)}; engine {', '.join(sorted({item['engine'] for item in found}))}")
    if wanted.out is not None:
        about = {"hardware": hardware_name("cpu"), "versions": dict(versions()), "data": Path(wanted.data).name}
        wanted.out.write_text(json.dumps({**about, "runs": runs}, indent=2) + "\n")


def run(command, cache):
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    said = json.loads(ended.stdout)
    return {name: said[name] for name in (*FIELDS, "engine") if name in said}


def described(found):
    parts = []
    for name in FIELDS:
        values = sorted(item[name] for item in found if name in item)
        if values:
            parts.append(f"{name} {statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
