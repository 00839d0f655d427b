"""A callback of transformers that has its trainer log a job's figures wherever it reports to."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from frostline.callbacks.figures import DIAGNOSIS, JobMeter
from frostline.jobs import Job

__all__ = ("TransformersCallback",)


class TransformersCallback(TrainerCallback):
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

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:  # noqa: ARG002
        """Log what is left, and keep what held the job back."""
        self._log_figures()
        history: list[Any] = state.log_history
        history.append({DIAGNOSIS: self._meter.diagnosis(), "step": state.global_step})

    def _log_figures(self) -> None:
        if figures := self._meter.figures():
            self._log(dict(figures))
