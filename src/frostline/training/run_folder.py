"""A run's folder: begun for a config, with checkpoints of which the latest whole one is read when it goes on."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.events import Evaluated
from frostline.core.files import read_regular, with_schema, without_schema
from frostline.core.system import crc32
from frostline.models.artifact import metadata
from frostline.training.loop import Checkpoint
from frostline.training.report.steps import forget_steps
from frostline.training.run_config import CHECKPOINTS, RunConfig, make_folder, mark_network, write_tensors
from frostline.training.settings import CheckpointEvery

__all__ = ("CheckpointFolder", "begin_run")

_FORMAT = 2
_KEY, _CHECKSUM = "checkpoint", "crc32"
# What ``atomic_file`` writes before it puts it in its place.
_UNFINISHED = ".step-*.part"
_KEPT = 2
_NAME = re.compile(r"step-(\d{10})\.safetensors")
# Epochs on kept features take milliseconds, and a slow disk seconds for a large head: where no steps were asked for,
# checkpoints take at most this share of the time.
_SHARE = 0.02
_PARTS = ("head", "optimizer", "best", "random")
# What a checkpoint has at most, of whoever gives the folder: the learned tensors, the best ones, and two for each of an
# optimizer, all in 32 bits where the network has 16; and losses of 2^25 steps.
_TIMES, _BESIDE_BYTES = 8, 256 << 20
_LISTS = ("losses", "epoch_losses")
_PLAIN = tuple(field.name for field in fields(Checkpoint) if field.name not in (*_PARTS, *_LISTS))


def begin_run(folder: Path, config: RunConfig) -> None:
    """Make a folder that of a new run; what an older run kept there to go on with is removed, its network is not.

    Raises:
        SettingError: the folder cannot be written.
        OutOfSpace: the disk is full.
    """
    mark_network(folder)  # first: no moment at which it would be taken for that of the new run
    CheckpointFolder(folder).clear()
    forget_steps(folder)
    config.write(folder)


class CheckpointFolder:
    """The checkpoints of a run, each whole or not there; the newest two are kept.

    Args:
        folder: the run's folder.
        every: number of times that one is due within an epoch.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, folder: Path, every: CheckpointEvery | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder / CHECKPOINTS
        self._every = every or CheckpointEvery()
        self._clock = clock
        self._step = 0
        self._at = clock()
        self._took_s = 0.0

    def is_due(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether so many steps passed since the last one; or so many seconds or an epoch, and it took few of them."""
        passed_s = self._clock() - self._at
        took_little = passed_s * _SHARE >= self._took_s
        is_due = self._every.is_due(steps=step - self._step, seconds=passed_s)
        if self._every.steps is None:
            return took_little and (ends_epoch or is_due)
        return is_due or (ends_epoch and took_little)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Write one, and remove those that are too many, and what a trainer left that was killed as it wrote.

        Raises:
            SettingError: the folder cannot be written.
            OutOfSpace: the disk is full.
        """
        began = self._clock()
        self._require_own()
        make_folder(self._folder)
        plain, tensors = json.dumps(with_schema(_plain(checkpoint), _FORMAT)), _tensors(checkpoint)
        said = {_KEY: plain, _CHECKSUM: _checksum(plain, tensors)}
        write_tensors(self._path(checkpoint.step), tensors, said)
        with self._as_unwritable():
            for path in (*self._paths()[:-_KEPT], *self._folder.glob(_UNFINISHED)):
                path.unlink(missing_ok=True)
        self._step, self._at = checkpoint.step, self._clock()
        self._took_s = self._at - began

    def read_latest(self, network_bytes: int = 0) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """The newest whole checkpoint, and why each newer one cannot be read; those are set aside, and never removed.

        Args:
            network_bytes: bytes of the network's parameters and buffers, of which a checkpoint has at most eight times
                as many, and 256 MiB.

        Raises:
            SettingError: No checkpoint is whole, another version of Frostline wrote one, one is larger than any of this
                network, or the system does not let it be read or set aside; all stay as they are.
        """
        damaged: dict[Path, str] = {}
        max_bytes = _TIMES * network_bytes + _BESIDE_BYTES
        for path in reversed(self._paths()):
            try:
                found = _read(path, max_bytes)
            except SafetensorError as error:
                damaged[path] = f"{path.name} is damaged ({error})"
                continue
            with self._as_unwritable():
                for other in damaged:  # else what comes next would be counted, and written, over it
                    other.rename(_free_name(other))
            self._step = found.step
            return found, tuple(damaged.values())
        if damaged:
            raise SettingError(
                f"no checkpoint in {self._folder} can be read, and none was touched: {', '.join(damaged.values())}; "
                "put back a copy of one, or begin a run in another folder (--out)"
            )
        return None, ()

    def clear(self) -> None:
        """Remove all of them.

        Raises:
            SettingError: the folder cannot be written; what could not be removed stays.
        """
        with self._as_unwritable():
            for path in self._paths():
                path.unlink(missing_ok=True)

    @contextmanager
    def _as_unwritable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SettingError(f"{self._folder} cannot be written: {error.strerror}") from error

    def _paths(self) -> list[Path]:
        """Oldest first; files of other names are nobody's business."""
        self._require_own()
        try:
            return sorted(path for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SettingError(f"{self._folder} cannot be read: {error.strerror}; it stays as it is") from error

    def _require_own(self) -> None:
        """Refuse a link in the place of the folder: checkpoints of another run would be read, and removed."""
        if self._folder.is_symlink():
            raise SettingError(
                f"{self._folder} is a link: a run's checkpoints lie in its own folder; link that instead"
            )

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:010}.safetensors"


def _free_name(path: Path) -> Path:
    """A name for a damaged checkpoint that no other one has."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in count())
    return next(name for name in names if not name.exists())


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    named = {f"{part}/{name}": tensor for part in _PARTS for name, tensor in getattr(checkpoint, part).items()}
    lists = {f"list/{name}": torch.tensor(getattr(checkpoint, name), dtype=torch.float64) for name in _LISTS}
    return named | lists


def _checksum(plain: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of all that a checkpoint says: a flipped bit in a weight would be another training, and nobody told."""
    found = crc32(plain.encode())
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous().reshape(-1)
        found = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = crc32(values.view(torch.uint8).numpy(), found)
    return f"{found:08x}"


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    """What of it is no tensor, as JSON."""
    values = {name: getattr(checkpoint, name) for name in _PLAIN}
    return values | {"scores": [asdict(score) for score in checkpoint.scores]}


def _read(path: Path, max_bytes: int) -> Checkpoint:
    """A checkpoint of this schema.

    Raises:
        SafetensorError: the file is cut off, or holds something else than was written.
        SettingError: The checkpoint is of another version, or the system does not let it be read.
    """
    try:
        body = read_regular(path, max_bytes)
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}; it stays as it is") from error
    tensors = load(body)
    try:
        said = metadata(body)
        plain = without_schema(parse_json(said[_KEY]), _FORMAT, path, _PLAIN)
        plain["scores"] = tuple(Evaluated(**score) for score in plain["scores"])
        plain |= {name: tuple(tensors[f"list/{name}"].tolist()) for name in _LISTS}
        plain |= {part: dict(_part(tensors, part)) for part in _PARTS}
        found = _checked(Checkpoint(**plain))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise SettingError(f"{path} holds no checkpoint that is understood ({error}); it stays as it is") from error
    if said.get(_CHECKSUM) != _checksum(said[_KEY], tensors):
        raise SafetensorError("it has another checksum than it was written with")
    return found


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, which anybody may have written; ``TypeError`` where a field has a value of another kind."""
    numbers = [getattr(checkpoint, name) for name in ("epoch", "epoch_steps", "steps", "samples")]
    numbers += [] if checkpoint.best_epoch is None else [checkpoint.best_epoch]
    numbers += [number for score in checkpoint.scores for number in (score.epoch, score.samples)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("its counts are no numbers from 0")
    if not isinstance(checkpoint.order, dict | None) or not isinstance(checkpoint.is_over, bool):
        raise TypeError("its order or its end makes no sense")
    scores: list[tuple[object, object]] = [(score.loss, score.scores) for score in checkpoint.scores]
    if not all(isinstance(loss, float) and isinstance(named, dict) for loss, named in scores):
        raise TypeError("its scores make no sense")
    return checkpoint


def _part(tensors: Mapping[str, torch.Tensor], part: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        owner, _, own = name.partition("/")
        if owner == part:
            yield own, tensor
