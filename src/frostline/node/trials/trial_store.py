"""Keeps trials of engines by prefix and by all that they hold for, and errors by samples as well."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from frostline.engines.backends.converted_files import clear_unfinished
from frostline.engines.machine.hardware import hardware_name
from frostline.engines.machine.vendors import version_of
from frostline.node.trials.trial_policy import TrialPolicy
from frostline.private import make_private_folder
from frostline.profiles import Trial
from frostline.version import __version__

__all__ = ("TrialShelf",)

_MAX_FAILED = 1000
# Raise it whenever trials measure something else.
_RULE = 6
# What an engine's speed, error or files may depend on.
_PACKAGES = ("torch", "openvino", "onnx", "onnxruntime", "onnxscript", "nncf", "tensorrt")


class TrialShelf:
    """A folder of trials, one folder a prefix. Safe for threads and for several nodes.

    Args:
        folder: made when something is kept.
        terms: how engines were tried.
        max_bytes: that it may take, converted files among them; prefixes longest unused go first.
    """

    def __init__(self, folder: Path, terms: TrialPolicy, max_bytes: int) -> None:
        self._folder = folder
        self._terms = terms
        self._max_bytes = max_bytes
        self._failed: dict[tuple[str, str, int], Trial] = {}

    def place(self, digest: str) -> Path:
        """The folder of a prefix, for converted files too."""
        return self._folder / digest

    def tidy(self, digest: str = "*") -> None:
        """Remove what conversions left that were ended, of a prefix or of all."""
        for folder in self._folder.glob(f"{digest}/cut-*"):
            clear_unfinished(folder)

    def known(self, digest: str, one: Trial) -> Trial | None:
        """What was kept of an engine at a cut, or how it failed here; None where nobody knows."""
        return self.get(digest, one) or self._failed.get((digest, one.engine, one.cut))

    def learn(self, digest: str, one: Trial, *, is_late: bool) -> None:
        """Keep a trial; one that failed only as long as this lives, since it may have been the moment's fault.

        Args:
            digest: of the prefix.
            one: the trial.
            is_late: the time for all trials was up. One that failed then is not kept: the next request has time again.

        Raises:
            OSError: It cannot be written.
        """
        if one.samples_per_s is not None:
            self.put(digest, one)
        elif not is_late:
            if len(self._failed) >= _MAX_FAILED:
                self._failed.clear()
            self._failed[digest, one.engine, one.cut] = one

    def get(self, digest: str, one: Trial) -> Trial | None:
        """What was kept of an engine at a cut, which is then used now; None where nothing can be read."""
        path = self._path(digest, one)
        try:
            found = Trial(**json.loads(path.read_bytes())["trial"])
            os.utime(path.parent)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found

    def put(self, digest: str, one: Trial) -> None:
        """Keep a trial; a file is whole or not there.

        Raises:
            OSError: It cannot be written.
        """
        _write(self._path(digest, one), {"trial": asdict(one), "circumstances": self._circumstances()})
        self._prune(self.place(digest))

    def error(self, digest: str, one: Trial, samples: str) -> float | None:
        """The error that was measured of an engine at a cut on some samples; None where it was not."""
        try:
            found = json.loads(self._path(digest, one, samples).read_bytes())["error"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return float(found) if isinstance(found, int | float) else None

    def put_error(self, digest: str, one: Trial, samples: str) -> None:
        """Keep the error of a trial as that on some samples.

        Args:
            digest: of the prefix.
            one: the trial.
            samples: what names them.

        Raises:
            OSError: It cannot be written.
        """
        of = {"engine": one.engine, "cut": one.cut, "samples": samples, "error": one.error}
        _write(self._path(digest, one, samples), {**of, "circumstances": self._circumstances()})

    def _prune(self, spared: Path) -> None:
        """Drop prefixes, longest unused first, while the folder holds more than it may."""
        folders = sorted(self._folder.iterdir(), key=lambda one: one.stat().st_mtime)
        sizes = {one: sum(file.stat().st_size for file in one.rglob("*") if file.is_file()) for one in folders}
        total = sum(sizes.values())
        for folder in folders:
            if total > self._max_bytes and folder != spared:
                shutil.rmtree(folder, ignore_errors=True)
                total -= sizes[folder]

    def _path(self, digest: str, one: Trial, samples: str = "") -> Path:
        of = {"engine": one.engine, "cut": one.cut, **({"samples": samples} if samples else {})}
        named = json.dumps({**self._circumstances(), **of}, sort_keys=True)
        return self.place(digest) / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.json"

    def _circumstances(self) -> dict[str, object]:
        """What a trial holds for, beside the prefix."""
        terms = self._terms
        return {
            "frostline": __version__,
            "rule": _RULE,
            "hardware": hardware_name(terms.device),
            "device": terms.device,
            "rows": terms.rows,
            "threads": terms.threads,
            "here": terms.here,
            "keeps_freed": terms.keeps_freed,
            "packages": {name: version_of(name) for name in _PACKAGES},
        }


def _write(path: Path, value: dict[str, object]) -> None:
    make_private_folder(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        json.dump(value, file, indent=1)
    Path(file.name).replace(path)
