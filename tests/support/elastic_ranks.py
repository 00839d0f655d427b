"""A loop that trains one epoch with as many ranks as there are, and goes on with more or fewer at the next sample."""

import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import frostline as fl
from support.averaging_ranks import network
from support.images import tiny_preprocess
from support.nodes import until

with suppress(ImportError):  # who trains in turns needs no Ray
    import ray
    import ray.train
    import ray.train.torch
    from ray.cluster_utils import Cluster

AT_ONCE = 8
"""Samples of a step of all ranks together, however many they are."""


def train(folder, near, saved, keep, wait, wrap):
    """Train to the end of the epoch.

    Args:
        folder: images.
        near: nodes.
        saved: what ``keep`` was given last; None at the beginning.
        keep: takes all that a later call goes on from, as JSON, after every step.
        wait: called with the number of steps that all ranks have taken before the last one is kept; may never return.
        wrap: makes of the head one that averages gradients over ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    with fl.offload(network(), fl.Dataset(folder), preprocess=tiny_preprocess(), near=near, accuracy="exact") as job:
        loader = job.loader(AT_ONCE // world, shuffle=True, seed=1)  # the ranks are those of the process group
        history = []
        if saved is not None:
            history = saved["history"]
            job.head.load_state_dict({name: torch.tensor(values) for name, values in saved["head"].items()})
            loader.load_state_dict(saved["order"])
        head = wrap(job.head)
        optimizer = optimizer_of(job)
        for batch in loader:
            loss = nn.functional.cross_entropy(head(batch.features), batch.labels % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shares = gathered((batch.ids.tolist(), loss.item()), world)
            history.append({"ranks": world, "ids": dealt([ids for ids, _ in shares]), "loss": mean(shares)})
            wait(len(history))
            values = {name: tensor.tolist() for name, tensor in job.head.state_dict().items()}
            keep({"head": values, "order": loader.state_dict(), "history": history})


def train_in_turns(folder, turns):
    """What ``train`` keeps, of ranks that are all in this process: so many ranks for so many steps, one after another.

    Args:
        folder: images.
        turns: pairs of ranks and steps; the last one goes on to the end of the epoch.
    """
    history, order = [], None
    with fl.offload(network(), fl.Dataset(folder), preprocess=tiny_preprocess(), accuracy="exact") as job:
        optimizer = optimizer_of(job)
        for world, steps in turns:
            ranks = [fl.Ranks(rank=rank, world_size=world) for rank in range(world)]
            loaders = [job.loader(AT_ONCE // world, shuffle=True, seed=1, ranks=rank) for rank in ranks]
            for loader in loaders:
                if order is not None:
                    loader.load_state_dict(order)
            passing = [iter(loader) for loader in loaders]
            for batches in itertools.islice(zip(*passing, strict=True), steps):
                losses = [nn.functional.cross_entropy(job.head(batch.features), batch.labels % 2) for batch in batches]
                optimizer.zero_grad()
                (sum(losses) / world).backward()
                optimizer.step()
                shares = [(batch.ids.tolist(), loss.item()) for batch, loss in zip(batches, losses, strict=True)]
                history.append({"ranks": world, "ids": dealt([ids for ids, _ in shares]), "loss": mean(shares)})
                order = json.loads(json.dumps(loaders[0].state_dict()))
            for loader in passing:
                loader.close()
    return history


def optimizer_of(job):
    return torch.optim.SGD((parameter for parameter in job.head.parameters() if parameter.requires_grad), 0.1)


def gathered(value, world):
    """The values of all ranks."""
    if world == 1:
        return [value]
    values = [None] * world
    dist.all_gather_object(values, value)
    return values


def dealt(shares):
    """Samples of a step in the order in which they were dealt to ranks, one by one."""
    rows = max(map(len, shares))
    return [ids[row] for row in range(rows) for ids in shares if row < len(ids)]


def mean(shares):
    """The loss over the samples of all ranks."""
    return sum(len(ids) * loss for ids, loss in shares) / sum(len(ids) for ids, _ in shares)


def loop_of_ray(config):
    """The loop of a trainer of Ray: it goes on from the newest checkpoint, in a group of any size."""
    here, newest = ray.train.get_context(), ray.train.get_checkpoint()
    saved = None
    if newest is not None:
        with newest.as_directory() as place:
            saved = json.loads((Path(place) / "state.json").read_text())

    def keep(state):
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "state.json").write_text(json.dumps(state))
            kept = ray.train.Checkpoint.from_directory(place) if here.get_world_rank() == 0 else None
            ray.train.report({"steps": len(state["history"])}, checkpoint=kept)

    def wait(steps):
        """After these steps the group stays until it has another size: the step is lost with it, and taken again."""
        if steps == config["hold"].get(here.get_world_size()):
            Path(config["out"], f"held-by-{here.get_world_size()}").touch()
            while True:
                time.sleep(0.1)

    train(config["folder"], config["near"], saved, keep, wait, ray.train.torch.prepare_model)


def main(folder, out, near):
    """Train on a Ray that whoever called this ends: a second host joins once the first worker waits, and then dies."""
    head = {"num_cpus": 2, "resources": {"seat": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        loop_of_ray,
        train_loop_config={"folder": folder, "out": out, "near": near, "hold": {1: 3, 2: 6}},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 2), elastic_resize_monitor_interval_s=1, resources_per_worker={"seat": 1}
        ),
        run_config=ray.train.RunConfig(
            name="elastic", storage_path=f"{out}/runs", failure_config=ray.train.FailureConfig(max_failures=-1)
        ),
    )
    with ThreadPoolExecutor(1) as threads:
        fitted = threads.submit(trainer.fit)
        until(lambda: fitted.done() or Path(out, "held-by-1").exists(), timeout_s=300)
        host = cluster.add_node(num_cpus=0, resources={"seat": 1}, object_store_memory=80_000_000)
        until(lambda: fitted.done() or Path(out, "held-by-2").exists(), timeout_s=300)
        cluster.remove_node(host, allow_graceful=False)
        with fitted.result().checkpoint.as_directory() as place:
            print((Path(place) / "state.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
