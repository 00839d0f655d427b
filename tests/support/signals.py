"""Rows of numbers and sounds of two classes, small networks for them, and what a plain loop loses."""

import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

__all__ = (
    "UNTIL",
    "array_bytes",
    "job_losses",
    "optimiser_of",
    "plain_losses",
    "rows_by_id",
    "signal_network",
    "small_network",
    "some_arrays",
    "spectrogram_network",
    "step",
    "write_arrays",
)

UNTIL = "1"
"""Frost line of the small networks."""


def some_arrays(rows=24, shape=(3, 40), seed=0):
    """Arrays and their labels."""
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(shape).astype(np.float32) for _ in range(rows)], [row % 2 for row in range(rows)]


def array_bytes(array):
    """An array as NumPy's ``save`` writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def write_arrays(folder, kind, arrays, labels):
    """Write them as class folders, a tar or a Parquet file; the column that has them, where one must be named."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [array_bytes(array) for array in arrays]
    if kind == "parquet":
        pq.write_table(pa.table({"signal": encoded, "label": labels}), folder / "train.parquet", row_group_size=10)
        return "signal"
    if kind == "tar":
        with tarfile.open(folder / "train-0.tar", "w") as tar:
            for row, (content, label) in enumerate(zip(encoded, labels, strict=True)):
                for name, data in [(f"{row:03}.npy", content), (f"{row:03}.cls", str(label).encode())]:
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return None
    for row, (content, label) in enumerate(zip(encoded, labels, strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        (folder / str(label) / f"{row:03}.npy").write_bytes(content)
    return None


def rows_by_id(data, kind="folders"):
    """The row of each sample by its id: class folders have the even rows first, as their labels are 0 and 1."""
    rows = range(len(data))
    return dict(
        zip(data.samples.ids.tolist(), sorted(rows, key=lambda row: row % 2 * (kind == "folders")), strict=True)
    )


def small_network(channels, dimensions=1, seed=0):
    """A network of two convolutions over signals, or over spectrograms, with random weights."""
    torch.manual_seed(seed)
    convolution, pool = (nn.Conv1d, nn.AdaptiveAvgPool1d) if dimensions == 1 else (nn.Conv2d, nn.AdaptiveAvgPool2d)
    first = nn.Sequential(convolution(channels, 6, 5, stride=2), nn.GELU())
    second = nn.Sequential(convolution(6, 8, 3, stride=2), nn.ReLU())
    return nn.Sequential(first, second, pool(4), nn.Flatten(), nn.Linear(8 * 4**dimensions, 2))


def spectrogram_network():
    """A network that the command line names, for spectrograms."""
    return small_network(1, dimensions=2)


def signal_network():
    """Another one, for arrays of three channels."""
    return small_network(3)


def plain_losses(model, samples, labels, orders):
    """What a loop over the whole network loses."""
    optimiser = optimiser_of(model)
    taken, wanted = torch.tensor(np.stack(samples)), torch.tensor(labels)
    return [step(model(taken[rows]), wanted[rows], optimiser) for rows in orders]


def job_losses(job, places, epochs, **options):
    """The losses of a job's head, and the rows of each batch.

    Args:
        job: job with a head.
        places: row of each sample, by its id.
        epochs: numbers of the epochs.
        options: of the loader.
    """
    optimiser = optimiser_of(job.head)
    losses, orders = [], []
    for epoch in epochs:
        for batch in job.loader(batch_size=8, shuffle=True, seed=3, epoch=epoch, **options):
            losses.append(step(job.head(batch.features), batch.labels, optimiser))
            orders.append([places[id] for id in batch.ids.tolist()])
    return losses, orders


def optimiser_of(model):
    return torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)


def step(logits, labels, optimiser):
    loss = nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    return loss.item()
