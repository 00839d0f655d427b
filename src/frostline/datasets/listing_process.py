"""A listing beside a node: a process that the node starts, which lists a data set and writes down its manifest.

It reads one line of JSON from stdin and says how far it is in lines of JSON on stdout. The end of stdin ends it at
once, since then its node is gone or nobody wants the listing any more. A bound on its memory was set by the node.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frostline.core.config import cache_folder
from frostline.core.errors import FrostlineError, OutOfSpace, OverBudget
from frostline.core.events import Event, ProgressMade
from frostline.core.processes import have_arrow_do_without_pandas
from frostline.core.units import in_bytes
from frostline.datasets.manifest import Manifest, load_manifest, null_observer
from frostline.datasets.manifest_store import NamedSplits, write_manifest
from frostline.ordering import Chosen
from frostline.stores.open import open_store
from frostline.stores.protocols import LinkBounds, ObjectStore, StoreLimits
from frostline.wire.listings import MAX_SPLITS, ManifestHead, failure_to_json, line_of_event

__all__ = ("main",)

_SAID_WHY = 3
# Counts come by folders, of which there may be a million.
_SAID_EVERY_S = 0.25
# Objects that there may be for each sample that may be listed: its mask and what says its label are others.
_OBJECTS_A_SAMPLE = 4
# Without a buffer, whose lock a thread that waits for a line would still hold when the interpreter ends.
_STDIN = os.fdopen(0, "rb", buffering=0, closefd=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    """What the node tells it.

    Attributes:
        data: URL of the data set's root, which the node serves to whoever asks.
        format: see ``load_manifest``.
        relist: False takes the last manifest, see ``load_manifest``.
        refuses_changes: True refuses a changed listing, see ``load_manifest``.
        folders: the folders within which symbolic links of a folder may lead; None lets them lead anywhere.
        deadline_s: the time that a store may be silent; None for as long as the environment says.
        known: SHA-256 of files that the client has.
        max_samples: maximum number of samples of the data set.
        max_bytes: maximum size of the manifest's file.
        memory_bytes: memory that this process may use.
        out: number of the open file for the manifest and the splits.
    """

    data: str
    format: str | None
    relist: bool
    refuses_changes: bool
    folders: Sequence[str] | None
    deadline_s: float | None
    known: Sequence[str]
    max_samples: int
    max_bytes: int
    memory_bytes: int
    out: int


def main() -> int:
    """Do what stdin says; what goes wrong is the last line on stdout."""
    have_arrow_do_without_pandas()
    line = _STDIN.readline()
    if not line:  # nobody needed it
        return 0
    orders = _Orders(**json.loads(line))
    threading.Thread(target=_end_with_the_node, daemon=True).start()
    try:
        head = _list(orders)
    except FrostlineError as error:
        return _fail(error)
    except MemoryError:
        return _fail(
            OverBudget(
                f"listing {orders.data} takes more than the {in_bytes(orders.memory_bytes)} that this node gives a "
                "listing: start it with more --listing-memory, or list a part of the data"
            )
        )
    except OSError as error:
        return _fail(OutOfSpace(f"{error.strerror or error}"))
    _say(head.to_json())
    return 0


def _list(orders: _Orders) -> ManifestHead:
    links = None if orders.folders is None else LinkBounds(tuple(orders.folders))
    limits = (
        StoreLimits(links=links)
        if orders.deadline_s is None
        else StoreLimits(links=links, deadline_s=orders.deadline_s)
    )
    store, cache = open_store(orders.data, limits), cache_folder()
    manifest = load_manifest(
        store,
        cache=cache,
        format=orders.format,
        relist=orders.relist,
        refuses_changes=orders.refuses_changes,
        only_within=True,
        on_event=_Teller(orders.data, orders.max_samples) if orders.relist else null_observer,
    )
    if len(manifest.samples) > orders.max_samples:
        raise _too_many(orders.data, f"{len(manifest.samples):,} samples", orders.max_samples)
    with os.fdopen(orders.out, "wb") as file:
        sink = _Sink(file, orders)
        write_manifest(manifest.columns.table, _about(manifest), sink)
        if sink.digest in orders.known:
            file.seek(0)
            file.truncate()
        splits, splits_sha256 = _write_splits(file, _splits(store, cache, manifest))
    return ManifestHead(
        digest=manifest.digest,
        samples=len(manifest.samples),
        nbytes=sink.nbytes,
        sha256=sink.digest,
        is_known=sink.digest in orders.known,
        splits=splits,
        splits_sha256=splits_sha256,
        applied=None if manifest.applied is None else manifest.applied.to_json(),
        found=manifest.found,
    )


def _about(manifest: Manifest) -> dict[str, Any]:
    names = ("digest", "classes", "reading", "splits", "left_out", "is_turned", "named")
    return {name: getattr(manifest, name) for name in names}


def _splits(store: ObjectStore, cache: Path, manifest: Manifest) -> dict[str, Chosen]:
    found = NamedSplits(store, cache, manifest.digest, len(manifest.samples)).load()
    return dict(list(found.items())[:MAX_SPLITS])


def _write_splits(file: Any, splits: dict[str, Chosen]) -> tuple[tuple[str, ...], str]:
    digest = hashlib.sha256()
    for chosen in splits.values():
        bits = np.ascontiguousarray(chosen.bits).tobytes()
        digest.update(bits)
        file.write(bits)
    return tuple(splits), digest.hexdigest()


class _Sink:
    """The manifest's file as it is written: counted, bounded and named by its SHA-256."""

    def __init__(self, file: Any, orders: _Orders) -> None:
        self._file = file
        self._orders = orders
        self._digest = hashlib.sha256()
        self.nbytes = 0
        self.closed = False

    @property
    def digest(self) -> str:
        """SHA-256 of what was written."""
        return self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """See ``io.RawIOBase``."""
        view = memoryview(data)
        self.nbytes += view.nbytes
        if self.nbytes > self._orders.max_bytes:
            raise OverBudget(
                f"the manifest of {self._orders.data} has more than the {in_bytes(self._orders.max_bytes)} that this "
                "node sends: start it with more --max-manifest, or list a part of the data"
            )
        self._digest.update(view)
        self._file.write(view)
        return view.nbytes

    def tell(self) -> int:
        """See ``io.RawIOBase``."""
        return self.nbytes

    def flush(self) -> None:
        """See ``io.RawIOBase``."""

    def close(self) -> None:
        """The file stays open for what follows."""
        self.closed = True


class _Teller:
    """Says how far the listing is, a few times a second, and ends one that is too long."""

    def __init__(self, data: str, max_samples: int) -> None:
        self._data = data
        self._max = max_samples
        self._said_at = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, ProgressMade):
            if event.done > _OBJECTS_A_SAMPLE * self._max:
                raise _too_many(self._data, f"over {event.done:,} objects", self._max)
            if time.monotonic() < self._said_at + _SAID_EVERY_S:
                return
            self._said_at = time.monotonic()
        line = line_of_event(event)
        if line is not None:
            _say(line)


def _too_many(data: str, has: str, maximum: int) -> OverBudget:
    return OverBudget(
        f"{data} has {has}, and this node lists up to {maximum:,} samples: start it with more --max-listed, or list a "
        "part of the data"
    )


def _fail(error: FrostlineError) -> int:
    _say(failure_to_json(error))
    return _SAID_WHY


def _say(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    sys.stdout.buffer.flush()


def _end_with_the_node() -> None:
    while _STDIN.read(1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
