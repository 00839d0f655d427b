"""Keeps what was measured for a job, so that the next one on the same network, data and machines begins with it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from frostline.file_cache import FileCache
from frostline.loaders.epoch.node_engine import EngineChoice
from frostline.planning import Situation
from frostline.profiles import Trial
from frostline.version import __version__

__all__ = ("Findings", "KeptFindings")


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
        self._files = FileCache(folder, ".json")
        self._key = hashlib.sha256(named.encode()).hexdigest()[:40]

    def get(self) -> Findings | None:
        """What was kept."""
        body = self._files.get(self._key)
        if body is None:
            return None
        try:
            value = json.loads(body)
            choice, situation = value["choice"], value["situation"]
            trials = tuple(Trial(**trial) for trial in choice["trials"])
            return Findings(
                choice=EngineChoice(engine=choice["engine"], error=choice["error"], trials=trials),
                situation=None if situation is None else Situation.from_json(situation),
            )
        except (AssertionError, ValueError, LookupError, TypeError):
            return None

    def put(self, found: Findings) -> None:
        """Keep it."""
        situation = None if found.situation is None else found.situation.to_json()
        self._files.put(self._key, json.dumps({"choice": asdict(found.choice), "situation": situation}).encode())
