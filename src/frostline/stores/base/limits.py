"""Decides how far a store is followed: where its symbolic links may lead, and how long it may be silent."""

import math
import os
from dataclasses import dataclass

from frostline.errors import AccessDenied

__all__ = ("NO_LIMITS", "LinkBounds", "StoreLimits")


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
            name: What the sentence calls it.

        Raises:
            AccessDenied: It lies outside.
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
