"""Logs a job's figures from a training loop of one's own to TensorBoard, MLflow or W&B, none of which is imported.

Each is given what it writes to, and uses no more of it than its protocol here names.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from frostline.callbacks.figures import DIAGNOSIS, JobMeter
from frostline.checks import check_minimums
from frostline.jobs import Job

__all__ = ("MlflowLog", "TensorBoardLog", "WandbLog")


class _StepLog(ABC):
    """Logs a job's figures every so many steps, and the diagnosis at the end. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, *, every_steps: int = 50) -> None:
        self.every_steps = every_steps
        check_minimums(self, every_steps=1)
        self._meter = JobMeter(job)
        self._last_step = 0

    def __enter__(self) -> Self:
        self._meter.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log()
        self._write_diagnosis(self._meter.diagnosis())

    def step(self, step: int) -> None:
        """Say that the step of this number was taken; call it after each."""
        self._last_step = step
        if not step % self.every_steps:
            self._log()

    def _log(self) -> None:
        if figures := self._meter.figures():
            self._write(figures, self._last_step)

    @abstractmethod
    def _write(self, figures: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def _write_diagnosis(self, diagnosis: str) -> None: ...


class _Writer(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...


class TensorBoardLog(_StepLog):
    """Logs a job's figures as scalars, and the diagnosis as a text. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        writer: a ``SummaryWriter`` of ``torch.utils.tensorboard`` or of ``tensorboardX``; it stays open.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, writer: _Writer, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._writer = writer

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._writer.add_text(DIAGNOSIS, diagnosis, self._last_step)


class _Mlflow(Protocol):
    def log_metrics(self, metrics: dict[str, float], step: int) -> Any: ...

    def set_tag(self, key: str, value: str) -> Any: ...


class MlflowLog(_StepLog):
    """Logs a job's figures as metrics of the active run, and the diagnosis as a tag. Use it as a context manager.

    Args:
        job: the job whose loader the loop takes.
        mlflow: the module ``mlflow``, in which a run was started.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, mlflow: _Mlflow, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._mlflow = mlflow

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._mlflow.set_tag(DIAGNOSIS, diagnosis)


class _Run(Protocol):
    @property
    def summary(self) -> Any: ...

    def log(self, data: dict[str, Any]) -> Any: ...

    def define_metric(self, name: str, step_metric: str) -> Any: ...


class WandbLog(_StepLog):
    """Logs a job's figures to a run of W&B, and the diagnosis to its summary. Use it as a context manager.

    They have a step of their own, ``frostline/step``, since W&B drops what comes for a step before its last.

    Args:
        job: the job whose loader the loop takes.
        run: a run, as ``wandb.init`` returns it; it stays open.
        every_steps: steps from one time that figures are logged to the next.

    Raises:
        SettingError: ``every_steps`` is below 1.
    """

    def __init__(self, job: Job, run: _Run, *, every_steps: int = 50) -> None:
        super().__init__(job, every_steps=every_steps)
        self._run = run
        run.define_metric("frostline/*", step_metric="frostline/step")

    def _write(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "frostline/step": step})

    def _write_diagnosis(self, diagnosis: str) -> None:
        self._run.summary[DIAGNOSIS] = diagnosis
