"""Loaders under Lightning, Accelerate, transformers and DistributedDataParallel.

Loaders under the trainers that people use, Lightning, Accelerate and transformers: ranks, epochs, going on.

Two ranks that wrap a job's head in DistributedDataParallel train as one process on both batches.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn, optim
from transformers import Trainer, TrainerCallback, TrainingArguments

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.preprocess.apply import decode_into
from support.averaging_ranks import BATCH, gradients, network
from support.images import image_folder, tiny_preprocess
from support.servers import free_ports

NODE = NodeSettings(memory_bytes=1 << 28, device_batch=8)
SETTINGS = LoaderSettings(samples_per_request=8)
# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=10)


@pytest.fixture(scope="module")
def job(folder):
    options = {"preprocess": tiny_preprocess(), "settings": SETTINGS, "node": NODE}
    with fl.offload(None, fl.Dataset(folder), **options) as job:
        yield job


def epoch_of(job, epoch):
    return [batch.ids.tolist() for batch in job.loader(4, shuffle=True, epoch=epoch)]


class Lit(pl.LightningModule):
    """Trains a layer on pixels; a loader of its own for each epoch, or one for all, which the trainer gives them."""

    def __init__(self, job, one=False):
        super().__init__()
        self.job, self.one, self.seen = job, one, []
        self.layer = nn.Linear(3 * 32 * 32, 3)

    def train_dataloader(self):
        return self.job.loader(4, shuffle=True, epoch=0 if self.one else self.current_epoch)

    def training_step(self, batch, _):
        self.seen.append(batch.ids.tolist())
        return nn.functional.cross_entropy(self.layer(batch.features.flatten(1)), batch.labels)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=1e-4)


def fit(module, folder, *, steps, checkpoint=None, precision=None):
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        reload_dataloaders_every_n_epochs=0 if module.one else 1,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving],
    )
    trainer.fit(module, ckpt_path=checkpoint)
    return folder / f"step={steps}.ckpt"


@pytest.mark.parametrize(("stopped", "one"), [(3, False), (8, False), (11, False), (3, True)])
def test_lightning_goes_on_from_its_checkpoint_with_the_next_sample(job, tmp_path, stopped, one):
    first = Lit(job, one)
    checkpoint = fit(first, tmp_path, steps=stopped)
    second = Lit(job, one)
    fit(second, tmp_path, steps=16, checkpoint=checkpoint)
    assert first.seen + second.seen == epoch_of(job, 0) + epoch_of(job, 1)


def test_lightning_casts_the_tensors_of_a_batch_where_it_trains_in_16_bits(job, tmp_path):
    module = Lit(job)
    fit(module, tmp_path, steps=2, precision="bf16-true")
    assert module.seen == epoch_of(job, 0)[:2]
    assert module.layer.weight.dtype == torch.bfloat16


def test_processes_of_accelerate_share_an_epoch_once(folder, shared_node):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "support.accelerated", str(folder), shared_node.url]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=200)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    ids = [id for rank in found for batch in rank["ids"] for id in batch]
    assert sorted(ids) == sorted(fl.Dataset(folder).samples.ids.tolist())
    assert len(found[0]["ids"]) == len(found[1]["ids"]) == 4


class Layer(nn.Module):
    """Computes its own loss, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(3 * 32 * 32, 3), []

    def forward(self, pixel_values, labels, ids):
        self.seen.append(ids.tolist())
        return {"loss": nn.functional.cross_entropy(self.layer(pixel_values.flatten(1)), labels)}


class OverFrostline(Trainer):
    """The trainer of transformers, which takes the loader that it is given."""

    def __init__(self, loader, **options):
        super().__init__(**options)
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


def as_inputs(batch, _):
    return {"pixel_values": batch.features, "labels": batch.labels, "ids": batch.ids}


