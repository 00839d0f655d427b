"""A job's figures reach the trainers and trackers that people use, as their own loggers keep them."""

import copy
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from torch import nn, optim
from transformers import Trainer, TrainerCallback, TrainingArguments

import frostline as fl
from frostline.callbacks import (
    LightningCallback,
    LightningRefreezing,
    MlflowLog,
    TensorBoardLog,
    TransformersCallback,
    WandbLog,
)
from frostline.callbacks.trackers import DIAGNOSIS, JobMeter, figures_between
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import NetworkChanged, SettingError
from frostline.jobs import JobStatistics
from support.images import image_folder, tiny_preprocess

SAMPLES = 30
NAMES = {
    "frostline/stall_share",
    "frostline/samples_per_s",
    "frostline/cache_share",
    "frostline/bytes_crossed",
    "frostline/bytes_saved",
}
# What these packages warn of is theirs.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("plain_starts")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=10)


@pytest.fixture
def job(folder):
    settings, node = LoaderSettings(samples_per_request=8), NodeSettings(memory_bytes=1 << 28, device_batch=8)
    with fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), settings=settings, node=node) as job:
        yield job


def test_shares_are_of_the_time_since_the_last_figures_and_bytes_are_sums():
    before = JobStatistics(samples=100, from_cache=0, stall_s=5.0, wire_bytes=4_000)
    now = JobStatistics(samples=180, from_cache=20, stall_s=7.0, wire_bytes=6_000)
    assert figures_between(before, now, seconds=4.0, sample_bytes=100.0) == {
        "frostline/stall_share": 0.5,
        "frostline/samples_per_s": 20.0,
        "frostline/cache_share": 0.25,
        "frostline/bytes_crossed": 6_000.0,
        "frostline/bytes_saved": 12_000.0,
    }


def test_nothing_is_said_of_a_time_in_which_no_sample_was_taken():
    now = JobStatistics(samples=8, stall_s=1.0)
    assert figures_between(now, now, seconds=1.0, sample_bytes=100.0) == {}
    assert figures_between(JobStatistics(), now, seconds=0.0, sample_bytes=100.0) == {}


def test_a_stall_that_began_before_the_last_figures_is_no_more_than_all_of_the_time():
    found = figures_between(JobStatistics(), JobStatistics(samples=1, stall_s=9.0), seconds=1.0, sample_bytes=1.0)
    assert found["frostline/stall_share"] == 1.0


def test_a_meter_agrees_with_the_statistics_of_its_job(job):
    seconds = iter([0.0, 2.0])
    meter = JobMeter(job, clock=lambda: next(seconds))
    for _ in range(2):
        assert sum(len(batch) for batch in job.loader(4)) == SAMPLES
    figures, done = meter.figures(), job.statistics()
    assert set(figures) == NAMES
    assert figures["frostline/samples_per_s"] == 2 * SAMPLES / 2.0
    assert figures["frostline/cache_share"] == done.from_cache / (2 * SAMPLES) == 0.5
    assert figures["frostline/bytes_crossed"] == done.wire_bytes
    stored = 2 * job.data.samples.encoded_bytes
    assert figures["frostline/bytes_saved"] == pytest.approx(stored - done.wire_bytes)


class Lit(pl.LightningModule):
    """Trains a layer on pixels."""

    def __init__(self, job):
        super().__init__()
        self.job, self.layer = job, nn.Linear(3 * 32 * 32, 3)

    def train_dataloader(self):
        return self.job.loader(3, epoch=self.current_epoch)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.layer(batch.features.flatten(1)), batch.labels)

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=1e-4)


def test_lightning_logs_figures_to_all_of_its_loggers(job, tmp_path):
    loggers = [CSVLogger(tmp_path, name=name, flush_logs_every_n_steps=1) for name in ("first", "second")]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=4,
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningCallback(job)],
    )
    trainer.fit(Lit(job))
    assert trainer.global_step == 10
    for logger in loggers:
        logged = figures_in(logger)
        assert [int(row["step"]) for row in logged] == [4, 8, 10]
        assert all(0 <= float(row["frostline/stall_share"]) <= 1 for row in logged)
        assert float(logged[-1]["frostline/bytes_crossed"]) == job.statistics().wire_bytes
        assert logger.experiment.hparams[DIAGNOSIS] == str(job.diagnosis())


class TwoParts(nn.Module):
    """A backbone with BatchNorm and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1))
        )
        self.fc = nn.Linear(5, 3)

    def forward(self, pixels):
        return self.fc(self.backbone(pixels).flatten(1))


class Tuned(pl.LightningModule):
    """Trains a network, or the head of it, and keeps its losses."""

    def __init__(self, network, head, loader):
        super().__init__()
        self.backbone, self.head, self.loader, self.losses = network.backbone, head, loader, []

    def train_dataloader(self):
        return self.loader

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.head(batch.features), batch.labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)


def fitted(network, head, loader, *callbacks):
    module = Tuned(network, head, loader)
    unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, train_bn=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[unfreezing, *callbacks],
    )
    trainer.fit(module)
    return module.losses


@pytest.fixture
def tuned(folder):
    """A network, its twin and its job."""
    torch.manual_seed(1)
    network = fl.freeze(TwoParts().train(), "backbone", input_shape=(3, 32, 32))
    twin, settings = copy.deepcopy(network), LoaderSettings(samples_per_request=8, device_batch=8)
    node = NodeSettings(memory_bytes=1 << 28, device_batch=8)
    preprocess, data = tiny_preprocess(), fl.Dataset(folder)
    with fl.offload(network, data, preprocess=preprocess, settings=settings, node=node, on_event=lambda _: None) as job:
        yield network, twin, job


def test_a_backbone_that_lightning_unfreezes_is_trained_as_without_frostline(tuned, job):
    network, twin, own = tuned
    ours = fitted(network, own.head, own.loader(6), LightningRefreezing(own))
    theirs = fitted(twin, twin, job.loader(6))
    assert len(ours) == 15
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_backbone_that_lightning_unfreezes_is_told_where_nobody_freezes_anew(tuned):
    network, _, own = tuned
    with pytest.raises(NetworkChanged, match=r"parameter 'backbone.1.weight' is trained now: .*job.refreeze"):
        fitted(network, own.head, own.loader(6))


def figures_in(logger):
    """The rows of its file that have a job's figures."""
    lines = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    return [row for row in csv.DictReader(lines) if row["frostline/stall_share"]]


