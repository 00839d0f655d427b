"""Keeps measured situations in the user's cache folder, so that a what-if question needs no measuring."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from frostline.config import NodeSettings, cache_folder
from frostline.planning import Situation
from frostline.stores.base.urls import normalise_url
from frostline.training.files import make_folder, write_text
from frostline.training.report.what_if import MeasuredSituation
from frostline.training.settings import RANDOM, JobSettings
from frostline.version import __version__

__all__ = ("asked_of", "find", "just_measured", "keep")


def just_measured(job: JobSettings, situation: Situation, *, fallback: str | None = None) -> MeasuredSituation:
    """A situation that was measured for a job a moment ago.

    Raises:
        SettingError: the data's URL is none that Frostline reads.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return MeasuredSituation(asked=asked_of(job), at=now, situation=situation, fallback=fallback)


def asked_of(job: JobSettings) -> dict[str, Any]:
    """What a measurement depends on, as plain values.

    No name and no password is among them: neither the data's URL nor the node's may carry any.

    Raises:
        SettingError: the data's URL is none that Frostline reads.
    """
    return {
        "data": normalise_url(job.data),
        "column": job.column,
        "model": job.model,
        "until": job.until,
        "near": None if job.near is None else job.near.rstrip("/"),
        "also_near": [url.rstrip("/") for url in job.also_near],
        "weights": job.weights if job.weights in (None, RANDOM) else str(Path(job.weights).absolute()),
        "tokenizer": job.tokenizer,
        "max_length": job.max_length,
        "samples": job.samples,
        "augment": job.augment,
        "accuracy": job.accuracy,
        "seed": job.seed,
        # A node of one's own is as large and as fast as it is told to be.
        "node": _own_node(job.node) if job.near is None else None,
    }


def keep(measured: MeasuredSituation) -> Path:
    """Write a measurement where ``find`` looks for it, in the place of an older one, and say where that is.

    Raises:
        SettingError: the cache folder cannot be written.
        OutOfSpace: the disk is full.
    """
    path = _place(measured.asked)
    make_folder(path.parent, is_private=True)
    whole = {
        "asked": measured.asked,
        "measured": measured.at,
        "fallback": measured.fallback,
        "situation": measured.situation.to_json(),
    }
    write_text(path, json.dumps(whole, indent=1, allow_nan=False) + "\n", is_private=True)
    return path


def find(job: JobSettings) -> MeasuredSituation | None:
    """The latest measurement that answers for a job, or None where this version of Frostline kept none."""
    asked = asked_of(job)
    try:
        kept = json.loads(_place(asked).read_text(encoding="utf-8"))
        situation = Situation.from_json(kept["situation"])
        return MeasuredSituation(asked=asked, at=kept["measured"], situation=situation, fallback=kept["fallback"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _own_node(node: NodeSettings) -> dict[str, Any]:
    return {"memory_bytes": node.memory_bytes, "device": node.device, "tries": node.trial_s > 0}


def _place(asked: Mapping[str, Any]) -> Path:
    """The file of a measurement: another version of Frostline may measure something else."""
    named = json.dumps({"frostline": __version__, **asked}, sort_keys=True)
    return cache_folder() / "plans" / f"{hashlib.sha256(named.encode()).hexdigest()[:40]}.json"
