"""Decides where manifests and splits of a data set are kept: beside the data, or in the user's cache folder."""

import json
from collections.abc import Collection, Sequence
from typing import NamedTuple

from frostline.errors import StoreError
from frostline.stores.base.protocols import Readable
from frostline.stores.objects.local import FolderStore

__all__ = ("HISTORY_BYTES", "KEPT", "LAST_MANIFEST", "History", "history_of", "history_text", "lies_beside", "tidied")

LAST_MANIFEST = ".frostline/last-manifest.json"
"""Says beside the data which manifest was built last."""


def lies_beside(store: Readable, *, is_asked: bool) -> bool:
    """Whether they are kept beside the data: in an object store always, in a folder where somebody asked for it.

    Whoever reads a local folder by its names, as ``torchvision.datasets.ImageFolder`` does, would take one more folder
    in it for a class. A folder that has a manifest beside it goes on having it there.
    """
    if is_asked or not isinstance(store, FolderStore):
        return True
    try:
        store.read(LAST_MANIFEST, 0, 1)
    except StoreError:
        return False
    return True


KEPT = 4
"""Manifests that stay, the newest one among them: somebody may be about to read the one before, or go back to it."""

HISTORY_BYTES = 2048
"""Of the text of a history: always as long as this, so that it is read without asking how long it is."""

# So many digests fit into the text.
_REMEMBERED = 24


class History(NamedTuple):
    """What becomes of the manifests of a data set when another one was built.

    Attributes:
        digests: digests of the manifests that stay, the newest first.
        gone: digests of those that are to be removed.
    """

    digests: tuple[str, ...]
    gone: tuple[str, ...]


def tidied(history: Sequence[str], built: str, *, there: Collection[str], named: Collection[str]) -> History:
    """The history once a manifest was built.

    Args:
        history: digests of those that were built before, the newest first, as far as that is known.
        built: digest of the new one.
        there: digests of all manifests that lie there; those of which nothing is known are taken for the oldest.
        named: digests that something else names: they stay.
    """
    known = [built, *(digest for digest in history if digest != built)]
    order = [*known, *sorted(set(there) - set(known))]
    gone = tuple(digest for digest in order[KEPT:] if digest in there and digest not in named)
    stay = [digest for digest in order if digest not in gone and (digest == built or digest in there)]
    return History(tuple(stay[:_REMEMBERED]), gone)


def history_of(text: bytes) -> tuple[str, ...]:
    """The digests of a history's text; none where it is damaged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(filter(_is_digest, value)) if isinstance(value, list) else ()


def history_text(digests: Sequence[str]) -> bytes:
    """The inverse of ``history_of``."""
    return json.dumps(list(digests)).encode().ljust(HISTORY_BYTES)


def _is_digest(value: object) -> bool:
    # They become names of objects that are removed.
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
