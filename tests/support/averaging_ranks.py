"""One rank of two that trains a job's head in DistributedDataParallel, and prints what it saw."""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import frostline as fl
from support.images import tiny_preprocess

BATCH = 4
PATIENCE = timedelta(seconds=60)


def network() -> nn.Module:
    """Convolution, pooling and two dense layers, of which the convolution is frozen; no statistics of the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2)
    )
    return fl.freeze(model, "0", input_shape=tiny_preprocess().shape)


def gradients(model: nn.Module) -> dict[str, list[float]]:
    """Of what is trained, by its name in the network."""
    return {name: tensor.grad.flatten().tolist() for name, tensor in model.named_parameters() if tensor.requires_grad}


def main(rank: int, folder: str, rendezvous: str) -> None:
    """One step on the rank's share of the first global batch."""
    dist.init_process_group("gloo", f"file://{rendezvous}/group", PATIENCE, 2, rank)
    model = network()
    with fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), accuracy="exact") as job:
        head = nn.parallel.DistributedDataParallel(job.head)
        batch = next(iter(job.loader(BATCH)))
        nn.functional.cross_entropy(head(batch.features), batch.labels).backward()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"ids": batch.ids.tolist(), "gradients": gradients(model)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