class Stop(TrainerCallback):
    """Ends a training after so many steps, with a checkpoint, as a killed run leaves one."""

    def __init__(self, steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == self.steps


def train(job, folder, *, epochs=2, stop=None, checkpoint=None, **options):
    model = Layer()
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        use_cpu=True,
        save_strategy="no" if stop is None else "steps",
        save_steps=100,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    loader = job.loader(4, shuffle=True, augment=as_inputs)
    trainer = OverFrostline(loader, model=model, args=arguments, callbacks=[] if stop is None else [Stop(stop)])
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return model.seen


def test_the_trainer_of_transformers_takes_each_epoch_in_its_own_order(job, tmp_path):
    assert train(job, tmp_path) == epoch_of(job, 0) + epoch_of(job, 1)


@pytest.mark.parametrize("stopped", [3, 8, 11])
def test_the_trainer_of_transformers_resumes_with_the_next_sample(job, tmp_path, stopped):
    first = train(job, tmp_path, stop=stopped)
    assert len(first) == stopped
    second = train(job, tmp_path, checkpoint=tmp_path / f"checkpoint-{stopped}", epochs=3)
    assert first + second == epoch_of(job, 0) + epoch_of(job, 1) + epoch_of(job, 2)


def test_the_trainer_of_transformers_counts_batches_of_which_several_are_a_step(job, tmp_path):
    first = train(job, tmp_path, stop=3, gradient_accumulation_steps=3)
    second = train(job, tmp_path, checkpoint=tmp_path / "checkpoint-3", gradient_accumulation_steps=3)
    assert first + second == epoch_of(job, 0) + epoch_of(job, 1)


def test_batches_that_accelerate_skips_are_never_requested(folder):
    options = {"preprocess": tiny_preprocess(), "settings": LoaderSettings(cache_bytes=0), "node": NODE}
    with fl.offload(None, fl.Dataset(folder), **options) as job:
        loader = job.loader(4, shuffle=True)
        skipping = skip_first_batches(loader, 6)
        assert len(skipping) == len(loader) - 6
        for _ in range(2):
            assert [batch.ids.tolist() for batch in skipping] == epoch_of_rest(job, 24)
        arrived = sum(samples for _, samples in job.statistics().routed)
    assert arrived == 4 * 6, "two passes and what is expected of each"


def epoch_of_rest(job, position):
    loader = job.loader(4, shuffle=True)
    loader.load_state_dict({**loader.state_dict(), "position": position})
    return [batch.ids.tolist() for batch in loader]


def test_a_pass_that_skips_counts_in_the_loader_and_is_left_like_any_other(job):
    loader = job.loader(4, shuffle=True)
    skipping = skip_first_batches(loader, 2)
    for batch in skipping:
        assert batch.ids.tolist() == epoch_of(job, 0)[2]
        assert loader.state_dict()["position"] == 12
        break
    del batch
    assert [batch.ids.tolist() for batch in skipping] == epoch_of(job, 0)[2:]
    assert [batch.ids.tolist() for batch in loader] == epoch_of(job, 0)


@pytest.mark.parametrize("stopped", [3, 11])
def test_accelerate_keeps_the_state_of_epochs_in_its_checkpoints(job, tmp_path, stopped):
    def prepared():
        accelerator, epochs = Accelerator(cpu=True), job.epochs(4, range(2), shuffle=True)
        accelerator.register_for_checkpointing(epochs)
        return accelerator, epochs

    def batches(epochs):
        for loader in epochs:
            yield from (batch.ids.tolist() for batch in loader)

    accelerator, epochs = prepared()
    passing = batches(epochs)
    first = list(itertools.islice(passing, stopped))
    accelerator.save_state(str(tmp_path))
    accelerator, epochs = prepared()
    accelerator.load_state(str(tmp_path))
    assert first + list(batches(epochs)) == epoch_of(job, 0) + epoch_of(job, 1)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The data, and what both ranks saw."""
    place = tmp_path_factory.mktemp("averaged")
    folder = image_folder(place / "images", per_class=4)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.averaging_ranks", str(rank), str(folder), str(place)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return fl.Dataset(folder), [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_both_ranks_have_the_gradients_of_one_process_on_both_batches(seen):
    data, (first, second) = seen
    assert first["gradients"] == second["gradients"]
    assert not set(first["ids"]) & set(second["ids"])
    ids = first["ids"] + second["ids"]
    assert len(ids) == 2 * BATCH
    model, pixels = network(), torch.zeros(len(ids), *tiny_preprocess().shape)
    rows = {int(id): row for row, id in enumerate(data.samples.ids)}
    for place, id in enumerate(ids):
        path = Path(data.url.removeprefix("file://")) / data.samples.objects[rows[id]]
        decode_into(tiny_preprocess(), path.read_bytes(), pixels[place].numpy(), id=id, view=None)
    labels = torch.tensor([int(data.samples.labels[rows[id]]) for id in ids])
    torch.nn.functional.cross_entropy(model(pixels), labels).backward()
    meant = gradients(model)
    assert meant.keys() == first["gradients"].keys()
    for name, values in meant.items():
        torch.testing.assert_close(torch.tensor(first["gradients"][name]), torch.tensor(values), rtol=1e-5, atol=1e-6)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten()).requires_grad_(False).eval()
        self.layer = nn.LazyLinear(3)
        self(torch.zeros(1, 3, 32, 32))

    def forward(self, pixels):
        return self.layer(self.stem(pixels))


class OverHead(Layer):
    """Trains the head of a job."""

    def __init__(self, head):
        super().__init__()
        self.layer = head

    def forward(self, pixel_values, labels, ids):
        self.seen.append(ids.tolist())
        return {"loss": nn.functional.cross_entropy(self.layer(pixel_values), labels)}


class LitHead(Lit):
    def __init__(self, job):
        super().__init__(job)
        self.layer = job.head

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layer(batch.features), batch.labels)


def train_by_transformers(job, folder):
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    OverFrostline(job.loader(4, augment=as_inputs), model=OverHead(job.head), args=arguments).train()


def train_by_lightning(job, folder):
    fit(LitHead(job), folder, steps=2, precision="bf16-mixed")


@pytest.mark.parametrize("trained", [train_by_transformers, train_by_lightning])
def test_a_trainer_that_casts_is_told_at_the_users_line_that_frozen_layers_are_not(folder, tmp_path, trained):
    options = {"preprocess": tiny_preprocess(), "settings": SETTINGS, "node": NODE}
    with (
        fl.offload(Frozen(), fl.Dataset(folder), **options) as job,
        pytest.warns(UserWarning, match="autocast") as told,
    ):
        trained(job, tmp_path)
    [said] = [one for one in told if "reaches what the head computes alone" in str(one.message)]
    assert said.filename == __file__
