"""One process of several under JAX: reads its share of global batches, and prints what it saw."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import OrderMismatch
from frostline.loaders.adapters.jax import JaxLoader, ranks
from support.images import tiny_preprocess


def main(rank: int, world_size: int, port: int, folder: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", world_size, rank)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    summed = jax.jit(lambda labels: labels.sum())
    seen = {"ids": [], "labels": [], "said": ""}
    settings = LoaderSettings(samples_per_request=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings) as job:
        loader = JaxLoader(
            job.arrays(4, shuffle=True, last="drop", ranks=ranks()),
            sharding=sharding,
            columns=("features", "labels", "ids"),
        )
        iterator = iter(loader)
        for batch in iterator:
            assert batch["features"].shape == (8, 3, 32, 32)
            seen["ids"].append(batch["ids"].tolist())
            seen["labels"].append(int(summed(batch["labels"])))
        seen["state"] = iterator.get_state()
        try:
            next(iter(JaxLoader(job.arrays(4, shuffle=True, seed=rank, ranks=ranks()), sharding=sharding)))
        except OrderMismatch as error:
            seen["said"] = str(error)
    jax.distributed.shutdown()
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
