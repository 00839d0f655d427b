"""Keeps what profiling measured of a prefix on this machine, so that the next job with it need not measure again."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from frostline.private import make_private_folder
from frostline.profiles import CodecCost, CutCost
from frostline.version import __version__

__all__ = ("KeptProfiles", "MeasuredPrefix", "ProfileKey")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a measurement holds for.

    Attributes:
        prefix: its digest.
        hardware: names the processor or accelerator and its threads.
        engine: what ran it, with its version.
        device_batch: rows of a run.
        codecs: that were to be measured.
        packed_cuts: numbers of the cuts at which they were.
    """

    prefix: str
    hardware: str
    engine: str
    device_batch: int
    codecs: tuple[str, ...]
    packed_cuts: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Names the key."""
        text = json.dumps({**asdict(self), "version": __version__}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrefix:
    """A prefix from its input on; reading and decoding belong to the data and are measured each time.

    Attributes:
        cuts: ``seconds`` counted from the network's input.
        codecs: on the activations of a few real samples.
    """

    cuts: tuple[CutCost, ...]
    codecs: tuple[CodecCost, ...]


class KeptProfiles:
    """Measurements as JSON files in a folder. Whatever cannot be read or written there is measured again.

    Args:
        folder: made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: ProfileKey) -> MeasuredPrefix | None:
        """What was kept under this key."""
        try:
            value = json.loads(self._path(key).read_bytes())
            return MeasuredPrefix(
                cuts=tuple(CutCost(**cut) for cut in value["cuts"]),
                codecs=tuple(CodecCost(**codec) for codec in value["codecs"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: ProfileKey, measured: MeasuredPrefix) -> None:
        """Keep it; a file is whole or not there."""
        value = {"key": asdict(key), "cuts": _plain(measured.cuts), "codecs": _plain(measured.codecs)}
        try:
            make_private_folder(self._folder)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as file:
                json.dump(value, file)
            Path(file.name).replace(self._path(key))
        except OSError:
            return

    def _path(self, key: ProfileKey) -> Path:
        return self._folder / f"{key.digest}.json"


def _plain(costs: Sequence[CutCost | CodecCost]) -> list[dict[str, object]]:
    return [asdict(cost) for cost in costs]
