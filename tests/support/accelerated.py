"""One process of several under Hugging Face Accelerate, which reads its share of an epoch and prints the ids."""

import json
import sys

from accelerate import Accelerator
from torch import nn, optim

import frostline as fl
from frostline.core.config import LoaderSettings
from support.images import tiny_preprocess


def main(folder: str, node: str) -> None:
    """Prepare all as Accelerate's users do."""
    accelerator = Accelerator(cpu=True)
    settings = LoaderSettings(samples_per_request=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, near=node) as job:
        model = nn.Linear(3 * 32 * 32, 3)
        model, optimizer, loader = accelerator.prepare(
            model, optim.SGD(model.parameters(), lr=1e-4), job.loader(4, shuffle=True)
        )
        found = []
        for batch in loader:
            batch = batch.to(accelerator.device)
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(batch.features.flatten(1)), batch.labels))
            optimizer.step()
            found.append(batch.ids.tolist())
    accelerator.end_training()
    print(json.dumps({"rank": accelerator.process_index, "ids": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
