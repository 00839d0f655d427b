"""Ray Train shares an epoch between its workers, also between others later; Ray Tune sweeps heads over one job."""

import json

import pytest

import frostline as fl
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings

pytest.importorskip("ray", reason="training under Ray needs the extra frostline[ray]")
# Ray starts a process of Python with torch for each of its workers.
pytestmark = pytest.mark.timeout(900)

TRAIN = """
import json, os, sys, tempfile
from pathlib import Path
import ray
import ray.train
import ray.train.torch
import torch
import frostline as fl
from support.averaging_ranks import network
from support.images import tiny_preprocess

folder, out = sys.argv[1:]


def loop(config):
    here = ray.train.get_context()
    model = network()
    head_state = order = None
    if config["begin"] is not None:
        with ray.train.Checkpoint(config["begin"]).as_directory() as place:
            saved = torch.load(Path(place) / "state.pt")
            head_state, order = saved["head"], saved["order"]
    with fl.offload(model, fl.Dataset(folder), preprocess=tiny_preprocess(), near="ray://frostline") as job:
        if head_state is not None:
            job.head.load_state_dict(head_state)
        head = ray.train.torch.prepare_model(job.head)
        optimizer = torch.optim.SGD((p for p in job.head.parameters() if p.requires_grad), 0.01)
        loader = job.loader(config["batch"], shuffle=True, seed=1)  # the ranks are those of Ray's process group
        if order is not None:
            loader.load_state_dict(order)
        for step, batch in enumerate(loader, 1):
            loss = torch.nn.functional.cross_entropy(head(batch.features), batch.labels % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = Path(out) / f"{config['name']}-{here.get_world_rank()}-{here.get_world_size()}-{step}.json"
            seen.write_text(json.dumps(batch.ids.tolist()))
            if step == config["stop"]:
                with tempfile.TemporaryDirectory() as place:
                    state = {"head": job.head.state_dict(), "order": loader.state_dict()}
                    torch.save(state, Path(place) / "state.pt")
                    kept = ray.train.Checkpoint(place) if here.get_world_rank() == 0 else None
                    ray.train.report({"loss": loss.item()}, checkpoint=kept)
                return


def train(name, workers, batch, stop, begin):
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"name": name, "batch": batch, "stop": stop, "begin": begin},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(name=name, storage_path=out + "/runs"),
    )
    return trainer.fit()


ray.init("auto", log_to_driver=False)
first = train("two", 2, 4, 2, None)
train("one", 1, 8, None, first.checkpoint.path)
"""

TUNE = """
import json, sys
import numpy as np
import ray
from ray import tune
import torch
import frostline as fl
from support.many_nodes import job

folder = sys.argv[1]


def head(config, features, labels):
    torch.manual_seed(0)
    inputs, wanted = torch.from_numpy(features.copy()), torch.from_numpy(labels.copy())
    layer = torch.nn.Linear(inputs.shape[1], 3)
    optimizer = torch.optim.Adam(layer.parameters(), config["lr"])
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(layer(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tune.report({"loss": loss.item()})


ray.init("auto", log_to_driver=False)
with job(folder, "ray://frostline") as running:
    batches = list(running.arrays(16))
features = np.concatenate([batch.features.reshape(len(batch), -1) for batch in batches])
labels = np.concatenate([batch.labels for batch in batches])
trial = tune.with_resources(tune.with_parameters(head, features=features, labels=labels), {"cpu": 0.5})
space = {"lr": tune.grid_search([1e-4, 1e-3, 1e-2])}
found = tune.Tuner(trial, param_space=space, run_config=tune.RunConfig(storage_path=sys.argv[2])).fit()
tried, best = sorted(result.config["lr"] for result in found), found.get_best_result("loss", "min").config["lr"]
print(json.dumps([found.num_errors, tried, best]))
"""


@pytest.mark.long
def test_two_workers_of_ray_train_share_an_epoch_and_one_goes_on_at_the_next_sample(folder, here, tmp_path):
    here.script(TRAIN, folder, tmp_path)
    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    two, one = ([ids for name, ids in seen.items() if name.startswith(run)] for run in ("two-", "one-"))
    assert [len(ids) for ids in two] == [4, 4, 4, 4], "two steps of two workers"
    ids = [id for ids in (*two, *one) for id in ids]
    assert sorted(ids) == sorted(fl.Dataset(folder).samples.ids.tolist())


@pytest.mark.long
def test_a_sweep_of_heads_runs_the_frozen_layers_once(folder, here, tmp_path):
    before = computed(here)
    errors, tried, best = json.loads(here.script(TUNE, folder, tmp_path).splitlines()[-1])
    assert (errors, tried, best) == (0, [1e-4, 1e-3, 1e-2], 1e-2)
    assert computed(here) - before == 36


def computed(here):
    """Samples that the node has answered."""
    transport = HttpTransport(here.node(0)["url"], LoaderSettings())
    try:
        return transport.node_statistics()["totals"]["samples"]
    finally:
        transport.close()
