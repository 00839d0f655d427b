"""Bulk extraction: the features of every sample of a data set, in the manifest's order, to one Parquet file."""

import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from frostline.core import Skipped
from frostline.errors import ModelError
from frostline.events import Observer
from frostline.loaders import Batch
from frostline.training.files import make_folder, whole_file
from frostline.training.setup import JobSettings, Setup, set_up

__all__ = ("ExtractSettings", "Extracted", "extract")

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings(JobSettings):
    """A job whose features go to the Parquet file ``out``."""

    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What an extraction did.

    Attributes:
        out: the file.
        samples: rows in it.
        shape: of one sample's features.
        dtype: of the features.
        seconds: from the first request to the file's last byte.
        wire_bytes: store side to trainer, bodies and headers.
        skipped: samples that could not be read; they have no row.
    """

    out: str
    samples: int
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    wire_bytes: int
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "shape": list(self.shape), "skipped": [asdict(one) for one in self.skipped]}
