"""One rank of several: a process that speaks with the others over loopback, reads its share, and prints what it saw."""

import json
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

import frostline as fl
from frostline.core.config import LoaderSettings
from frostline.core.errors import OrderMismatch, Unavailable
from frostline.loaders import WorkerLoader
from support.images import tiny_preprocess

PATIENCE = timedelta(seconds=60)


def main(rank: int, world_size: int, folder: str, other: str, node: str, rendezvous: str) -> None:
    """Read as all do, then differ from the others in one thing after another, as rank 1."""
    dist.init_process_group("gloo", f"file://{rendezvous}/group", PATIENCE, world_size, rank)
    store = dist.PrefixStore("order", dist.FileStore(f"{rendezvous}/store", world_size))
    settings = LoaderSettings(samples_per_request=8)
    seen = {"said": {}}

    def attempt(name, job, workers=0, **options):
        loader = job.loader(4, shuffle=True, **options)
        try:
            passing = iter(WorkerLoader(loader, workers) if workers else loader)
            if not workers:  # else they would be started only now
                next(passing)
        except (OrderMismatch, Unavailable) as error:
            seen["said"][name] = str(error)

    with (
        fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, near=node) as job,
        fl.offload(None, fl.Dataset(other), preprocess=tiny_preprocess(), settings=settings, near=node) as another,
    ):
        loader = job.loader(4, shuffle=True)
        seen["ids"] = [batch.ids.tolist() for batch in loader]
        seen["state"] = loader.state_dict()
        attempt("seed", job, seed=int(rank == 1))
        attempt("epoch", job, epoch=7 * (rank == 1))
        attempt("manifest", another if rank == 1 else job)
        attempt("nothing", job, epoch=3)
        by_store = fl.Ranks.by_store(store, rank, world_size)
        attempt("store", job, ranks=by_store, seed=int(rank == 1))
        attempt("nothing", job, ranks=by_store)
        attempt("workers", job, workers=1, ranks=by_store, seed=int(rank == 1))
        attempt("nothing", job, workers=1, ranks=by_store)
        attempt("alone", job, ranks=fl.Ranks(), seed=rank)
        store.set_timeout(timedelta(seconds=1))
        if rank == 0:  # the others never come
            attempt("absent", job, ranks=by_store)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
