"""Where a data set's manifest and saved splits come from: its own store, or a node that lists it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frostline.datasets.manifest.from_node import NodeListing, node_urls
from frostline.datasets.manifest.manifest import Manifest, load_manifest
from frostline.datasets.manifest.named_splits import NamedSplits
from frostline.errors import SettingError
from frostline.events import Observer
from frostline.stores.open import open_store

__all__ = ("ManifestSource",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSource:
    """How a data set is listed, as values.

    Attributes:
        url: canonical URL of its root.
        cache: folder for what does not lie beside the data.
        beside: see ``Dataset``.
        form: likewise.
        relist: likewise.
        changed: likewise.
        near: addresses of the nodes that list it; none where it is listed here.
        token: see ``Dataset``.
    """

    url: str
    cache: Path
    beside: bool
    form: str | None
    relist: bool
    changed: str
    near: tuple[str, ...]
    token: str | None = field(repr=False)

    def __post_init__(self) -> None:
        if self.near and self.beside:
            raise SettingError("a node keeps manifests where it can: beside= is for whoever lists a folder themselves")

    @staticmethod
    def nodes(near: str | Sequence[str] | None) -> tuple[str, ...]:
        """Addresses of nodes, as ``near=`` takes them; see ``node_urls`` for what may be raised."""
        return () if near is None else node_urls(near)

    def manifest(self, observe: Observer) -> Manifest:
        """List the data here, or have a node list it; see ``load_manifest`` and ``NodeListing``."""
        if self.near:
            asked = {name: getattr(self, name) for name in ("form", "relist", "changed", "cache", "token")}
            return NodeListing(nodes=self.near, data=self.url, **asked).manifest(observe)
        return load_manifest(
            open_store(self.url),
            cache=self.cache,
            beside=self.beside,
            form=self.form,
            relist=self.relist,
            refuses_changes=self.changed == "refuse",
            looks_elsewhere=self.changed != "skip",
            observe=observe,
        )

    def named(self, manifest: Manifest) -> NamedSplits:
        """The splits that were saved of a manifest of this data."""
        store = None if self.near else open_store(self.url)
        size = len(manifest.samples)
        return NamedSplits(store, self.cache, manifest.digest, size, beside=self.beside, given=manifest.saved)

    def require_store(self) -> None:
        """Do nothing where the data's own store is asked.

        Raises:
            SettingError: a node listed it.
        """
        if self.near:
            raise SettingError(
                f"{self.url} was listed by the node at {', '.join(self.near)} and has no store here: what reads its "
                "samples is given that node (near=), or a Dataset without near= and credentials for the store"
            )
