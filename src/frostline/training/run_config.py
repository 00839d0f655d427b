"""The config of a run: its options by name, and digests of what it began with, as ``config.json`` in its folder."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from frostline.errors import SettingError
from frostline.training.files import write_text
from frostline.version import __version__

__all__ = ("RunConfig",)

_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run began with.

    Attributes:
        options: options of the command by name, those among them that nobody gave.
        outputs: number of scores that the network gives for a sample.
        classes: names of the classes or labels, in the order of the scores; empty where numbers are learned.
        identity: digests of what must be the same when the run goes on, by what they are of.
        frostline: version that began it.
    """

    options: Mapping[str, Any]
    outputs: int
    classes: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    frostline: str = __version__

    def write(self, folder: Path) -> None:
        """Write it into a run's folder.

        Raises:
            SettingError: the folder cannot be written.
            OutOfSpace: the disk is full.
        """
        write_text(folder / _FILE, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The config of the run in a folder.

        Raises:
            SettingError: there is none, or it is damaged.
        """
        try:
            found = cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            raise SettingError(
                f"there is no run in {folder}: it has no {_FILE}, which frostline train --out writes when it begins"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise SettingError(f"{folder / _FILE} cannot be read: {error}") from error
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