class Layer(nn.Module):
    """Computes its own loss, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 3)

    def forward(self, pixel_values, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(pixel_values.flatten(1)), labels)}


class OverFrostline(Trainer):
    """The trainer of transformers, which takes the loader that it is given."""

    def __init__(self, loader, **options):
        super().__init__(**options)
        self.loader = loader

    def get_train_dataloader(self):
        return self.loader


class Reporter(TrainerCallback):
    """Keeps what a trainer reports, as the callbacks of its trackers are told it."""

    def __init__(self):
        self.told = []

    def on_log(self, args, state, control, logs=None, **_):
        self.told.append((state.global_step, dict(logs)))


def test_the_trainer_of_transformers_logs_figures_beside_its_losses(job, tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        use_cpu=True,
        save_strategy="no",
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
    )
    loader = job.loader(3, augment=lambda batch, _: {"pixel_values": batch.features, "labels": batch.labels})
    reporter = Reporter()
    trainer = OverFrostline(loader, model=Layer(), args=arguments, callbacks=[reporter])
    trainer.add_callback(TransformersCallback(job, trainer.log))
    trainer.train()
    losses = [step for step, logs in reporter.told if "loss" in logs]
    assert losses == [4, 8, 12, 16, 20], "all losses are still logged"
    assert [step for step, logs in reporter.told if logs.keys() >= NAMES] == losses
    trainer.save_state()
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if row.keys() >= NAMES] == losses
    assert history[-1] == {DIAGNOSIS: str(job.diagnosis()), "step": 20}


class Recorder:
    """What has the methods of the trackers that are used here, with their signatures, and keeps what they are told.

    TensorBoard, MLflow and W&B are not in the environment of the tests. The signatures are those that they document:
    ``SummaryWriter.add_scalar(tag, scalar_value, global_step)`` and ``add_text(tag, text_string, global_step)``,
    ``mlflow.log_metrics(metrics, step)`` and ``set_tag(key, value)``, and of ``wandb.Run`` ``log(data)``,
    ``define_metric(name, step_metric)`` and ``summary``.
    """

    def __init__(self):
        self.rows, self.texts, self.defined, self.summary = {}, {}, [], {}

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.rows.setdefault(global_step, {})[tag] = scalar_value

    def add_text(self, tag, text_string, global_step=None):
        self.texts[tag] = text_string

    def log_metrics(self, metrics, step=None):
        assert all(isinstance(value, float) for value in metrics.values())
        self.rows[step] = metrics

    def set_tag(self, key, value):
        self.texts[key] = value

    def log(self, data):
        data = dict(data)
        self.rows[data.pop("frostline/step")] = data

    def define_metric(self, name, step_metric=None):
        self.defined.append((name, step_metric))


@pytest.mark.parametrize("kind", [TensorBoardLog, MlflowLog, WandbLog])
def test_a_plain_loop_logs_every_few_steps_and_the_rest_with_the_diagnosis(job, kind):
    recorder = Recorder()
    with kind(job, recorder, every_steps=4) as log:
        for step, _ in enumerate(job.loader(3), 1):
            log.step(step)
    assert list(recorder.rows) == [4, 8, 10]
    assert all(figures.keys() == NAMES for figures in recorder.rows.values())
    assert {**recorder.texts, **recorder.summary} == {DIAGNOSIS: str(job.diagnosis())}
    assert recorder.defined == ([("frostline/*", "frostline/step")] if kind is WandbLog else [])


def test_a_loop_that_fails_has_logged_its_last_figures_and_its_error_is_its_own(job):
    recorder = Recorder()

    def fail_in_a_loop():
        with MlflowLog(job, recorder) as log:
            for step, _ in enumerate(job.loader(3), 1):
                log.step(step)
                if step == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_loop()
    assert list(recorder.rows) == [2]
    assert DIAGNOSIS in recorder.texts


def test_steps_between_figures_are_at_least_one(job):
    with pytest.raises(SettingError, match="every_steps"):
        TensorBoardLog(job, Recorder(), every_steps=0)


def test_no_framework_is_imported_for_the_trackers():
    code = (
        "import sys\nfrom frostline.callbacks import MlflowLog, TensorBoardLog, WandbLog\n"
        "print([name for name in ('lightning', 'mlflow', 'tensorboard', 'torch', 'transformers', 'wandb') "
        "if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
