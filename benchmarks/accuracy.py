"""What an engine's error costs: how often a linear head is right on photographs that it was not trained on.

    python benchmarks/accuracy.py --data DIR [--splits 20] [--features FOLDER] [--out FILE]

EfficientNet-lite0 with its ImageNet weights, all but the classifier, turns every photograph of DIR (images in class
folders) into features once by each engine; engines of 8 bits are calibrated on 64 of them. For each split a linear head
is trained on three quarters of the photographs of each class, and tested on the rest, with the features of that engine
both times, as a job has them. What an engine costs is the difference to the reference's features on the same split.
Beside the engines stands noise: the reference's features with a random vector added to each, of so many of its own
lengths, which says what an error of that size costs that has nothing to do with the picture. With --features they are
kept in a folder for the next time. Writes JSON and a table with --out (without suffix).

Where torchvision was built for CUDA and torch was not, `PYTHONPATH=tests/support/torchvision_cpu` lets it be imported.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

import numpy as np
import torch
from networks import CLASSES, NETWORKS, frozen

from frostline.core import REFERENCE
from frostline.datasets import Dataset
from frostline.engines.catalog import OFFERS, build
from frostline.engines.machine import hardware_name, keep_freed_memory
from frostline.models import cut_network
from frostline.preprocess.apply import pixels_into
from frostline.stores.open import open_store
from frostline.training.networks import load_model

ENGINES = ("torch-bf16", "openvino-bf16", "onnxruntime-int8", "openvino-int8")
NOISE = (0.1, 0.2, 0.3, 0.5, 1.0)
ROWS = 32
CALIBRATED_ON = 64
TRAINED_ON = 0.75
# So that a head does not know 780 photographs by heart; no other was tried.
DECAY = 1e-3
STEPS = 60


def main():
    wanted = arguments()
    torch.set_num_threads(wanted.threads)
    keep_freed_memory()
    data = Dataset(wanted.data)
    labels = np.array(data.samples.labels)
    by_engine = features_of(data, wanted)
    reference = by_engine[REFERENCE]
    errors = {name: relative_errors(some, reference) for name, some in by_engine.items()}
    for size in NOISE:
        by_engine[f"noise of {size:g}"] = noisy(reference, size)
        errors[f"noise of {size:g}"] = np.full(len(reference), size)
    right = {name: [] for name in by_engine}
    for seed in range(wanted.splits):
        trained, tested = split(labels, seed)
        for name, some in by_engine.items():
            right[name].append(share_right(some, labels, trained, tested))
    result = {
        "hardware": hardware_name("cpu"),
        "torch": torch.__version__,
        "photographs": len(labels),
        "splits": wanted.splits,
        "of": {name: said(right[name], right[REFERENCE], errors[name]) for name in by_engine},
    }
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps(result, indent=1) + "\n")
        Path(f"{wanted.out}.md").write_text(table(result))
    print(table(result))


def features_of(data, wanted):
    """Features of all samples, ``float32[n, ...]``, by engine; the reference's first."""
    pretrained = load_model(NETWORKS["efficientnet_lite0"], classes=CLASSES)
    preprocess = pretrained.preprocess
    prefix = cut_network(frozen(pretrained.model, preprocess.shape), preprocess.shape).prefix
    levels = preprocess.levels
    pixels = remembered(wanted.features, "pixels", lambda: kept(data, preprocess))
    spread = np.random.default_rng(0).permutation(len(pixels))[:CALIBRATED_ON]
    calibration = levels.applied(pixels[spread])
    return {
        name: remembered(wanted.features, name, lambda name=name: computed(name, prefix, calibration, pixels, levels))
        for name in (REFERENCE, *wanted.engines)
    }


def remembered(folder, name, make):
    """What was made, which is kept in a folder where there is one."""
    path = None if folder is None else folder / f"{name}.npy"
    if path is not None and path.exists():
        return np.load(path)
    made = make()
    if path is not None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, made)
    return made


