"""The plain PyTorch loop that Frostline is measured against: read, decode, run the whole network, step."""

from pathlib import Path

import numpy as np
import torch

from frostline.core import View
from frostline.datasets import Dataset
from frostline.ordering import Order
from frostline.preprocess import Preprocess
from frostline.preprocess.apply import decode_into


def batches(folder: Path, data: Dataset, preprocess: Preprocess, *, batch_size: int, seed: int, epoch: int):
    """Pixels and labels in the seeded order, read and decoded one by one."""
    rows = Order(size=len(data), seed=seed, epoch=epoch).indices(0, len(data))
    view = View(seed=seed, epoch=epoch) if preprocess.is_random else None
    for start in range(0, len(rows), batch_size):
        some = data.samples.take(rows[start : start + batch_size])
        pixels = np.empty((len(some), *preprocess.shape), np.float32)
        for place, (id, name) in enumerate(zip(some.ids.tolist(), some.objects, strict=True)):
            decode_into(preprocess, (folder / name).read_bytes(), pixels[place], id=id, view=view)
        yield torch.from_numpy(pixels), torch.from_numpy(some.labels)


def losses(model, folder: Path, data: Dataset, preprocess: Preprocess, *, batch_size: int, epochs: int, seed: int = 0):
    """Train with SGD and give the loss of each step; dropout is seeded as ``through`` seeds it."""
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], 0.1)
    found = []
    torch.manual_seed(seed)
    for epoch in range(epochs):
        for pixels, labels in batches(folder, data, preprocess, batch_size=batch_size, seed=seed, epoch=epoch):
            found.append(step(model, optimizer, pixels, labels))
    return found


def through(job, *, batch_size: int, epochs: int, seed: int = 0):
    """The same training through a job."""
    optimizer = torch.optim.SGD(job.head.parameters(), 0.1)
    found = []
    torch.manual_seed(seed)
    for epoch in range(epochs):
        for batch in job.loader(batch_size, shuffle=True, seed=seed, epoch=epoch):
            found.append(step(job.head, optimizer, batch.features, batch.labels))
    return found


def step(network, optimizer, inputs, labels) -> float:
    loss = torch.nn.functional.cross_entropy(network(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
