"""A job's figures in the trainers and trackers that people use; each framework is imported when its class is named."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.callbacks.progress import JobProgress
    from frostline.callbacks.traces import OpenTelemetryTrace, TraceFile
    from frostline.callbacks.trackers import JobCollector, MlflowLog, TensorBoardLog, WandbLog
    from frostline.callbacks.trainers import LightningCallback, LightningRefreezing, TransformersCallback

__all__ = (
    "JobCollector",
    "JobProgress",
    "LightningCallback",
    "LightningRefreezing",
    "MlflowLog",
    "OpenTelemetryTrace",
    "TensorBoardLog",
    "TraceFile",
    "TransformersCallback",
    "WandbLog",
)

_MODULES = {
    "JobCollector": "frostline.callbacks.trackers",
    "JobProgress": "frostline.callbacks.progress",
    "LightningCallback": "frostline.callbacks.trainers",
    "LightningRefreezing": "frostline.callbacks.trainers",
    "MlflowLog": "frostline.callbacks.trackers",
    "OpenTelemetryTrace": "frostline.callbacks.traces",
    "TensorBoardLog": "frostline.callbacks.trackers",
    "TraceFile": "frostline.callbacks.traces",
    "TransformersCallback": "frostline.callbacks.trainers",
    "WandbLog": "frostline.callbacks.trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
