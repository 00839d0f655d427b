"""Photographs with masks that follow from them, a network that learns those, and the plain loop it is compared with."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from frostline.core import View
from frostline.ordering import Order
from frostline.preprocess import (
    CenterCrop,
    Decode,
    Normalize,
    Preprocess,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from frostline.preprocess.apply import decode_into, mask_into
from frostline.training.networks import load_model

SIDE = 128
CLASSES = 3
_SCALE = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
MIDDLE = Preprocess(steps=(Decode(), Resize(144), CenterCrop(SIDE), _SCALE))
RANDOM = Preprocess(steps=(Decode(), RandomResizedCrop(SIDE, 0.3), RandomHorizontalFlip(0.5), _SCALE))


def classes_of(image):
    """Dark, middle and bright pixels, and a frame that counts for nothing."""
    found = np.digitize(np.asarray(image.convert("L")), (85, 170)).astype(np.uint8)
    found[:9] = found[-9:] = 255
    return found


def photographs_with_masks(photographs, folder, count=20):
    """Some photographs, each with its mask: palette images, grey TIFFs of 16 bits and arrays in turn."""
    paths = sorted(Path(photographs).rglob("*.jpg"))
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    for number, path in enumerate(paths[:: len(paths) // count][:count]):
        (folder / "images" / f"{number:03}.jpg").write_bytes(path.read_bytes())
        save_mask(folder / "masks" / f"{number:03}", classes_of(Image.open(path)), number)
    return folder


def save_mask(path, classes, kind):
    if kind % 3 == 2:
        np.save(path.with_suffix(".npy"), classes.astype(np.int64))
        return
    image = Image.fromarray(classes if kind % 3 == 0 else classes.astype(np.uint16))
    if kind % 3 == 0:
        image.putpalette([place * 5 % 256 for place in range(768)])
    image.save(path.with_suffix(".png" if kind % 3 == 0 else ".tif"))


class Segmenter(nn.Module):
    """Pretrained layers, and a decoder to classes of pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers = dict(load_model("demo:efficientnet_lite0", classes=CLASSES).model.named_children())
        first = [layers[name] for name in ("_conv_stem", "_bn0", "_swish")]
        self.backbone = nn.Sequential(*first, *list(layers["_blocks"])[:8])
        self.decoder = nn.Sequential(nn.Conv2d(80, 16, 1), nn.BatchNorm2d(16))
        self.last = nn.Conv2d(16, CLASSES, 3, padding=1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        scores = self.last(torch.relu(self.decoder(self.backbone(pixels))))
        return nn.functional.interpolate(scores, size=(SIDE, SIDE), mode="bilinear")


def step(network, optimizer, inputs, targets):
    loss = nn.functional.cross_entropy(network(inputs), targets, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def through(job, *, epochs, batch_size=8, **options):
    """Train on what a job gives."""
    optimizer = torch.optim.SGD(job.head.parameters(), 0.1)
    return [
        step(job.head, optimizer, batch.features, batch.targets)
        for epoch in range(epochs)
        for batch in job.loader(batch_size, shuffle=True, seed=0, epoch=epoch, **options)
    ]


def losses(model, folder, data, preprocess, *, epochs, batch_size=8):
    """The same training by a plain loop over files, in the same order."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.1)
    found = []
    for epoch in range(epochs):
        view = View(seed=0, epoch=epoch) if preprocess.is_random else None
        order = Order(size=len(data), seed=0, epoch=epoch).indices(0, len(data))
        for start in range(0, len(order), batch_size):
            some = data.samples.take(order[start : start + batch_size])
            pixels = np.empty((len(some), *preprocess.shape), np.float32)
            masks = np.empty((len(some), SIDE, SIDE), np.int64)
            for place, (id, name) in enumerate(zip(some.ids.tolist(), some.objects, strict=True)):
                decode_into(preprocess, (folder / name).read_bytes(), pixels[place], id=id, view=view)
                masks[place] = mask_of(folder, name, preprocess, id, view)
            found.append(step(model, optimizer, torch.from_numpy(pixels), torch.from_numpy(masks)))
    return found


def mask_of(folder, name, preprocess, id, view):
    """The mask of an image: where nothing is random by Pillow alone, without any of the code under test."""
    path = next((folder / "masks").glob(f"{Path(name).stem}.*"))
    if view is not None:
        out = np.empty((SIDE, SIDE), np.uint16)
        mask_into(preprocess, path.read_bytes(), out, id=id, view=view)
        return out
    classes = np.load(path).astype(np.uint8) if path.suffix == ".npy" else np.asarray(Image.open(path)).astype(np.uint8)
    mask = Image.fromarray(classes)
    width, height = mask.size
    longer = int(144 * max(width, height) / min(width, height))
    mask = mask.resize((longer, 144) if width > height else (144, longer), Image.Resampling.NEAREST)
    left, top = round((mask.width - SIDE) / 2), round((mask.height - SIDE) / 2)
    return np.asarray(mask.crop((left, top, left + SIDE, top + SIDE)))
