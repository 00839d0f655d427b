"""Trainers that own their loop, as iterators: each waits after every step for whoever iterates."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import lightning.pytorch as pl
import torch
from torch import nn, optim
from transformers import Trainer, TrainerCallback, TrainingArguments

from frostline.loaders import merge_worker_states

__all__ = ("Fitted", "Trained", "stepped")

_OVER = object()
_NUMBERS = itertools.count()


class Left(Exception):
    """Nobody wants the rest of a training."""


def stepped(train):
    """What a training hands over after each step. It runs in a thread, never further than asked; closing ends it.

    Args:
        train: runs to its end; calls what it is given once before its first step, and with each step's batch.
    """
    passing = _steps(train)
    next(passing, None)
    return passing


def _steps(train):
    came, asked = SimpleQueue(), SimpleQueue()

    def hand_over(found=None):
        came.put(found)
        if not asked.get():
            raise Left

    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(train, hand_over)
        training.add_done_callback(lambda _: came.put(_OVER))
        try:
            while (found := came.get()) is not _OVER:
                yield found
                asked.put(True)
            training.result()
        finally:
            asked.put(False)


class Fitted:
    """A loader under Lightning's trainer, an epoch a pass, with the checkpoints that it writes at every step.

    Args:
        loader: that its module returns.
        folder: for the checkpoints.
    """

    def __init__(self, loader, folder):
        self._loader, self._folder = loader, folder
        self._from, self._last = None, None

    def __iter__(self):
        begin, self._from = self._from, None
        return stepped(lambda hand_over: self._fit(hand_over, begin))

    def checkpoint(self):
        """The one that was written last; None before the first."""
        return self._last

    def load_state_dict(self, checkpoint):
        """Let the next pass be a run that goes on from a checkpoint, or another first one."""
        self._from = checkpoint

    def state_dict(self):
        """What Lightning keeps of the loader."""
        if self._last is None:
            return self._loader.state_dict()
        return merge_worker_states(torch.load(self._last, weights_only=True)["loops"]["fit_loop"])

    def write(self, trainer):
        """Another checkpoint."""
        self._last = str(self._folder / f"{next(_NUMBERS)}.ckpt")
        trainer.save_checkpoint(self._last)

    def _fit(self, hand_over, checkpoint):
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_Writing(self, hand_over)],
        )
        trainer.fit(_Module(), self._loader, ckpt_path=checkpoint, weights_only=True)


class _Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, _):
        return self.layer(batch.features.flatten(1).mean(1, keepdim=True)).mean()

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), lr=1e-4)


class _Writing(pl.Callback):
    """Writes a checkpoint before the first step and after each, and hands over."""

    def __init__(self, fitted, hand_over):
        self._fitted, self._hand_over = fitted, hand_over

    def on_train_start(self, trainer, module):
        self._fitted.write(trainer)
        self._hand_over()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self._fitted.write(trainer)
        self._hand_over(batch)


class Trained:
    """A loader under the trainer of transformers, an epoch a pass; states are the loader's.

    Args:
        loader: of batches that are mappings; see ``inputs``.
        folder: for what the trainer writes.
    """

    def __init__(self, loader, folder):
        self._loader, self._folder = loader, folder
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    @staticmethod
    def inputs(batch, _):
        """What the network takes of a batch; an ``augment``."""
        return {"features": batch.features, "ids": batch.ids}

    def __iter__(self):
        return stepped(self._train)

    def _train(self, hand_over):
        arguments = TrainingArguments(
            output_dir=str(self._folder),
            num_train_epochs=1,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = _Network()
        trainer = _Trainer(self._loader, model=model, args=arguments, callbacks=[_Handing(model, hand_over)])
        trainer.train()


class _Trainer(Trainer):
    def __init__(self, loader, **options):
        super().__init__(**options)
        self._loader = loader

    def get_train_dataloader(self):
        return _OneEpoch(self._loader)


class _OneEpoch:
    """A loader that keeps its epoch, though the trainer counts from 0 in each pass."""

    def __init__(self, loader):
        self._loader = loader

    def __len__(self):
        return len(self._loader)

    def __iter__(self):
        return iter(self._loader)


class _Network(nn.Module):
    """Computes its own loss, as networks of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.ids = None

    def forward(self, features, ids):
        self.ids = ids
        return {"loss": self.layer(features.flatten(1).mean(1, keepdim=True)).mean()}


class _Handing(TrainerCallback):
    def __init__(self, model, hand_over):
        self._model, self._hand_over = model, hand_over

    def on_train_begin(self, args, state, control, **_):
        self._hand_over()

    def on_step_end(self, args, state, control, **_):
        self._hand_over(self._model.ids)
