"""A callback of Lightning that logs a job's figures to whatever loggers the trainer has."""

from typing import Any

from lightning.pytorch import Callback, Trainer

from frostline.callbacks.figures import DIAGNOSIS, JobMeter
from frostline.jobs import Job

__all__ = ("LightningCallback",)


class LightningCallback(Callback):
    """Logs a job's figures every ``log_every_n_steps`` steps of the trainer, and the diagnosis at the end.

    The diagnosis is logged as a hyperparameter, which is what every logger of Lightning keeps as text.

    Args:
        job: the job whose loader the trainer takes.
    """

    def __init__(self, job: Job) -> None:
        self._meter = JobMeter(job)
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Count from here on."""
        self._logged_step = trainer.global_step
        self._meter.restart()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log what is due; batches of which several are a step are logged once."""
        step = trainer.global_step
        every_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # it sets this one from elsewhere
        if step != self._logged_step and not step % every_steps:
            self._logged_step = step
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Log what is left, and what held the job back."""
        self._log(trainer)
        for logger in trainer.loggers:
            logger.log_hyperparams({DIAGNOSIS: self._meter.diagnosis()})

    def _log(self, trainer: Trainer) -> None:
        if figures := self._meter.figures():
            for logger in trainer.loggers:
                logger.log_metrics(dict(figures), step=trainer.global_step)
