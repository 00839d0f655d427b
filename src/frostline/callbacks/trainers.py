"""Callbacks of Lightning and of transformers that log a job's figures to wherever the trainer reports.

Each gets its framework's own base class when it is named, so that whoever has one framework needs no other.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from frostline.callbacks.trackers import DIAGNOSIS, JobMeter
from frostline.jobs import Job

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from transformers import TrainerCallback, TrainerState, TrainingArguments

__all__ = ("LightningCallback", "LightningRefreezing", "TransformersCallback")


class _LightningEvents:
    """Logs a job's figures every ``log_every_n_steps`` steps of the trainer, and the diagnosis at the end.

    The diagnosis is logged as a hyperparameter, which is what every logger of Lightning keeps as text.

    Args:
        job: the job whose loader the trainer takes.
    """

    def __init__(self, job: Job) -> None:
        self._meter = JobMeter(job)
        self._logged_step = 0

    def on_train_start(self, trainer: "Trainer", *_: Any) -> None:
        """Count from here on."""
        self._logged_step = trainer.global_step
        self._meter.restart()

    def on_train_batch_end(self, trainer: "Trainer", *_: Any) -> None:
        """Log what is due; batches of which several are a step are logged once."""
        step = trainer.global_step
        every_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # it sets this one from elsewhere
        if step != self._logged_step and not step % every_steps:
            self._logged_step = step
            self._log(trainer)

    def on_train_end(self, trainer: "Trainer", *_: Any) -> None:
        """Log what is left, and what held the job back."""
        self._log(trainer)
        for logger in trainer.loggers:
            logger.log_hyperparams({DIAGNOSIS: self._meter.diagnosis()})

    def _log(self, trainer: "Trainer") -> None:
        if figures := self._meter.figures():
            for logger in trainer.loggers:
                logger.log_metrics(dict(figures), step=trainer.global_step)


class _LightningRefreezing:
    """Makes a job's frozen part anew where other callbacks, such as ``BackboneFinetuning``, have unfrozen layers.

    It looks at the network as each epoch begins, so put it behind those callbacks. The loader that the trainer has is
    one of the new frozen part from then on, and the job's head trains what was unfrozen.

    Args:
        job: the job whose loader the trainer takes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_epoch_start(self, *_: Any) -> None:
        """Freeze anew where something has changed."""
        if self._job.changed is not None:
            self._job.refreeze()


class _TransformersEvents:
    """Logs a job's figures whenever the trainer logs its loss, and keeps the diagnosis in its history at the end.

    Add it with ``trainer.add_callback(TransformersCallback(job, trainer.log))``: what goes through the trainer's own
    ``log`` reaches all that it reports to, and the history in ``trainer_state.json``. The diagnosis is a sentence,
    which most of these refuse, so that it goes into the history alone.

    Args:
        job: the job whose loader the trainer takes.
        log: the trainer's own ``log``.
    """

    def __init__(self, job: Job, log: Callable[[dict[str, float]], None]) -> None:
        self._meter = JobMeter(job)
        self._log = log

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Count from here on."""
        self._meter.restart()

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """Log the figures beside a loss; not beside scores, nor beside the figures themselves."""
        if logs and "loss" in logs:
            self._log_figures()

    def on_train_end(self, args: "TrainingArguments", state: "TrainerState", *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Log what is left, and keep what held the job back."""
        self._log_figures()
        history: list[Any] = state.log_history
        history.append({DIAGNOSIS: self._meter.diagnosis(), "step": state.global_step})

    def _log_figures(self) -> None:
        if figures := self._meter.figures():
            self._log(dict(figures))


if TYPE_CHECKING:

    class LightningCallback(_LightningEvents, Callback): ...  # noqa: D101

    class LightningRefreezing(_LightningRefreezing, Callback): ...  # noqa: D101

    class TransformersCallback(_TransformersEvents, TrainerCallback): ...  # noqa: D101


_MADE_OF = {
    "LightningCallback": (_LightningEvents, "lightning.pytorch", "Callback"),
    "LightningRefreezing": (_LightningRefreezing, "lightning.pytorch", "Callback"),
    "TransformersCallback": (_TransformersEvents, "transformers", "TrainerCallback"),
}


def __getattr__(name: str) -> Any:
    if name not in _MADE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    events, package, base = _MADE_OF[name]
    bases = (events, getattr(importlib.import_module(package), base))
    # Kept as a name of the module: callbacks travel to other processes, which look their classes up here.
    globals()[name] = made = type(name, bases, {"__module__": __name__, "__doc__": events.__doc__})
    return made
