"""Stores trials of engines by prefix, engine and circumstances, and errors by samples too."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.files import make_private_folder, replace_file, with_schema, without_schema
from frostline.core.system import __version__
from frostline.engines.machine import hardware_name, version_of
from frostline.engines.recipe import clear_unfinished
from frostline.node.trials.queue import TrialPolicy
from frostline.profiles import Trial

__all__ = ("TrialStore",)

_FORMAT = 1
_MAX_FAILED = 1000
# Increase it whenever trials measure something else.
_RULE = 6
# Packages on which an engine's speed, error or files may depend.
_PACKAGES = ("torch", "openvino", "onnx", "onnxruntime", "onnxscript", "nncf", "tensorrt")


class TrialStore:
    """A folder of trials, with a folder per prefix. Safe for threads and for several nodes.

    Args:
        folder: folder, created when something is stored.
        policy: the way that engines were tried.
        max_bytes: maximum size including converted files; least recently used prefixes are removed first.
    """

    def __init__(self, folder: Path, policy: TrialPolicy, max_bytes: int) -> None:
        self._folder = folder
        self._policy = policy
        self._max_bytes = max_bytes
        self._failed: dict[tuple[str, str, int], Trial] = {}

    def place(self, digest: str) -> Path:
        """The folder of a prefix, which holds converted files too."""
        return self._folder / digest

    def tidy(self, digest: str = "*") -> None:
        """Remove unfinished conversions, of one prefix or of all."""
        for folder in self._folder.glob(f"{digest}/cut-*"):
            clear_unfinished(folder)

    def find(self, digest: str, trial: Trial) -> Trial | None:
        """The stored trial of an engine at a cut, or its failure in this process; None if neither is known."""
        return self.get(digest, trial) or self._failed.get((digest, trial.engine, trial.cut))

    def learn(self, digest: str, trial: Trial, *, is_late: bool) -> None:
        """Store a trial. A failed one is kept in memory only, since its cause may be temporary.

        Args:
            digest: digest of the prefix.
            trial: trial to be stored.
            is_late: True if the time for all trials was used up. A failure is then not kept: the next request has time.

        Raises:
            OSError: The trial cannot be written.
        """
        if trial.samples_per_s is not None:
            self.put(digest, trial)
        elif not is_late:
            if len(self._failed) >= _MAX_FAILED:
                self._failed.clear()
            self._failed[digest, trial.engine, trial.cut] = trial

    def get(self, digest: str, trial: Trial) -> Trial | None:
        """The stored trial of an engine at a cut, which then counts as used; None if there is none."""
        path = self._path(digest, trial)
        try:
            found = Trial(**_read(path, "trial", "circumstances")["trial"])
            os.utime(path.parent)
        except (OSError, ValueError, KeyError, TypeError, SettingError):
            return None
        return found

    def put(self, digest: str, trial: Trial) -> None:
        """Store a trial, as a whole file or not at all.

        Raises:
            OSError: The trial cannot be written.
        """
        _write(self._path(digest, trial), {"trial": asdict(trial), "circumstances": self._circumstances()})
        self._prune(self.place(digest))

    def error(self, digest: str, trial: Trial, samples: str) -> float | None:
        """The measured error of an engine at a cut on some samples; None if it is unknown."""
        try:
            known = ("engine", "cut", "samples", "error", "circumstances")
            found = _read(self._path(digest, trial, samples), *known)["error"]
        except (OSError, ValueError, KeyError, TypeError, SettingError):
            return None
        return float(found) if isinstance(found, int | float) else None

    def put_error(self, digest: str, trial: Trial, samples: str) -> None:
        """Store the error of a trial on some samples.

        Args:
            digest: digest of the prefix.
            trial: trial with the error.
            samples: digest of the samples.

        Raises:
            OSError: The error cannot be written.
        """
        of = {"engine": trial.engine, "cut": trial.cut, "samples": samples, "error": trial.error}
        _write(self._path(digest, trial, samples), {**of, "circumstances": self._circumstances()})

    def _prune(self, spared: Path) -> None:
        """Remove the least recently used prefixes while the folder is too large."""
        folders = sorted(self._folder.iterdir(), key=lambda folder: folder.stat().st_mtime)
        sizes = {folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders}
        total = sum(sizes.values())
        for folder in folders:
            if total > self._max_bytes and folder != spared:
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]

    def _path(self, digest: str, trial: Trial, samples: str = "") -> Path:
        of = {"engine": trial.engine, "cut": trial.cut, **({"samples": samples} if samples else {})}
        named = json.dumps({**self._circumstances(), **of}, sort_keys=True)
        return self.place(digest) / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"

    def _circumstances(self) -> dict[str, object]:
        """Everything beside the prefix that a trial depends on."""
        policy = self._policy
        return {
            "frostline": __version__,
            "rule": _RULE,
            "hardware": hardware_name(policy.device),
            "device": policy.device,
            "rows": policy.rows,
            "threads": policy.threads,
            "here": policy.here,
            "keeps_freed": policy.keeps_freed,
            "packages": {name: version_of(name) for name in _PACKAGES},
        }


def _read(path: Path, *known: str) -> dict[str, Any]:
    return without_schema(parse_json(path.read_bytes()), _FORMAT, path, known)


def _write(path: Path, value: dict[str, object]) -> None:
    make_private_folder(path.parent)
    replace_file(path, json.dumps(with_schema(value, _FORMAT), indent=1).encode())
