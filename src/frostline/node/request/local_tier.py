"""Decides which samples a node keeps on its own disk: those of stores away from this machine, version by version."""

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from frostline.config import NodeSettings, cache_folder
from frostline.core import URLS, Samples
from frostline.errors import SettingError
from frostline.stores.base.protocols import Buffer, Place
from frostline.stores.base.versions import is_other_version
from frostline.stores.objects.disk_tier import LocalTier, TierStatistics, tier_name

__all__ = ("SamplesHere", "TierOfNode")

# Where nobody says how much: of what is free, and what is there, and at most so much.
_SHARE_OF_DISK = 4
_MAX_BYTES = 50 << 30
# With less, a disk has better uses.
_MIN_BYTES = 256 << 20
_HERE = ("file", "memory")


class SamplesHere:
    """The samples of one request, as far as a tier has them. Safe for threads.

    Args:
        tier: that keeps them.
        url: of the root of their data.
        samples: of the request; those whose versions nobody knows are not kept, since they could be others.
    """

    def __init__(self, tier: LocalTier, url: str, samples: Samples) -> None:
        self._tier = tier
        self._lengths = samples.lengths
        places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
        versions = samples.versions if len(samples.versions) else [""] * len(samples)
        self._versions = versions
        self._names = [
            tier_name(url, Place(*place), version) if version else None
            for place, version in zip(places, versions, strict=True)
        ]

    def has(self, row: int) -> bool:
        """Whether a sample is there."""
        name = self._names[row]
        return name is not None and self._tier.has(name)

    def get(self, row: int) -> Buffer | None:
        """A sample's bytes, in the version that the request names; None where it is not there."""
        name = self._names[row]
        return None if name is None else self._tier.get(name, int(self._lengths[row]))

    def put(self, row: int, data: Buffer, version: str) -> None:
        """Keep a sample as it was read, if it has the version that the request names."""
        name = self._names[row]
        if name is not None and version and not is_other_version(self._versions[row], version):
            self._tier.put(name, data)


class TierOfNode:
    """The local tier of a node. Safe for threads.

    Where nobody asks for it, it is opened when the first samples of a store away from the node are asked for.

    Args:
        settings: of the node.

    Raises:
        SettingError: it is asked for, and its folder cannot be used.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_open = False
        self._tier: LocalTier | None = None
        if self._is_asked:
            self._for(("",))

    def of(self, url: str, reading: str, samples: Samples) -> SamplesHere | None:
        """What is here of a request's samples; None where nothing of them is kept."""
        tier = self._for(samples.objects if reading == URLS else (url,))
        return None if tier is None else SamplesHere(tier, url, samples)

    def has(self, url: str, place: Place, version: str) -> bool:
        """Whether a sample of objects of one's own is kept; its data's root is ``url``."""
        tier = self._for((url,))
        return tier is not None and bool(version) and tier.has(tier_name(url, place, version))

    def statistics(self) -> TierStatistics | None:
        """What it did; None where nothing was kept so far."""
        return None if self._tier is None else self._tier.statistics()

    @property
    def _is_asked(self) -> bool:
        """Somebody said where, or how much."""
        return bool(self._settings.local_tier or self._settings.local_tier_bytes)

    def _for(self, urls: Iterable[str]) -> LocalTier | None:
        if self._settings.local_tier_bytes == 0 or all(url.partition("://")[0] in _HERE for url in urls):
            return None
        with self._lock:
            if not self._is_open:
                self._tier = self._opened()
                self._is_open = True
            return self._tier

    def _opened(self) -> LocalTier | None:
        named, nbytes = self._settings.local_tier, self._settings.local_tier_bytes
        folder = Path(named) if named else cache_folder() / "samples"
        try:
            tier = LocalTier(folder, budget_bytes=nbytes or _MAX_BYTES)
            if nbytes is not None:
                return tier
            there = tier.statistics().bytes
            share = min(_MAX_BYTES, (there + shutil.disk_usage(folder).free) // _SHARE_OF_DISK)
            return LocalTier(folder, budget_bytes=share) if share >= _MIN_BYTES else None
        except (SettingError, OSError):
            if self._is_asked:
                raise
            return None  # there is no place for it, and nobody asked for one
