"""The process that tries one engine on one prefix: data comes in as files, and trials go out as JSON."""

import json
import os
import sys
import threading
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frostline.core import Levels
from frostline.engines.machine import end_at_once, import_now, limit_memory
from frostline.engines.protocols import Footprint
from frostline.engines.trials import Arrays, Subject, compare_engine, try_briefly, try_engine
from frostline.models.artifact import read_prefix
from frostline.profiles import Trial

__all__ = ("main",)


def main() -> int:
    """Try an engine as described by a JSON object, which is read from standard input once all is imported.

    Its fields are: ``folder`` with ``prefix.safetensors``, ``pixels.npy`` and the reference's features, to which
    trials are written, one per line of ``trials.jsonl``; ``levels``, the ``mean`` and ``std`` of the pixels, or null;
    ``engine``; ``cuts`` to try it at; ``device``, ``rows``, ``threads`` and ``converted`` as in
    ``engines.trials.Subject``; ``footprints`` of the reference, each the cut and its two numbers;
    ``max_bytes``, its memory limit; ``only_error``, whether its speed and memory are known; and ``is_brief``, whether
    it is tried at one setting only.
    """
    _import_usual()
    argument = sys.stdin.buffer.readline()
    if not argument:  # nobody needed it
        return 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    wanted = json.loads(argument)
    if wanted["device"] == "cpu":  # an accelerator's driver maps far more memory than it uses
        limit_memory(wanted["max_bytes"])
    folder = Path(wanted["folder"])
    subject = _subject(wanted, folder)
    torch.set_num_threads(subject.threads[0])
    with (folder / "trials.jsonl").open("w", encoding="utf-8") as out:
        for cut in wanted["cuts"]:
            out.write(json.dumps(asdict(_trial(wanted, subject, cut, folder)), allow_nan=False) + "\n")
            out.flush()
    return 0


def _trial(wanted: dict[str, Any], subject: Subject, cut: int, folder: Path) -> Trial:
    look = compare_engine if wanted["only_error"] else try_briefly if wanted["is_brief"] else try_engine
    return look(subject, wanted["engine"], cut, _reference(folder, cut))


def _import_usual() -> None:
    """What the usual engine needs, which takes seconds."""
    if find_spec("openvino"):
        import_module("frostline.engines.openvino")
        import_now("openvino")


def _subject(wanted: dict[str, Any], folder: Path) -> Subject:
    prefix = read_prefix((folder / "prefix.safetensors").read_bytes())
    return Subject(
        graph=prefix.graph,
        cuts=prefix.cuts,
        tensors=prefix.tensors,
        pixels=np.load(folder / "pixels.npy", allow_pickle=False),
        levels=_levels(wanted["levels"]),
        device=wanted["device"],
        rows=tuple(wanted["rows"]),
        threads=tuple(wanted["threads"]),
        folder=Path(wanted["converted"]),
        footprints={
            cut: Footprint(fixed_bytes=fixed_bytes, bytes_per_sample=bytes_per_sample)
            for cut, fixed_bytes, bytes_per_sample in wanted["footprints"]
        },
    )


def _levels(wanted: dict[str, list[float]] | None) -> Levels | None:
    return None if wanted is None else Levels(mean=tuple(wanted["mean"]), std=tuple(wanted["std"]))


def _reference(folder: Path, cut: int) -> Arrays:
    paths = sorted(folder.glob(f"reference-{cut}-*.npy"))
    return tuple(np.load(path, allow_pickle=False) for path in paths)


def _end_with_parent() -> None:
    """Exit when the parent has died, because then nobody waits for the trial."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    end_at_once()
    raise SystemExit(main())
