"""Seconds an epoch over a long link: a framework's own loader against Frostline, where reading is the limit or is not.

    scripts/compared_loaders.sh; scripts/frameworks.sh      # once: s3torchconnector, and TensorFlow
    python benchmarks/training_time.py --data DIR [--round-trips 20,75] [--frameworks pytorch,tensorflow] [--out FILE]

Photographs lie in a SeaweedFS at one end of a wide-area link (`wide_link.py`), each side on a core of its own, and are
trained on at the other: LeNet and AlexNet, for which reading is the limit there, and ResNet-50, whose computing is.
*plain* is PyTorch's DataLoader over s3torchconnector, and tf.data mapping a read and a decoding in parallel, each with
as many workers as its documentation asks for; Frostline reads the same objects with all settings at their defaults, but
keeps nothing for later epochs. Decoding is the same function, the steps are those of the framework. Needs root. With
--out FILE (without suffix) the runs that FILE.json holds count too, and a table is made.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

import compare
from links import STORE, TRAINER, Inside, answer_questions
from wide_link import WideLink

BATCH = 32
LOADERS = ("plain", "Frostline")
# Samples of an epoch: as many as take some seconds.
SAMPLES = {"lenet": 256, "alexnet": 128, "resnet50": 64}
SIDES = {"lenet": 64, "alexnet": 224, "resnet50": 224}


def main():
    wanted = arguments()
    if wanted.inside:
        trainer_inside()
        return
    os.sched_setaffinity(0, {0})
    compare.find_packages()
    path = Path(f"{wanted.out}.json")
    runs = json.loads(path.read_text())["runs"] if wanted.out and path.exists() else []
    compare.ask_self(wanted, "formats")
    for number in range(wanted.rounds):
        for round_trip_ms in wanted.round_trips:
            for found in over_one_link(wanted, round_trip_ms, number):
                runs.append(found)
                if wanted.out:
                    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
                    Path(f"{wanted.out}.md").write_text(table(runs))
    print(table(runs))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument(
        "--folder", default=str(Path(tempfile.gettempdir()) / "frostline-compare"), help="keeps formats"
    )
    parser.add_argument("--frameworks", type=compare.words, default=["pytorch", "tensorflow"])
    parser.add_argument("--networks", type=compare.words, default=list(SAMPLES))
    parser.add_argument("--round-trips", type=compare.numbers, default=[20, 75], help="ms")
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--samples", type=int, default=3000, help="that the store has")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def over_one_link(wanted, round_trip_ms, number):
    options = compare.options(wanted)
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit),
        Inside(STORE, 0, compare.__file__, "--inside", "store", *options) as store,
    ):
        environment = store.answer()
        for framework in wanted.frameworks:
            for network in wanted.networks:
                for loader in LOADERS if number % 2 == 0 else LOADERS[::-1]:
                    cell = {"framework": framework, "network": network, "loader": loader}
                    with Inside(
                        TRAINER, 1, __file__, "--inside", "trainer", "--data", wanted.data, environment=environment
                    ) as trainer:
                        trainer.ask(do="epoch", **cell, samples=BATCH, part="warm")
                        seconds = trainer.ask(do="epoch", **cell, samples=SAMPLES[network], part="all")["seconds"]
                    print(f"{round_trip_ms:4.0f} ms {framework:10} {network:8} {loader:9} {seconds:6.1f} s", flush=True)
                    yield {**cell, "round_trip_ms": round_trip_ms, "samples": SAMPLES[network], "seconds": seconds}


def trainer_inside():
    side = Trainer()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        sys.stdout = answers
        answer_questions({"epoch": side.epoch})
    os._exit(0)


class Trainer:
    """The program at the trainer's end: one framework, network and loader, for a warm-up and an epoch."""

    def __init__(self):
        self._step = None

    def epoch(self, *, framework, network, loader, samples, part):
        from compare_loaders import Task

        if self._step is None:
            self._step = {"pytorch": torch_step, "tensorflow": tensorflow_step}[framework](network)
        task = Task(
            what="photographs",
            part=part,
            samples=samples,
            side=SIDES[network],
            workers=len(os.sched_getaffinity(0)),
            local="",
            scratch="",
            node="",
        )
        batches = {"plain": plain, "Frostline": frostline}[loader](task, framework)
        started, done = time.perf_counter(), 0
        with suppress(StopIteration):
            for pixels, labels in islice(batches, samples // BATCH):
                self._step(pixels, labels)
                done += len(labels)
        seconds = time.perf_counter() - started
        assert done == samples, f"{done} samples of {samples}"
        batches.close()
        return {"seconds": seconds}


def plain(task, framework):
    import compare_loaders

    if framework == "pytorch":
        yield from compare_loaders.torch_s3(task, batch=BATCH)
        return
    import tensorflow as tf

    yield from compare_loaders.tf_data(task, batch=BATCH, reads=tf.data.AUTOTUNE)


def frostline(task, framework):
    """PyTorch's tensors, or a data set of TensorFlow."""
    import compare_loaders

    if framework == "pytorch":
        yield from compare_loaders.frostline(task, batch=BATCH)
        return
    import frostline as fl
    from frostline.core.config import LoaderSettings
    from frostline.loaders.adapters.tensorflow import TensorFlowLoader

    settings = LoaderSettings(cache_bytes=0)
    with fl.offload(None, fl.Dataset(task.url("files")), preprocess=task.preprocess(), settings=settings) as job:
        yield from TensorFlowLoader(job.arrays(BATCH, shuffle=True, seed=task.seed), prefetch=1)


def torch_step(network):
    import torch
    from torch import nn

    classes = 10
    if network == "lenet":
        model = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16 * 13 * 13, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
            nn.Linear(84, classes),
        )  # fmt: skip
    else:
        import torchvision

        model = getattr(torchvision.models, network)(num_classes=classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(pixels, labels):
        loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def tensorflow_step(network):
    import keras
    import tensorflow as tf

    layers, side = keras.layers, SIDES[network]
    if network == "resnet50":
        model = keras.applications.ResNet50(weights=None, classes=10, input_shape=(side, side, 3))
    else:
        model = keras.Sequential([keras.Input((side, side, 3)), *_keras_layers(layers, network)])
    optimizer = keras.optimizers.SGD(0.01)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=network != "resnet50")

    @tf.function
    def step(pixels, labels):
        with tf.GradientTape() as tape:
            # Both loaders give the channels first; TensorFlow computes with them last on processors.
            loss = losses(labels, model(tf.transpose(pixels, (0, 2, 3, 1)), training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return lambda pixels, labels: step(tf.convert_to_tensor(pixels), tf.convert_to_tensor(labels))


def _keras_layers(layers, network):
    if network == "lenet":
        return [
            layers.Conv2D(6, 5, activation="relu"), layers.MaxPool2D(2), layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPool2D(2), layers.Flatten(), layers.Dense(120, "relu"), layers.Dense(84, "relu"),
            layers.Dense(10),
        ]  # fmt: skip
    return [
        layers.Conv2D(64, 11, 4, "same", activation="relu"), layers.MaxPool2D(3, 2),
        layers.Conv2D(192, 5, padding="same", activation="relu"), layers.MaxPool2D(3, 2),
        layers.Conv2D(384, 3, padding="same", activation="relu"),
        layers.Conv2D(256, 3, padding="same", activation="relu"),
        layers.Conv2D(256, 3, padding="same", activation="relu"), layers.MaxPool2D(3, 2), layers.Flatten(),
        layers.Dropout(0.5), layers.Dense(4096, "relu"), layers.Dropout(0.5), layers.Dense(4096, "relu"),
        layers.Dense(10),
    ]  # fmt: skip


def table(runs):
    lines = [
        "| framework | network | round trip | samples | plain, s | Frostline, s | less |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = {}
    for run in runs:
        key = (run["framework"], run["network"], run["round_trip_ms"], run["samples"])
        groups.setdefault(key, {}).setdefault(run["loader"], []).append(run["seconds"])
    for (framework, network, round_trip_ms, samples), found in sorted(groups.items()):
        if set(found) != set(LOADERS):
            continue
        theirs, ours = (statistics.median(found[loader]) for loader in LOADERS)
        spans = [
            f"{statistics.median(some):.1f} ({min(some):.1f} to {max(some):.1f})" for some in map(found.get, LOADERS)
        ]
        lines.append(
            f"| {framework} | {network} | {round_trip_ms:.0f} ms | {samples} | {spans[0]} | {spans[1]} | "
            f"{1 - ours / theirs:.0%} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
