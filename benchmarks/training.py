"""The main job through Frostline against the plain PyTorch loop, on the same order of samples.

    python benchmarks/training.py --data DIR [--model demo:efficientnet_lite0] [--until features] [--epochs 5]

The plain loop reads and decodes each image and runs the whole network, frozen layers in eval mode, one batch after
another. Prints accuracy and seconds of both, the largest difference between their losses, and the bytes that crossed.
The losses are the same numbers where every batch is a multiple of eight; a smaller last batch rounds otherwise in
the plain loop (docs/decisions/0004-one-device-batch.md). Writes the same as JSON with --out FILE.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from frostline.datasets import Dataset
from frostline.engines.hardware import hardware_name
from frostline.models import freeze
from frostline.models.freezing import frozen_modules
from frostline.ordering import Order
from frostline.preprocess.apply import decode_into
from frostline.stores.objects import open_store
from frostline.training.networks import load_model
from frostline.training.run import train
from frostline.training.settings import JobSettings, TrainSettings


def main():
    wanted = arguments()
    job = JobSettings(data=wanted.data, model=wanted.model, until=wanted.until)
    settings = TrainSettings(job=job, epochs=wanted.epochs, batch_size=wanted.batch_size)
    report = train(settings, lambda event: None)
    print(f"Frostline: {report.val_accuracy:.1%} in {report.seconds:.1f} s, {report.wire_bytes / 1e6:.2f} MB crossed")
    started = time.perf_counter()
    losses, accuracy = plain(settings)
    seconds = time.perf_counter() - started
    apart = max(abs(one - two) for one, two in zip(report.losses, losses, strict=True))
    print(f"plain:     {accuracy:.1%} in {seconds:.1f} s, {report.baseline_wire_bytes / 1e6:.1f} MB read")
    print(f"largest difference between two of the {len(losses)} losses: {apart:.1e}")
    print(f"{report.bytes_ratio:.1f} times fewer bytes, {seconds / report.seconds:.2f} times the plain loop's speed")
    if wanted.out is not None:
        result = {
            "hardware": hardware_name("cpu"),
            "versions": dict(report.versions),
            "settings": {
                "data": Path(wanted.data).name,
                "model": wanted.model,
                "until": wanted.until,
                "epochs": wanted.epochs,
            },
            "frostline": {"val_accuracy": report.val_accuracy, "seconds": report.seconds, "bytes": report.wire_bytes},
            "plain": {"val_accuracy": accuracy, "seconds": seconds, "bytes": report.baseline_wire_bytes},
            "losses": len(losses),
            "largest_difference": apart,
        }
        wanted.out.write_text(json.dumps(result, indent=2) + "\n")


def plain(settings):
    """Losses of every step, and the last accuracy on the held-out samples."""
    job = settings.job
    data = Dataset(job.data)
    train_data, held_out = data.split(settings.val_share, job.seed)
    network = load_model(job.model, classes=len(data.classes), seed=job.seed)
    model = freeze(network.model, job.until)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], settings.learning_rate)
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
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--until", default="features")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
