"""Keeps named splits of a data set beside its manifest: which samples each has, as one small Parquet table."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from frostline.datasets.manifest.location import lies_beside
from frostline.errors import AccessDenied, BadRequest, DataNotFound, ObjectNotFound
from frostline.ordering import Chosen
from frostline.stores.base.protocols import ObjectStore
from frostline.stores.objects.local import FolderStore

__all__ = ("SPLITS", "NamedSplits")

SPLITS = ".frostline/splits"
"""Where they lie; ``<digest of the listing>.json`` says that there are some."""
# Always as long as this, so that it is read without asking how long it is.
_ABOUT_BYTES = 256
# What a store says of an object that is not there; one of rows cannot even name it.
_ABSENT = (AccessDenied, BadRequest, DataNotFound, ObjectNotFound)
_SCHEMA = pa.schema({"name": pa.string(), "samples": pa.int64(), "bits": pa.large_binary()})


class NamedSplits:
    """The splits of one listing of some data; of another listing there are others.

    Args:
        store: store that holds the data; None where a node listed it, and only the cache folder takes splits.
        cache: folder for the splits of local folders and of stores that take no writes.
        digest: digest of the listing.
        size: samples of all of the data.
        beside: keep them beside the data in a local folder too.
        given: splits that came with the listing; one of the same name in the cache folder goes first.
    """

    def __init__(
        self,
        store: ObjectStore | None,
        cache: Path,
        digest: str,
        size: int,
        *,
        beside: bool = False,
        given: Mapping[str, Chosen] = MappingProxyType({}),
    ) -> None:
        self._given = given
        self._store = store
        self._cache = cache
        self._digest = digest
        self._size = size
        self._beside = beside

    def load(self) -> dict[str, Chosen]:
        """All of them by name, in the order in which they were saved.

        Raises:
            StoreUnavailable: asking again may help.
        """
        return {**self._given, **self._kept()}

    def _kept(self) -> dict[str, Chosen]:
        for store in filter(None, (self._store, self._in_cache())):
            try:
                about = json.loads(bytes(store.read(self._about, 0, _ABOUT_BYTES)))
                return self._parsed(bytes(store.read(str(about["object"]), 0, int(about["nbytes"]))))
            except (*_ABSENT, ValueError, KeyError, pa.ArrowException):
                continue
        return {}

    def save(self, splits: Mapping[str, Chosen]) -> str:
        """Keep them, in place of any of the same name, and say where.

        Raises:
            OutOfSpace: the disk is full.
            StoreUnavailable: asking again may help.
        """
        data = _file({**self._kept(), **splits})
        if self._store is not None and lies_beside(self._store, is_asked=self._beside):
            with suppress(AccessDenied):
                return self._write(self._store, data)
        cache = self._in_cache()
        cache.create()
        return self._write(cache, data)

    @property
    def _about(self) -> str:
        return f"{SPLITS}/{self._digest}.json"

    def _write(self, store: ObjectStore, data: bytes) -> str:
        # Named by its content, and named last: a reader finds the old splits or the new ones.
        name = f"{SPLITS}/{self._digest[:16]}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"
        store.write(name, data)
        store.write(self._about, json.dumps({"object": name, "nbytes": len(data)}).encode().ljust(_ABOUT_BYTES))
        return f"{store.url}/{name}"

    def _in_cache(self) -> FolderStore:
        return FolderStore(str(self._cache), is_private=True)

    def _parsed(self, data: bytes) -> dict[str, Chosen]:
        table = pq.ParquetFile(pa.py_buffer(data)).read(use_threads=False)
        rows = zip(table["name"].to_pylist(), table["bits"], strict=True)
        return {name: Chosen(np.frombuffer(bits.as_buffer(), np.uint8), self._size) for name, bits in rows}


def _file(splits: Mapping[str, Chosen]) -> bytes:
    columns = [
        list(splits),
        [len(split) for split in splits.values()],
        [split.bits.tobytes() for split in splits.values()],
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=_SCHEMA), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())
