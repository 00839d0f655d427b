"""What tuning is decided from and what it decides: a look at the window, bounds, and a change with its reason."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ("Look", "NewBounds", "Setting", "Steady", "TuningRule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Bounds of a window: those in force, or the most that a rule may choose.

    Attributes:
        requests: under way at once.
        window_bytes: asked for and not yet handed out.
    """

    requests: int
    window_bytes: int

    def __post_init__(self) -> None:
        if self.requests < 1 or self.window_bytes < 1:
            raise ValueError(f"a window needs a request and a byte at least, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a window did since the look before, and where it stands.

    Attributes:
        now_s: when.
        seconds: since the look before.
        bytes_arrived: in them.
        bytes_handed_out: in them.
        stalled_s: of them, in which the training loop waited for rows.
        took_s: how long each request took that was answered whole in them; not those that were made twice.
        failures: requests that failed in them.
        ready_bytes: arrived and not handed out.
        expected_bytes: asked for and not arrived.
        requests_in_flight: under way.
        requests_allowed: that may be; fewer than set while the window opens step by step.
        is_full: bytes, and not the number of requests, keep the window from asking.
        is_ending: nothing is left to ask for.
    """

    now_s: float
    seconds: float
    bytes_arrived: int
    bytes_handed_out: int
    stalled_s: float
    took_s: tuple[float, ...]
    failures: int
    ready_bytes: int
    expected_bytes: int
    requests_in_flight: int
    requests_allowed: int
    is_full: bool
    is_ending: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBounds:
    """Other bounds from now on.

    Attributes:
        before: what was kept until now.
        after: in force from now on.
        is_trial: whether they are only tried; what comes of it is the next change.
        reason: what was measured, in one sentence.
    """

    before: Setting
    after: Setting
    is_trial: bool = False
    reason: str


class TuningRule(Protocol):
    """Chooses a window's bounds. It decides how fast rows come, never which ones or in what order."""

    @property
    def setting(self) -> Setting:
        """The bounds in force."""

    def look(self, look: Look) -> NewBounds | None:
        """Take what the window did since the look before; other bounds, where these are better."""


class Steady:
    """What was set stays: to compare with, and for whoever knows better.

    Args:
        setting: the bounds.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def look(self, look: Look) -> NewBounds | None:  # noqa: ARG002 - whatever comes
        """Nothing changes."""
        return None
