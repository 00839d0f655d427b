"""Which engine the node is asked to use, and what lossy codecs may still lose beside it; it may change in a job."""

from dataclasses import dataclass, field

from frostline.core import REFERENCE
from frostline.profiles import Profile, Trial

__all__ = ("EngineChoice", "NodeEngine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine of the node, as it was found for a job.

    Attributes:
        engine: its name.
        error: its largest relative error against the reference on the job's samples; 0 for the reference itself.
        trials: of every engine that was looked at, with why the others are not used.
    """

    engine: str = REFERENCE
    error: float = 0.0
    trials: tuple[Trial, ...] = ()

    @property
    def samples_per_s(self) -> float | None:
        """By its trial up to the last cut, alone on the node; None where it is not known."""
        mine = [trial for trial in self.trials if trial.engine == self.engine]
        return max(mine, key=lambda one: one.cut).samples_per_s if mine else None

    @classmethod
    def of(cls, profile: Profile) -> "EngineChoice":
        """What a node's profile says."""
        return cls(engine=profile.engine, error=profile.engine_error, trials=profile.trials)


@dataclass(slots=True, eq=False)
class NodeEngine:
    """The engine in use. Requests that were made keep theirs; safe for threads, which see one choice or the other.

    Args:
        accuracy: that the job allows, for engine and codecs together.
        choice: to begin with.
    """

    accuracy: str | float
    choice: EngineChoice = field(default_factory=EngineChoice)

    @property
    def name(self) -> str:
        """Of the engine."""
        return self.choice.engine

    @property
    def tolerance(self) -> float | None:
        """Largest relative error that a lossy codec may make; None where the codec itself is the bound."""
        return None if isinstance(self.accuracy, str) else max(0.0, self.accuracy - self.choice.error)
