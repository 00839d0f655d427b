"""The config of a run, as ``frostline.json`` in its folder, written as all its files are: whole or not at all.

The config of a run: its options by name, and digests of what it began with. ``config.json`` is transformers' name.
"""

import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.files import (
    lock,
    make_private_folder,
    open_private,
    read_regular,
    try_lock,
    with_schema,
    without_schema,
    write_errors,
)

if TYPE_CHECKING:
    import torch

__all__ = (
    "CHECKPOINTS",
    "NETWORK",
    "REPORT",
    "RunConfig",
    "atomic_file",
    "has_earlier_network",
    "keep_report",
    "make_folder",
    "mark_network",
    "own_folder",
    "require_ended",
    "unmark_network",
    "write_bytes",
    "write_tensors",
    "write_text",
)


_PART = re.compile(r"\.[0-9a-f]{8}\.part")


def make_folder(path: Path) -> None:
    """Make a folder and those above it for their user alone, where they are missing, and see that it takes files.

    Raises:
        SettingError: The folder cannot be made there, or a file is in its place.
        OutOfSpace: the disk is full.
    """
    with write_errors(path):
        make_private_folder(path)
        # Some folders exist and take no files; better to know before the work than after it.
        with tempfile.TemporaryFile(dir=path):
            pass


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, as ``atomic_file`` does."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_tensors(path: Path, tensors: Mapping[str, "torch.Tensor"], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that ``load_state_dict`` takes back whole, as ``write_bytes`` does.

    Tensors may be on any device. Tied weights are written under each of their names.

    Args:
        path: The place where it will be.
        tensors: the tensors by their names.
        metadata: Texts to write beside them.
    """
    from safetensors.torch import save

    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        # The format refuses tensors that share memory, and a loader expects every name.
        plain[name] = one.clone() if one.untyped_storage().data_ptr() in seen else one
        seen.add(one.untyped_storage().data_ptr())
    write_bytes(path, save(plain, None if metadata is None else dict(metadata)))


def write_bytes(path: Path, payload: bytes) -> None:
    """Put ``payload`` at ``path`` in one step, as ``atomic_file`` does."""
    with atomic_file(path) as file:
        file.write(payload)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to that takes its place at ``path`` in one step, on the disk when the block ends.

    What was at ``path`` stays as it is until then, whatever happens on the way; if the block raises, it stays. What a
    process left there that was killed as it wrote is removed. The file is its user's alone: what comes of a data set
    says much of what is in it.

    Raises:
        OutOfSpace: the disk, the quota or the largest file allowed is full.
        SettingError: the folder is missing or may not be written.
    """
    with write_errors(path):
        _remove_unfinished(path)
        part, file = _begun(path)
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _begun(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside ``path``, locked as long as it is open, so that nobody takes it for one of a killed process."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        file = open_private(part, "xb")
        with suppress(SettingError, OSError):  # without locks nothing is removed either
            lock(file.fileno())
        if part.exists():
            return part, file
        file.close()  # somebody took it for one in the moment before it was locked


def _remove_unfinished(path: Path) -> None:
    """Remove what processes that were killed left of files that were to be at ``path``."""
    beginning = f".{path.name}"
    with suppress(SettingError, OSError):
        for part in path.parent.iterdir():
            if not part.name.startswith(beginning) or not _PART.fullmatch(part.name, len(beginning)):
                continue
            handle = os.open(part, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if try_lock(handle):
                    part.unlink(missing_ok=True)
            finally:
                os.close(handle)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Make a run's folder, and keep other trainings out of it until the block ends, or this process does.

    Raises:
        SettingError: Another training runs in the folder, or it cannot be made or written.
    """
    make_folder(folder)
    handle, is_free = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), True
    try:
        with suppress(SettingError, OSError):  # where there are no locks, nobody can tell
            is_free = try_lock(handle)
        if not is_free:
            raise SettingError(
                f"another training runs in {folder}, and each would write over the other's checkpoints: wait until it "
                "has ended, or give another folder (--out)"
            )
        yield
    finally:
        os.close(handle)


CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints in its own folder."""

REPORT = "report.json"
"""File of a run's figures, which is written when the run ends or is interrupted."""

# More than the figures of any run, and few enough for memory: the folder may come from anybody.
_MAX_REPORT_BYTES = 256 << 20


def require_ended(folder: Path) -> None:
    """Do nothing unless a run was cut off in a folder: it has a checkpoint that no report came after.

    Raises:
        SettingError: The folder has a checkpoint, which a new run would remove.
    """
    report = folder / REPORT
    ended = report.stat().st_mtime_ns if report.is_file() else 0
    if any(path.stat().st_mtime_ns > ended for path in (folder / CHECKPOINTS).glob("step-*.safetensors")):
        raise SettingError(
            f"{folder} has a training that was cut off before its end: go on with it by --resume {folder}, or give "
            "another folder, or remove this one"
        )


def keep_report(folder: Path) -> None:
    """Keep a copy of an earlier run's report beside it, as ``report.1.json``, before another run replaces it.

    The next one is ``report.2.json``; a report that was kept already is not kept twice.

    Raises:
        SettingError: The report cannot be read, or the folder not be written.
        OutOfSpace: the disk is full.
    """
    try:
        report = read_regular(folder / REPORT, _MAX_REPORT_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingError(f"{folder / REPORT} cannot be read: {error.strerror}") from error
    for number in count(1):
        kept = folder / f"report.{number}.json"
        if not kept.exists():
            write_bytes(kept, report)
            return
        if kept.is_file() and kept.stat().st_size == len(report) and kept.read_bytes() == report:
            return


NETWORK = "model.safetensors"
"""File of the whole network in a run's folder, which is written when the run ends or is interrupted."""

_EARLIER = "earlier-network.txt"
_EARLIER_SAYS = f"{NETWORK} here is that of the run before; the one that begun since has written none.\n"


def mark_network(folder: Path) -> None:
    """Note beside the network of an earlier run, if there is one, that it is not that of the run that begins.

    The names of its outputs would else be those of another data set. A file stays with it where the folder is copied,
    as times of files do not.

    Raises:
        SettingError: The folder cannot be written.
        OutOfSpace: the disk is full.
    """
    if (folder / NETWORK).exists():
        write_text(folder / _EARLIER, _EARLIER_SAYS)


def has_earlier_network(folder: Path) -> bool:
    """Whether the network in a folder is that of a run before the one whose config is there."""
    return (folder / _EARLIER).exists()


def unmark_network(folder: Path) -> None:
    """Take the note back: the run has written its own network.

    Raises:
        SettingError: The folder cannot be written.
    """
    with write_errors(folder):
        (folder / _EARLIER).unlink(missing_ok=True)


_FILE = "frostline.json"
_FORMAT = 2
# More than a config of as many classes as there may be.
_MAX_BYTES = 64 << 20
# More than any data set has classes, and few enough for memory.
_MAX_OUTPUTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run began with.

    Attributes:
        options: options of the command by name, those among them that nobody gave.
        outputs: number of scores that the network gives for a sample.
        classes: names of the classes or labels, in the order of the scores; empty where numbers are learned.
        identity: digests of what must be the same when the run goes on, by what they are of.
    """

    options: Mapping[str, Any]
    outputs: int
    classes: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into a run's folder.

        Raises:
            SettingError: the folder cannot be written.
            OutOfSpace: the disk is full.
        """
        write_text(folder / _FILE, json.dumps(with_schema(asdict(self), _FORMAT), indent=2) + "\n")

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has a run."""
        return (folder / _FILE).exists()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The config of the run in a folder.

        Raises:
            SettingError: The folder has no config, or one that is damaged or of another version.
        """
        path = folder / _FILE
        try:
            said, known = parse_json(read_regular(path, _MAX_BYTES)), (field.name for field in fields(cls))
            found = cls(**_checked(without_schema(said, _FORMAT, path, known)))
        except (FileNotFoundError, NotADirectoryError):
            raise SettingError(
                f"there is no run in {folder}: it has no {_FILE}, which frostline train --out writes when it begins"
            ) from None
        except OSError as error:
            raise SettingError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise SettingError(f"{path} cannot be read: {error}") from error
        return found

    def require(self, identity: Mapping[str, str], folder: Path) -> None:
        """Do nothing if a run may go on with what is there now.

        Args:
            identity: digests of what is there now.
            folder: the run's folder.

        Raises:
            SettingError: the run began with something else.
        """
        changed = [name for name in {**self.identity, **identity} if identity.get(name) != self.identity.get(name)]
        if changed:
            raise SettingError(
                f"the run in {folder} cannot go on: {' and '.join(changed)} are not those that it began with; begin "
                "another run (--out)"
            )


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, which anybody may have written; a wrong one raises ``TypeError`` or ``ValueError``."""
    outputs, classes = value.get("outputs"), value.get("classes", [])
    if not isinstance(value.get("options"), dict) or not isinstance(value.get("identity", {}), dict):
        raise TypeError("options and identity have names")
    if type(outputs) is not int or not 0 < outputs <= _MAX_OUTPUTS:
        raise ValueError(f"a network gives from 1 to {_MAX_OUTPUTS} scores, not {outputs!r}")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise TypeError("classes are texts")
    if classes and len(classes) != outputs:
        raise ValueError(f"it names {len(classes)} classes for {outputs} scores")
    "\0".join(classes).encode(errors="surrogateescape")  # half a character can be written nowhere
    return {**value, "classes": tuple(classes)}
