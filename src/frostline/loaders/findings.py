"""Keeps what was measured for a job, so that the next one on the same network, data and machines begins with it."""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frostline.loaders.node_engine import EngineChoice
from frostline.planning import Situation
from frostline.profiles import Trial
from frostline.version import __version__

__all__ = ("Findings", "KeptFindings")

_MAX_FILES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What measuring found.

    Attributes:
        choice: the node's engine.
        situation: what a plan is made from; None where both sides share their cores, so that no plan gains anything.
    """

    choice: EngineChoice = field(default_factory=EngineChoice)
    situation: Situation | None = None


class KeptFindings:
    """Findings as JSON files in a folder. Whatever cannot be read or written there is measured again.

    Args:
        folder: made when something is kept.
        asked: what findings depend on, as plain values.
    """

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        named = json.dumps({"frostline": __version__, **asked}, sort_keys=True, default=str)
        self._path = folder / f"{hashlib.sha256(named.encode()).hexdigest()[:40]}.json"

    def get(self) -> Findings | None:
        """What was kept."""
        try:
            value = json.loads(self._path.read_bytes())
            choice, situation = value["choice"], value["situation"]
            trials = tuple(Trial(**trial) for trial in choice["trials"])
            found = Findings(
                choice=EngineChoice(engine=choice["engine"], error=choice["error"], trials=trials),
                situation=None if situation is None else Situation.from_json(situation),
            )
            os.utime(self._path)
        except (AssertionError, OSError, ValueError, LookupError, TypeError):
            return None
        return found

    def put(self, found: Findings) -> None:
        """Keep it; a file is whole or not there."""
        situation = None if found.situation is None else found.situation.to_json()
        folder = self._path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
                json.dump({"choice": asdict(found.choice), "situation": situation}, file)
            Path(file.name).replace(self._path)
            files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError:
            return
