"""The verb train at its defaults beside the script that a good engineer would write, and beside the plain loop.

    python benchmarks/training.py --data DIR [--rounds 3] [--train="--accuracy bf16"] [--plain-loop] [--out FILE]

By turns, each in a process of its own: ``frostline train`` with an empty cache folder and again with what the first run
left there, and ``benchmarks/extract_once.py`` with one and two threads, with glibc's defaults and with freed memory
kept. All hold out the same photographs. Prints the median seconds since the process began, those by the shell, set-up
and first step where they are known, and how often the head is right. Features are kept for no later run.

With --plain-loop, instead: the losses of five epochs against a loop that reads and decodes each image and runs the
whole network, frozen layers in eval mode, one batch after another. They are the same numbers where every batch is a
multiple of eight; a smaller last batch rounds otherwise in the plain loop (docs/decisions/0004-one-device-batch.md).
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from frostline.datasets import Dataset
from frostline.engines.machine import hardware_name
from frostline.models import freeze
from frostline.models.freezing import frozen_modules
from frostline.ordering import Order
from frostline.preprocess.apply import decode_into
from frostline.stores.open import open_store
from frostline.training.networks import load_model
from frostline.training.report.report import versions
from frostline.training.run import train
from frostline.training.settings import JobSettings, TrainSettings

MODEL = ("--model", "demo:efficientnet_lite0", "--until", "features")
FREED_MEMORY_IS_KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
SECONDS = ("seconds", "setup_s", "first_step_s")
FIELDS = (*SECONDS, "shell_s", "accuracy")


def main():
    wanted = arguments()
    found = plain_loop(wanted) if wanted.plain_loop else by_turns(wanted)
    if wanted.out is not None:
        about = {"hardware": hardware_name("cpu"), "versions": dict(versions()), "data": Path(wanted.data).name}
        wanted.out.write_text(json.dumps({**about, **found}, indent=2) + "\n")


def by_turns(wanted):
    """Runs by name, each with ``FIELDS``."""
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        held_out = Path(scratch, "held_out.json")
        held_out.write_text(json.dumps(held_out_of(wanted)))
        for number in range(wanted.rounds):
            cache = {"XDG_CACHE_HOME": str(Path(scratch, f"cache{number}"))}
            extra = shlex.split(wanted.train)
            for name in ("frostline train, first time", "frostline train, again"):
                runs.setdefault(name, []).append(frostline(wanted, extra, cache))
            for threads in (1, 2):
                for words, kept in (("", {}), (", freed memory kept", FREED_MEMORY_IS_KEPT)):
                    name = f"extract once, {threads} thread{'s' * (threads > 1)}{words}"
                    runs.setdefault(name, []).append(script(wanted, held_out, threads, kept))
    print(table(runs))
    return {"train": wanted.train, "runs": runs}


def held_out_of(wanted):
    _, held_out = Dataset(wanted.data).split(0.2, wanted.seed)
    return list(held_out.samples.take(np.arange(len(held_out))).objects)


def frostline(wanted, extra, environment):
    verb = Path(sys.executable).with_name("frostline")
    argv = [verb, "train", "--data", wanted.data, *MODEL, "--seed", str(wanted.seed), "--json", *extra]
    report, shell_s = timed(argv, environment)
    known = {
        name: report[name] for name in ("seconds", "setup_s", "first_step_s", "epochs", "head_epoch", "wire_bytes")
    }
    return {**known, "shell_s": shell_s, "accuracy": report["val_accuracy"], "engine": report["engine"]}


def script(wanted, held_out, threads, environment):
    where = Path(__file__).with_name("extract_once.py")
    about = ["--data", wanted.data, "--seed", wanted.seed, "--held-out", held_out, "--threads", threads]
    found, shell_s = timed([sys.executable, where, *about], environment)
    return {"seconds": found["seconds"], "shell_s": shell_s, "accuracy": found["accuracy"]}


def timed(argv, environment):
    started = time.perf_counter()
    done = subprocess.run(
        [str(item) for item in argv], env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout), time.perf_counter() - started


def table(runs):
    lines = [f"| | {' | '.join(FIELDS)} |", f"| --- |{' ---: |' * len(FIELDS)}"]
    for name, some in runs.items():
        cells = (words(field, [item.get(field) for item in some]) for field in FIELDS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    medians = {name: statistics.median(item["seconds"] for item in some) for name, some in runs.items()}
    best = min((name for name in runs if name.startswith("extract")), key=medians.__getitem__)
    for name, median in medians.items():
        if name.startswith("frostline"):
            lines.append(f"\n{name}: {medians[best] / median:.2f} times as fast as the best script ({best})")
    return "\n".join(lines)


def words(field, values):
    if None in values:
        return "-"
    median = statistics.median(values)
    if field == "accuracy":
        return f"{median:.1%}"
    return f"{median:.1f} ({min(values):.1f} to {max(values):.1f})"


def plain_loop(wanted):
    job = JobSettings(data=wanted.data, model=MODEL[1], until=MODEL[3], seed=wanted.seed)
    settings = TrainSettings(job=job, epochs=5, batch_size=16)
    report = train(settings, lambda event: None)
    print(
        f"Frostline: {report.val_accuracy:.1%} in {report.seconds:.1f} s, of which set-up {report.setup_s:.1f} s; "
        f"{report.wire_bytes / 1e6:.2f} MB crossed, the encoded images are {report.baseline_wire_bytes / 1e6:.1f} MB"
    )
    started = time.perf_counter()
    losses, accuracy = plain(settings)
    seconds = time.perf_counter() - started
    apart = max(abs(loss - two) for loss, two in zip(report.losses, losses, strict=True))
    print(f"plain:     {accuracy:.1%} in {seconds:.1f} s")
    print(f"largest difference between two of the {len(losses)} losses: {apart:.1e}")
    ours = {
        name: getattr(report, name) for name in ("val_accuracy", "seconds", "setup_s", "first_step_s", "wire_bytes")
    }
    theirs = {"val_accuracy": accuracy, "seconds": seconds, "bytes": report.baseline_wire_bytes}
    return {"frostline": ours, "plain": theirs, "losses": len(losses), "largest_difference": apart}


def plain(settings):
    """Losses of every step, and the last accuracy on the held-out samples."""
    job = settings.job
    data = Dataset(job.data)
    train_data, held_out = data.split(settings.held_out_share, job.seed)
    network = load_model(job.model, classes=len(data.classes), seed=job.seed)
    model = freeze(network.model, job.until)
    optimizer = torch.optim.Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad], settings.learning_rate
    )
    torch.manual_seed(job.seed)
    losses, right = [], 0
    for epoch in range(settings.epochs):
        model.train()
        for _, module in frozen_modules(model):
            module.eval()
        order = Order(size=len(train_data), seed=job.seed, epoch=epoch)
        for pixels, labels in batches(train_data, network.preprocess, order, settings.batch_size):
            loss = torch.nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        order = Order(size=len(held_out), seed=0, epoch=0, shuffle=False)
        with torch.no_grad():
            right = sum(
                int((model(pixels).argmax(1) == labels).sum())
                for pixels, labels in batches(held_out, network.preprocess, order, settings.batch_size)
            )
    return losses, right / len(held_out)


def batches(data, preprocess, order, batch_size):
    store = open_store(data.url)
    for start in range(0, len(data), batch_size):
        some = data.samples.take(order.indices(start, min(start + batch_size, len(data))))
        pixels = np.empty((len(some), *preprocess.shape), np.float32)
        for row, name in enumerate(some.objects):
            encoded = store.read(name, int(some.offsets[row]), int(some.lengths[row]))
            decode_into(preprocess, encoded, pixels[row], id=int(some.ids[row]), view=None)
        yield torch.from_numpy(pixels), torch.from_numpy(some.labels)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", default="", help="further options of frostline train, in one text")
    parser.add_argument("--plain-loop", action="store_true", help="compare losses with the plain loop instead")
    parser.add_argument("--out", type=Path, help="for the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
