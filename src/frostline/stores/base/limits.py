"""Decides how far a store is followed: where its symbolic links may lead, and how long it may be silent."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from frostline.errors import AccessDenied, SettingError

__all__ = ("NO_LIMITS", "PREFIX", "REQUESTS", "RETRY_FOR", "TIMEOUT", "LinkBounds", "StoreLimits", "Waits")


class LinkBounds:
    """The folders that links may lead to. Safe for threads.

    Args:
        folders: Absolute paths. They may be links themselves: whoever names a folder means what it leads to.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self._real: tuple[str, ...] = ()

    def check(self, place: str, name: str) -> None:
        """Do nothing if a path without links lies within one of the folders.

        Args:
            place: The path, absolute.
            name: name that the sentence uses.

        Raises:
            AccessDenied: The path lies outside of these folders.
        """
        if not _is_within(place, self._real):
            # A folder may be a link that points elsewhere since it was looked at.
            self._real = tuple(os.path.realpath(folder) for folder in self._folders)
            if not _is_within(place, self._real):
                raise AccessDenied(
                    f"{name} is reached by a symbolic link that leads out of the data root: copy what it points to, "
                    "or start the node with --follow-links"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """What whoever opens a store allows it.

    Attributes:
        links: The folders within which symbolic links of a folder may lead; None lets them lead anywhere.
        deadline_s: How long it may be silent, and how long a call of it is tried again, where the environment does not
            say less.
    """

    links: LinkBounds | None = None
    deadline_s: float = math.inf


NO_LIMITS = StoreLimits()
"""Of whoever reads their own data."""


def _is_within(place: str, folders: tuple[str, ...]) -> bool:
    return any(place == folder or place.startswith(f"{folder.rstrip('/')}/") for folder in folders)


PREFIX = "FROSTLINE_STORE_"
"""What the names of these variables begin with."""
TIMEOUT = f"{PREFIX}TIMEOUT_S"
RETRY_FOR = f"{PREFIX}RETRY_FOR_S"
REQUESTS = f"{PREFIX}REQUESTS_PER_S"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long stores behind the driver are waited for, and how fast they are asked.

    Attributes:
        timeout_s: without a byte from the store before a request is given up. What comes steadily may take any time.
        retry_for_s: while it refuses for its rate, or does not answer though it did before, until its caller is told.
        requests_per_s: largest number of requests a second that one process makes of one store, where a whole listing
            counts as one; infinite where only the store's refusals count.
    """

    timeout_s: float = 30.0
    retry_for_s: float = 60.0
    requests_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name, value, minimum in ((TIMEOUT, self.timeout_s, 1e-3), (RETRY_FOR, self.retry_for_s, 0.0)):
            if not minimum <= value < math.inf:
                raise SettingError(f"{name} is a number of seconds, such as 30, not {value!r}")
        if not self.requests_per_s >= 1e-3:
            raise SettingError(f"{REQUESTS} is a number of requests, such as 100, not {self.requests_per_s!r}")

    def within(self, deadline_s: float) -> "Waits":
        """The same for a caller who waits no longer than that for a store that says nothing, or fails."""
        deadline_s = max(deadline_s, 1e-3)
        return replace(self, timeout_s=min(self.timeout_s, deadline_s), retry_for_s=min(self.retry_for_s, deadline_s))

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Waits":
        """What the environment says, and the defaults where it says nothing.

        Raises:
            SettingError: a variable is no such number.
        """
        said = {"timeout_s": TIMEOUT, "retry_for_s": RETRY_FOR, "requests_per_s": REQUESTS}
        return cls(**{field: _number(name, environment[name]) for field, name in said.items() if name in environment})


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        what = "requests" if name == REQUESTS else "seconds"
        raise SettingError(f"{name} is a number of {what}, such as 30, not {text[:40]!a}") from error
