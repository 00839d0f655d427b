"""What every rule of tuning is: it is told what the window does, and answers with other bounds."""

from typing import Protocol

from frostline.tuning.values import Look, NewBounds, Setting

__all__ = ("Steady", "TuningRule")


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
