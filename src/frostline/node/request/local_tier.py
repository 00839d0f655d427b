"""Keeps samples of remote stores on the node's own disk, by version."""

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

from frostline.config import NodeSettings, cache_folder
from frostline.core import UNPACKED, URLS, Samples
from frostline.errors import SettingError
from frostline.stores.base.protocols import Buffer, Place, is_other_version
from frostline.stores.objects.disk_tier import LocalTier, TierStatistics, tier_name

__all__ = ("LocalSamples", "NodeTier")

# Default size: a quarter of the free space and what is kept already, at most 50 GiB.
_SHARE_OF_DISK = 4
_MAX_BYTES = 50 << 30
# A smaller tier is not worth its disk.
_MIN_BYTES = 256 << 20
_HERE = ("file", "memory")


class LocalSamples:
    """The samples of one request that a tier holds. Safe for threads.

    Args:
        tier: local tier that keeps them.
        url: URL of the root of their data.
        samples: samples of the request; those without a version are not kept, since they could change unnoticed.
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
        """Whether a sample is kept."""
        name = self._names[row]
        return name is not None and self._tier.has(name)

    def get(self, row: int) -> Buffer | None:
        """The bytes of a sample in the version that the request names; None if it is not kept."""
        name = self._names[row]
        return None if name is None else self._tier.get(name, int(self._lengths[row]))

    def put(self, row: int, data: Buffer, version: str) -> None:
        """Keep a sample's bytes, if they have the version that the request names."""
        name = self._names[row]
        if name is not None and version and not is_other_version(self._versions[row], version):
            self._tier.put(name, data)


class NodeTier:
    """The local tier of a node. Safe for threads.

    If no setting asks for it, it is opened when samples of a remote store are first requested.

    Args:
        settings: settings of the node.

    Raises:
        SettingError: if a setting asks for it and its folder cannot be used.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._is_open = False
        self._tier: LocalTier | None = None
        if self._is_asked:
            self._for(("",))

    def of(self, url: str, reading: str, samples: Samples) -> LocalSamples | None:
        """The kept samples of a request; None if its samples are not kept."""
        tier = self._for(samples.objects if reading == URLS else (url,))
        return None if tier is None or reading == UNPACKED else LocalSamples(tier, url, samples)

    def has(self, url: str, place: Place, version: str) -> bool:
        """Whether a sample that is an object of its own is kept; ``url`` is the root of its data."""
        tier = self._for((url,))
        return tier is not None and bool(version) and tier.has(tier_name(url, place, version))

    def statistics(self) -> TierStatistics | None:
        """The statistics of the tier; None if nothing was kept so far."""
        return None if self._tier is None else self._tier.statistics()

    @property
    def _is_asked(self) -> bool:
        """Whether a setting names its folder or size."""
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
            return None  # there is no place for it, and no setting asks for one