def computed(name, prefix, calibration, pixels, levels):
    """Features by one engine."""
    cut, made = prefix.cuts[-1].number, []
    engine = build(
        name,
        prefix.graph,
        prefix.cuts,
        prefix.tensors,
        cut=cut,
        max_rows=ROWS,
        threads=torch.get_num_threads(),
        calibration=calibration,
    )
    for start in range(0, len(pixels), ROWS):
        some = pixels[start : start + ROWS]
        batch = levels.applied(np.resize(some, (ROWS, *some.shape[1:])))
        made.append(engine.run(batch, cut)[0][: len(some)].reshape(len(some), -1))
    print(name, flush=True)
    return np.concatenate(made).astype(np.float32)


def kept(data, preprocess):
    """All samples as they are kept, ``uint8[n, H, W, C]``."""
    store, samples = open_store(data.url), data.samples
    channels, *sides = preprocess.shape
    pixels = np.empty((len(samples), *sides, channels), np.uint8)
    for row in range(len(samples)):
        encoded = store.read(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))
        pixels_into(preprocess, encoded, pixels[row], id=row, view=None)
    return pixels


def noisy(features, size):
    """Each sample's features with a random vector added, of that part of their length."""
    noise = np.random.default_rng(0).normal(size=features.shape)
    noise *= size * np.linalg.norm(features, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    return (features + noise).astype(np.float32)


def relative_errors(features, reference):
    """Relative RMS of each sample."""
    return np.linalg.norm(features - reference, axis=1) / np.linalg.norm(reference, axis=1)


def split(labels, seed):
    """Places to train on and to test on, of each class the same part."""
    random = np.random.default_rng(seed)
    trained, tested = [], []
    for label in np.unique(labels):
        places = random.permutation(np.flatnonzero(labels == label))
        many = round(TRAINED_ON * len(places))
        trained.append(places[:many])
        tested.append(places[many:])
    return np.concatenate(trained), np.concatenate(tested)


def share_right(features, labels, trained, tested):
    """How often a linear head that was trained on some samples is right on others."""
    mean, spread = features[trained].mean(0), features[trained].std(0) + 1e-6
    inputs = torch.from_numpy((features - mean) / spread)
    wanted = torch.from_numpy(labels)
    head = torch.nn.Linear(inputs.shape[1], int(labels.max()) + 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    steps = torch.optim.LBFGS(head.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss():
        steps.zero_grad()
        value = torch.nn.functional.cross_entropy(head(inputs[trained]), wanted[trained])
        value = value + DECAY * head.weight.square().sum()
        value.backward()
        return value

    steps.step(loss)
    with torch.no_grad():
        return (head(inputs[tested]).argmax(1) == wanted[tested]).double().mean().item()


def said(right, of_reference, errors):
    costs = [100 * (theirs - ours) for ours, theirs in zip(right, of_reference, strict=True)]
    return {
        "right_percent": 100 * statistics.mean(right),
        "costs_points": statistics.mean(costs),
        "costs_from_to": [min(costs), max(costs)],
        "standard_error": statistics.stdev(costs) / len(costs) ** 0.5,
        "error_median": float(np.median(errors)),
        "error_most": float(errors.max()),
    }


def table(result):
    lines = [
        f"{result['photographs']} photographs, {result['splits']} splits.",
        "",
        "| features | error, median | error, worst | right | costs, points | from, to |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, item in result["of"].items():
        low, high = item["costs_from_to"]
        lines.append(
            f"| {name} | {item['error_median']:.2g} | {item['error_most']:.2g} | {item['right_percent']:.2f} % | "
            f"{item['costs_points']:+.2f} ± {item['standard_error']:.2f} | {low:+.2f}, {high:+.2f} |"
        )
    return "\n".join(lines) + "\n"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--engines", nargs="+", choices=[offer.name for offer in OFFERS], default=ENGINES)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
